"""What the log says of the first update on a GPU, which a fake stands in for, and the micro-batches that fill it."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_counts  # noqa: E402
import rollouts  # noqa: E402
from update_bench import training_flags  # noqa: E402

from arlopti_openrlhf.update import checkpointing, first_update, trainer  # noqa: E402
from arlopti_openrlhf.update.checkpointing import NONE, WHOLE  # noqa: E402
from arlopti_openrlhf.update.first_update import GpuWatch, report  # noqa: E402


def chosen(level: str = NONE, fills: bool = False, **flags) -> SimpleNamespace:
    """Stands in for `Checkpointing`."""
    given = dict(dynamic_batch_enable=False, use_liger_kernel=False, adam_offload=False) | flags
    args = SimpleNamespace(train=SimpleNamespace(**given), ds=SimpleNamespace(**given))
    return SimpleNamespace(args=args, level=level, fills_memory=fills)


def watched(*shares: float) -> GpuWatch:
    watch = GpuWatch()
    watch.shares, watch.seconds = list(shares), 12.34
    return watch


FILL, LIGER = "--actor.fill_memory for larger micro-batches", "--ds.use_liger_kernel for fewer kernels"


@pytest.mark.parametrize(
    ("shares", "tokens", "of", "busy", "hints"),
    [
        ([0.1, 0.2, 0.4, 0.5], [4000, 2000], chosen(), "45%", [FILL, LIGER]),
        ([], [4000, 2000], chosen(), "unknown", [FILL, LIGER]),
        ([0.9], [4000, 2000], chosen(), "90%", []),
        ([0.4], [3000], chosen(), "40%", [LIGER]),
        ([0.4], [3000, 3000], chosen(fills=True, use_liger_kernel=True), "40%", []),
        (
            [0.4],
            [3000, 3000],
            chosen(use_liger_kernel=True, dynamic_batch_enable=True),
            "40%",
            ["a larger --train.max_tokens_per_gpu"],
        ),
        ([0.9], [3000], chosen(WHOLE, adam_offload=True), "90%", ["more free memory", "no --ds.adam_offload"]),
    ],
)
def test_what_is_said(shares, tokens, of, busy, hints):
    said, _, advice = report(watched(*shares), tokens, of, fits_tokens=True).partition(". To make updates faster: ")
    assert said.startswith(f"first update: 12.3 s, 3,000 tokens per micro-batch, GPU busy: {busy}")
    found = advice.split("; ") if advice else []
    assert len(found) == len(hints) and all(line.startswith(hint) for line, hint in zip(found, hints, strict=True))


def test_memory_is_no_advice_where_micro_batches_count_samples():
    assert "fill_memory" not in report(watched(0.4), [3000, 3000], chosen(), fits_tokens=False)


def test_the_driver_is_asked_while_the_context_lasts(monkeypatch):
    monkeypatch.setattr(first_update, "_SECONDS", 0.01)
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 40)
    with GpuWatch() as watch:
        while len(asked) < 3:
            pass
    assert set(asked) == {3} and watch.busy == pytest.approx(0.4) and watch.seconds > 0


def test_a_gpu_that_the_driver_does_not_count_ends_nothing(monkeypatch):
    def utilization(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(first_update, "_SECONDS", 0.001)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    with GpuWatch() as watch:
        watch._thread.join()
    assert watch.busy is None


@pytest.mark.parametrize(
    ("flags", "is_known"), [([], True), (["--actor.fill_memory"], True), (["--actor.fill_memory"], False)]
)
def test_the_first_update_of_the_trainer_is_reported_once(flags, is_known, monkeypatch):
    """Two prompts, in micro-batches of two samples, or in one that takes what is free."""
    said, warned = [], []
    monkeypatch.setattr(trainer.logger, "info", said.append)
    monkeypatch.setattr(trainer.logger, "warning", warned.append)
    for module in (checkpointing, trainer):
        monkeypatch.setattr(module, "is_known", lambda config: is_known)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(checkpointing, "_free_bytes", lambda *args: 2**40)
    monkeypatch.setitem(rollouts.SHAPES, "filled", rollouts.Shape("filled", 32, 64, 1, 4, 2, vocab_size=211))
    sizes = argparse.Namespace(
        shape="filled",
        prompts=2,
        mini_batches=1,
        micro_batch_size=2,
        packing=False,
        prompt_length=None,
        response_length=None,
    )
    args = training_flags(sizes, ["--algo.lopti.eta", "0.005", *flags])
    samples = rollouts.rollout(sizes, scale=0.03)
    for sample in samples:
        sample.base_action_log_probs = torch.full(sample.action_mask.shape, -5.0)
    with gpu_counts._alone():
        driver = gpu_counts._trainer(rollouts.make_model("filled", "sdpa"), args, micro_batches=1)
        for _ in range(2):
            for sample in samples:
                sample.action_log_probs = gpu_counts._old_log_probs(driver, sample)
                driver.replay_buffer.append(sample)
            driver.ppo_train(args.algo.kl.init_coef)
            driver.replay_buffer.clear()
    divided, first = said
    assert ("in 1 micro-batch " in divided) == (bool(flags) and is_known) and first.startswith("first update: ")
    assert ("--actor.fill_memory" in first) == (not flags)
    expected = "--actor.fill_memory has no effect: the size of the model's layers is not known"
    assert warned == ([] if is_known else [expected])
