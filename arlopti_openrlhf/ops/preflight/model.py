"""Checks the folders of the models: configuration, whole weights, tokenizer, chat template."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.local_model import is_offline, load_config, load_tokenizer, local_folder, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_DOWNLOAD = "download it first, for a check and a faster start"


def check(args: SimpleNamespace) -> list[Finding]:
    """Return what is wrong with the models that the run loads.

    Args:
        args: upstream's nested arguments, as its `train` gets them.
    """
    if not args.actor.model_name_or_path:
        return [Finding("--actor.model_name_or_path", None, "there is no policy to train", "give a folder or a name")]
    findings: list[Finding] = []
    for flag, model in _models(args).items():
        if args.use_ms and not Path(model).is_dir():
            continue  # ModelScope has a cache of its own
        of_model = check_folder(flag, model)
        is_fatal = any(finding.is_fatal for finding in of_model)
        if flag == "--actor.model_name_or_path" and not is_fatal and (folder := local_folder(model)):
            of_model += _check_tokenizer(flag, model, folder, args) + _check_context(folder, args)
        findings += of_model
    return findings


def check_folder(flag: str, model: str) -> list[Finding]:
    """Return what keeps a model from being loaded: no folder, or one without a whole configuration or weights.

    What the hub is to give, all of the model or a part, is a warning.

    Args:
        flag: where the model was named.
        model: a folder, or a name on the hub.
    """
    folder = local_folder(model)
    if folder is None:
        return [not_here(flag, model)]
    if not os.access(folder, os.R_OK | os.X_OK):
        return [Finding(flag, model, "the folder cannot be read", "mend its permissions")]
    problems = _config_problems(folder)
    if not problems and _hub_completes(model) and _lacks_weights(folder):
        problem = "not all of its weights are in the hub's cache, so the run downloads the rest, and none are checked"
        return [Finding(flag, model, problem, _DOWNLOAD, is_fatal=False)]
    problems += _weight_problems(folder)
    return [Finding(flag, model, problem, remedy) for problem, remedy in problems]


def _models(args: SimpleNamespace) -> dict[str, str]:
    """Return {flag: model} of what the run loads, each model once. The reference model is the actor."""
    models = {
        "--actor.model_name_or_path": args.actor.model_name_or_path,
        "--critic.model_name_or_path": args.critic.model_name_or_path,
        # Where no model is given either, the check of the reward says so.
        "--reward.model_name_or_path": None if args.reward.remote_url else args.reward.model_name_or_path,
    }
    flags = {model: flag for flag, model in reversed(models.items()) if model}
    return {flag: model for model, flag in reversed(flags.items())}


def not_here(flag: str, model: str) -> Finding:
    """Return what follows from a model's not being on this machine. It may be on the hub, unless that is shut off."""
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith("/"):
        return Finding(flag, model, "there is no such folder", "correct the path")
    if is_offline():
        problem = "neither a folder nor in the hub's cache, and HF_HUB_OFFLINE forbids to download it"
        return Finding(flag, model, problem, "correct the path, or download it first")
    problem = (
        "neither a folder nor in the hub's cache, so the run looks for it on the hub, and nothing of it is checked"
    )
    return Finding(flag, model, problem, _DOWNLOAD, is_fatal=False)


def _hub_completes(model: str) -> bool:
    """Return whether files that are not on this machine come from the hub."""
    return not (Path(model).is_dir() or is_offline())


