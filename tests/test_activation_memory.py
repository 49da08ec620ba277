"""What a micro-batch takes is derived from the tensors that transformers' layers save, at the sizes of real models."""

from types import SimpleNamespace

import pytest
import torch
from arlopti_testing import saved_bytes
from arlopti_testing.peak_bytes import PeakBytes
from openrlhf.models import Actor
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from arlopti_openrlhf.activation_memory import layer_bytes, peak_bytes
from arlopti_openrlhf.forward import lm_head, segment_attention
from arlopti_openrlhf.forward.lm_head import BLOCK_ELEMENTS
from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.update import plan
from arlopti_openrlhf.update.plan import NONE, WHOLE, Planner
from arlopti_openrlhf.update.sample import Sample, numbered
from arlopti_openrlhf.update.settings import Settings


def model(kind, hidden, inner, heads, keys, layers, vocabulary, **more):
    return AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        use_cache=False,
        **more,
    )


MODELS = {
    "Qwen2.5-0.5B": model("qwen2", 896, 4864, 14, 2, 24, 151_936),
    "Qwen2.5-1.5B": model("qwen2", 1536, 8960, 12, 2, 28, 151_936),
    "Qwen2.5-3B": model("qwen2", 2048, 11008, 16, 2, 36, 151_936),
    "Qwen2.5-7B": model("qwen2", 3584, 18944, 28, 4, 28, 152_064),
    "Llama-3.2-1B": model("llama", 2048, 8192, 32, 8, 16, 128_256, head_dim=64),
    "Llama-3.1-8B": model("llama", 4096, 14336, 32, 8, 32, 128_256),
    "Llama-2-7B": model("llama", 4096, 11008, 32, 32, 32, 32_000),
    "Mistral-7B": model("mistral", 4096, 14336, 32, 8, 32, 32_768, sliding_window=None),
    "Qwen3-1.7B": model("qwen3", 2048, 6144, 16, 8, 28, 151_936, head_dim=128),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_what_is_counted(name):
    config = MODELS[name]
    assert layer_bytes(config) == pytest.approx(saved_bytes.of_a_layer(config), rel=0.05)


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Llama-3.1-8B"])
def test_a_checkpointed_layer_keeps_its_input(name):
    config = MODELS[name]
    saved = saved_bytes.of_a_layer(config, is_checkpointed=True)
    assert saved == pytest.approx(2 * config.hidden_size, rel=0.05)
    layer, config.num_hidden_layers = layer_bytes(config), 2
    assert peak_bytes(config, True, keeps_logits=False) == (2 * 2 + 8) * config.hidden_size + 2 * layer


def test_experts_stand_in_for_the_mlp():
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=999
    )
    config.moe_intermediate_size, config.num_experts_per_tok = 32, 4
    assert layer_bytes(config) == 8 * 4 * 32 + 16 * 64 + 4 * 64 + 4 * 32


def samples(prompt: int, responses: list[int], vocabulary: int = 100) -> list[Sample]:
    """Return single samples with one prompt and responses of these lengths."""
    generator = torch.Generator().manual_seed(0)
    beginning, items = torch.randint(0, vocabulary, (prompt,), generator=generator), []
    for length in responses:
        tokens = torch.cat([beginning, torch.randint(0, vocabulary, (length,), generator=generator)])
        mask = torch.zeros(len(tokens) - 1, dtype=torch.long)
        mask[prompt - 1 :] = 1
        items.append(Experience(sequences=tokens, action_mask=mask, attention_mask=torch.ones_like(tokens)))
    return numbered(items)


def setter_of(model: nn.Module, micro_batch_size: int, is_checkpointed: bool) -> Planner:
    actor = SimpleNamespace(gradient_checkpointing_enable=is_checkpointed)
    train = SimpleNamespace(dynamic_batch_enable=False, micro_batch_size=micro_batch_size)
    ds = SimpleNamespace(use_liger_kernel=False, lora=SimpleNamespace(rank=0))
    policy = SimpleNamespace(model=SimpleNamespace(module=model))
    return Planner(policy, SimpleNamespace(train=train, actor=actor, ds=ds), Settings(), ranks=None)


