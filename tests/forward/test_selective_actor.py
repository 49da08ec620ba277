"""The selective actor beside upstream's: log-probs, entropies, gradients, for every layout and kind of model."""

import pytest
import torch
from arlopti_testing.forward_models import MODELS, SHAPE, actors, assert_same, run, save
from transformers import (
    BertConfig,
    Gemma2Config,
    GraniteSWAConfig,
    GraniteSWAPreTrainedModel,
    LlamaConfig,
    MixtralConfig,
    NemotronConfig,
)

from arlopti_openrlhf.forward.packed_attention import LateObstacle

SHARING = ["qwen2, tied", "llama, untied", "granite, scaled logits"]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return save(MODELS[request.param], tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_equals_upstream(model, batch, packing):
    stock, ours = actors(model, packing_samples=packing)
    assert_same(stock, ours, batch)
    assert_same(stock, ours, batch, entropy=False)
    some = batch[2] * (torch.rand(batch[2].shape, generator=torch.Generator().manual_seed(2)) < 0.3)
    assert_same(stock, ours, batch, mask=some)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"lora_rank": 4}], ids=["full", "lora"])
def test_gradient_checkpointing_and_lora(tiny_model, batch, kwargs, reentrant):
    stock, ours = actors(tiny_model, target_modules="all-linear", **kwargs)
    for actor in (stock, ours):
        actor.gradient_checkpointing_enable({"use_reentrant": reentrant})
        actor.model.enable_input_require_grads()
        actor.train()
    assert_same(stock, ours, batch)


def test_an_adapted_head(tiny_model, batch):
    """LoRA on the LM head itself: its own forward is called."""
    assert_same(*actors(tiny_model, lora_rank=4, target_modules=["lm_head", "q_proj"]), batch)


def test_left_padding(tiny_model, batch):
    sequences, attention_mask, action_mask = (torch.flip(x, [1]) for x in batch)
    sequences = torch.stack([torch.cat([row[row == 0], row[row > 0].flip(0)]) for row in sequences])
    action_mask = torch.zeros_like(action_mask)
    action_mask[:, -3:] = attention_mask[:, -3:]
    assert_same(*actors(tiny_model), (sequences, attention_mask, action_mask))


def test_nothing_selected(tiny_model, batch):
    """All parameters get a gradient, of zeros: ranks that have something wait for it."""
    _, ours = actors(tiny_model)
    results, gradient = run(ours, batch, mask=torch.zeros_like(batch[2]))
    assert not any(x.any() for x in results) and not gradient.any()
    assert gradient.numel() == sum(p.numel() for p in ours.parameters())


def test_no_logits_of_the_whole_batch_exist(tiny_model, batch, monkeypatch):
    """The head sees the selected positions only, and prompts pass through the model once."""
    _, ours = actors(tiny_model)
    seen = {}
    ours.model.model.embed_tokens.register_forward_hook(lambda m, args, out: seen.update(tokens=out.shape[1]))
    ours.model.lm_head.register_forward_hook(lambda m, args, out: seen.update(head=out.shape))
    run(ours, batch)
    # Prompts of 9 and 5 once; of each response all but its last token.
    assert seen["tokens"] == 9 + 5 + (5 + 13) + (10 + 2 + 0)
    assert seen["head"] == (1, 35, 2)


def test_models_say_whether_they_share(model, batch, request):
    """Before the first pass, and the same whatever the batch holds. So is whether the head is fused."""
    _, ours = actors(model)
    run(ours, batch, mask=torch.zeros_like(batch[2]))
    name = request.node.callspec.params["model"]
    assert (ours.shortcuts.reason_not_to_share is None) == (name in SHARING)
    assert ours.shortcuts.fuses_head == ("logits" not in name)


def test_a_model_that_loses_the_batch_on_the_way_to_attention_does_not_share(tmp_path, batch):
    """The check finds out, with gradient checkpointing too. No later pass is computed twice."""
    stock, ours = actors(save(NemotronConfig(**SHAPE), tmp_path))
    passes = []
    ours.model.get_input_embeddings().register_forward_hook(lambda m, args, out: passes.append(out.shape[:2]))
    for actor in (stock, ours):
        actor.gradient_checkpointing_enable({"use_reentrant": False})
        actor.model.enable_input_require_grads()
        actor.train()
    assert_same(stock, ours, batch)
    assert "swallow keyword arguments" in ours.shortcuts.reason_not_to_share and ours.shortcuts.fuses_head
    # The check takes three: the model's own, one that shares, and one that does not.
    assert len(passes) == 4 and passes[3] == batch[0].shape
    assert_same(stock, ours, batch)
    assert len(passes) == 5


@pytest.mark.parametrize(
    ("name", "value", "reason"), [("sliding_window", 4, "window"), ("is_causal", False, "causal")]
)
def test_an_obstacle_after_the_check_is_an_error(tiny_model, batch, name, value, reason):
    """Without it results would be wrong: attention over a packed row has no window, and is causal."""
    _, ours = actors(tiny_model)
    run(ours, batch)
    shortcuts = ours.shortcuts
    setattr(ours.model.model.layers[1].self_attn, name, value)
    with pytest.raises(LateObstacle, match=f"Qwen2Attention .*{reason}"):
        run(ours, batch)
    assert ours.shortcuts is shortcuts


