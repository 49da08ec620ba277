"""Reads the models that are on this machine with transformers, and checks them: configuration, weights, tokenizer."""

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from arlopti_openrlhf.ops.preflight import tensors, weights
from arlopti_openrlhf.ops.preflight.finding import Finding, first_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_ACTOR = "--actor.model_name_or_path"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_HEADS = ("lm_head.weight", "embed_out.weight")
_AUTO_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText")  # that a run uses
_HUB_SECONDS = 5.0  # that the hub gets to answer
_DOWNLOAD = "download it first, for a check and a faster start"
# Forms of a tokenizer that transformers reads. Where none is there, it makes an empty one and says nothing.
_TOKENIZERS = "tokenizer.json tokenizer.model vocab.json vocab.txt spiece.model tokenizer.tiktoken tekken.json".split()


class ModelSize(NamedTuple):
    """What the estimates of memory and disk depend on."""

    parameters: int
    config: "PreTrainedConfig"  # of the language model


def local_folder(model: str | None) -> Path | None:
    """Return the folder of a model: its own, or where the hub's cache keeps it. None where neither is there."""
    if not model:
        return None
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def is_offline() -> bool:
    """Return whether the hub is shut off."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or {} where there is no such file. ValueError, with the name, for anything else."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no object with keys")
    return value


def load_config(folder: Path) -> "PreTrainedConfig":
    """Return the configuration of a model.

    Raises:
        OSError, ValueError: it cannot be read, or transformers does not know the model's type.
    """
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)


@functools.cache  # three checks use it, and a large one takes a second to load
def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model as the run loads it.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: it cannot be loaded.
    """
    if not any((folder / name).exists() for name in _TOKENIZERS):
        raise FileNotFoundError(folder / _TOKENIZERS[0])
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise anything
        for path in sorted(folder.glob("*.json")):
            read_json(path)  # raises with the file's name, which transformers leaves out
        text = (str(error).splitlines() or [""])[0]
        raise ValueError(f"its tokenizer cannot be loaded: {type(error).__name__}: {text}") from None
    # The processor of a vision-language model has a template of its own. Loading it takes torchvision.
    template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, str) and "vision_config" in read_json(folder / "config.json"):
        tokenizer.chat_template = template
    return tokenizer


def model_size(model: str | None) -> ModelSize | None:
    """Return a model's size, or None where it is not here or transformers cannot build it. No memory is taken."""
    folder = local_folder(model)
    if folder is None:
        return None
    try:
        return ModelSize(build(folder).num_parameters(), load_config(folder).get_text_config())
    except Exception:  # a model's class raises anything; the check of the model says what is wrong with it
        return None


def build(folder: Path) -> "PreTrainedModel":
    """Return a model without its weights. It takes no memory.

    Raises:
        Exception: transformers cannot build it.
    """
    import torch
    import transformers

    config = load_config(folder)
    name = (config.architectures or [""])[0]
    make = getattr(transformers, name)._from_config if name else transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(config)


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the models that the run loads, each once. The reference model is the actor."""
    actor = args.actor.model_name_or_path
    if not actor:
        yield Finding(_ACTOR, None, "there is no policy to train", "give a folder or a name")
        return
    for flag, model in loaded(args):
        head = args.ds.value_head_prefix if flag.startswith("--reward") else None
        findings = list(check_folder(flag, model, head))
        yield from findings
        folder = local_folder(model)
        is_broken = any(finding.is_fatal for finding in findings)
        if flag == _ACTOR and folder and not is_broken and not _missing_code(folder):
            yield from _check_tokenizer(model, folder, args)
            yield from _check_context(folder, args)


def loaded(args: SimpleNamespace) -> Iterator[tuple[str, str]]:
    """Yield the models that the run loads, each once, with the flags that name them."""
    flags = {args.actor.model_name_or_path: _ACTOR}
    if not args.reward.remote_url:  # a source of rewards leaves no work to the model
        flags.setdefault(args.reward.model_name_or_path, "--reward.model_name_or_path")
    # Last, because a critic that the user has not named is one of the others.
    flags.setdefault(args.critic.model_name_or_path, "--critic.model_name_or_path")
    for model, flag in flags.items():
        # ModelScope has a cache of its own.
        if model and not (args.use_ms and not Path(model).is_dir()):
            yield flag, model


def check_folder(flag: str, model: str, reward_head: str | None = None) -> Iterator[Finding]:
    """Yield what keeps a model from being loaded: no folder, or one without a whole configuration or weights.

    The model is a folder, or a name on the hub. What the hub is to give, all of it or a part, is a warning. A reward
    model needs a head of the name given, unless its configuration names another.
    """
    folder = local_folder(model)
    if foreign := _foreign_form(Path(model) if folder is None else folder):
        yield Finding(flag, model, *foreign)
    elif folder is None:
        yield not_here(flag, model)
    elif not os.access(folder, os.R_OK | os.X_OK):
        yield Finding(flag, model, "the folder cannot be read", "mend its permissions")
    else:
        problem, lacks_code = _config_problem(folder), _missing_code(folder)
        if problem:
            yield Finding(flag, model, *problem)
        elif lacks_code:
            what = f"config.json names code that is not in the folder: {', '.join(lacks_code)}"
            yield Finding(flag, model, what, "copy it there from the model's origin", not _hub_completes(model))
        findings = list(_check_weights(flag, model, folder, is_completed=_hub_completes(model) and not problem))
        yield from findings
        brings_code = not problem and "auto_map" in read_json(folder / "config.json")  # which `load_config` would run
        if not (problem or brings_code or findings):
            config, has_value_head = load_config(folder), flag.startswith(("--critic", "--reward"))
            head = reward_head and getattr(config, "value_head_prefix", reward_head)
            for misfit in tensors.compare(folder, _weight_files(folder), config, has_value_head, head):
                yield Finding(flag, model, *misfit)


def not_here(flag: str, model: str) -> Finding:
    """Return what follows from a model's not being on this machine. The hub is asked for it, unless it is shut off."""
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith("/"):
        return Finding(flag, model, "there is no such folder", "correct the path")
    nowhere = "neither a folder nor in the hub's cache"
    if is_offline():
        problem = f"{nowhere}, and HF_HUB_OFFLINE forbids to download it"
        return Finding(flag, model, problem, "correct the path, or download it first")
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=_HUB_SECONDS)
    except (errors.HFValidationError, errors.RepositoryNotFoundError, errors.EntryNotFoundError):
        # The hub answers alike for what it has not and for what it hides.
        problem = f"{nowhere}, and {constants.ENDPOINT} shows no config.json under this name"
        return Finding(flag, model, problem, "correct the name, or set HF_TOKEN if it takes one to see the model")
    except Exception as error:  # no network, or the hub's own trouble
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        problem = f"{nowhere}, and {constants.ENDPOINT} does not say whether it has it ({cause})"
        return Finding(flag, model, problem, "the run fails unless it can be downloaded then", is_fatal=False)
    problem = f"{nowhere}, so the run downloads it from the hub, and none of it is checked"
    return Finding(flag, model, problem, _DOWNLOAD, is_fatal=False)


