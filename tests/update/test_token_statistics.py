"""The sums over a rollout batch by hand: four tokens, three bins of which one is empty."""

import math

import pytest
import torch

from arlopti_openrlhf.update.token_statistics import TokenUpdates, UpdateStatistics


def tokens(**changes) -> TokenUpdates:
    """π_old 0.1, 0.5, 0.9, 0.9; the last one is not computed."""
    values = dict(
        old_log_probs=torch.tensor([0.1, 0.5, 0.9, 0.9]).log(),
        log_probs=torch.tensor([0.2, 0.4, 0.95, 1.0]).log(),
        advantages=torch.tensor([2.0, -1.0, 1.0, 0.0]),
        weights=torch.tensor([1.0, -1.0, 2.0, 0.0]),
        weights_before_ar=torch.tensor([2.0, -1.0, 2.0, 0.0]),
        is_clipped=torch.tensor([False, True, False, False]),
        is_computed=torch.tensor([True, True, True, False]),
        entropies=torch.tensor([0.5, 0.6, 0.1, 99.0]),
        squared_rest=torch.tensor([0.36, 0.0, 0.0, 99.0]),
    )
    return TokenUpdates(**values | changes)


def test_metrics_by_hand():
    statistics = UpdateStatistics()
    statistics.add(tokens(), is_moved=False)
    found = statistics.metrics(before="ar")
    # Norms: sqrt(0.8² + 0.36) = 1; sqrt(0.6²) = 0.6; 2 · 0.05 = 0.1. Together 1.7, before AR 2.7.
    assert found["tokens/p0.00-0.25/logit_grad_norm"] == pytest.approx(1.0)
    assert [found[f"tokens/{p}/grad_share"] for p in ("p0.00-0.25", "p0.50-0.75", "p0.75-1.00")] == pytest.approx(
        [1 / 1.7, 0.6 / 1.7, 0.1 / 1.7], rel=1e-5
    )
    assert found["tokens/p0.00-0.25/grad_share_before_ar"] == pytest.approx(2 / 2.7)
    assert found["tokens/p0.75-1.00/count"] == 2 and found["tokens/p0.75-1.00/share"] == 0.5
    assert found["tokens/p0.75-1.00/abs_advantage"] == 0.5
    assert found["tokens/p0.75-1.00/entropy"] == pytest.approx(0.1)  # of the one that is computed
    assert found["tokens/p0.50-0.75/clip_ratio"] == 1
    assert found["tokens/p0.25-0.50/count"] == 0 and "tokens/p0.25-0.50/entropy" not in found
    assert not any(name.endswith(("/rose", "/probability_change")) for name in found)
    assert not any("before_ar" in name for name in statistics.metrics())
    fifths = statistics.histograms.view(2, 5, 10).sum(dim=2)  # 0.1, 0.5 and 0.9 lie in the middle of one each
    assert fifths[0].tolist() == [1, 0, 1, 0, 2]
    assert fifths[1].tolist() == pytest.approx([1.0, 0, 0.6, 0, 0.1], rel=1e-5)


def test_change_since_the_rollout():
    statistics = UpdateStatistics()
    statistics.add(tokens(), is_moved=False)  # tells nothing of change
    statistics.add(tokens(log_probs=torch.tensor([0.05, 0.7, 0.95, 1.0]).log()), is_moved=True)
    found = statistics.metrics()
    low, middle, high = "tokens/p0.00-0.25", "tokens/p0.50-0.75", "tokens/p0.75-1.00"
    assert found[f"{low}/probability_change"] == pytest.approx(-0.05)
    assert found[f"{middle}/probability_change"] == pytest.approx(0.2)
    assert found[f"{high}/probability_change"] == pytest.approx(0.05)
    assert (found[f"{low}/rose"], found[f"{high}/rose"]) == (0, 1) and f"{middle}/rose" not in found


def test_ranks_add_up():
    """Sums of two halves are those of the whole; certain tokens, π = 1, lie in the last bin."""
    certain = tokens(old_log_probs=torch.tensor([0.0, math.log(0.25), -50.0, 0.0]))
    whole, *halves = (UpdateStatistics() for _ in range(3))
    whole.add(certain, is_moved=True)
    for i, half in enumerate(halves):
        half.add(TokenUpdates(*(values[2 * i : 2 * i + 2] for values in certain)), is_moved=True)
    halves[0].sums += halves[1].sums
    halves[0].histograms += halves[1].histograms
    assert halves[0].metrics("ar") == pytest.approx(whole.metrics("ar"))
    assert whole.metrics("ar")["tokens/p0.75-1.00/count"] == 2 and whole.histograms[0, 49] == 2
