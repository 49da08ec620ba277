"""The weight sync of a LoRA model, through upstream's own loop: fake engines, real PEFT layers, real ZeRO-3."""

import copy
import gc
import itertools
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from arlopti_testing.processes import errors_on_two_ranks
from openrlhf.trainer.ray import ppo_actor
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM

from arlopti_openrlhf.ops.lora import merged_parameters, without_adapters


def lora_model(folder, dtype=torch.float32, targets="all-linear"):
    """A LoRA model whose adapters are random: PEFT starts them at zero."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, target_modules=targets)
    torch.manual_seed(3)
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def merged_by_peft(model) -> dict[str, torch.Tensor]:
    return dict(copy.deepcopy(model).merge_and_unload().named_parameters())


class Engine:
    """A vLLM engine that keeps what it is told, and a process group that keeps what is sent.

    `on_arrival` is called with the engine while a weight is on its way.
    """

    def __init__(self, on_arrival=lambda engine: None) -> None:
        self.weights, self.last, self.on_arrival = {}, None, on_arrival
        self.update_weight = self.update_weight_cuda_ipc = SimpleNamespace(remote=self._update)

    def _update(self, name, dtype, shape, empty_cache, ipc_handles=None):
        assert name not in self.weights and self.last is None
        self.weights[name] = (dtype, tuple(shape))
        self.last = name if empty_cache else None
        if ipc_handles is not None:
            rebuild, arguments = ipc_handles["gpu"]
            self._receive(rebuild(*arguments))

    def broadcast(self, tensor, src, stream):
        assert src == 0 and tensor.is_contiguous()
        self._receive(tensor)

    def _receive(self, tensor):
        name = list(self.weights)[-1]
        assert self.weights[name] == (tensor.dtype, tuple(tensor.shape))
        self.weights[name] = tensor.clone()
        self.on_arrival(self)


def sync(model, monkeypatch, is_vlm=False, zero_stage=2, use_cuda_ipc=False, **kwargs) -> Engine:
    """Upstream's `broadcast_to_vllm`, of a trainer on one rank."""
    engine = Engine(**kwargs)
    args = SimpleNamespace(
        vllm=SimpleNamespace(enable_prefix_caching=False, sync_with_ray=False),
        ds=SimpleNamespace(zero_stage=zero_stage, tensor_parallel_size=1),
    )
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        actor=SimpleNamespace(model=SimpleNamespace(module=model), is_vlm=is_vlm),
        vllm_engines=[engine],
        use_cuda_ipc=use_cuda_ipc,
        _model_update_group=engine,
    )
    if not torch.distributed.is_initialized():
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
        monkeypatch.setattr(torch.distributed, "all_gather_object", lambda all, own: all.__setitem__(0, own))
    monkeypatch.setattr(ppo_actor, "get_physical_gpu_id", lambda: "gpu")
    monkeypatch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    monkeypatch.setattr(ppo_actor.ray, "get", lambda refs: None)
    with merged_parameters(model, gathered=zero_stage == 3):
        ppo_actor.ActorPPOTrainer.broadcast_to_vllm(trainer)
    return engine


