"""The LM head on selected positions, against plain log_softmax in float64, in plain torch and in Triton's kernels."""

import os

import pytest
import torch

from arlopti_openrlhf.forward import lm_head
from arlopti_openrlhf.forward.lm_head import selected_log_probs

pytestmark = pytest.mark.usefixtures("arithmetic")


@pytest.fixture(params=["triton" if os.environ.get("TRITON_INTERPRET") else "torch"])
def arithmetic(request, monkeypatch):
    """Take a block's arithmetic in plain torch. tests/long/test_triton.py takes it in Triton's kernels."""
    if request.param == "triton":
        chosen = lm_head._arithmetic.__wrapped__
        monkeypatch.setattr(lm_head, "_arithmetic", lambda device: chosen("cuda"))


def reference(hidden, weight, targets, bias, temperature):
    logits = hidden @ weight.T
    log_p = ((logits if bias is None else logits + bias) / temperature).log_softmax(dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("block_elements", [1, 2**24])
def test_values_and_gradients(monkeypatch, with_bias, with_entropy, block_elements):
    """One block and several, the last one short. The third row has no gradient."""
    monkeypatch.setattr(lm_head, "BLOCK_ELEMENTS", block_elements)
    generator = torch.Generator().manual_seed(0)
    rows, width, vocabulary = 7, 16, 2500
    hidden = torch.randn(rows, width, generator=generator)
    weight, bias = (
        0.3 * torch.randn(vocabulary, width, generator=generator),
        torch.randn(vocabulary, generator=generator),
    )
    targets = torch.tensor([0, 1023, 1024, 2499, 5, 5, 2048])
    of_log_probs, of_entropy = torch.randn(2, rows, generator=generator).unbind()
    of_log_probs[2] = of_entropy[2] = 0.0
    bias = bias if with_bias else None

    def gradients(function, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias) if x is not None]
        log_probs, entropy, *_ = function(*inputs[:2], targets, inputs[2] if with_bias else None, 0.7)
        loss = (log_probs * of_log_probs.to(dtype)).sum()
        if with_entropy:
            loss = loss + (entropy * of_entropy.to(dtype)).sum()
        return [log_probs, *([entropy] if with_entropy else []), *torch.autograd.grad(loss, inputs)]

    def of_logits(hidden, weight, targets, bias, temperature):
        """The logits are there, as those of Granite and Gemma 2 are."""
        logits = torch.nn.functional.linear(hidden, weight, bias)
        kept = logits.clone()
        results = selected_log_probs(logits, None, targets, None, temperature, with_entropy)
        assert torch.equal(logits, kept)
        return results

    exact = gradients(reference, torch.float64)
    for function in (lambda *args: selected_log_probs(*args, with_entropy), of_logits):
        for a, b in zip(gradients(function, torch.float32), exact, strict=True):
            assert a.dtype == torch.float32
            assert (a.double() - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("has_logits", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_only_tokens_that_are_trained_have_a_gradient(with_entropy, has_logits):
    """Theirs are those of these tokens alone."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(7, 16, generator=generator), torch.randn(2500, 16, generator=generator)
    targets, rows = torch.randint(0, 2500, (7,), generator=generator), torch.tensor([1, 2, 6])

    def gradients(hidden, targets, **trained):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        states = (inputs[0] @ inputs[1].T, None) if has_logits else inputs
        log_probs, entropy, _ = selected_log_probs(*states, targets, with_entropy=with_entropy, **trained)
        loss = log_probs.sum() + (3 * entropy.sum() if with_entropy else 0)
        return torch.autograd.grad(loss, inputs)

    of_all, of_weight = gradients(hidden, targets, trained=lambda: rows)
    of_rows, alone = gradients(hidden[rows], targets[rows])
    torch.testing.assert_close(of_all[rows], of_rows, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(of_weight, alone, rtol=1e-4, atol=1e-5)
    others = torch.ones(7).bool().index_fill(0, rows, False)
    assert not of_all[others].any() and of_all[rows].any()


@pytest.mark.parametrize("block_elements", [1, 2**24])
def test_statistics(monkeypatch, block_elements):
    """They leave log-probs and gradients as they are; the sum of squares is exact also where π is next to 1."""
    monkeypatch.setattr(lm_head, "BLOCK_ELEMENTS", block_elements)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(6, 16, generator=generator)
    weight = torch.randn(2500, 16, generator=generator)
    targets = torch.tensor([0, 1023, 1024, 2499, 5, 7])
    hidden[5] = 40 * weight[7] / weight[7].norm()  # its π is 1 - 1e-9
    logits = hidden.double() @ weight.double().T / 0.7
    p = logits.softmax(dim=-1)
    rest = p.scatter(1, targets[:, None], 0.0).square().sum(dim=-1)
    results = {}
    for with_statistics in (False, True):
        inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
        log_probs, entropy, squares = selected_log_probs(
            *inputs, targets, temperature=0.7, with_statistics=with_statistics
        )
        results[with_statistics] = [log_probs, *torch.autograd.grad(log_probs.sum(), inputs)]
    assert all(torch.equal(a, b) for a, b in zip(results[False], results[True], strict=True))
    assert not entropy.requires_grad and not squares.requires_grad
    torch.testing.assert_close(squares.double(), rest, rtol=1e-4, atol=0)
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(dim=-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_elements", [1, 2**24])
def test_tokens_that_a_model_rules_out_are_as_if_they_were_not_there(monkeypatch, block_elements):
    """Their logits are −∞: some of each block, and all of one of the small blocks."""
    monkeypatch.setattr(lm_head, "BLOCK_ELEMENTS", block_elements)
    generator = torch.Generator().manual_seed(4)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((5, 16), (2500, 16), (2500,)))
    bias[1024:2048] = bias[7::50] = -torch.inf
    kept = bias.isfinite().nonzero()[:, 0]
    targets = kept[torch.tensor([0, 1, 700, 1200, 1400])]
    inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    log_probs, entropy, squares = selected_log_probs(*inputs[:2], targets, inputs[2], 0.7, True, True)
    found = [log_probs, entropy, *torch.autograd.grad((2 * log_probs + 30 * entropy).sum(), inputs)]
    found[3:] = [found[3][kept], found[4][kept]]
    exact_inputs = [x.double().requires_grad_() for x in (hidden, weight[kept], bias[kept])]
    exact = [*reference(*exact_inputs[:2], torch.searchsorted(kept, targets), exact_inputs[2], 0.7)]
    exact += torch.autograd.grad((2 * exact[0] + 30 * exact[1]).sum(), exact_inputs)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)
    p = exact_distributions(hidden, weight, bias, 0.7)
    rest = p.scatter(1, targets[:, None], 0.0).square().sum(dim=-1)
    assert entropy.isfinite().all()
    torch.testing.assert_close(squares.double(), rest, rtol=1e-4, atol=1e-5)


def exact_distributions(hidden, weight, bias, temperature):
    return (torch.nn.functional.linear(hidden.double(), weight.double(), bias.double()) / temperature).softmax(dim=-1)


def test_bf16_is_no_further_from_the_truth_than_bf16_logits():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(64, 128, generator=generator).bfloat16()
    weight = (0.2 * torch.randn(3000, 128, generator=generator)).bfloat16()
    targets = torch.randint(0, 3000, (64,), generator=generator)
    exact, _ = reference(hidden.double(), weight.double(), targets, None, 1.0)
    rounded, _ = reference((hidden @ weight.T).float(), torch.eye(3000), targets, None, 1.0)
    ours, _, _ = selected_log_probs(hidden, weight, targets)
    assert (ours - exact).abs().mean() <= 1.01 * (rounded - exact).abs().mean()


def test_no_rows():
    weight = torch.randn(50, 4, requires_grad=True)
    log_probs, entropy, squares = selected_log_probs(
        torch.empty(0, 4, requires_grad=True), weight, torch.empty(0, dtype=torch.long), with_entropy=True
    )
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_logits_keep_their_dtype_and_get_a_gradient_of_it():
    """Only a block of them is in float32: what is kept for the backward pass holds no other copy."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 2500, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 2500, (5,), generator=generator)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        log_probs, _, _ = selected_log_probs(logits, None, targets, None, 0.7)
    assert sum(x.numel() for x in kept if x.dtype == torch.float32) == 5
    log_probs.sum().backward()
    exact = logits.detach().double().requires_grad_()
    (exact / 0.7).log_softmax(dim=-1).gather(1, targets[:, None]).sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=2**-7, atol=1e-9)
