"""Whether an update computes layers again: exactly the same gradients, and no more memory than there is."""

from types import SimpleNamespace

import pytest
import torch
from arlopti_testing.peak_bytes import PeakBytes
from arlopti_testing.processes import errors_on_two_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from arlopti_openrlhf.activation_memory import layer_bytes
from arlopti_openrlhf.forward.selective_actor import SelectiveActor, Shortcuts
from arlopti_openrlhf.update import plan
from arlopti_openrlhf.update.plan import NONE, WHOLE, Planner, divide
from arlopti_openrlhf.update.sample import Sample
from arlopti_openrlhf.update.settings import Settings

LAYERS = 3


def flags(
    micro_batch_size: int = 1,
    is_checkpointed: bool = True,
    tokens: int | None = None,
    packs: bool = False,
    liger: bool = False,
) -> SimpleNamespace:
    """With `tokens` in dynamic batches of so many."""
    actor = SimpleNamespace(gradient_checkpointing_enable=is_checkpointed)
    train = SimpleNamespace(
        micro_batch_size=micro_batch_size,
        dynamic_batch_enable=tokens is not None,
        max_tokens_per_gpu=tokens,
        colocate_all=True,
    )
    ds = SimpleNamespace(
        packing_samples=packs,
        zero_stage=2,
        adam_offload=False,
        grad_accum_dtype=None,
        enable_sleep=False,
        use_liger_kernel=liger,
        lora=SimpleNamespace(rank=8, dropout=0.0),
    )
    algo = SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm"))
    return SimpleNamespace(actor=actor, train=train, ds=ds, algo=algo)


