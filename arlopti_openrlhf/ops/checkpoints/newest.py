"""Finds the checkpoint to resume from: the newest whole one, the same on all ranks and for actor and critic."""

import argparse
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from arlopti_openrlhf.ops.checkpoints import files
from arlopti_openrlhf.ops.checkpoints.rank_agreement import everywhere, on_rank_0, say, share
from arlopti_openrlhf.ops.lifecycle.stopping import RunStopped


class NoWholeCheckpoint(RunStopped):
    """There are checkpoints, and none of them is whole. To start again silently would lose the run."""

    exit_code = 5


class Part(NamedTuple):
    """The actor's or the critic's part of a run's checkpoints."""

    folder: Path
    ranks: int  # that write it


def parts_of(folder: Path, args: argparse.Namespace) -> list[Part]:
    """Return the parts of a run's checkpoints. `folder` holds one of them, and `args` are upstream's, nested."""
    parts = [Part(folder.parent / "_actor", args.actor.num_nodes * args.actor.num_gpus_per_node)]
    if args.critic.model_name_or_path:
        parts.append(Part(folder.parent / "_critic", args.critic.num_nodes * args.critic.num_gpus_per_node))
    return parts


def newest_whole(parts: list[Part]) -> str | None:
    """Return the newest checkpoint that is whole in all parts, or None where there is no checkpoint.

    All ranks have to call it. They share the reading. Every checkpoint that is passed over is named, with the reason.

    Raises:
        NoWholeCheckpoint: there are checkpoints, and none of them is whole.
    """
    since = time.monotonic()

    def candidates() -> list[str]:
        for part in parts:
            for line in files.clear_leftovers(part.folder):
                say(line)
        return files.newest_first([part.folder for part in parts])

    def problems(tag: str) -> list[str]:
        return [
            f"{part.folder.name}: {problem}"
            for part in parts
            for problem in files.problems(part.folder / tag, part.ranks, share())
        ]

    tags = on_rank_0(candidates)
    passed_over = []
    for i, tag in enumerate(tags):
        found = list(dict.fromkeys(chain(*everywhere(partial(problems, tag)))))
        if not found:
            _say_chosen(parts[0].folder / tag, tags[i + 1 :], time.monotonic() - since)
            return tag
        passed_over.append(f"{tag} is not whole ({'; '.join(found[:3])})")
        say(f"passed over checkpoint {passed_over[-1]}")
    if passed_over:
        raise NoWholeCheckpoint(
            f"{parts[0].folder.parent}: no checkpoint is whole: {', '.join(passed_over)}. To start anew, give another "
            "--ckpt.path."
        )
    return None


def _say_chosen(checkpoint: Path, older: list[str], seconds: float) -> None:
    if files.has_manifest(checkpoint):
        say(f"resumes from {checkpoint}, verified in {seconds:.1f} s")
    else:
        say(
            f"resumes from {checkpoint}. It has no manifest, so that it cannot be verified: the files that DeepSpeed "
            "needs are there, and the checksums inside them are right."
        )
    for tag in older:
        if (files.step_of(tag) or 0) > (files.step_of(checkpoint.name) or 0):
            say(f"{tag} is not taken: it was written before {checkpoint.name}, by an earlier run")
