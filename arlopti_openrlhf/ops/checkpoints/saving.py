"""Saves checkpoints that are whole and complete, and resumes from the newest whole one.

OpenRLHF deletes before it writes, writes in place, and loads what `latest` names. `CheckpointStrategy` is the one
place where that changes, because OpenRLHF saves and loads through its strategy alone.
"""

import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
from torch import distributed as dist

from arlopti_openrlhf import learning_rate
from arlopti_openrlhf.ops.checkpoints import files, state, unpickling
from arlopti_openrlhf.ops.checkpoints.ranks import everywhere, on_rank_0, say
from arlopti_openrlhf.ops.health.guard import GuardedStrategy, engine_of, first_non_finite
from arlopti_openrlhf.ops.lifecycle.stopping import Diverged, RunStopped
from arlopti_openrlhf.patching import replaced_attribute

# What upstream's controllers take from a checkpoint, for a run that has none yet.
BEGINNING = {"episode": 0, "global_step": 0, "total_consumed_prompts": 0, "data_loader_state_dict": {}}


class NotWritten(RunStopped):
    """A checkpoint or a model could not be written."""


class NoWholeCheckpoint(RunStopped):
    """There are checkpoints, and none of them is whole. To start again silently would lose the run."""

    exit_code = 5


class NotAllowed(RunStopped):
    """A checkpoint would call something on loading that no checkpoint of a run calls."""

    exit_code = 2