def budgets_of(items: list[Sample], setter: Planner) -> dict[str, int]:
    """Return the budget at each level, in OpenRLHF's own peak."""
    padded = setter.args.train.micro_batch_size * max(len(item.sequences) for item in items)
    cost, keys = plan.cost(items), plan.keys_per_token(items)
    return {level: setter.budget(level, padded, cost, keys, free=plan._UNKNOWN) for level in setter.levels}


CASES = [
    (name, micro_batch_size, is_checkpointed)
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B", "Llama-3.1-8B", "Llama-2-7B")
    for micro_batch_size, is_checkpointed in ((1, False), (1, True), (8, True))
]


@pytest.mark.parametrize(("name", "micro_batch_size", "is_checkpointed"), CASES)
def test_a_micro_batch_takes_no_more_memory_than_stocks(name, micro_batch_size, is_checkpointed):
    """Derived: by what layers save, at prompts of 2,000 tokens, whose keys and values each response keeps anew."""
    config = MODELS[name]
    items = samples(2000, [100 * n for n in range(1, 17)])
    model = nn.Linear(1, 1)
    model.config = config
    layer = saved_bytes.of_a_layer(config)
    layers, hidden = config.num_hidden_layers, config.hidden_size
    inputs = 2 * hidden
    padded = micro_batch_size * max(len(item.sequences) for item in items)
    norm = 8 * hidden  # the last one
    stock = padded * (layers * (inputs if is_checkpointed else layer) + norm + max(10 * config.vocab_size, 2 * layer))
    for level, budget in budgets_of(items, setter_of(model, micro_batch_size, is_checkpointed)).items():
        for batch in plan.divide(items, budget):
            tokens, keys = plan.cost(batch), sum(len(item.sequences) for item in batch)
            keys += 2000 * (len(batch) > 1)  # a shared prompt's own
            width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
            of_prefixes = (keys - tokens) * 4 * config.num_key_value_heads * width
            of_layers = tokens * layer + of_prefixes
            kept, at_work = {
                NONE: (layers * of_layers, of_layers),
                WHOLE: (layers * tokens * inputs, 2 * of_layers),
            }[level]
            at_head = 10 * BLOCK_ELEMENTS + 6 * hidden * tokens
            assert kept + tokens * norm + max(at_work, at_head) <= stock or len(batch) == 1


@pytest.mark.parametrize("micro_batch_size", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 4])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_measured_peaks_are_not_above_stocks(micro_batch_size, is_checkpointed, monkeypatch):
    monkeypatch.setattr(segment_attention, "multiplies_bf16", lambda: True)  # a float32 copy is no GPU's
    for module in (lm_head, plan):
        monkeypatch.setattr(module, "BLOCK_ELEMENTS", 2**17)  # as small beside these batches as it is beside real ones
    config = model("qwen2", 64, 320, 4, 4, 6, 4096)
    items = samples(80, [20, 40, 60, 80, 100, 120, 140, 160], vocabulary=4096)
    policy = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").bfloat16().train()
    if is_checkpointed:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def peak(actor: Actor, batch: list[Sample]) -> int:
        one = make_experience_batch(batch)
        with PeakBytes() as counted:
            actor(one.sequences, one.action_mask, one.attention_mask).sum().backward()
        return counted.peak

    stock, selective = Actor(policy), SelectiveActor(policy)
    for actor in (stock, selective):
        actor.packing_samples = actor.is_vlm = False
    selective.check(items[-1].sequences[None])
    stock_peak = peak(stock, items[-micro_batch_size:])
    setter = setter_of(policy, micro_batch_size, is_checkpointed)
    budgets = budgets_of(items, setter)
    assert list(budgets) == ([NONE, WHOLE] if is_checkpointed else [NONE])
    assert min(budgets.values()) >= len(items[-1].sequences)
    for level, budget in budgets.items():
        setter.set(level)
        assert max(peak(selective, batch) for batch in plan.divide(items, budget)) <= stock_peak
