"""A model for which the selective layout is wrong is found out before its first pass, and computed as stock does."""

import logging

import pytest
import torch
from arlopti_testing.forward_models import MODELS, SHAPE, actors, assert_same, save
from torch import nn
from transformers import LlamaConfig

from arlopti_openrlhf.forward import self_check
from arlopti_openrlhf.forward.selective_actor import Shortcuts


class TokenShift(nn.Module):
    """Adds to each token's embedding some of the one before it, which in a packed row may be another sequence's."""

    def __init__(self, embedding: nn.Module, share: float) -> None:
        super().__init__()
        self.embedding, self.share = embedding, share

    def forward(self, ids):
        states = self.embedding(ids)
        return torch.cat([states[:, :1], states[:, 1:] + self.share * states[:, :-1]], dim=1)


@pytest.fixture
def shifting(tmp_path):
    """Upstream's actor and ours of a model that mixes neighbours before the first layer."""
    pair = actors(save(LlamaConfig(**SHAPE, tie_word_embeddings=False), tmp_path))
    for actor in pair:
        actor.model.set_input_embeddings(TokenShift(actor.model.get_input_embeddings(), 0.3))
    return pair


@pytest.fixture
def warnings(caplog, monkeypatch):
    """The warnings of the actor."""
    monkeypatch.setattr(logging.getLogger("arlopti_openrlhf.forward.selective_actor"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_architecture_that_nobody_thought_of_is_slow_and_right(shifting, batch, warnings):
    stock, ours = shifting
    ours.train()
    assert_same(stock, ours, batch)
    assert ours.shortcuts.reason_not_to_share and not ours.shortcuts.fuses_head and ours.model.training
    (warning,) = warnings()
    assert warning.startswith("llama: prompts are not shared") and "takes longer" in warning


def test_without_the_check_it_would_be_wrong(shifting, batch):
    stock, ours = shifting
    ours.check(batch[0])
    ours.shortcuts = Shortcuts(reason_not_to_share=None, fuses_head=True)
    with pytest.raises(AssertionError):
        assert_same(stock, ours, batch)


def test_a_head_whose_logits_are_changed_in_a_hook_is_found_out(tmp_path, batch, monkeypatch):
    """It leaves what is no logits alone, as a fused head's results are."""
    stock, ours = actors(save(MODELS["llama, untied"], tmp_path))
    for actor in (stock, ours):
        actor.model.lm_head.register_forward_hook(
            lambda head, args, logits: logits if logits.shape[-1] < 10 else logits * logits.new_tensor(1.5)
        )
    with torch.no_grad():
        expected = stock(batch[0], batch[2], attention_mask=batch[1])
        torch.testing.assert_close(ours(batch[0], batch[2], attention_mask=batch[1]), expected, rtol=1e-5, atol=1e-5)
    assert not ours.shortcuts.fuses_head and ours.shortcuts.reason_not_to_share is None


@pytest.mark.parametrize("in_place", [False, True])
def test_a_head_whose_logits_change_by_less_than_rounding_is_found_out(tmp_path, batch, in_place):
    """In bf16 the check by numbers would pass it. Logits of a real model may be far greater than the probe's."""
    _, ours = actors(save(MODELS["llama, untied"], tmp_path))
    ours.to(torch.bfloat16)
    causal_lm = ours.model
    forward = causal_lm.forward

    def forward_with_capped_logits(*args, **kwargs):
        output = forward(*args, **kwargs)
        capped = 30 * (output.logits / 30).tanh()
        output["logits"] = output.logits.copy_(capped) if in_place else capped
        return output

    causal_lm.forward = forward_with_capped_logits
    with torch.no_grad():
        ours(batch[0], batch[2], attention_mask=batch[1])
    assert ours.shortcuts == Shortcuts(reason_not_to_share=None, fuses_head=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2, tied", "granite, scaled logits"])
def test_rounding_is_no_reason(name, dtype, tmp_path, batch, warnings):
    _, ours = actors(save(MODELS[name], tmp_path))
    ours.to(dtype)
    passes = []
    ours.model.get_input_embeddings().register_forward_hook(lambda module, args, out: passes.append(out.shape[:2]))
    state = torch.get_rng_state()
    with torch.no_grad():
        for _ in range(2):
            ours(batch[0], batch[2], attention_mask=batch[1])
    assert ours.shortcuts.reason_not_to_share is None and not warnings()
    assert torch.equal(torch.get_rng_state(), state)
    assert passes[-1] == passes[-2] and (3, 23) in passes[:-2]  # once, and in upstream's layout too


def test_the_probe_has_all_features():
    """A shared beginning, a sequence that ends earlier, and one that shares nothing."""
    for longest in (23, 600):
        tokens, action_mask, attended = self_check.probe(longest, vocabulary=1000)
        length = attended.sum(dim=1).tolist()
        assert length[0] == length[2] == longest > length[1]
        prompt = length[0] // 2
        assert torch.equal(tokens[0, :prompt], tokens[1, :prompt]) and tokens[0, 0] != tokens[2, 0]
        assert tokens[0, prompt] != tokens[1, prompt]
        assert action_mask[:, prompt - 1].all() and not action_mask[:, : prompt - 1].any()
        # Nothing behind a sequence's end.
        assert not (action_mask.bool() & ~attended[:, 1:].bool()).any()
        assert 9 < action_mask.sum(dim=1).max() <= self_check.POSITIONS + self_check.FIRST_POSITIONS


@pytest.mark.parametrize("length", [2, 3, 5])
def test_few_tokens_make_a_probe(length):
    sequences, action_mask, attended = self_check.probe(length, vocabulary=9)
    assert sequences.shape == attended.shape == (3, length) and action_mask.shape == (3, length - 1)


def test_an_answer_of_one_token_says_nothing_of_the_model(tmp_path, warnings):
    """It is often the longest sample: a loop that is cut off. The model repeats its token for certain."""
    stock, ours = actors(save(MODELS["llama, untied"], tmp_path))
    with torch.no_grad():
        ours.model.lm_head.weight.zero_()[7] = 1000.0
    ours.to(torch.bfloat16)
    ours.check(torch.full((1, 400), 7))
    assert ours.shortcuts == Shortcuts(reason_not_to_share=None, fuses_head=True) and not warnings()


def test_log_probs_without_a_spread_agree_where_they_are_equal():
    assert self_check.disagreement(torch.zeros(32), torch.zeros(32), torch.bfloat16) is None


def test_a_model_that_is_not_finite_is_not_compared():
    """What is wrong with it is for the guard to say."""
    nan = torch.full((32,), torch.nan)
    assert self_check.disagreement(nan, nan, torch.float32) is None
    assert self_check.disagreement(nan, torch.randn(32), torch.float32)
