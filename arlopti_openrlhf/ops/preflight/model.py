"""Loads the models that are on this machine as the run does, without the content of their weights."""

import contextlib
import difflib
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from arlopti_openrlhf.ops.preflight.finding import Finding, first_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_ACTOR, _REWARD = "--actor.model_name_or_path", "--reward.model_name_or_path"


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


def is_on_hub(name: str) -> bool:
    """Return whether a name that is not here may be the hub's: not if it is a path, or a slip of the pen for one."""
    return bool(re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)) and not _nearly(name)


def _nearly(name: str) -> list[str]:
    """Return what lies here with nearly the same name."""
    path = Path(name)
    there = os.listdir(path.parent) if path.parent.is_dir() else []
    return [str(path.parent / each) for each in difflib.get_close_matches(path.name, there, n=1, cutoff=0.8)]


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
    """Return the configuration of a model. transformers raises anything."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)


@functools.cache  # three checks use it, and a large one takes a second to load
def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model as the run loads it. transformers raises anything.

    Raises:
        ValueError: it is empty. transformers makes such a one where files are missing.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ValueError("it makes no tokens of a text, as where its files are missing")
    # The processor of a vision-language model has a template of its own. Loading it takes torchvision.
    template = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, str) and "vision_config" in read_json(folder / "config.json"):
        tokenizer.chat_template = template
    return tokenizer


def build(folder: Path, has_head: bool = True) -> "PreTrainedModel":
    """Return a model without the content of its weights, so it takes no memory. transformers raises anything.

    Args:
        folder: of the model.
        has_head: it has an output over tokens. OpenRLHF takes the rest as a critic or a reward model.
    """
    import torch
    import transformers

    config = load_config(folder)
    auto: Any = transformers.AutoModelForCausalLM if has_head else transformers.AutoModel
    if has_head and hasattr(config, "vision_config"):  # as upstream's `is_vlm_model` decides
        auto = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=True)


def num_parameters(model: str | None) -> int | None:
    """Return a model's parameters, or None where it is not here or transformers cannot build it."""
    folder = local_folder(model)
    if folder is None:
        return None
    try:
        return build(folder).num_parameters()
    except Exception:  # a model's class raises anything; the check of the model says what is wrong with it
        return None


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the models that the run loads, each once. The reference model is the actor."""
    flags = {args.actor.model_name_or_path: _ACTOR}
    if not args.reward.remote_url:  # a source of rewards leaves no work to the model
        flags.setdefault(args.reward.model_name_or_path, _REWARD)
    # Last, because a critic that the user has not named is one of the others.
    flags.setdefault(args.critic.model_name_or_path, "--critic.model_name_or_path")
    for model, flag in flags.items():
        if model:
            reward_head = args.ds.value_head_prefix if flag == _REWARD else None
            yield from check_model(flag, model, flag == _ACTOR, reward_head)
            if args.ds.lora.rank and flag != _REWARD:
                yield from _check_lora(model, args)


def check_model(flag: str, model: str, is_policy: bool = True, reward_head: str | None = None) -> Iterator[Finding]:
    """Yield why a model could not be loaded, or would be another than its files say.

    What is not on this machine is a warning, and so is what the hub may complete. The hub is not asked.

    Args:
        flag: the flag that names it.
        model: a folder, or a name on the hub.
        is_policy: it has a tokenizer and an output over tokens. OpenRLHF takes others without them.
        reward_head: the name of a reward model's head, unless its configuration has another. None for other models.
    """
    folder, is_folder = local_folder(model), Path(model).is_dir()
    if folder is None:
        problem, remedy = "there is no such folder", " or ".join(["correct the path", *_nearly(model)])
        if may_come := is_on_hub(model):
            problem = "it is neither a folder nor in the hub's cache, so it is not checked"
            remedy = "download it first, for a check and a faster start"
        yield Finding(flag, model, problem, remedy, is_fatal=not may_come)
        return
    part = "configuration"
    try:
        config = load_config(folder)
        if is_policy:
            part = "tokenizer"
            tokenizer = load_tokenizer(folder)
        part = "class"
        skeleton = build(folder, is_policy)
        part = "weights"
        tensors = _tensors(folder)
    except Exception as error:  # transformers raises anything
        problem = f"its {part} cannot be loaded: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        yield Finding(flag, model, problem, "give a folder with a whole model", is_folder)
        return
    if any(getattr(each, "quantization_config", None) for each in (config, config.get_text_config())):
        problem = "its weights are quantized, and vLLM takes no trained weights in place of them"
        yield Finding(flag, model, problem, "give the model that it was quantized from")
        return
    if is_policy:
        yield from _check_vocabulary(flag, model, tokenizer, config.get_text_config().vocab_size)
    if tensors and not hasattr(config, "auto_map"):  # the class is transformers' own
        misfits = _misfits(skeleton, tensors)
        head = reward_head and f"{getattr(config, 'value_head_prefix', reward_head)}.weight"
        if head and head not in tensors:
            misfits.append(f"{head} is not there")
        if misfits:
            problem = f"its files do not fill a {type(skeleton).__name__}: {first_of(misfits)}"
            yield Finding(flag, model, problem, "give the weights that belong to this config.json", is_folder)


def _tensors(folder: Path) -> dict[str, "Tensor"]:
    """Return the tensors in a model's safetensors files, without their content.

    Raises:
        ValueError: a file is not whole. The message has its name, which those of safetensors lack.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}
        except SafetensorError as error:
            raise ValueError(f"{file.name}: {error}") from None
        tensors |= {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return tensors


def _misfits(skeleton: "PreTrainedModel", tensors: dict[str, "Tensor"]) -> list[str]:
    """Return the tensors of a model that are not in its files, or with another shape.

    transformers itself loads them, with its mapping of names. It makes random ones in place of those that are missing,
    and at another shape vLLM ends without a message.
    """
    with _quiet():
        _, info = type(skeleton).from_pretrained(
            None,
            config=skeleton.config,
            state_dict=tensors,
            device_map="meta",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    shapes = [
        f"{name} is {[*in_file]} and not {[*wanted]}" for name, in_file, wanted in sorted(info["mismatched_keys"])
    ]
    return shapes + [f"{name} is not there" for name in sorted(info["missing_keys"])]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing what it finds, and its progress."""
    from transformers.utils import logging

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def _check_vocabulary(
    flag: str, model: str, tokenizer: "PreTrainedTokenizerBase", embeddings: int
) -> Iterator[Finding]:
    """Report tokens without an embedding, at the first of which the run would end."""
    beyond = {token: id for token, id in tokenizer.get_vocab().items() if id >= embeddings}
    if beyond:
        in_use = [token for token in (tokenizer.eos_token, tokenizer.pad_token) if token in beyond]
        named = in_use or sorted(beyond, key=lambda token: beyond[token])
        tokens = first_of([f"{token!r} is {beyond[token]}" for token in named])
        problem = f"its tokenizer has ids up to {max(beyond.values())}, but the model has {embeddings} embeddings"
        # Tokens that were added and do not occur do no harm. Those that end and fill up answers do occur.
        is_fatal = tokenizer.vocab_size > embeddings or bool(in_use)
        yield Finding(flag, model, f"{problem}: {tokens}", "use the tokenizer of this model", is_fatal)


def _check_lora(model: str, args: SimpleNamespace) -> Iterator[Finding]:
    """Report target modules that the model lacks. PEFT says so only if it has none of them."""
    folder, targets = local_folder(model), args.ds.lora.target_modules
    if folder is None or not isinstance(targets, list):
        return
    names = [f".{name}" for name, _ in build(folder).named_modules()]
    missing = [each for each in targets if not any(name.endswith(f".{each}") for name in names)]
    if missing:
        problem = f"{model} has no module {', '.join(missing)}, which gets no adapter"
        remedy = "leave the flag out, for one on each linear module"
        yield Finding.of(args, "ds.lora.target_modules", problem, remedy, is_fatal=len(missing) == len(targets))
