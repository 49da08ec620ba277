"""Compares the tensors in a model's files, of which it reads names and shapes, with those that its class needs."""

import contextlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from arlopti_openrlhf.ops.preflight.finding import first_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


class Misfit(NamedTuple):
    """What is wrong with a model's tensors."""

    problem: str
    remedy: str
    is_fatal: bool


def compare(
    folder: Path, files: Sequence[str], config: "PreTrainedConfig", has_value_head: bool, reward_head: str | None
) -> Iterator[Misfit]:
    """Yield how the tensors of whole files differ from those of the model that the run builds.

    transformers itself loads them, with its mapping of names, as tensors without memory.

    Args:
        folder: of the model.
        files: the names of its weights there.
        config: its configuration. Models that are quantized are not compared.
        has_value_head: OpenRLHF takes the model for a critic or a reward model, without the output over tokens.
        reward_head: the name of a reward model's head, which has to be in the files. A critic may begin without one.
    """
    model_class = _model_class(config, has_value_head)
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= _read(folder / file)
        except Exception as error:  # what unpickling raises
            if names := re.findall(r"GLOBAL (\S+)", str(error)):  # as PyTorch says it
                problem = f"on loading {file} would call {', '.join(names)}, which no weights do"
                yield Misfit(problem, "do not trust it: take the model from its origin, in safetensors", True)
            else:
                problem = f"{file} cannot be read: {(str(error).splitlines() or [''])[0][:200]}"
                yield Misfit(problem, "save it again", True)
            return
    if model_class is None or not tensors:
        return
    # First, as a model cannot be built if its pad token is beyond vocab_size.
    rows = config.get_text_config().vocab_size
    name = next((name for name in tensors if name.endswith(EMBEDDINGS)), None)
    if name and tensors[name].numel() and tensors[name].shape[0] != rows:
        given = tensors[name].shape[0]
        problem = f"config.json has vocab_size {rows}, and the weights have {given} rows ({name})"
        yield Misfit(problem, f"set vocab_size to {given}, if the weights are the model's", True)
        return
    try:
        info = _load(model_class, config, tensors)
    except Exception as error:  # a conversion may take more than a shape
        problem = f"its tensors could not be compared with those of {model_class.__name__}: {type(error).__name__}"
        yield Misfit(f"{problem}: {(str(error).splitlines() or [''])[0][:200]}", "the run may end at that", False)
        return
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    shapes = sorted(info["mismatched_keys"])
    if reward_head:
        head = tensors.get(f"{reward_head}.weight")
        if head is None:
            missing.append(f"{reward_head}.weight")
        elif head.shape[0] != 1:
            shapes.append((f"{reward_head}.weight", head.shape, (1, *head.shape[1:])))
    if shapes:
        yield _of_shape(shapes)
    elif missing:
        yield _of_missing(missing, unused, model_class.__name__, config)
    elif unused and not has_value_head:
        problem = f"{model_class.__name__} does not use {len(unused)} of the tensors in its files"
        yield Misfit(f"{problem}: {first_of(unused)}", "check that config.json belongs to these weights", False)


def first_row(folder: Path, files: Sequence[str], names: tuple[str, ...]) -> tuple[str, bytes] | None:
    """Return the name and the first row of a tensor with one of the names, or None if there is none."""
    from safetensors import safe_open

    for file in files:
        with safe_open(folder / file, "pt") as opened:
            for name in opened.keys():
                if name.endswith(names):
                    return name, opened.get_slice(name)[:1].float().numpy().tobytes()
    return None


def _of_shape(shapes: Sequence[tuple[str, Any, Any]]) -> Misfit:
    named = [
        f"{name} is {[*in_file]} in the files and {[*in_model]} in the model" for name, in_file, in_model in shapes
    ]
    remedy = "give the weights that belong to this config.json"
    if 0 in shapes[0][1]:
        remedy = "save it again: weights that ZeRO-3 has divided have to be gathered first"
    return Misfit(f"tensors have another shape than config.json says: {first_of(named)}", remedy, True)


def _of_missing(missing: Sequence[str], unused: Sequence[str], name: str, config: "PreTrainedConfig") -> Misfit:
    problem = f"its files lack {len(missing)} tensors of {name}, which would be random: {first_of(missing)}"
    remedy = "copy or save it again, whole"
    before = next((found.removesuffix(each) for found in unused[:1] for each in missing if found.endswith(each)), None)
    if before:
        remedy = f"rename the tensors: their names in the files begin with {before!r}"
    # A vision-language model of which only the language is trained and asked.
    is_seen_only = hasattr(config, "vision_config") and all("vis" in each for each in missing)
    return Misfit(problem, remedy, not is_seen_only)


def _model_class(config: "PreTrainedConfig", has_value_head: bool) -> Any:
    """Return the class that OpenRLHF loads, or None if it is not transformers' own or its weights are quantized."""
    import transformers

    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if has_value_head:
        mapping = transformers.MODEL_MAPPING
    elif hasattr(config, "vision_config"):  # as upstream's `is_vlm_model` decides
        mapping = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if hasattr(config, "quantization_config"):
        return None
    found: Any = mapping.get(type(config), None)
    # Some types have several classes, or one for a part of them.
    return found if found and not isinstance(found, tuple) and isinstance(config, found.config_class) else None


def _read(file: Path) -> dict[str, "Tensor"]:
    """Return the tensors of a file, without their content."""
    import torch
    from safetensors import safe_open

    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if not zipfile.is_zipfile(file):  # the form of PyTorch before 1.6, which can only be read as a whole
        return {}
    return torch.load(file, map_location="meta", mmap=True, weights_only=True)


def _load(model_class: Any, config: "PreTrainedConfig", tensors: dict[str, "Tensor"]) -> dict[str, Any]:
    with _quiet():
        return model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            device_map="meta",
            ignore_mismatched_sizes=True,  # all are returned, where the run raises
            output_loading_info=True,
        )[1]


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
