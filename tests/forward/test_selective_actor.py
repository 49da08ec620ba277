"""The selective actor beside upstream's: log-probs, entropies, gradients, for every layout and kind of model."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    GraniteConfig,
    GraniteSWAConfig,
    GraniteSWAPreTrainedModel,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Phi3Config,
    Qwen2Config,
)


@pytest.fixture(scope="module")
def batch():
    """Six sequences: two prompts with three responses each, shuffled, one of them without tokens, right-padded."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 200, (n,), generator=generator) for n in (9, 5)]
    rows, lengths = [], []
    for prompt, tokens in [(0, 6), (1, 11), (0, 0), (1, 3), (0, 14), (1, 1)]:
        rows.append(torch.cat([prompts[prompt], torch.randint(1, 200, (max(tokens, 1),), generator=generator)]))
        lengths.append((len(prompts[prompt]), tokens))
    length = max(map(len, rows))
    sequences, attention_mask = torch.zeros(2, 6, length, dtype=torch.long).unbind()
    action_mask = torch.zeros(6, length - 1, dtype=torch.long)
    for i, (row, (prompt, tokens)) in enumerate(zip(rows, lengths, strict=True)):
        sequences[i, : len(row)], attention_mask[i, : len(row)] = row, 1
        action_mask[i, prompt - 1 : prompt - 1 + tokens] = 1
    return sequences, attention_mask, action_mask


SHAPE = dict(
    vocab_size=211,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    initializer_range=0.2,
    attention_dropout=0.0,
)
MODELS = {
    "qwen2, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama, untied": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "mistral, sliding window": MistralConfig(**SHAPE, sliding_window=4),
    "gemma 2, capped logits": Gemma2Config(**SHAPE, sliding_window=4, final_logit_softcapping=2.0),
    "granite, scaled logits": GraniteConfig(**SHAPE, logits_scaling=3.0),
    "nemotron, layers swallow keyword arguments": NemotronConfig(**SHAPE),
    # The batch's longest sequence has 23 tokens. Without its last one it would have other frequencies.
    "llama, dynamic RoPE": LlamaConfig(
        **SHAPE | dict(max_position_embeddings=8),
        rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0),
    ),
    "phi 3, longrope": Phi3Config(
        **SHAPE,
        original_max_position_embeddings=22,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.0, 4.0]
        ),
    ),
}
SHARING = ["qwen2, tied", "llama, untied", "granite, scaled logits"]


def save(config, folder) -> str:
    """Save a model of that shape whose parameters are random, those that start at 0 or 1 included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return save(MODELS[request.param], tmp_path_factory.mktemp("model"))


def actors(folder, attn_implementation="sdpa", **kwargs):
    """(upstream's actor, ours) with the same float32 weights."""
    from openrlhf.models import Actor

    from arlopti_openrlhf.forward.selective_actor import SelectiveActor

    pair = []
    for kind in (Actor, SelectiveActor):
        torch.manual_seed(1)  # LoRA's
        actor = kind(folder, attn_implementation=attn_implementation, param_dtype="bf16", temperature=0.7, **kwargs)
        for name, parameter in actor.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        pair.append(actor.float())
    return pair


def run(actor, batch, mask=None, entropy=True):
    """Log-probs, entropies, and the gradients of a random mix of both."""
    sequences, attention_mask, action_mask = batch
    mask = action_mask if mask is None else mask
    actor.zero_grad()
    log_probs, output = actor(
        sequences, mask, attention_mask=attention_mask, return_output=True, return_entropy=entropy
    )
    results = [log_probs]
    generator = torch.Generator().manual_seed(3)
    loss = (log_probs * torch.randn(log_probs.shape, generator=generator)).sum()
    if entropy:
        results.append(output.entropy[:, -mask.shape[1] :] * mask)
        loss = loss + (results[-1] * torch.randn(log_probs.shape, generator=generator)).sum()
    loss.backward()
    return results, torch.cat([p.grad.flatten() for p in actor.parameters() if p.grad is not None])


def assert_same(stock, ours, batch, **kwargs):
    (a, gradient_a), (b, gradient_b) = run(stock, batch, **kwargs), run(ours, batch, **kwargs)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)
    assert (gradient_a - gradient_b).norm() <= 1e-5 * gradient_a.norm() and gradient_a.norm() > 0.1


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
    assert seen["head"] == (1, 35 + 1, 2)  # and a witness that nothing follows the head


