"""Upstream's nested arguments, as its `train` gets them, of a run on the tiny model and data."""

from types import SimpleNamespace
from typing import Any


def arguments(**changes: Any) -> SimpleNamespace:
    """Return them with changes: `arguments(data__max_len=40)` stands for --data.max_len 40."""
    values = {
        "actor__model_name_or_path": None,
        "critic__model_name_or_path": None,
        "reward__model_name_or_path": None,
        "reward__remote_url": None,
        "reward__timeout_seconds": 300.0,
        "data__prompt_dataset": None,
        "data__prompt_split": "train",
        "data__prompt_probs": None,
        "data__input_key": "prompt",
        "data__label_key": "label",
        "data__input_template": None,
        "data__apply_chat_template": True,
        "data__max_len": 512,
        "data__max_samples": 10**8,
        "data__max_images_per_prompt": 0,
        "data__image_key": "images",
        "eval__dataset": None,
        "eval__split": "train",
        "eval__sampling": [],
        "rollout__batch_size": 1,
        "rollout__n_samples_per_prompt": 4,
        "rollout__max_new_tokens": 16,
        "train__batch_size": 4,
        "train__agent_func_path": None,
    }
    tree: dict[str, dict] = {}
    for name, value in (values | changes).items():
        assert name in values, name
        group, _, leaf = name.partition("__")
        tree.setdefault(group, {})[leaf] = value
    return SimpleNamespace(use_ms=False, **{group: SimpleNamespace(**leaves) for group, leaves in tree.items()})