def test_a_packed_row_that_gets_lost_after_the_check_is_an_error(tiny_model, batch, monkeypatch):
    _, ours = actors(tiny_model)
    run(ours, batch)
    layer = ours.model.model.layers[1]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, packed_batch, **kwargs: forward(*args, **kwargs))
    with pytest.raises(LateObstacle, match="swallow keyword arguments"):
        run(ours, batch)
    monkeypatch.undo()
    for layer in ours.model.model.layers:
        monkeypatch.setattr(layer, "forward", lambda hidden, *args, **kwargs: hidden)
    with pytest.raises(LateObstacle, match="does not call transformers' attention functions"):
        run(ours, batch)


def test_a_model_that_is_not_causal_does_not_share(tmp_path, batch):
    """BERT as a "causal" model sees both ways: what it computes for a token depends on the tokens after it."""
    shape = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    stock, ours = actors(save(BertConfig(**shape, **no_dropout, is_decoder=False), tmp_path))
    assert_same(stock, ours, batch)
    assert "is not causal" in ours.shortcuts.reason_not_to_share


def test_experts_share_unless_their_balance_counts(tmp_path, batch):
    """OpenRLHF asks each model of experts for its balancing loss, which is a loss over all tokens."""
    config = MixtralConfig(**SHAPE, num_local_experts=4, sliding_window=None)
    stock, ours = actors(save(config, tmp_path))
    assert stock.model.config.output_router_logits
    passes = []
    ours.model.get_input_embeddings().register_forward_hook(lambda m, args, out: passes.append(out.shape[:2]))
    assert_same(stock, ours, batch)
    assert ours.shortcuts.reason_not_to_share is None and passes[-1][0] == 1
    sequences, attention_mask, action_mask = batch
    _, output = stock(sequences, action_mask, attention_mask=attention_mask, return_output=True)
    log_probs, ours_output = ours(
        sequences, action_mask, attention_mask=attention_mask, return_output=True, return_aux_loss=True
    )
    torch.testing.assert_close(ours_output.aux_loss, output.aux_loss)
    assert passes[-1] == sequences.shape and ours.hf_config.output_router_logits


FULL = dict(layer_types=["full_attention"] * 2)
FLASH_MODELS = {  # and what the kernel must get beside the layout
    "llama": (LlamaConfig(**SHAPE), None),
    "gemma 2, capped scores": (
        Gemma2Config(**SHAPE, **FULL, attn_logit_softcapping=0.5, final_logit_softcapping=None),
        "softcap",
    ),
    "granite, attention sinks": (GraniteSWAConfig(**SHAPE, **FULL), "s_aux"),
}


@pytest.mark.parametrize(
    ("packing", "version"), [(False, 2), (True, 2), (True, 3)], ids=["padded", "packed", "packed, version 3"]
)
@pytest.mark.parametrize("name", FLASH_MODELS)
def test_flash_attention_gets_all_that_a_layer_gives(
    name, packing, version, batch, tmp_path, flash_attention, monkeypatch
):
    """Upstream's own flash attention caps scores and adds sinks; so does that of a packed row."""
    config, argument = FLASH_MODELS[name]
    # Else transformers fetches a kernel with sinks from its hub.
    monkeypatch.setattr(GraniteSWAPreTrainedModel, "_compatible_flash_implementations", None)
    stock, ours = actors(
        save(config, tmp_path), attn_implementation=f"flash_attention_{version}", packing_samples=packing
    )
    assert_same(stock, ours, batch)
    assert ours.shortcuts.reason_not_to_share is None
    # One call per layer: stock's, those of the check, in both layouts, and ours.
    of_stock, of_ours = flash_attention[:2], flash_attention[6:]
    assert len(of_ours) == 2 and all(call["max_seqlen_k"] > call["max_seqlen_q"] for call in of_ours)
    for call in of_stock + of_ours:
        assert call.keys() & {"softcap", "s_aux"} == {argument} - {None}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("entropy", [False, True])
def test_statistics_come_with_the_output(model, batch, packing, entropy):
    """They equal those of upstream's logits, and leave log-probs and gradients as they are, to the last bit."""
    stock, ours = actors(model, packing_samples=packing)
    sequences, attention_mask, action_mask = batch
    results = {}
    for with_statistics in (False, True):
        ours.zero_grad()
        log_probs, output = ours(
            sequences,
            action_mask,
            attention_mask=attention_mask,
            return_output=True,
            return_entropy=entropy,
            return_statistics=with_statistics,
        )
        (log_probs.sum() + (output.entropy.sum() if entropy else 0)).backward()
        gradient = torch.cat([p.grad.flatten() for p in ours.parameters() if p.grad is not None])
        results[with_statistics] = (log_probs, gradient)
    assert all(torch.equal(a, b) for a, b in zip(results[False], results[True], strict=True))
    _, stock_output = stock(sequences, action_mask, attention_mask=attention_mask, return_output=True)
    logits = stock_output["logits"].flatten(0, -2)
    before = attention_mask.flatten().long().cumsum(0) - 1  # where packed logits, which have no padding, stand
    entropies, squares = output.statistics
    for row, column in action_mask.nonzero().tolist():
        place = row * sequences.shape[1] + sequences.shape[1] - action_mask.shape[1] + column - 1
        p = logits[before[place] if packing else place].double().softmax(dim=-1)
        torch.testing.assert_close(entropies[row, column].double(), -(p * p.log()).sum(), rtol=1e-4, atol=1e-5)
        p[sequences.flatten()[place + 1]] = 0
        torch.testing.assert_close(squares[row, column].double(), p.square().sum(), rtol=1e-4, atol=1e-6)
    for values in output.statistics:
        assert values.dtype == torch.float32 and not values.requires_grad
        assert values[action_mask == 0].count_nonzero() == 0
