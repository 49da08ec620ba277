"""The figures' data equal autograd and arithmetic by hand."""

import pytest
import torch
from arlopti_testing.analysis_fakes import flat

from arlopti_openrlhf.lab.analysis import figures, plots
from arlopti_openrlhf.lab.analysis.policy import Update


def test_figure_2_is_autograds_gradient_of_single_tokens_within_the_cone(policy, batch, tokens):
    data = figures.figure_2(policy, batch, tokens, count=40, layers=[2])
    assert [panel["layer"] for panel in data["layers"]] == ["embedding", "layer 2 of 2", "logits"]
    assert data["inside_bounds"] == 1 and data["largest_gap_to_eq_15"] < 1e-5
    rest, (low, high) = torch.tensor(data["one_minus_probability"]), data["logit_slopes"]  # what the picture shows
    norms = torch.tensor(data["layers"][-1]["norm"])
    assert (norms >= low * rest * 0.999 - 1e-6).all() and (norms <= high * rest * 1.001 + 1e-6).all()
    # One of them again, alone and without padding, from its number in the list.
    row, column = (batch.action_mask & (tokens.log_probs.exp() < 0.1)).nonzero()[0].tolist()
    chosen = torch.tensor([[row, column], [row + 1, column]])
    modules = {"embedding": policy.model.get_input_embeddings()}
    norms = figures.activation_gradient_norms(policy, batch, chosen, modules)
    embedded = modules["embedding"](batch.sequences[row : row + 1, : column + 1]).detach().requires_grad_()
    logits = policy.model(inputs_embeds=embedded).logits[0, -1] / policy.temperature
    logits.log_softmax(dim=-1)[batch.sequences[row, column + 1]].backward()
    assert norms["embedding"][0].item() == pytest.approx(embedded.grad.norm().item(), rel=1e-4)


def test_share_in_the_right_direction_and_its_interval():
    # Prompt 0: 2 of 2 right, prompt 1: 1 of 3. Share 3/5; residuals 2 - 0.6·2 = 0.8 and 1 - 0.6·3 = -0.8, so that the
    # standard error is √(2/1 · (0.8² + 0.8²)) / 5 = 0.32, for two prompts.
    right = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    selected = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    share = figures._share(right, selected, torch.tensor([0, 1]))
    assert share == {"share": pytest.approx(0.6), "ci95": pytest.approx(1.959964 * 2 * 0.8 / 5)}
    assert figures._share(right, selected & right, torch.tensor([1, 1])) == {"share": 1.0, "ci95": None}
    assert figures._share(right, selected & False, torch.tensor([0, 1])) is None


def test_figure_2_of_a_policy_that_is_sure(policy, batch, tokens):
    sure = tokens._replace(log_probs=torch.zeros_like(tokens.log_probs))
    data = figures.figure_2(policy, batch, sure, count=40, layers=[1])
    assert all(panel["slope"] is None and panel["correlation"] is None for panel in data["layers"])
    assert plots.png("fig2", data).startswith(b"\x89PNG")


def test_figure_1_equals_the_gradients_and_steps_of_its_quarters(policy, batch, tokens):
    moments, rate = policy.zeros(), 1e-3
    gradient = policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask, moments)
    update = Update(gradient, moments, rate, policy.log_probs_after_step(batch, gradient, moments, rate))
    data = figures.figure_1(policy, batch, tokens, update)
    quarters = figures.bins(tokens.log_probs.exp(), batch.action_mask, figures.EDGES)
    changes = data["change"]
    assert list(changes) == ["all", "lowest", "highest"]
    for i, (group, quarter) in enumerate(zip(data["groups"], quarters, strict=True)):
        own = policy.gradient(batch, tokens.log_probs, batch.advantages, quarter)
        assert group["gradient_norm"] == pytest.approx(flat(own).norm().item(), rel=1e-4, abs=1e-6)
        if i in (0, 3):
            change = policy.log_probs_after_step(batch, own, moments, rate).exp() - tokens.log_probs.exp()
            expected = [change[q].abs().mean().item() if q.any() else None for q in quarters]
            found = changes["highest" if i else "lowest"]["mean_absolute"]
            assert found == [b if b is None else pytest.approx(b, rel=1e-2, abs=1e-6) for b in expected]