def _config_problems(folder: Path) -> list[tuple[str, str]]:
    """Return problems and remedies of the configuration."""
    import transformers

    remedy = "give the folder with config.json, weights and tokenizer"
    try:
        config = read_json(folder / "config.json")
    except ValueError as error:
        return [(str(error), "mend the file")]
    if not config:
        inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
        return [("it has no config.json" + (f", but {', '.join(inside[:5])} in it have one" * bool(inside)), remedy)]
    if "auto_map" in config:  # the model brings its own code
        return []
    known = set(dir(transformers))
    if strange := [name for name in config.get("architectures") or () if name not in known]:
        problem = f"transformers {transformers.__version__} does not know the architecture {', '.join(strange)}"
        return [(problem, "use a version that does, or another model")]
    try:
        load_config(folder)
    except (OSError, ValueError) as error:
        return [(f"its configuration cannot be loaded: {str(error).splitlines()[0]}", remedy)]
    return []


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the files that hold the weights. ValueError, with the name, for an index that is broken."""
    for name in _WEIGHTS:
        if (folder / name).exists():
            return [name]
        index = f"{name}.index.json"
        if (folder / index).exists():
            try:
                return sorted(set(read_json(folder / index).get("weight_map", {}).values()))
            except (ValueError, AttributeError, TypeError) as error:
                raise ValueError(f"{index}: {error}") from None
    return []


def _lacks_weights(folder: Path) -> bool:
    """Return whether a file of the weights is not there. What is there may be broken."""
    try:
        files = _weight_files(folder)
    except ValueError:
        return False
    return not files or not all((folder / file).exists() for file in files)


def _weight_problems(folder: Path) -> list[tuple[str, str]]:
    """Return problems and remedies of the weights: files that are not there, or not whole."""
    remedy = "copy or download it anew"
    try:
        files = _weight_files(folder)
    except ValueError as error:
        return [(str(error), remedy)]
    if not files:
        return [(f"it has no weights: {', '.join(_WEIGHTS)}, or either in parts", "give a folder that has them")]
    problems = {file: problem for file in files if (problem := _file_problem(folder / file))}
    more = f" (and {len(problems) - 1} of {len(files)} files more)" if len(problems) > 1 else ""
    return [(f"{file} {problem}{more}", remedy) for file, problem in list(problems.items())[:1]]


def _file_problem(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with open(path, "rb") as file:
            start = file.read(8)
        if start.startswith(b"version "):
            return "is a pointer of Git LFS, not the weights themselves"
        if path.suffix != ".safetensors":
            return None if start else "is empty"
        with safe_open(path, "np"):  # compares the header with the file's size
            return None
    except FileNotFoundError:
        return "is not there"
    except OSError as error:
        return f"cannot be read: {error}"
    except SafetensorError as error:
        return f"is not whole: {error}"


def _check_tokenizer(flag: str, model: str, folder: Path, args: SimpleNamespace) -> list[Finding]:
    try:
        tokenizer = load_tokenizer(folder)
    except FileNotFoundError:
        if _hub_completes(model):
            problem = "its tokenizer is not in the hub's cache, so neither it nor lengths of prompts are checked"
            return [Finding(flag, model, problem, _DOWNLOAD, is_fatal=False)]
        return [Finding(flag, model, "it has no tokenizer", "copy the tokenizer's files into the folder")]
    except ValueError as error:
        return [Finding(flag, model, str(error), "mend the file")]
    findings = []
    if args.data.apply_chat_template and not tokenizer.chat_template:
        remedy = "take a model that has one, add it to the folder, or use --data.input_template"
        findings.append(
            Finding("--data.apply_chat_template", "", f"the tokenizer of {model} has no chat template", remedy)
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        problem = "its tokenizer has no pad token and no eos token"
        findings.append(Finding(flag, model, problem, "name one in tokenizer_config.json"))
    return findings + _check_vocabulary(flag, model, folder, tokenizer)


def _check_vocabulary(flag: str, model: str, folder: Path, tokenizer: "PreTrainedTokenizerBase") -> list[Finding]:
    rows, last = load_config(folder).get_text_config().vocab_size, max(tokenizer.get_vocab().values(), default=-1)
    if last < rows:
        return []
    problem = f"its tokenizer has ids up to {last}, but the model has {rows} embeddings"
    pad = tokenizer.pad_token_id
    # Tokens that were added and do not occur do no harm. The pad token occurs in each batch.
    is_fatal = tokenizer.vocab_size > rows or (pad is not None and pad >= rows)
    return [Finding(flag, model, problem, "use the tokenizer of this model", is_fatal)]


def _check_context(folder: Path, args: SimpleNamespace) -> list[Finding]:
    """Compare --data.max_len with the positions of the model. vLLM refuses more, unless RoPE is stretched."""
    config = load_config(folder).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    is_stretched = bool(rope) and rope.get("rope_type") != "default"
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
    if not isinstance(positions, int) or args.data.max_len <= positions or is_stretched or allowed:
        return []
    problem = f"the model has {positions} positions, and vLLM refuses more"
    return [Finding("--data.max_len", args.data.max_len, problem, f"give {positions} at most")]
