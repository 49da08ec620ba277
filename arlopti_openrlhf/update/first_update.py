"""Reports how a run's first update used the GPU, and which flags should make updates faster."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from arlopti_openrlhf.update.checkpointing import WHOLE, Checkpointing

_SECONDS = 0.25  # between readings. The driver's share covers its last second, or less
_BUSY = 0.85  # share of the time above which fewer kernels and larger micro-batches gain little


class GpuWatch:
    """Reads, while its context lasts, in which share of the time this process's GPU computes, by NVIDIA's driver."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def __enter__(self) -> "GpuWatch":
        self._start, self._ends, self._device = time.monotonic(), threading.Event(), torch.cuda.current_device()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        self.seconds = time.monotonic() - self._start

    def _read(self) -> None:
        with suppress(Exception):  # without NVML, or on a part of a GPU: its errors are no classes of PyTorch's
            while not self._ends.wait(_SECONDS):
                self.shares.append(torch.cuda.utilization(self._device) / 100)

    @property
    def busy(self) -> float | None:
        """The share in the second half of the time, as the first one warms up; None if it is not known."""
        later = self.shares[len(self.shares) // 2 :]
        return sum(later) / len(later) if later else None


def report(watch: GpuWatch, tokens: Sequence[int], checkpointing: Checkpointing, fits_tokens: bool) -> str:
    """Return a line on the first update.

    Args:
        watch: which has seen it.
        tokens: of each micro-batch of its first mini-batch.
        checkpointing: which has chosen their size.
        fits_tokens: whether it has done so by their tokens, and not by their number of samples.
    """
    busy = "unknown" if watch.busy is None else f"{watch.busy:.0%}, in its second half"
    per_batch = f"{sum(tokens) / len(tokens):,.0f} tokens per micro-batch"
    line = f"first update: {watch.seconds:.1f} s, {per_batch}, GPU busy: {busy}"
    hints = list(_hints(watch.busy, len(tokens), checkpointing, fits_tokens))
    return f"{line}. To make updates faster: {'; '.join(hints)}" if hints else line


def _hints(busy: float | None, micro_batches: int, checkpointing: Checkpointing, fits_tokens: bool) -> Iterator[str]:
    args, waits = checkpointing.args, busy is None or busy < _BUSY
    if waits and micro_batches > 1:
        if args.train.dynamic_batch_enable:
            yield "a larger --train.max_tokens_per_gpu"
        elif fits_tokens and not checkpointing.fills_memory:
            yield "--actor.fill_memory for larger micro-batches"
    if waits and not args.ds.use_liger_kernel:
        yield "--ds.use_liger_kernel for fewer kernels"
    if checkpointing.level == WHOLE:
        yield "more free memory, so that the layers are not computed twice"
    if args.ds.adam_offload:
        yield "no --ds.adam_offload, if the optimizer fits on the GPU"
