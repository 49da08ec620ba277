"""Compares the flags of a run that is resumed with those that it had.

The prompts themselves are compared where they are loaded (`ops.rollouts.prompts`).
"""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from arlopti_openrlhf.cli import config_file
from arlopti_openrlhf.ops.checkpoints import files as checkpoint_files
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.preflight.finding import Finding

_Values = dict[str, str | list]

# How the run is started, and where it writes.
_LEFT_OUT = ("ckpt.path", "ckpt.output_dir", "ckpt.load_enable", "ckpt.load_changed", "dry_run", "logger.")
# The place in the prompts, or that in the schedule of the learning rate, counts in these.
_COUNTED_IN = (
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "train.batch_size",
    "train.max_epochs",
    "train.seed",  # of the order of the prompts
)
_PASSES = ("algo.lopti.eta", "algo.lopti.quantile", "algo.lopti.groups", "algo.token_method", "algo.token_method_args")
# DeepSpeed loads no checkpoint that other ranks, or another stage, have written.
_RANKS = ("num_nodes", "num_gpus_per_node")
_LAYOUT = ("ds.zero_stage", "ds.ring_attn_size", "ds.tensor_parallel_size")
# The optimizer's own state has these.
_IN_THE_CHECKPOINT = ("adam.lr", "adam.betas", "adam.eps", "adam.weight_decay", "muon.lr", "muon.momentum")


def check(flat: argparse.Namespace, args: SimpleNamespace) -> list[Finding]:
    """Return a finding for each flag that differs from those of the run that is resumed.

    Args:
        flat: the flags as the parser has returned them.
        args: upstream's nested arguments, as its `train` gets them.
    """
    folder = Path(args.ckpt.path)
    if not args.ckpt.load_enable or not checkpoint_files.saved_in(folder):
        return []
    try:
        had = config_file.read((folder / config_file.KEPT).read_text("utf-8"))
    except (OSError, ValueError) as error:
        problem = f"the flags of the run that is resumed cannot be read ({error})"
        return [Finding("--ckpt.path", args.ckpt.path, problem, "compare them yourself", is_fatal=False)]
    if urls := had.get("reward.remote_url"):
        had["reward.remote_url"] = credentials.divide(urls)[0]  # a file of an earlier version may show more
    has = config_file.read(config_file.text(flat))
    keys = sorted(key for key in had.keys() | has.keys() if _comparable(had.get(key)) != _comparable(has.get(key)))
    return [_difference(key, had, has, args) for key in keys if not key.startswith(_LEFT_OUT)]


def _difference(key: str, had: _Values, has: _Values, args: SimpleNamespace) -> Finding:
    before, now = _shown(had.get(key)), _shown(has.get(key))
    problem, remedy, is_fatal = f"the run that is resumed had {before}", f"it goes on with {now}", False
    if _changes_layout(key, had, has) and not args.ds.use_universal_ckpt:
        problem += ", and DeepSpeed cannot load its checkpoints otherwise"
        remedy = f"give {before}, or convert one by DeepSpeed's ds_to_universal and add --ds.use_universal_ckpt"
        is_fatal = True
    elif _changes_place(key, had, has) and not args.ckpt.load_changed:
        problem += ", and its place in the prompts or in the learning rate's schedule counts in that"
        remedy = f"give {before}, or add --ckpt.load_changed to go on with {now}"
        is_fatal = True
    elif key.endswith(_IN_THE_CHECKPOINT):
        remedy = f"it goes on with {before}, which its checkpoints hold"
    return Finding(f"--{key}", now, problem, remedy, is_fatal)


def _comparable(value: str | list | None) -> Any:
    """Return numbers for their text: a default may be 0 where its flag reads 0.0."""
    if isinstance(value, list):
        return [_comparable(part) for part in value] or None
    try:
        return value and float(value)
    except ValueError:
        return value


def _shown(value: str | list | None) -> str:
    return "no value" if value in (None, []) else " ".join(value) if isinstance(value, list) else value


def _changes_place(key: str, had: _Values, has: _Values) -> bool:
    return key in _COUNTED_IN or (key in _PASSES and _passes(had) != _passes(has))


def _passes(values: _Values) -> int:
    """Return how many optimizer steps a mini-batch takes. A token method in a file may take more."""
    by_flags = "algo.lopti.eta" in values or "algo.lopti.quantile" in values
    takes_one = values.get("algo.lopti.groups") != "both" or any(
        argument in ("lopti.groups=low", "lopti.groups=high") for argument in values.get("algo.token_method_args", ())
    )
    return 2 if (by_flags or "lopti" in values.get("algo.token_method", ())) and not takes_one else 1


def _changes_layout(key: str, had: _Values, has: _Values) -> bool:
    model, _, name = key.partition(".")
    if name in _RANKS and model in ("actor", "critic"):
        return _ranks(model, had) != _ranks(model, has)
    return key in _LAYOUT


def _ranks(model: str, values: _Values) -> int:
    nodes, gpus = (int(str(values.get(f"{model}.{name}", 0))) for name in _RANKS)
    return nodes * gpus if f"{model}.model_name_or_path" in values else 0
