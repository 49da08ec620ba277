"""Checks a run of a vision-language model: that model, flags and data agree on images."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.local_model import local_folder, read_json
from arlopti_openrlhf.ops.preflight.rows import Row

_FLAG = "--data.max_images_per_prompt"
_TAG = "<image>"


def check(args: SimpleNamespace) -> list[Finding]:
    """Return why the policy could not take images, or could not be loaded with them.

    Args:
        args: upstream's nested arguments, as its `train` gets them.
    """
    name, wanted = args.actor.model_name_or_path, args.data.max_images_per_prompt
    has_vision = is_vision_language(args)
    if wanted and has_vision is False:
        problem = f"{name} takes no images: its config.json has no vision_config"
        return [Finding(_FLAG, wanted, problem, "leave the flag out, or take a vision-language model")]
    if has_vision and importlib.util.find_spec("torchvision") is None:
        problem = "vision-language models need torchvision, in transformers and in vLLM, and it is not installed"
        return [Finding("--actor.model_name_or_path", name, problem, "install the build that fits this PyTorch")]
    return []


def is_vision_language(args: SimpleNamespace) -> bool | None:
    """Return whether the policy is a vision-language model, as upstream's `is_vlm_model` decides. None: not known."""
    folder = local_folder(args.actor.model_name_or_path) if args.actor.model_name_or_path else None
    try:
        config = read_json(folder / "config.json") if folder else {}
    except ValueError:
        return None
    return "vision_config" in config if config else None


def check_rows(flag: str, value: str, rows: Sequence[tuple[str, Row]], args: SimpleNamespace) -> list[Finding]:
    """Return what is wrong with the images of a data set.

    Args:
        flag, value: where the data set was named.
        rows: where each row stands, and the row.
        args: upstream's nested arguments, as its `train` gets them.
    """
    key, most = args.data.image_key, args.data.max_images_per_prompt
    with_images = [(where, row, images) for where, row in rows if (images := _images(row.get(key)))]
    if not with_images:
        if not most:
            return []
        keys = ", ".join(sorted({name for _, row in rows[:1000] for name in row}))
        return [Finding("--data.image_key", key, f"no row of {value} has images there", f"the keys are {keys}")]
    if not most:
        unasked = f"{len(with_images)} of {len(rows)} rows of {value} have images under {key}"
        if is_vision_language(args):
            largest = max(len(images) for _, _, images in with_images)
            return [Finding(_FLAG, most, f"{unasked}, whose tokens vLLM would count twice", f"give {largest}")]
        remedy = "take a vision-language model if it should see them"
        return [Finding(_FLAG, most, f"{unasked}, and the policy is no vision-language model", remedy, is_fatal=False)]
    bad = [(where, problem) for where, row, images in with_images if (problem := _problem(row, images, args))]
    if not bad:
        return []
    others = f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else ""
    return [Finding(flag, value, f"{bad[0][0]}, {key}: {bad[0][1]}{others}", "correct these rows")]


def as_parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages as upstream's `preprocess_data` hands them to the template: `<image>` in a text is a part.

    Args:
        messages: each with a `content`, a text or a list of parts.
    """
    return [message | {"content": _parts(message["content"])} for message in messages]


def _parts(content: Any) -> Any:
    if not (isinstance(content, str) and _TAG in content):
        return content
    first, *others = (
        [{"type": "text", "text": text}] if (text := part.strip()) else [] for part in content.split(_TAG)
    )
    return first + [part for texts in others for part in ({"type": "image"}, *texts)]


def _images(value: Any) -> list:
    """Return the images of a row. Upstream takes one or a list, and leaves out those that are None."""
    return [image for image in (value if isinstance(value, list) else [value]) if image is not None and image != ""]


def _problem(row: Row, images: list, args: SimpleNamespace) -> str | None:
    if len(images) > (most := args.data.max_images_per_prompt):
        return f"{len(images)} images, and {_FLAG} is {most}"
    for image in images:
        # What is longer may be the image itself, in base64.
        if isinstance(image, str) and len(image) <= 256 and ":" not in image and not Path(image).is_file():
            return f"there is no file {image}"
    prompt = row.get(args.data.input_key)
    if not args.data.apply_chat_template or not isinstance(prompt, str | list):
        return None
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    contents = [message["content"] for message in as_parts(messages)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    places = sum(isinstance(part, dict) and part.get("type") == "image" for part in parts)
    return None if places == len(images) else f"{len(images)} images, and the prompt has {places} places ({_TAG})"
