"""Checks the folders of the models: configuration, whole weights, tokenizer, chat template."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from arlopti_openrlhf.ops.preflight.finding import Finding, first_of
from arlopti_openrlhf.ops.preflight.local_model import is_offline, load_config, load_tokenizer, local_folder, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ACTOR = "--actor.model_name_or_path"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_DOWNLOAD = "download it first, for a check and a faster start"


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the models that the run loads, each once. The reference model is the actor."""
    actor = args.actor.model_name_or_path
    if not actor:
        yield Finding(_ACTOR, None, "there is no policy to train", "give a folder or a name")
        return
    flags = {actor: _ACTOR}
    if not args.reward.remote_url:  # a source of rewards leaves no work to the model
        flags.setdefault(args.reward.model_name_or_path, "--reward.model_name_or_path")
    # Last, because a critic that the user has not named is one of the others.
    flags.setdefault(args.critic.model_name_or_path, "--critic.model_name_or_path")
    for model, flag in flags.items():
        if not model or (args.use_ms and not Path(model).is_dir()):
            continue  # ModelScope has a cache of its own
        findings = list(check_folder(flag, model))
        yield from findings
        folder = local_folder(model)
        if flag == _ACTOR and folder and not any(finding.is_fatal for finding in findings):
            yield from _check_tokenizer(model, folder, args)
            yield from _check_context(folder, args)


def check_folder(flag: str, model: str) -> Iterator[Finding]:
    """Yield what keeps a model from being loaded: no folder, or one without a whole configuration or weights.

    The model is a folder, or a name on the hub. What the hub is to give, all of it or a part, is a warning.
    """
    folder = local_folder(model)
    if folder is None:
        yield not_here(flag, model)
    elif not os.access(folder, os.R_OK | os.X_OK):
        yield Finding(flag, model, "the folder cannot be read", "mend its permissions")
    else:
        problem = _config_problem(folder)
        if problem:
            yield Finding(flag, model, *problem)
        yield from _check_weights(flag, model, folder, is_completed=_hub_completes(model) and not problem)


def not_here(flag: str, model: str) -> Finding:
    """Return what follows from a model's not being on this machine. It may be on the hub, unless that is shut off."""
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith("/"):
        return Finding(flag, model, "there is no such folder", "correct the path")
    if is_offline():
        problem = "neither a folder nor in the hub's cache, and HF_HUB_OFFLINE forbids to download it"
        return Finding(flag, model, problem, "correct the path, or download it first")
    problem = "neither a folder nor in the hub's cache, so the run looks for it on the hub, and none of it is checked"
    return Finding(flag, model, problem, _DOWNLOAD, is_fatal=False)


def _hub_completes(model: str) -> bool:
    """Return whether files that are not on this machine come from the hub."""
    return not (Path(model).is_dir() or is_offline())


def _config_problem(folder: Path) -> tuple[str, str] | None:
    """Return problem and remedy of the configuration."""
    import transformers

    remedy = "give the folder with config.json, weights and tokenizer"
    try:
        config = read_json(folder / "config.json")
    except ValueError as error:
        return str(error), "mend the file"
    if not config:
        inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
        return "it has no config.json" + (f", but {', '.join(inside[:5])} in it have one" * bool(inside)), remedy
    if "auto_map" in config:  # the model brings its own code
        return None
    # Its list of names, as `hasattr` would import the model.
    if strange := [name for name in config.get("architectures") or () if name not in transformers.__all__]:
        problem = f"transformers {transformers.__version__} does not know the architecture {', '.join(strange)}"
        return problem, "use a version that does, or another model"
    try:
        load_config(folder)
    except (OSError, ValueError) as error:
        return f"its configuration cannot be loaded: {str(error).splitlines()[0]}", remedy
    return None


def _check_weights(flag: str, model: str, folder: Path, is_completed: bool) -> Iterator[Finding]:
    """Yield what is wrong with the weights: files that are not there, unless the hub completes them, or not whole."""
    remedy = "copy or download it again"
    try:
        files = _weight_files(folder)
    except ValueError as error:
        yield Finding(flag, model, str(error), remedy)
        return
    problems = [f"{file} {problem}" for file in files if (problem := _file_problem(folder / file))]
    if is_completed and not (files and all((folder / file).exists() for file in files)):
        problem = "not all of its weights are in the hub's cache, so the run downloads the rest, and none are checked"
        yield Finding(flag, model, problem, _DOWNLOAD, is_fatal=False)
    elif not files:
        problem = f"it has no weights: {', '.join(_WEIGHTS)}, or either in parts"
        yield Finding(flag, model, problem, "give a folder that has them")
    elif problems:
        yield Finding(flag, model, first_of(problems, f"of {len(files)} files more"), remedy)


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the files that hold the weights. ValueError, with the name, for an index that is broken."""
    for name in _WEIGHTS:
        if (folder / name).exists():
            return [name]
        index = f"{name}.index.json"
        try:
            if (folder / index).exists():
                return sorted(set(read_json(folder / index).get("weight_map", {}).values()))
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{index}: {error}") from None
    return []


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


def _check_tokenizer(model: str, folder: Path, args: SimpleNamespace) -> Iterator[Finding]:
    try:
        tokenizer = load_tokenizer(folder)
    except FileNotFoundError:
        if _hub_completes(model):
            problem = "its tokenizer is not in the hub's cache, so neither it nor lengths of prompts are checked"
            yield Finding(_ACTOR, model, problem, _DOWNLOAD, is_fatal=False)
        else:
            yield Finding(_ACTOR, model, "it has no tokenizer", "copy the tokenizer's files into the folder")
        return
    except ValueError as error:
        yield Finding(_ACTOR, model, str(error), "mend the file")
        return
    if args.data.apply_chat_template and not tokenizer.chat_template:
        problem = f"the tokenizer of {model} has no chat template"
        remedy = "take a model that has one, add it to the folder, or use --data.input_template"
        yield Finding("--data.apply_chat_template", "", problem, remedy)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        problem = "its tokenizer has no pad token and no eos token"
        yield Finding(_ACTOR, model, problem, "name one in tokenizer_config.json")
    yield from _check_vocabulary(model, folder, tokenizer)


def _check_vocabulary(model: str, folder: Path, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Finding]:
    rows, last = load_config(folder).get_text_config().vocab_size, max(tokenizer.get_vocab().values(), default=-1)
    if last >= rows:
        problem = f"its tokenizer has ids up to {last}, but the model has {rows} embeddings"
        pad = tokenizer.pad_token_id
        # Tokens that were added and do not occur do no harm. The pad token occurs in each batch.
        is_fatal = tokenizer.vocab_size > rows or (pad is not None and pad >= rows)
        yield Finding(_ACTOR, model, problem, "use the tokenizer of this model", is_fatal)


def _check_context(folder: Path, args: SimpleNamespace) -> Iterator[Finding]:
    """Compare --data.max_len with the positions of the model. vLLM refuses more, unless RoPE is stretched."""
    config = load_config(folder).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    is_stretched = bool(rope) and rope.get("rope_type") != "default"
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
    if isinstance(positions, int) and args.data.max_len > positions and not is_stretched and not allowed:
        problem = f"the model has {positions} positions, and vLLM refuses more"
        yield Finding.of(args, "data.max_len", problem, f"give {positions} at most")
