"""Which method lowers noise and which lowers signal follows from the cells' shares, by hand."""

import pytest
import torch

from arlopti_openrlhf.lab.analysis import method_effects
from arlopti_openrlhf.lab.analysis.method_effects import effect, sentences
from arlopti_openrlhf.lab.analysis.policy import Tokens
from arlopti_openrlhf.lab.analysis.rollouts import Batch


@pytest.mark.parametrize(
    ("after", "lowers", "noise", "signal"),
    [
        ([0.5, 0.2, 0.3], "noise", 0.1, 0.0),  # the second cell, which does not agree, loses 0.1
        ([0.3, 0.3, 0.4], "signal", 0.0, 0.1),
        ([0.35, 0.2, 0.45], "both", 0.1, 0.05),
        ([0.402, 0.3, 0.298], "neither", 0.0, 0.0),  # 0.002 is less than half a point
        (None, "both", 0.3, 0.7),  # no token is left
    ],
)
def test_effect(after, lowers, noise, signal):
    found = effect([0.4, 0.3, 0.3], after, [True, False, True])
    assert (found["lowers"], found["noise"], found["signal"]) == (lowers, pytest.approx(noise), pytest.approx(signal))
    assert found["agreeing_before"] == pytest.approx(0.7)
    assert found["agreeing_after"] == pytest.approx(after[0] + after[2] if after else 0)


def test_shares_of_cells_ignore_a_common_factor():
    sizes = torch.tensor([[1.0, 2.0, 1.0]])
    cells = [torch.tensor([[1, 1, 0]]).bool(), torch.tensor([[0, 0, 1]]).bool()]
    assert method_effects.gradient_shares(sizes, cells) == [0.75, 0.25]
    assert method_effects.gradient_shares(0.1 * sizes, cells) == pytest.approx([0.75, 0.25])
    assert method_effects.gradient_shares(0 * sizes, cells) is None


def test_every_built_in_method_is_asked(batch, tokens):
    weights, left_out = method_effects.method_weights(batch, tokens)
    assert set(left_out) == {"surprisal_band"} and "needs lo, hi" in left_out["surprisal_band"]
    assert {"ar", "ar alpha=-0.2 (Direction)", "lopti", "eighty_twenty", "clip_cov"} <= set(weights)
    probabilities, mask = tokens.log_probs.exp(), batch.action_mask
    assert torch.allclose(weights["ar"][mask], 0.3 * probabilities[mask] + 0.7)
    assert torch.allclose(weights["ar alpha=-0.2 (Direction)"][mask], 1.2 - 0.2 * probabilities[mask])
    assert torch.equal(weights["lopti"], mask.float())  # its two passes share the tokens
    assert torch.equal(weights["dppo"], mask.float())  # the policy has drawn the batch itself
    # A fifth of the response's tokens, and none of the padding, whose entropy is 0.
    assert weights["eighty_twenty"].sum() >= 0.2 * mask.sum() and not weights["eighty_twenty"][~mask].any()


def data(**methods) -> dict:
    whole = {"cosine": 0.5, "low": 0.25, "high": 0.625}
    cells = [
        {"share": 0.875, "logit_share": 0.75, "found": "agrees"},
        {"share": 0.125, "logit_share": 0.25, "found": "no agreement"},
    ]
    return {"prompts": 24, "whole": whole, "cells": cells, "methods": methods}


def test_sentences():
    noise, signal, both, neither = (
        effect([0.75, 0.25], after, [True, False]) for after in ([1.0, 0.0], [0.5, 0.5], None, [0.75, 0.25])
    )
    first, second, third = sentences(data(stapo=noise, ar=signal, a=both, lopti=neither, steer=noise))
    assert first == (
        "24 prompts have a gradient. Between that of one half of them and that of the other the cosine is 0.50 "
        "(95%: 0.25 to 0.62)."
    )
    assert second.startswith(
        "Cells that agree on other prompts carry 88% of the gradient over all parameters, and 75% token by token "
        "at the logits."
    )
    assert third == (
        "At their default constants, stapo, steer lower noise; ar lower signal; "
        "a (noise by 25.0 points, signal by 75.0) lower both; lopti lower neither."
    )


def test_nothing_is_judged_where_nothing_agrees():
    _, second = sentences(data())
    assert second.startswith("Too little agrees to tell signal from noise, so no token method is judged.")


def test_shares_by_hand():
    # Two tokens per prompt, A = 1, each the norm √2 (1 - π): π = 0.25 has 0.75/0.85 = 88% of the gradient.
    log_probs = torch.tensor([[0.25, 0.9, 0.25]] * 6).log()
    rest = 1 - log_probs.exp()
    mask = torch.tensor([[True, True, False]] * 6)
    found = method_effects.gradient_by_probability(
        Batch(mask, mask, mask, torch.ones(6, 3) * mask, torch.arange(6)),
        Tokens(log_probs, rest.square(), torch.zeros(6, 3)),
    )
    assert found["low_tokens"] == 0.5 and found["low_gradient"] == pytest.approx(0.75 / 0.85)
    by_alpha, by_eta = found["low_gradient_by_alpha"], found["low_gradient_by_eta"]
    assert by_alpha["0"] == found["low_gradient"] == by_eta["0.5"]
    # α = 1: 0.75 · 0.25 = 0.1875 against 0.1 · 0.9 = 0.09.
    assert by_alpha["1"] == pytest.approx(0.1875 / 0.2775, rel=1e-4)
    # α = 0.2: 0.75 · 0.85 = 0.6375 against 0.1 · 0.98 = 0.098.
    assert by_alpha["0.2"] == pytest.approx(0.6375 / 0.7355, rel=1e-4)
    assert [by_eta[eta] for eta in ("0.2", "0.3", "0.8")] == pytest.approx([0, 0.75 / 0.85, 0.75 / 0.85], abs=1e-6)