def made(kind: str = "qwen2", dtype=torch.float32, reentrant: bool = False, **sizes):
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, vocab_size=211) | sizes
    heads = dict(num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    config = AutoConfig.for_model(kind, **heads | sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def policy(model: nn.Module, steps: int = 1) -> SimpleNamespace:
    """Return an actor of an engine that has taken so many steps, beside one that was refused."""
    return SimpleNamespace(model=SimpleNamespace(module=model, global_steps=steps + 1, skipped_steps=1))


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name().startswith(("aten::mm", "aten::addmm"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same(dtype, reentrant):
    """The backward pass repeats a layer's seven products. Not reentrant, it needs no last one."""
    model, found = made(dtype=dtype, reentrant=reentrant), {}
    actor = SelectiveActor(model)
    actor.packing_samples = actor.is_vlm = False
    sequences = torch.randint(1, 200, (4, 20), generator=torch.Generator().manual_seed(0))
    sequences[1::2, :8] = sequences[::2, :8]  # two prompts with two responses each
    attention_mask, action_mask = torch.ones_like(sequences), torch.ones(4, 12, dtype=torch.long)
    actor.check(sequences, attention_mask)
    setter = Planner(policy(model), flags(), Settings(), None)
    for level in (NONE, WHOLE):
        setter.set(level)
        model.zero_grad()
        with Products() as products:
            log_probs = actor(sequences, action_mask, attention_mask)
            (log_probs * torch.arange(log_probs.numel()).view_as(log_probs)).sum().backward()
        found[level] = products.count, [log_probs.detach(), *(each.grad.clone() for each in model.parameters())]
    (products, kept), (more_products, computed_again) = found.values()
    assert more_products == products + (7 if reentrant else 6) * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(kept, computed_again, strict=True))


def change_levels(folder: str) -> None:
    """Run one of two ranks, whose weights DeepSpeed gathers ahead, and the fewer at a time the smaller its buckets."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    model = made(num_hidden_layers=8)
    actor, setter = SelectiveActor(model), Planner(policy(model), flags(), Settings(), None)
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
    for level in (NONE, WHOLE, WHOLE, NONE, NONE, WHOLE):
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


RANKS = Ranks(free=plan._UNKNOWN)


def samples(responses: int, prompt: int, response: int) -> list[Sample]:
    """Return samples of one prompt."""
    sequences = torch.zeros(prompt + response)
    return [Sample(sequences=sequences, prompt=prompt, prompt_length=prompt) for _ in range(responses)]


@pytest.mark.parametrize(
    ("free", "room"),
    [(2**40, 2**40), (1_200_000, 1_200_000), (0, 0), (plan._UNKNOWN, 100 * (3 * 64 + 256 + 2 * 1216))],
    ids=["much", "some", "nothing", "unknown"],
)
def test_what_is_free_is_room_for_activations(free, room):
    """A layer keeps 1,216 bytes of a token, or 64, and the last norm 256. Gradients take one layer more, and what is
    computed again another one. At a vocabulary of 8 OpenRLHF's peak is taken for granted if nothing is known. A prompt
    has 250 tokens.
    """
    setter = Planner(policy(made(vocab_size=8)), flags(), Settings(), RANKS)
    assert layer_bytes(setter.config) == 1216
    assert setter.budget(NONE, 100, 250, keys_per_token=1, free=free) == min(250, room // (4 * 1216 + 256))
    assert setter.budget(WHOLE, 100, 250, keys_per_token=1, free=free) == 100


def test_ligers_layers_keep_less():
    """6 x 64 + 8 x 32 + 4 x 32 + 4 x 16 = 832 bytes of a token."""
    setter = Planner(policy(made(vocab_size=8)), flags(liger=True), Settings(), RANKS)
    assert setter.budget(NONE, 100, 10**9, keys_per_token=1, free=10**9) == 10**9 // (4 * 832 + 256)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_is_free_is_filled(is_checkpointed, monkeypatch):
    """Whatever the number of samples. Where less is free than OpenRLHF takes, it gets OpenRLHF's tokens.

    A model whose layers are not known has what the user says.
    """
    kept = 3 * 1216 + 256 if not is_checkpointed else 3 * 64 + 256
    at_work = 1216 if not is_checkpointed else 2 * 1216
    setter = Planner(
        policy(made(vocab_size=8)), flags(is_checkpointed=is_checkpointed), Settings(fills_memory=True), RANKS
    )
    level = setter.levels[-1]
    assert setter.budget(level, 100, 250, keys_per_token=1, free=10**9) == 10**9 // (kept + at_work) > 250
    assert setter.budget(level, 1000, 250, keys_per_token=1, free=0) == 1000  # its logits are 8 numbers
    items = samples(8, 100, 100) + samples(8, 90, 100)
    monkeypatch.setattr(plan, "_free_bytes", lambda *args: 2**40)
    assert len(divide(items, setter._fit([items]))) == 1
    setter.fills_memory = False
    assert len(divide(items, setter._fit([items]))) > 1
    unknown = Planner(
        policy(made("gemma")), flags(is_checkpointed=is_checkpointed), Settings(fills_memory=True), RANKS
    )
    assert unknown.budget(level, 100, 250, keys_per_token=1, free=10**9) == 100


@pytest.mark.parametrize("level", [NONE, WHOLE])
def test_openrlhfs_own_peak_is_room(level):
    """Its logits of 200 tokens, at 1 MB each with all that goes with them, hold 250 tokens and a block of ours."""
    setter = Planner(policy(made(vocab_size=100_000)), flags(), Settings(), RANKS)
    assert setter.budget(level, 200, 250, keys_per_token=1, free=plan._UNKNOWN) == 250
    # If there is no room for it, micro-batches are the user's, and layers are computed again.
    assert setter.budget(level, 200, 250, keys_per_token=1, free=10**6) == (200 if level == WHOLE else 0)


def test_a_number_of_samples_gives_way_to_a_whole_prompt_in_stocks_memory():
    """A layer takes 8 x 24 + 20 x 8 + 4 x 4 = 368 bytes per token, and as many of gradients. The last norm takes 64,
    and states in the head take 48."""
    sizes = dict(hidden_size=8, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    model, args = made(num_key_value_heads=1, **sizes), flags(micro_batch_size=2, is_checkpointed=False)
    setter = Planner(policy(model), args, Settings(), RANKS)

    def budget(costliest: int, keys: int = 1) -> int:
        return setter.budget(NONE, 10_000, costliest, keys, free=2**60)  # what is free does not count

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


@pytest.mark.parametrize("checks", [False, True])
def test_a_forward_alone_takes_what_fits_into_stocks_memory(checks):
    """Of a layer it keeps the inputs alone, for a moment. OpenRLHF's logits of one sample hold many."""
    setter = Planner(policy(made(vocab_size=100_000)), flags(is_checkpointed=checks), Settings(), RANKS)
    setter.actor.shortcuts, setter.args.rollout = Shortcuts(None, True), SimpleNamespace(micro_batch_size=1)
    setter.args.actor.aux_loss_coef = 0
    own = samples(64, 200, 300)
    assert [len(batch) for batch in setter.without_gradient(own)] == [64]
    assert max(len(batch) for batch in setter.without_gradient(samples(64, 20, 30))) == 1  # all in one block of logits
    # Where prompts are not shared it is as upstream's, of so many samples or tokens.
    setter.actor.shortcuts = Shortcuts("no", True)
    assert {len(batch) for batch in setter.without_gradient(own)} == {1}
    setter.args.train.dynamic_batch_enable, setter.args.rollout.max_tokens_per_gpu = True, 2000
    assert {len(batch) for batch in setter.without_gradient(own)} == {4}


@pytest.mark.parametrize(("tokens", "expected"), [(199, WHOLE), (201, NONE)])
def test_the_longest_sample_needs_room(tokens, expected, monkeypatch):
    monkeypatch.setattr(plan, "_free_bytes", lambda *args: tokens * (4 * 1216 + 256))
    setter = Planner(policy(made(vocab_size=8)), flags(), Settings(), RANKS)
    setter._fit([samples(1, 100, 100)])
    assert setter.level == expected


@pytest.mark.parametrize(("free", "expected"), [(0, WHOLE), (2**40, NONE)])
def test_dynamic_batches_are_as_large_as_asked_for(free, expected, monkeypatch):
    """OpenRLHF's peak, where its logits do not show, holds all of them but for the states in our head."""
    monkeypatch.setattr(plan, "_free_bytes", lambda *args: free)
    setter = Planner(policy(made(vocab_size=8)), flags(tokens=77), Settings(), RANKS)
    assert setter._fit([samples(1, 10, 10)]) == 77
    assert setter.level == expected
    # A prompt of which each token has 100 keys keeps them in the layer at work.
    assert setter.budget(WHOLE, 77, 250, keys_per_token=100, free=0) < 77


@pytest.mark.parametrize(
    ("packs", "size", "expected"), [(False, 3, 3 * 30), (True, 3, 75), (True, 9, 85), (False, 9, 120)]
)
def test_openrlhf_pads_where_it_does_not_pack(packs, size, expected):
    setter = Planner(policy(made()), flags(micro_batch_size=size, packs=packs), Settings(), RANKS)
    own = [samples(1, length - 5, 5)[0] for length in (10, 25, 30, 20)]
    assert setter._tokens_of_stock(own) == expected


@pytest.mark.parametrize(
    ("vocabulary", "layers", "responses", "prompt", "response", "expected"),
    [
        (10_000, 40, 4, 8000, 2000, (WHOLE, 16_000)),
        (20_000, 80, 8, 100, 1900, (WHOLE, 15_300)),
        (20_000, 40, 4, 2000, 18_000, (NONE, 65_542)),
    ],
    ids=["the prompt twice", "many micro-batches", "neither"],
)
def test_the_level_of_least_time_is_taken(vocabulary, layers, responses, prompt, response, expected):
    """In OpenRLHF's memory for one response. A micro-batch costs 3,500 tokens by itself.

    1. With all kept there is room for 15,871 tokens: 14,000 + 10,000, or all at once with layers computed again.
       24,000 + 2 x 3,500 > (16,000 + 3,500) x 4/3.
    2. With all kept there is room for one response: 8 x (2,000 + 3,500) > (15,300 + 3,500) x 4/3.
    3. With all kept there is room for 65,542: 56,000 + 20,000 + 2 x 3,500 < (74,000 + 3,500) x 4/3.
    """
    setter = Planner(policy(made(vocab_size=vocabulary, num_hidden_layers=layers)), flags(), Settings(), RANKS)
    budget = setter._fit([samples(responses, prompt, response)])
    assert (setter.level, budget) == expected


def test_all_ranks_choose_alike(monkeypatch):
    monkeypatch.setattr(plan, "_free_bytes", lambda *args: 2**50)
    setter = Planner(policy(made(vocab_size=8)), flags(), Settings(), RANKS)
    for free, expected in ((2**60, NONE), (0, WHOLE), (2**60, NONE)):
        setter.ranks = Ranks(free)
        setter._fit([samples(2, 10, 10)])
        assert setter.level == expected
        assert all(module.gradient_checkpointing == (expected != NONE) for module in setter.modules)


@pytest.mark.parametrize(
    ("kind", "is_checkpointed", "choice", "expected"),
    [
        ("qwen2", True, "auto", [NONE, WHOLE]),
        ("qwen2", True, WHOLE, [WHOLE]),
        ("gemma", True, "auto", [WHOLE]),
        ("qwen2", False, "auto", [NONE]),
    ],
    ids=["auto", "forced", "unknown", "off"],
)
def test_levels(kind, is_checkpointed, choice, expected):
    args, settings = flags(is_checkpointed=is_checkpointed), Settings(checkpointing=choice)
    assert Planner(policy(made(kind)), args, settings, RANKS).levels == expected
    args.ds.lora.dropout = 0.05  # its masks take memory that nobody has counted
    assert Planner(policy(made(kind)), args, settings, RANKS).levels == expected[-1:]


def test_deepspeed_needs_room_too(monkeypatch):
    """Of 10 GB free and 1 GB that the allocator holds unused, a tenth is left, and 3 GB for buckets."""
    model, args = made(), flags()
    numbers = sum(parameter.numel() for parameter in model.parameters())

    def free(has_stepped: bool = True) -> int:
        return plan._free_bytes(policy(model, steps=int(has_stepped)), args, 4)

    assert free() == plan._UNKNOWN  # without a GPU
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
    assert free() == plan._UNKNOWN
    args.ds.enable_sleep = True
    assert 0 < free() < plan._UNKNOWN


def take_two_steps(stage: str) -> None:
    """Run one of two ranks with OpenRLHF's configuration, a model of 500k numbers and buckets of 200k."""
    import deepspeed
    from openrlhf.utils.deepspeed.deepspeed_utils import get_train_ds_config

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    adamw = {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}}
    config = get_train_ds_config(False, adam_offload=False, stage=int(stage), zpg=1, optim_config=adamw)
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "train_batch_size": 4}
    assert config["zero_optimization"]["reduce_bucket_size"] == "auto"  # which is 500M
    config["zero_optimization"]["reduce_bucket_size"] = 200_000
    plan._BUCKETS = plan._BUCKETS * 200_000 // 500_000_000
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)]).bfloat16()
    args = flags()
    args.ds.zero_stage = int(stage)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for has_stepped in (False, True):
        most = plan._deepspeed_bytes(policy(model, steps=int(has_stepped)), args, 2)
        with PeakBytes() as counted:
            for is_last in (False, True):
                engine.set_gradient_accumulation_boundary(is_last)
                engine.backward(engine(torch.zeros(1, 256, dtype=torch.bfloat16)).sum())
        assert most / 5 < counted.peak <= most, (counted.peak, most)
        engine.step()


@pytest.mark.long
@pytest.mark.parametrize("stage", ["2", "3"])
def test_deepspeed_takes_no_more(stage):
    assert not errors_on_two_ranks(__file__, "take_two_steps", stage)