def _foreign_form(path: Path) -> tuple[str, str] | None:
    """Return problem and remedy of what is a model, but not one that transformers, vLLM and DeepSpeed load alike."""
    if path.is_file() and path.suffix != ".gguf":
        return "it is a file", f"give the folder of a model, as {path.parent} may be"
    gguf = path.name if path.is_file() else next((file.name for file in sorted(path.glob("*.gguf"))), None)
    if gguf and (path.is_file() or not (path / "config.json").exists()):
        file = path if path.is_file() else path / gguf
        remedy = f"convert it: arlopti model --from {file} --out FOLDER"
        return f"{gguf} is a GGUF file, which cannot be trained", remedy
    if (path / "adapter_config.json").exists():
        try:
            base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        except ValueError:
            base = None
        load = f"AutoPeftModelForCausalLM.from_pretrained({str(path)!r})"
        remedy = f"merge it: {load}.merge_and_unload().save_pretrained(FOLDER), with the tokenizer copied there"
        return f"it is an adapter of {base or 'another model'}, not a model", remedy
    return None


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
        # verl keeps a checkpoint's model in actor/huggingface, and the hub's cache in snapshots/REVISION.
        found = [*folder.glob("*/config.json"), *folder.glob("*/*/config.json")]
        inside = sorted(str(path.parent.relative_to(folder)) for path in found)
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


def _missing_code(folder: Path) -> list[str]:
    """Return the files of the model's own code that the run loads it with, and that are not in its folder."""
    try:
        names = read_json(folder / "config.json").get("auto_map") or {}
    except ValueError:
        return []
    loaded = [str(names[each]) for each in _AUTO_CLASSES if each in names]
    files = {f"{name.rpartition('.')[0]}.py" for name in loaded if "--" not in name}  # that is in another repository
    return sorted(file for file in files if not (folder / file).exists())


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
    elif problem := weights.not_finite(folder, files):
        yield Finding(flag, model, problem, "take a checkpoint whose weights are finite")


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
    yield from check_vocabulary(_ACTOR, model, folder, tokenizer)


def check_vocabulary(flag: str, model: str, folder: Path, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Finding]:
    """Yield how the tokens of a model, which can be loaded, do not fit its embedding and its output."""
    config = load_config(folder).get_text_config()
    rows = config.vocab_size
    try:
        files = _weight_files(folder)
        embedding, head = (tensors.first_row(folder, files, names) for names in (tensors.EMBEDDINGS, _HEADS))
    except Exception:  # another form of weights, or broken ones, which `_check_weights` names
        embedding = head = None
    if config.tie_word_embeddings and embedding and head and head[1] != embedding[1]:
        problem = f"config.json ties the output to the embedding, and the weights have another {head[0]}"
        remedy = "set tie_word_embeddings to false, or leave that tensor out: vLLM and transformers choose differently"
        yield Finding(flag, model, problem, remedy, is_fatal=False)
    beyond = {token: id for token, id in tokenizer.get_vocab().items() if id >= rows}
    if beyond:
        in_use = [token for token in (tokenizer.eos_token, tokenizer.pad_token) if token in beyond]
        named = in_use or sorted(beyond, key=lambda token: beyond[token])
        tokens = first_of([f"{token!r} is {beyond[token]}" for token in named])
        problem = f"its tokenizer has ids up to {max(beyond.values())}, but the model has {rows} embeddings: {tokens}"
        # Tokens that were added and do not occur do no harm. Those that end and fill up answers do occur.
        is_fatal = tokenizer.vocab_size > rows or bool(in_use)
        yield Finding(flag, model, problem, "use the tokenizer of this model", is_fatal)


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
