"""What the statistics by probability (`--logger.probability_stats`) add to an update."""

import statistics
import time
from unittest.mock import patch

import torch
from hardware import synchronize
from operations import LOW_SHARE
from rollouts import SHAPES
from update_bench import Bench

from arlopti_openrlhf.patching import replaced_attribute
from arlopti_openrlhf.update import step, trainer
from arlopti_openrlhf.update.token_statistics import UpdateStatistics


def seconds_of_statistics(bench: Bench) -> dict[str, float]:
    """What `--logger.probability_stats` adds to an update, by variant.

    What follows the forward pass is timed in an update. In the selective one the head also sums up its blocks of
    logits with entropies and squares. What that adds is timed on one block, with and without by turns.
    """
    # The first pass of Lopti is on-policy, and computes the high group too.
    rows = int(sum(s.action_mask.sum().item() for s in bench.rollout) * (2 - LOW_SHARE))
    per_row = seconds_of_statistics_per_row(SHAPES[bench.args.shape].vocab_size)
    return {
        "stock GRPO": seconds_of_observing(bench, "observed stock GRPO"),
        "AR + Lopti": seconds_of_observing(bench, "AR + Lopti") + rows * per_row,
    }


def seconds_of_observing(bench: Bench, variant: str) -> float:
    """What follows the forward pass in one update: derivatives and sums, and on stock's logits their statistics."""
    seconds = [0.0]

    def timed(function):
        def call(*args, **kwargs):
            synchronize()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize()
            seconds[0] += time.perf_counter() - start
            return result

        return call

    with (
        replaced_attribute(trainer, "token_updates", timed(trainer.token_updates)),
        patch.object(UpdateStatistics, "add", timed(UpdateStatistics.add)),
        replaced_attribute(step, "statistics_of_logits", timed(step.statistics_of_logits)),
    ):
        bench.step(variant)
    return seconds[0]


def seconds_of_statistics_per_row(vocabulary: int) -> float:
    """What entropies and squares add to the sums over one row of the vocabulary's logits."""
    from arlopti_openrlhf.forward.lm_head import BLOCK_ELEMENTS, _arithmetic

    device, rows = torch.cuda.current_device(), 512
    logits = torch.randn(rows, BLOCK_ELEMENTS // rows, device=device)
    targets = torch.zeros(rows, dtype=torch.long, device=device)
    differences = []
    for _ in range(9):
        durations = []
        for with_statistics in (False, True):
            block = logits.clone()
            synchronize()
            start = time.perf_counter()
            _arithmetic(logits.device.type).sum_up(block, targets, 1.0, with_statistics)
            synchronize()
            durations.append(time.perf_counter() - start)
        differences.append(durations[1] - durations[0])
    return statistics.median(differences) * vocabulary / logits.numel()
