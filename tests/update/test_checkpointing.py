"""How much of its activations an update keeps: exactly the same gradients, and no more memory than there is."""

from types import SimpleNamespace

import pytest
import torch
from arlopti_testing.processes import errors_on_two_ranks
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from arlopti_openrlhf.activation_memory import layer_bytes, products_bytes
from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.update import checkpointing
from arlopti_openrlhf.update.checkpointing import NONE, SELECTIVE, WHOLE, Checkpointing

LAYERS = 3


def flags(
    level: str = "auto",
    reentrant: bool = False,
    micro_batch_size: int = 1,
    is_checkpointed: bool = True,
    tokens: int | None = None,
    packs: bool = False,
    lora_rank: int = 0,
) -> SimpleNamespace:
    """With `tokens` in dynamic batches of so many."""
    actor = SimpleNamespace(
        gradient_checkpointing_enable=is_checkpointed,
        gradient_checkpointing_level=level,
        gradient_checkpointing_reentrant=reentrant,
    )
    train = SimpleNamespace(
        micro_batch_size=micro_batch_size,
        dynamic_batch_enable=tokens is not None,
        max_tokens_per_gpu=tokens,
        colocate_all=True,
    )
    ds = SimpleNamespace(
        lora=SimpleNamespace(rank=lora_rank),
        packing_samples=packs,
        zero_stage=2,
        adam_offload=False,
        grad_accum_dtype=None,
        enable_sleep=False,
    )
    algo = SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm"))
    return SimpleNamespace(actor=actor, train=train, ds=ds, algo=algo)


