"""How much of its activations an update keeps: exactly the same gradients, and no more memory than there is."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.update import checkpointing
from arlopti_openrlhf.update.checkpointing import NONE, SELECTIVE, WHOLE, Checkpointing
from arlopti_openrlhf.update.mini_batches import MiniBatch

LAYERS = 3


def flags(level: str = "auto", reentrant: bool = False, micro_batch_size: int = 1) -> SimpleNamespace:
    actor = SimpleNamespace(
        gradient_checkpointing_enable=True,
        gradient_checkpointing_level=level,
        gradient_checkpointing_reentrant=reentrant,
    )
    train = SimpleNamespace(micro_batch_size=micro_batch_size, dynamic_batch_enable=False)
    return SimpleNamespace(actor=actor, train=train)


def made(kind: str = "qwen2", dtype=torch.float32, reentrant: bool = False, attention: str = "sdpa", **sizes):
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, vocab_size=211) | sizes
    heads = dict(num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    config = AutoConfig.for_model(kind, **sizes, **heads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


class Products(TorchDispatchMode):
    count = attention = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        self.count += name.startswith(("aten::mm", "aten::addmm"))
        self.attention += name.startswith("aten::_scaled_dot_product_flash_attention_for_cpu") and "back" not in name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_and_products_are_computed_once(dtype):
    """The backward pass repeats a layer as far as its last matrix, whose product it does not need."""
    model, found = made(dtype=dtype), {}
    actor = SelectiveActor(model)
    actor.packing_samples = actor.is_vlm = False
    sequences = torch.randint(1, 200, (4, 20), generator=torch.Generator().manual_seed(0))
    sequences[1::2, :8] = sequences[::2, :8]  # two prompts with two responses each
    attention_mask, action_mask = torch.ones_like(sequences), torch.ones(4, 12, dtype=torch.long)
    actor.check(sequences, attention_mask)
    setter = Checkpointing(model, flags())
    for level in (NONE, SELECTIVE, WHOLE):
        setter.set(level)
        model.zero_grad()
        with Products() as products:
            log_probs = actor(sequences, action_mask, attention_mask)
            (log_probs * torch.arange(log_probs.numel()).view_as(log_probs)).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        found[level] = log_probs.detach(), gradients, products.count, products.attention
    log_probs, gradients, products, attention = found[NONE]
    for level in (SELECTIVE, WHOLE):
        assert torch.equal(found[level][0], log_probs)
        assert all(torch.equal(a, b) for a, b in zip(found[level][1], gradients, strict=True))
    assert found[SELECTIVE][2:] == (products, attention)
    assert found[WHOLE][2] == products + 6 * LAYERS and found[WHOLE][3] == 2 * attention


class Ranks:
    """Two ranks; the other one has so many tokens in a micro-batch and so many bytes free."""

    def __init__(self, tokens: int = 0, free: int = 2**60) -> None:
        self.others = tokens, free

    def max(self, value: int) -> int:
        return max(value, self.others[0]) if value > 10 else value

    def min(self, value: int) -> int:
        return min(value, self.others[1])


@pytest.mark.parametrize(
    ("free", "expected"), [(2**40, NONE), (1_200_000, SELECTIVE), (0, WHOLE)], ids=["much", "some", "nothing"]
)
def test_what_fits_is_kept(free, expected):
    """At a vocabulary of 8 OpenRLHF's own peak has no room. A token keeps 1,216 bytes in each layer, or 656."""
    setter = Checkpointing(made(vocab_size=8), flags())
    assert setter.fitting(computed=250, keys_per_token=1, padded=10, free=free) == expected


def test_openrlhfs_own_peak_is_room():
    """Its logits of 200 tokens, at 1 MB each with all that goes with them, hold 250 tokens and a block of ours."""
    setter = Checkpointing(made(vocab_size=100_000), flags())
    assert setter.fitting(250, 1, padded=200, free=0) == NONE


def test_all_ranks_choose_alike(monkeypatch):
    monkeypatch.setattr(checkpointing, "_free_bytes", lambda model: 2**50)
    setter = Checkpointing(made(vocab_size=8), flags())
    mask = torch.ones(19, dtype=torch.long)
    batches = [MiniBatch([[SimpleNamespace(sequences=torch.arange(20), action_mask=mask)]])]
    for ranks, expected in ((Ranks(), NONE), (Ranks(free=0), WHOLE), (Ranks(), NONE), (Ranks(2**60, 2**50), WHOLE)):
        setter.adapt(batches, ranks)
        assert setter.level == expected
        assert all(module.gradient_checkpointing == (expected != NONE) for module in setter.modules)


@pytest.mark.parametrize(
    ("model", "args", "expected"),
    [
        ({}, flags(), [NONE, SELECTIVE]),
        ({}, flags("whole"), []),
        ({"reentrant": True}, flags(reentrant=True), [NONE]),
        ({"attention": "flex_attention"}, flags(), [NONE]),
        ({"kind": "gemma"}, flags(), []),
    ],
    ids=["all", "forced", "reentrant", "flex", "unknown"],
)
def test_levels(model, args, expected):
    assert Checkpointing(made(**model), args).levels == expected


def test_gradients_need_room_too(monkeypatch):
    """Of 1 MB free and 1 MB that the allocator holds unused, a tenth is left, and two gradients of the weights."""
    model = made()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert checkpointing._free_bytes(model) == 0  # without a GPU
    figures = dict(
        is_available=True, memory_reserved=3_000_000, memory_allocated=2_000_000, mem_get_info=(10**6, 2**40)
    )
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert checkpointing._free_bytes(model) == 1_800_000 - 2 * weights


def test_without_checkpointing_there_is_nothing_to_set():
    args = flags()
    args.actor.gradient_checkpointing_enable = False
    assert checkpointing.of(None, args) is None