class CheckpointStrategy(GuardedStrategy):
    """`GuardedStrategy` that changes how checkpoints and models are saved and loaded.

    Ray pickles it to every worker, with its class by name.

    1. A checkpoint is written under another name and renamed when all ranks' files are on the disk, with a manifest.
       Only then are older ones removed, by upstream's rule. A model's files get their names when all are whole.
    2. It also holds what `state.save` lists.
    3. A run resumes from the newest whole checkpoint, and says which it passed over and why.
    4. Where a checkpoint cannot be written, a line says why, and the run continues. Where the final model cannot be
       written, the run fails.
    5. Weights that are not finite are not saved, and the run stops.
    6. The learning rate of a resumed run is that of its own plan, and the minimum past the plan's end.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        kept = Path(self.args.ckpt.path, files.KEPT)  # as this start has written it: a user may edit it meanwhile
        self.flags = kept.read_text("utf-8") if kept.exists() else None
        self.averaged: Any = None  # the model without an optimizer that this process holds: next to the policy, EMA

    def _ds_init_train_model(self, model, cfg: dict):
        model, optimizer, scheduler = super()._ds_init_train_model(model, cfg)
        learning_rate.stay_at_minimum(scheduler, cfg)
        return model, optimizer, scheduler

    def _ds_init_eval_model(self, model) -> Any:
        self.averaged = super()._ds_init_eval_model(model)
        return self.averaged

    def save_ckpt(
        self,
        model: deepspeed.DeepSpeedEngine,
        save_dir: str,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: float = 1000,
        client_state: dict | None = None,
        save_latest: bool = True,
        metric_value: float | None = None,
        metric_key: str | None = None,
    ) -> None:
        """Save a checkpoint. This restates upstream's method in another order. All ranks have to call it.

        The file `latest` names it, as in each of upstream's calls, which leave `save_latest` at True.

        Raises:
            Diverged: a weight is not finite.
        """
        _require_finite(model)
        folder, tag = Path(save_dir), tag or f"global_step{model.global_steps}"
        writing = folder / f"{files.WRITING}{tag}"

        def require_shared() -> None:  # before DeepSpeed makes it on every node
            for _ in range(30):
                if writing.is_dir():
                    return
                time.sleep(1)  # a network's file system may show it late
            raise OSError("--ckpt.path is no folder that all nodes share")

        try:
            on_rank_0(lambda: files.begin(writing, say))
            everywhere(require_shared)
            self._write(model, writing, client_state or {})
            on_rank_0(lambda: self._write_ckpt_metric(str(writing), metric_value, metric_key))
            on_rank_0(lambda: files.publish(writing, self.flags))
        except (NotWritten, OSError) as error:
            self._clear(f"checkpoint {folder / tag}", writing, error)
            say("The run goes on, and older checkpoints stay.")
            return

        def rotate() -> None:
            folders, metric = files.folders_of(folder.parent, self.args), self._read_ckpt_metric
            try:
                for line in files.rotate(folders, tag, max_num, max_mem, lambda other: metric(str(folder / other))):
                    say(line)
            except OSError as error:
                say(f"older checkpoints stay: {error}")

        on_rank_0(rotate)

    def _write(self, model: deepspeed.DeepSpeedEngine, writing: Path, client_state: dict) -> None:
        """Write every rank's files.

        Raises:
            NotWritten: on all ranks, where one could not write. It waits until DeepSpeed's collective calls are over.
        """
        failures: list[Exception] = []

        def keeping_failure(function: Callable[..., None]) -> Callable[..., None]:
            def call(*args, **kwargs) -> None:
                try:
                    function(*args, **kwargs)
                except (OSError, RuntimeError) as error:
                    failures.append(error)

            return call

        engine = model.checkpoint_engine
        with (
            replaced_attribute(engine, "save", keeping_failure(engine.save)),
            replaced_attribute(model, "_copy_recovery_script", keeping_failure(model._copy_recovery_script)),
        ):
            model.save_checkpoint(str(writing.parent), tag=writing.name, client_state=client_state, save_latest=False)
        keeping_failure(state.save)(writing, self)

        def raise_failure() -> None:
            if failures:
                raise NotWritten(files.cause_of(failures[0], writing))

        everywhere(raise_failure)

    def load_ckpt(
        self, model: deepspeed.DeepSpeedEngine, load_dir: str, tag: str | None = None, **kwargs
    ) -> tuple[str | None, dict]:
        """Load the newest whole checkpoint, with the state of this process. All ranks have to call it.

        Returns:
            What upstream returns. Where no checkpoint has been written yet, None and the state of a run's beginning.

        Raises:
            NoWholeCheckpoint: there are checkpoints, and none of them is whole.
            NotAllowed: it would call something that `unpickling` does not allow.
        """
        try:
            with unpickling.restricted():
                return self._load(model, load_dir, tag, **kwargs)
        except pickle.UnpicklingError as error:
            names = re.findall(r"GLOBAL (\S+)", str(error)) or [str(error)]
            raise NotAllowed(f"{load_dir}: {'; '.join(unpickling.refusal(names))}") from error

    def _load(self, model: Any, load_dir: str, tag: str | None, **kwargs) -> tuple[str | None, dict]:
        # DeepSpeed's tool makes universal checkpoints in a layout of their own. What was saved since then comes first.
        is_universal = self.use_ds_universal_ckpt and on_rank_0(lambda: not files.is_past_universal(Path(load_dir)))
        if not is_universal:
            folders = [folder for folder in files.folders_of(Path(load_dir).parent, self.args) if folder.is_dir()]
            tag = tag or newest_whole(folders)
            if tag is None:
                say(f"{load_dir}: no checkpoint yet, the run starts at its beginning")
                return None, dict(BEGINNING)
        with replaced_attribute(model._config, "load_universal_checkpoint", is_universal):
            path, states = super().load_ckpt(model, load_dir, tag, **kwargs)
        if model.zero_optimization_stage() == 3:  # a sleeping run has saved its host buffers, which are on the GPU now
            for state_of in model.optimizer.optimizer.state.values():
                for name in [name for name in state_of if name.endswith("_offload_buffer")]:
                    del state_of[name]
        model.optimizer.clip_grad = model.gradient_clipping()  # below ZeRO-3 DeepSpeed takes the checkpoint's
        learning_rate.follow(model.lr_scheduler)
        if is_universal:
            everywhere(lambda: state.begin_average(self, model.module))
        elif tag:
            checkpoint = Path(load_dir, tag)
            everywhere(lambda: state.restore(checkpoint, self, model.module))
        return path, states

    def save_model(self, model, tokenizer, output_dir: str, **kwargs) -> None:
        """Save a model as upstream does. Its files get their names when all are whole, `config.json` the last.

        Raises:
            NotWritten: the final model could not be written. That of a checkpoint (`--ckpt.save_hf`) costs a line.
            Diverged: a weight is not finite.
        """
        _require_finite(engine_of(model))
        writing = Path(output_dir, f"{files.WRITING}model")
        failure: Exception | None = None

        def finish() -> None:
            if failure:
                raise NotWritten(files.cause_of(failure, writing))
            if self.is_rank_0():
                _move_up(writing)

        try:
            on_rank_0(lambda: files.begin(writing, say))
            try:
                super().save_model(model, tokenizer, str(writing), **kwargs)
            except Exception as error:  # on rank 0, which writes, while the others wait at upstream's last barrier
                failure = error
                torch_dist_barrier_and_cuda_sync()
            everywhere(finish)
        except (NotWritten, OSError) as error:
            explained = self._clear(f"model {output_dir}", writing, error)
            if output_dir in (self.args.ckpt.output_dir, f"{self.args.ckpt.output_dir}_critic"):
                raise NotWritten(explained) from error

    def _clear(self, what: str, writing: Path, error: Exception) -> str:
        """Remove what was written of something, and return what is missing, which is also printed."""

        def clear() -> str:
            written, needed = files.size_of(writing), files.size_needed(writing.parent)
            shutil.rmtree(writing, ignore_errors=True)
            free = shutil.disk_usage(files.nearest(writing)).free
            size = f"{needed:,}" if needed else f"more than {written:,}"
            return f"{what} is NOT written: {error}. It needs {size} bytes, {free:,} are free."

        explained = on_rank_0(clear)
        say(explained)
        return explained


def newest_whole(folders: list[Path]) -> str | None:
    """Return the newest checkpoint that is whole in all folders, or None where there is no checkpoint.

    All ranks have to call it. Every checkpoint that is passed over is named, with the reason.

    Raises:
        NoWholeCheckpoint: there are checkpoints, and none of them is whole.
    """

    def candidates() -> list[str]:
        for line in chain.from_iterable(map(files.clear_leftovers, folders)):
            say(line)
        return files.newest_first(folders)

    def problems(tag: str) -> list[str]:
        return [f"{folder.name}: {line}" for folder in folders for line in files.problems(folder / tag)]

    def damages(tag: str) -> list[str]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own = [(folder, unpickling.damages(folder / tag, rank, ranks)) for folder in folders]
        return [f"{folder.name}: {line}" for folder, lines in own for line in lines]

    passed_over = []
    for tag in on_rank_0(candidates):
        found = on_rank_0(partial(problems, tag)) or list(chain(*everywhere(partial(damages, tag))))
        if not found:
            say(f"resumes from {folders[0] / tag}")
            return tag
        passed_over.append(f"{tag} is not whole ({'; '.join(found[:3])})")
        say(f"passed over checkpoint {passed_over[-1]}")
    if passed_over:
        raise NoWholeCheckpoint(
            f"{folders[0].parent}: no checkpoint is whole: {', '.join(passed_over)}. To start anew, give another "
            "--ckpt.path."
        )
    return None


def _require_finite(engine: deepspeed.DeepSpeedEngine) -> None:
    """Raise `Diverged` on all ranks where a weight is not finite on one."""

    def check() -> None:
        if parameter := first_non_finite(engine):
            raise Diverged(f"the weights are not finite, first in {parameter}, and are not saved")

    everywhere(check)


def _move_up(writing: Path) -> None:
    """Move a whole model's files out of `writing`. A folder that holds `config.json` is whole."""
    folder = writing.parent
    (folder / "config.json").unlink(missing_ok=True)
    for path in sorted(writing.iterdir(), key=lambda path: path.name == "config.json"):
        files.flush(path)
        if path.is_dir():  # a tokenizer's chat templates, which no folder of an earlier model may hold up
            shutil.rmtree(folder / path.name, ignore_errors=True)
        os.replace(path, folder / path.name)
    files.flush(folder)
    writing.rmdir()
