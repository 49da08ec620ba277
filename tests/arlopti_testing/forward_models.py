"""Small models of several architectures, as upstream's actor and as ours, and how the two are compared."""

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Phi3Config,
    Qwen2Config,
)

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


def save(config, folder) -> str:
    """Save a model of that shape whose parameters are random, those that start at 0 or 1 included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    model.save_pretrained(folder)
    return str(folder)


def actor(kind, folder, attn_implementation="sdpa", **kwargs):
    """Return an actor of this class with float32 weights, LoRA's included."""
    torch.manual_seed(1)  # LoRA's
    made = kind(folder, attn_implementation=attn_implementation, param_dtype="bf16", temperature=0.7, **kwargs)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return made.float()


def actors(folder, attn_implementation="sdpa", **kwargs):
    """(upstream's actor, ours) with the same float32 weights."""
    from openrlhf.models import Actor

    from arlopti_openrlhf.forward.selective_actor import SelectiveActor

    return [actor(kind, folder, attn_implementation, **kwargs) for kind in (Actor, SelectiveActor)]


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
    expected = run(stock, batch, **kwargs)
    assert_equal(run(ours, batch, **kwargs), expected)


def assert_equal(found, expected):
    """Compare the results of `run`: log-probs, entropies, the gradient by its norm (docs/costs.md on roundings)."""
    (b, gradient_b), (a, gradient_a) = found, expected
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)
    assert (gradient_a - gradient_b).norm() <= 1e-5 * gradient_a.norm() and gradient_a.norm() > 0.1