@pytest.mark.parametrize("use_cuda_ipc", [False, True], ids=["broadcast", "cuda ipc"])
@pytest.mark.parametrize(
    "tied, dtype, targets",
    [
        *itertools.product([True, False], [torch.float32, torch.bfloat16], ["all-linear"]),
        (False, torch.float32, ["embed_tokens", "q_proj"]),
    ],
)
def test_weights_are_those_of_pefts_merged_model(make_model, tied, targets, dtype, use_cuda_ipc, monkeypatch):
    """PEFT keeps an embedding's adapters transposed, and rounds their product to bfloat16 before it is added."""
    model = lora_model(make_model(tied), dtype, targets)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    expected = merged_by_peft(model)
    engine = sync(model, monkeypatch, use_cuda_ipc=use_cuda_ipc)
    assert list(engine.weights) == list(expected) and engine.last == list(expected)[-1]
    assert all(torch.equal(engine.weights[name], expected[name]) for name in expected)
    # The model itself is as it was.
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def storages(objects) -> dict[int, int]:
    """Address and bytes of the memory under the tensors among some objects."""
    memory = [x.untyped_storage() for x in objects if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return {x.data_ptr(): x.nbytes() for x in memory}


@pytest.mark.long
def test_one_merged_weight_exists_at_a_time(tiny_model, monkeypatch):
    """The memory of all tensors that there are grows by that of the weight on its way, and no more."""
    model = lora_model(tiny_model)
    largest = max(parameter.nbytes for parameter in model.parameters())
    gc.collect()
    before, peaks = storages(gc.get_objects()), []

    def measure(engine):
        new = storages(gc.get_objects()).items() - before.items() - storages(engine.weights.values()).items()
        peaks.append(sum(size for _, size in new))

    engine = sync(model, monkeypatch, on_arrival=measure)
    assert len(engine.weights) > 20 and 0 < max(peaks) <= largest


def test_a_vision_model_is_sent_what_training_changes(tiny_model, monkeypatch):
    """Upstream sends a vision model's trainable weights: here the merged ones, with the frozen ones left in vLLM."""
    model = lora_model(tiny_model, targets=["q_proj", "down_proj"])
    expected = merged_by_peft(model)
    engine = sync(model, monkeypatch, is_vlm=True)
    adapted = [name for name in expected if name.endswith(("q_proj.weight", "down_proj.weight"))]
    assert list(engine.weights) == adapted and engine.last == adapted[-1]
    assert all(torch.equal(engine.weights[name], expected[name]) for name in adapted)


def test_a_tied_head_cannot_be_adapted(make_model):
    """vLLM holds one weight, of which the trained policy has two versions."""
    model = lora_model(make_model(True), targets=["lm_head", "q_proj"])
    with pytest.raises(ValueError, match="lm_head.weight.*--ds.lora.target_modules"), merged_parameters(model, False):
        pass
    with merged_parameters(lora_model(make_model(False), targets=["lm_head", "q_proj"]), False):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", ["all-linear", ["embed_tokens", "q_proj", "lm_head"]])
def test_without_its_adapter_a_model_is_the_base_model(make_model, targets, dtype):
    folder = make_model(False)
    base, model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), lora_model(folder, dtype, targets)
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, trained = base(tokens).logits, model(tokens).logits
        with without_adapters(model):
            assert torch.equal(model(tokens).logits, expected)
            assert any(p.requires_grad for p in model.parameters())  # for DeepSpeed's hooks
        assert not torch.equal(trained, expected) and torch.equal(model(tokens).logits, trained)


def sync_partitioned(folder: str) -> None:
    """Run one of two ranks whose model ZeRO-3 partitions; rank 0 sends."""
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    model = lora_model(folder)
    expected = merged_by_peft(model) if rank == 0 else {}
    parameters = list(model.parameters())
    largest, gathered = max(map(torch.Tensor.numel, parameters)), []

    def note(engine):
        gathered.append(sum(map(torch.Tensor.numel, parameters)))

    deepspeed.zero.Init(module=model, config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}})
    assert not any(parameter.numel() for parameter in parameters)
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = sync(model, monkeypatch, zero_stage=3, on_arrival=note)
    assert list(engine.weights) == list(expected)
    assert all(torch.equal(engine.weights[name], expected[name]) for name in expected)
    # One weight and its adapters at a time, and all are partitioned again.
    assert max(gathered, default=0) < 1.5 * largest and not any(parameter.numel() for parameter in parameters)
    torch.distributed.barrier()


@pytest.mark.long
def test_zero_3_gathers_weight_and_adapters_on_every_rank(tiny_model):
    assert not errors_on_two_ranks(__file__, "sync_partitioned", tiny_model)