def test_models_say_whether_they_share(model, batch, request):
    """At the latest after the first forward pass, and the same whatever the batch holds."""
    _, ours = actors(model)
    run(ours, batch, mask=torch.zeros_like(batch[2]))
    shares = request.node.callspec.params["model"] in SHARING
    assert (ours.reason_not_to_share is None) == shares


def test_a_batch_lost_on_the_way_to_attention_is_computed_again(tmp_path, batch):
    """Once, at the first forward pass, with gradient checkpointing too."""
    stock, ours = actors(save(NemotronConfig(**SHAPE), tmp_path))
    passes = []
    ours.model.get_input_embeddings().register_forward_hook(lambda m, args, out: passes.append(out.shape[:2]))
    for actor in (stock, ours):
        actor.gradient_checkpointing_enable({"use_reentrant": False})
        actor.model.enable_input_require_grads()
        actor.train()
    assert ours.reason_not_to_share is None
    assert_same(stock, ours, batch)
    assert "swallow keyword arguments" in ours.reason_not_to_share
    assert len(passes) == 2 and passes[1] == batch[0].shape
    assert_same(stock, ours, batch)
    assert len(passes) == 3


def test_a_model_that_is_not_causal_does_not_share(tmp_path, batch):
    """BERT as a "causal" model sees both ways: what it computes for a token depends on the tokens after it."""
    shape = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    stock, ours = actors(save(BertConfig(**shape, **no_dropout, is_decoder=False), tmp_path))
    assert_same(stock, ours, batch)
    assert "is not causal" in ours.reason_not_to_share


FULL = dict(layer_types=["full_attention"] * 2)
FLASH_MODELS = {  # and what the kernel must get beside the layout
    "llama": (LlamaConfig(**SHAPE), None),
    "gemma 2, capped scores": (
        Gemma2Config(**SHAPE, **FULL, attn_logit_softcapping=0.5, final_logit_softcapping=None),
        "softcap",
    ),
    "granite, attention sinks": (GraniteSWAConfig(**SHAPE, **FULL), "s_aux"),
}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", FLASH_MODELS)
def test_flash_attention_gets_all_that_a_layer_gives(name, packing, batch, tmp_path, flash_attention, monkeypatch):
    """Upstream's own flash attention caps scores and adds sinks; so does that of a packed row."""
    config, argument = FLASH_MODELS[name]
    # Else transformers fetches a kernel with sinks from its hub.
    monkeypatch.setattr(GraniteSWAPreTrainedModel, "_compatible_flash_implementations", None)
    stock, ours = actors(save(config, tmp_path), attn_implementation="flash_attention_2", packing_samples=packing)
    assert_same(stock, ours, batch)
    assert ours.reason_not_to_share is None
    of_stock, of_ours = flash_attention[:2], flash_attention[2:]  # one call per layer
    assert len(of_ours) == 2 and all(call["max_seqlen_k"] > call["max_seqlen_q"] for call in of_ours)
    for call in of_stock + of_ours:
        assert call.keys() & {"softcap", "s_aux"} == {argument} - {None}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("entropy", [False, True])
def test_statistics_come_with_the_output(model, batch, packing, entropy):
    """They equal those of upstream's logits, and leave log-probs and gradients as they are, to the last bit."""
    from arlopti_openrlhf.forward.lm_head import statistics_of_logits

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
    expected = statistics_of_logits(stock_output["logits"], sequences, action_mask, attention_mask, packed=packing)
    for values, exact in zip(output.statistics, expected, strict=True):
        assert values.dtype == torch.float32 and not values.requires_grad
        torch.testing.assert_close(values, exact, rtol=1e-4, atol=1e-5)
        assert values[action_mask == 0].count_nonzero() == 0
    row, column = 1, int(action_mask[1].nonzero()[0, 0])
    if not packing:  # by hand, for one token
        p = stock_output["logits"][row, column].softmax(dim=-1)
        torch.testing.assert_close(expected[0][row, column], -(p * p.log()).sum(), rtol=1e-4, atol=1e-5)
        p[sequences[row, column + 1]] = 0
        torch.testing.assert_close(expected[1][row, column], p.square().sum(), rtol=1e-4, atol=1e-6)
