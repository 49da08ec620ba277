"""Reads a model that is on this machine with transformers: its folder, configuration, tokenizer and size."""

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

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
    import torch
    import transformers

    try:
        config = load_config(folder)
        name = (config.architectures or [""])[0]
        build = getattr(transformers, name)._from_config if name else transformers.AutoModelForCausalLM.from_config
        with torch.device("meta"):
            parameters = build(config).num_parameters()
        return ModelSize(parameters, config.get_text_config())
    except Exception:  # a model's class raises anything; the check of the model says what is wrong with it
        return None