def made(kind: str = "qwen2", dtype=torch.float32, reentrant: bool = False, attention: str = "sdpa", **sizes):
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, vocab_size=211) | sizes
    heads = dict(num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    config = AutoConfig.for_model(kind, **heads | sizes)
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


@pytest.mark.parametrize("is_zero3", [False, True], ids=["plain", "zero3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_and_products_are_computed_once(dtype, is_zero3, monkeypatch):
    """The backward pass repeats a layer as far as its last matrix, whose product it does not need.

    With ZeRO-3 DeepSpeed puts its own function in place of `F.linear`, which adds the biases in place. There the last
    product is computed too.
    """
    model, found = made(dtype=dtype), {}
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    assert len(biases) == 3 * LAYERS
    for bias in biases:
        nn.init.normal_(bias)
    if is_zero3:
        monkeypatch.setattr(F, "linear", zero3_linear_wrap)
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
    assert found[WHOLE][2] == products + (6 + is_zero3) * LAYERS and found[WHOLE][3] == 2 * attention


def change_levels(folder: str) -> None:
    """Run one of two ranks, whose weights DeepSpeed gathers ahead, and the fewer at a time the smaller its buckets."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    model = made(num_hidden_layers=8)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    actor, setter = SelectiveActor(model), Checkpointing(model, flags())
    actor.packing_samples = actor.is_vlm = False
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": layer // 5,
        "stage3_max_reuse_distance": 4 * layer,
    }
    parameters = list(model.parameters())
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    actor.model, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(parameters, lr=0.0), config=config)
    sequences = torch.randint(1, 200, (4, 20), generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    attention_mask, action_mask = torch.ones_like(sequences), torch.ones(4, 12, dtype=torch.long)
    actor.check(sequences, attention_mask)
    expected = None
    for level in (NONE, SELECTIVE, SELECTIVE, SELECTIVE, WHOLE, SELECTIVE, SELECTIVE, NONE, SELECTIVE):
        setter.set(level)
        log_probs = actor(sequences, action_mask, attention_mask)
        actor.model.backward((log_probs * torch.arange(log_probs.numel()).view_as(log_probs)).sum())
        gradient = torch.cat([safe_get_full_grad(parameter).flatten() for parameter in parameters])
        actor.model.step()
        expected = gradient if expected is None else expected
        assert torch.equal(gradient, expected), level


@pytest.mark.long
def test_weights_that_are_gathered_within_a_layer_change_nothing(tmp_path):
    """The second run of a layer gathers others than the first, and at other moments."""
    assert not errors_on_two_ranks(__file__, "change_levels", str(tmp_path))


class Ranks:
    """This rank and another, which has as many samples and so many bytes free."""

    count = 2

    def __init__(self, free: int) -> None:
        self.free = free

    def max(self, value: int) -> int:
        return value

    def min(self, value: int) -> int:
        return min(value, self.free)

    def sum(self, *values: float) -> list[float]:
        return [2 * value for value in values]


def samples(responses: int, prompt: int, response: int) -> list[SimpleNamespace]:
    """Return samples of one prompt."""
    mask = torch.tensor([0] * (prompt - 1) + [1] * response)
    return [SimpleNamespace(sequences=torch.zeros(prompt + response), action_mask=mask) for _ in range(responses)]


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (2**40, {NONE: 250, SELECTIVE: 250, WHOLE: 100}),
        (1_200_000, {NONE: 1_200_000 // (4 * 1216 + 256), SELECTIVE: 250, WHOLE: 100}),
        (0, {WHOLE: 100}),
    ],
    ids=["much", "some", "nothing"],
)
def test_what_fits_is_kept(free, expected):
    """At a vocabulary of 8 OpenRLHF's own peak of 100 tokens has no room.

    A layer keeps 1,216 bytes of a token, or 656, or 64, and the last norm 256. Gradients take one layer more, and what
    is computed again another one. A prompt has 250 tokens.
    """
    setter = Checkpointing(made(vocab_size=8), flags())
    assert (layer_bytes(setter.config), products_bytes(setter.config)) == (1216, 656)
    assert setter.budgets(100, 100, 250, keys_per_token=1, free=free) == expected


def test_openrlhfs_own_peak_is_room():
    """Its logits of 200 tokens, at 1 MB each with all that goes with them, hold 250 tokens and a block of ours."""
    setter = Checkpointing(made(vocab_size=100_000), flags())
    assert setter.budgets(200, 200, 250, keys_per_token=1, free=0) == {NONE: 250, SELECTIVE: 250, WHOLE: 250}


def test_a_number_of_samples_gives_way_to_a_whole_prompt_in_stocks_memory():
    """A layer takes 8 x 24 + 20 x 8 + 4 x 4 = 368 bytes per token, and as many of gradients. The last norm takes 64,
    and states in the head take 48."""
    sizes = dict(hidden_size=8, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    model, args = made(num_key_value_heads=1, **sizes), flags(micro_batch_size=2, is_checkpointed=False)
    setter = Checkpointing(model, args)

    def budget(costliest: int, keys: int = 1) -> int:
        return setter.budgets(5000, 10_000, costliest, keys, free=2**60)[NONE]  # what is free does not count

    # One block holds all logits, as many as OpenRLHF's.
    setter.config.vocab_size = 100
    stock = 10_000 * (368 + 64 + 10 * 100)
    assert budget(60) == budget(10**9) == stock // (368 + 64 + 48 + 10 * 100) < 10_000
    setter.config.vocab_size = 10_000
    stock = 10_000 * (368 + 64 + 10 * 10_000)
    assert [budget(cost) for cost in (60, 30_000)] == [10_000, 30_000]
    # A block has 1,024 columns at least, which take more than a layer's gradients.
    assert budget(10**9) == stock // (368 + 64 + 48 + 10 * 1024)
    setter.config.num_hidden_layers = 100
    stock = 10_000 * (100 * 368 + 64 + 10 * 10_000)
    assert budget(10**9) == stock // (100 * 368 + 64 + 48 + 10 * 1024)
    # A shared prompt of which each token has three keys: 16 bytes more.
    assert budget(10**9, keys=3) == stock // (100 * (368 + 2 * 16) + 64 + 48 + 10 * 1024)
    setter.config.model_type = "unheard_of"
    assert budget(10**9) == 10_000


@pytest.mark.parametrize(("tokens", "fits"), [(199, False), (201, True)])
def test_the_longest_sample_needs_room(tokens, fits):
    setter = Checkpointing(made(vocab_size=8), flags())
    assert (NONE in setter.budgets(200, 200, 250, keys_per_token=1, free=tokens * (4 * 1216 + 256))) == fits


@pytest.mark.parametrize("free", [0, 2**40])
def test_dynamic_batches_are_as_large_as_asked_for(free):
    """OpenRLHF's peak, where its logits do not show, holds all of them but for the states in our head."""
    setter = Checkpointing(made(vocab_size=8), flags(tokens=77))
    found = setter.budgets(100, 77, 250, keys_per_token=1, free=free)
    assert found == ({NONE: 77, SELECTIVE: 77, WHOLE: 77} if free else {WHOLE: 77})
    # A prompt of which each token has 100 keys keeps them in the layer at work.
    assert setter.budgets(100, 77, 250, keys_per_token=100, free=0)[WHOLE] < 77


@pytest.mark.parametrize(
    ("packs", "size", "expected"), [(False, 3, 3 * 30), (True, 3, 75), (True, 9, 85), (False, 9, 120)]
)
def test_openrlhf_pads_where_it_does_not_pack(packs, size, expected):
    setter = Checkpointing(made(), flags(micro_batch_size=size, packs=packs))
    assert setter._tokens_of_stock([30, 25, 20, 10], Ranks(0)) == expected


@pytest.mark.parametrize(
    ("vocabulary", "layers", "prompt", "response", "expected"),
    [
        (4000, 26, 8000, 2000, (WHOLE, 16_000)),
        (20_000, 40, 2000, 8000, (SELECTIVE, 34_000)),
        (20_000, 40, 2000, 18_000, (NONE, 65_542)),
    ],
    ids=["the prompt twice", "a micro-batch more", "neither"],
)
def test_the_level_of_least_time_is_taken(vocabulary, layers, prompt, response, expected):
    """Of four responses, in OpenRLHF's memory for one. A micro-batch costs 2,000 tokens by itself.

    1. With products kept there is room for 14,364 tokens: 14,000 + 10,000, or all at once with layers computed again.
       (24,000 + 2 x 2,000) x 13/12 > (16,000 + 2,000) x 4/3.
    2. With all kept there is room for 32,771: 26,000 + 10,000 + 2 x 2,000 > (34,000 + 2,000) x 13/12.
    3. With all kept there is room for 65,542: 56,000 + 20,000 + 2 x 2,000 < (74,000 + 2,000) x 13/12.
    """
    setter = Checkpointing(made(vocab_size=vocabulary, num_hidden_layers=layers), flags())
    budget = setter.fit([samples(4, prompt, response)], Ranks(free=0), has_stepped=True)
    assert (setter.level, budget) == expected


def test_all_ranks_choose_alike(monkeypatch):
    monkeypatch.setattr(checkpointing, "_free_bytes", lambda *args: 2**50)
    setter = Checkpointing(made(vocab_size=8), flags())
    for free, expected in ((2**60, NONE), (0, WHOLE), (2**60, NONE)):
        setter.fit([samples(2, 10, 10)], Ranks(free), has_stepped=True)
        assert setter.level == expected
        assert all(module.gradient_checkpointing == (expected != NONE) for module in setter.modules)


@pytest.mark.parametrize(
    ("model", "args", "expected"),
    [
        ({}, flags(), [NONE, SELECTIVE, WHOLE]),
        ({}, flags("whole"), [WHOLE]),
        ({"reentrant": True}, flags(reentrant=True), [NONE, WHOLE]),
        ({"attention": "flex_attention"}, flags(), [NONE, WHOLE]),
        ({"kind": "gemma"}, flags(), [WHOLE]),
        ({}, flags(is_checkpointed=False), [NONE]),
        ({}, flags(lora_rank=8), [NONE, WHOLE]),
    ],
    ids=["all", "forced", "reentrant", "flex", "unknown", "off", "lora"],
)
def test_levels(model, args, expected):
    assert Checkpointing(made(**model), args).levels == expected


def test_deepspeed_needs_room_too(monkeypatch):
    """Of 10 GB free and 1 GB that the allocator holds unused, a tenth is left, and 3 GB for buckets."""
    model, args = made(), flags()
    numbers = sum(parameter.numel() for parameter in model.parameters())

    def free(has_stepped: bool = True) -> int:
        return checkpointing._free_bytes(model, args, 4, has_stepped)

    assert free() == 0  # without a GPU
    figures = dict(
        is_available=True, memory_reserved=3 * 10**9, memory_allocated=2 * 10**9, mem_get_info=(10**10, 2**40)
    )
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert free() == 6_900_000_000 - 2 * 4 * numbers  # the gradients twice, in float32
    assert free(has_stepped=False) == free() - 8 * numbers // 4  # Adam's moments, divided among four ranks
    args.ds.adam_offload = True
    assert free(has_stepped=False) == free()
    args.ds.zero_stage = 3
    assert free() == 6_900_000_000 - 2 * 4 * numbers // 4
    model.bfloat16()
    assert free() == 6_900_000_000 - 2 * 2 * numbers // 4
    args.ds.grad_accum_dtype = "fp32"
    assert free() == 6_900_000_000 - 2 * 4 * numbers // 4
    args.algo.advantage.estimator = "gae"  # the critic trains on the same GPU, at the same time
    assert free() == 0
    args.ds.enable_sleep = True
    assert free() > 0
