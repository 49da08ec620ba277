"""Checks a run of a vision-language model: that model, flags and data agree on images."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from arlopti_openrlhf.ops.preflight.finding import Finding, first_of
from arlopti_openrlhf.ops.preflight.prompt import is_vision_language, renderer
from arlopti_openrlhf.ops.preflight.rows import Row

_MOST = "data.max_images_per_prompt"
_TAG = "<image>"


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield why the policy could not take images, or could not be loaded with them."""
    has_vision = is_vision_language(args)
    if args.data.max_images_per_prompt and has_vision is False:
        problem = f"{args.actor.model_name_or_path} takes no images: its config.json has no vision_config"
        yield Finding.of(args, _MOST, problem, "leave the flag out, or take a vision-language model")
    elif has_vision and importlib.util.find_spec("torchvision") is None:
        problem = "vision-language models need torchvision, in transformers and in vLLM, and it is not installed"
        yield Finding.of(args, "actor.model_name_or_path", problem, "install the build that fits this PyTorch")


def check_rows(flag: str, value: str, rows: Sequence[Row], args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the images in the rows of the data set that the flag's value names."""
    key, most = args.data.image_key, args.data.max_images_per_prompt
    images_of = {number: images for number, row in enumerate(rows, start=1) if (images := _images(row.get(key)))}
    if not images_of:
        if most:
            keys = ", ".join(sorted({name for row in rows[:1000] for name in row}))
            problem = f"no row of {value} has images there, and --{_MOST} is {most}"
            yield Finding.of(args, "data.image_key", problem, f"the keys are {keys}")
    elif not most:
        problem = f"{len(images_of)} of {len(rows)} rows of {value} have images under {key}"
        if is_vision_language(args):
            remedy = f"give {max(map(len, images_of.values()))}"
            yield Finding.of(args, _MOST, f"{problem}, and vLLM would count their tokens twice", remedy)
        else:
            problem += ", and the policy is no vision-language model"
            remedy = "take a vision-language model if it should see them"
            yield Finding.of(args, _MOST, problem, remedy, is_fatal=False)
    else:
        problems = {number: _problem(rows[number - 1], images, args) for number, images in images_of.items()}
        bad = [f"row {number}, {key}: {problem}" for number, problem in problems.items() if problem]
        if bad:
            yield Finding(flag, value, first_of(bad, "more rows"), "correct these rows")


def _images(value: Any) -> list:
    """Return the images of a row. Upstream takes one or a list, and leaves out those that are None."""
    return [image for image in (value if isinstance(value, list) else [value]) if image is not None and image != ""]


def _problem(row: Row, images: list, args: SimpleNamespace) -> str | None:
    if len(images) > (most := args.data.max_images_per_prompt):
        return f"{len(images)} images, and --{_MOST} is {most}"
    for image in images:
        # What is longer may be the image itself, in base64.
        if isinstance(image, str) and len(image) <= 256 and ":" not in image and not Path(image).is_file():
            return f"there is no file {image}"
    prompt = row.get(args.data.input_key)
    if not args.data.apply_chat_template or not isinstance(prompt, str | list):
        return None
    # What the run hands to the chat template is here what comes back.
    messages: Any = renderer(args, lambda given, **_: given)(row)
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    places = sum(isinstance(part, dict) and part.get("type") == "image" for part in parts)
    return None if places == len(images) else f"{len(images)} images, and the prompt has {places} places ({_TAG})"
