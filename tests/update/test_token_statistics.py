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
        unweighted=torch.tensor([2.0, -1.0, 2.0, 0.0]),
        is_clipped=torch.tensor([False, True, False, False]),
        is_computed=torch.tensor([True, True, True, False]),
        entropies=torch.tensor([0.5, 0.6, 0.1, 99.0]),
        squared_rest=torch.tensor([0.36, 0.0, 0.0, 99.0]),
    )
    return TokenUpdates(**values | changes)


def test_metrics_by_hand():
    statistics = UpdateStatistics()
    statistics.add(tokens(), is_moved=False)
    found = statistics.metrics(is_whole=True, is_rescaled=True)
    # Norms: sqrt(0.8² + 0.36) = 1; sqrt(0.6²) = 0.6; 2 · 0.05 = 0.1. Together 1.7, without weights 2.7.
    assert found["tokens/p0.00-0.25/logit_grad_norm"] == pytest.approx(1.0)
    assert [found[f"tokens/{p}/grad_share"] for p in ("p0.00-0.25", "p0.50-0.75", "p0.75-1.00")] == pytest.approx(
        [1 / 1.7, 0.6 / 1.7, 0.1 / 1.7], rel=1e-5
    )
    assert found["tokens/p0.00-0.25/grad_share_unweighted"] == pytest.approx(2 / 2.7)
    assert found["tokens/p0.75-1.00/count"] == 2 and found["tokens/p0.75-1.00/share"] == 0.5
    assert found["tokens/p0.75-1.00/abs_advantage"] == 0.5
    assert found["tokens/p0.75-1.00/entropy"] == pytest.approx(0.1)  # of the one that is computed
    assert found["tokens/p0.50-0.75/clip_ratio"] == 1
    assert found["tokens/p0.25-0.50/count"] == 0 and "tokens/p0.25-0.50/entropy" not in found
    assert not any(name.endswith(("/rose", "/probability_change")) for name in found)
    assert found["tokens/entropy"] == pytest.approx((0.5 + 0.6 + 0.1) / 3)
    partly = statistics.metrics(is_whole=False, is_rescaled=False)
    assert not any("unweighted" in name or name == "tokens/entropy" for name in partly)
    # By hundredths. 0.1, 0.5 and 0.9 lie in the middle of a fifth each.
    fifths = torch.tensor([found["tokens/probability"], found["tokens/logit_grad_norm_by_probability"]]).view(2, 5, 20)
    assert fifths.sum(dim=2)[0].tolist() == [1, 0, 1, 0, 2]
    assert fifths.sum(dim=2)[1].tolist() == pytest.approx([1.0, 0, 0.6, 0, 0.1], rel=1e-5)


def test_change_since_the_rollout():
    statistics = UpdateStatistics()
    statistics.add(tokens(), is_moved=False)  # tells nothing of change
    statistics.add(tokens(log_probs=torch.tensor([0.05, 0.7, 0.95, 1.0]).log()), is_moved=True)
    found = statistics.metrics(is_whole=True, is_rescaled=False)
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
    found = whole.metrics(True, True)
    for name, value in halves[0].metrics(True, True).items():
        assert value == pytest.approx(found[name])
    assert found["tokens/p0.75-1.00/count"] == found["tokens/probability"][99] == 2
