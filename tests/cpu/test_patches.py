"""What is replaced on the CPU and without flash-attn, the locks of builds, and vLLM's weights after a sync."""

import copy
import importlib
import os
import subprocess
import sys
import threading
import types

import pytest
import ray
import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.file_baton import FileBaton

from arlopti_openrlhf import bindings
from arlopti_openrlhf.cpu import patches as cpu_patches


def test_device_redirections():
    assert torch.zeros(2).to(torch.cuda.current_device()).device.type == "cpu"
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
    torch.cuda.synchronize(), torch.cuda.empty_cache(), torch.cuda.set_device(0)
    from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer

    assert NaiveReplayBuffer(2).target_device == torch.device("cpu")


@pytest.mark.whole_stack  # for its time
def test_on_a_gpu_without_flash_attn_only_the_import_fallback_is_used(monkeypatch):
    """With a CUDA device (pretended: nothing is run on it) torch.cuda and OpenRLHF's CUDA code stay as they are."""
    code = """
import torch
torch.cuda.is_available = lambda: True
current_device = torch.cuda.current_device
from arlopti_openrlhf import cpu
cpu.enable()
assert torch.cuda.current_device is current_device and torch.cuda.is_available()
torch.cuda.is_available = lambda: False
from openrlhf.models import Actor
from openrlhf.utils.distributed_util import stateless_init_process_group
assert stateless_init_process_group.__module__ == "openrlhf.utils.distributed_util"
assert stateless_init_process_group.__name__ != "<lambda>"
import sys
assert not any(name.startswith("flash_attn") for name in sys.modules)
seen = {}
import openrlhf.models.actor as module
def stop(*args, **kwargs):
    seen.update(kwargs)
    raise KeyboardInterrupt
module.AutoModelForCausalLM.from_pretrained = stop
from openrlhf.utils import utils
utils.is_vlm_model = lambda path: False
try:
    Actor("model", attn_implementation="flash_attention_2")
except KeyboardInterrupt:
    pass
assert seen["attn_implementation"] == "sdpa", seen
print("fallback alone")
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ARLOPTI", "DS_ACC"))}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert output.stdout.splitlines()[-1:] == ["fallback alone"], output.stderr[-2000:]
    assert "flash-attn is not installed" in output.stdout


def test_patching_after_the_import_is_refused():
    import openrlhf.models.ring_attn_utils  # noqa: F401

    with pytest.raises(RuntimeError, match=r"must be called before openrlhf.models.\w+ is imported"):
        cpu_patches.make(without_cuda=False, without_flash_attn=True, without_bf16=False)


def test_pytorchs_causal_masks_work_where_bf16_is_computed_in_float32(monkeypatch):
    """Such a mask compares the function that it is given to with PyTorch's, by identity."""
    for name in ("linear", "scaled_dot_product_attention"):
        monkeypatch.setattr(F, name, getattr(F, name))  # undone at the end
    cpu_patches._compute_bf16_in_float32()
    query, key = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 5, 4)
    seen = torch.ones(2, 5, dtype=torch.bool).tril(3)
    for dtype in (torch.float32, torch.bfloat16):
        q, k = query.to(dtype), key.to(dtype)
        output = F.scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(2, 5))
        assert output.dtype == dtype
        torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, k, attn_mask=seen))


def test_an_all_gather_is_complete_when_it_returns():
    """DeepSpeed starts several and waits for the last one only; gloo may finish that one first."""
    events = []

    class TorchBackend:
        def all_gather(self, *args, async_op=False):
            events.append("started")
            return types.SimpleNamespace(wait=lambda: events.append("complete")) if async_op else None

        all_gather_into_tensor = all_gather

    cpu_patches._patch_deepspeed_comm(types.SimpleNamespace(TorchBackend=TorchBackend))
    TorchBackend().all_gather_into_tensor(async_op=True)
    TorchBackend().all_gather(async_op=True)
    assert events == ["started", "complete"] * 2
    TorchBackend().all_gather()
    assert events == ["started", "complete"] * 2 + ["started"]

    from deepspeed.comm.torch import TorchBackend

    assert all(hasattr(f, "__wrapped__") for f in (TorchBackend.all_gather, TorchBackend.all_gather_into_tensor))


@pytest.mark.parametrize(
    "optimizer_class",
    ["FusedAdam", pytest.param("DeepSpeedCPUAdam", marks=pytest.mark.long)],  # which is compiled for it
)
def test_adam_resumed_at_any_step_equals_adam_that_went_on(optimizer_class):
    """DeepSpeed's op multiplies the powers of the betas from step to step, and a resumed run computes them anew."""
    from deepspeed.ops import adam

    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(30, 64, generator=generator)
    parameter = torch.nn.Parameter(torch.randn(64, generator=generator))

    def train(steps: range, weights: torch.Tensor, state: dict | None = None) -> list[tuple[torch.Tensor, dict]]:
        parameter.data = weights.clone()
        optimizer = getattr(adam, optimizer_class)([parameter], lr=1e-3, betas=(0.9, 0.95))
        if state:
            optimizer.load_state_dict(copy.deepcopy(state))
        after = []
        for i in steps:
            parameter.grad = gradients[i].clone()
            optimizer.step()
            after.append((parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())))
        return after

    whole = train(range(30), parameter.detach())
    for done in reversed(range(1, 29)):  # upwards, the op's own count of the steps would go on
        [(resumed, _), *_] = train(range(done, done + 1), *whole[done - 1])
        assert torch.equal(resumed, whole[done][0]), done


def test_unpadding_helpers_undo_each_other():
    from openrlhf.models.ring_attn_utils import gather_and_pad_tensor, unpad_and_slice_tensor

    sequences = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4]])
    mask = (sequences > 0).long()
    packed, position_ids, rolled, pad, indices = unpad_and_slice_tensor(sequences, mask, None)
    assert packed.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3, 4]]
    assert position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert rolled[0, :2].tolist() == [6, 7]
    assert torch.equal(gather_and_pad_tensor(packed, None, pad, indices, 3, 4), sequences)


def test_packed_log_probs_are_those_of_separate_sequences(tiny_model):
    from openrlhf.models import Actor

    torch.manual_seed(0)
    actor = Actor(tiny_model, attn_implementation="flash_attention_2", packing_samples=True)
    actor.model.float()
    assert actor.model.config._attn_implementation == "sdpa"
    lengths = (9, 4, 12)
    sequences = torch.zeros(3, 12, dtype=torch.long)
    mask = torch.zeros_like(sequences)
    for row, length in enumerate(lengths):
        sequences[row, :length], mask[row, :length] = torch.randint(0, 256, (length,)), 1
    packed = actor(sequences, mask[:, 1:], mask)
    actor.packing_samples = False
    for row, length in enumerate(lengths):
        alone = actor(sequences[row : row + 1, :length], mask[row : row + 1, 1:length], mask[row : row + 1, :length])
        torch.testing.assert_close(packed[row, : length - 1], alone[0], rtol=1e-5, atol=1e-5)


def test_no_actor_class_carries_a_patch_of_the_driver():
    """Ray pickles actor classes by value: a patch that one captured would decide for the workers, on any machine."""
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic, vllm_engine
    from openrlhf.utils.deepspeed import deepspeed

    # That a captured patch would be seen:
    assert b"cpu.patches" in ray.cloudpickle.dumps(deepspeed.init_device_mesh)
    seen = []
    for module in (ppo_trainer, ppo_trainer_async, launcher, ppo_actor, ppo_critic, vllm_engine):
        for name, value in vars(module).items():
            if isinstance(value, ray.actor.ActorClass):
                seen.append(name)
                assert b"cpu.patches" not in ray.cloudpickle.dumps(value.__ray_metadata__.modified_class), name
    assert {"PPOTrainer", "PolicyModelActor", "CriticModelActor", "ReferenceModelActor"} <= set(seen)


def test_the_lock_that_a_build_waits_for_is_named(tmp_path, recwarn):
    """As that of a killed build, which stays."""
    cpu_patches._name_locks_of_builds()
    baton = FileBaton(str(tmp_path / "lock"), wait_seconds=0.01)
    assert baton.warn_after_seconds == 10
    baton.warn_after_seconds = 0.02
    (tmp_path / "lock").touch()
    threading.Timer(0.5, (tmp_path / "lock").unlink).start()
    baton.wait()
    assert str(tmp_path / "lock") in str(recwarn.pop().message)


# --- weight sync ----------------------------------------------------------------------------------------------------


def sync_probe():
    from openrlhf.trainer.ray.ppo_actor import PolicyModelActor

    class SyncProbe(PolicyModelActor.__ray_metadata__.modified_class.__ray_actor_class__):
        def move_weights(self) -> float:
            """Adds noise of half its own size to every trained weight, the same on all ranks; their relative move."""
            import deepspeed

            generator = torch.Generator().manual_seed(5)
            parameters = [p for p in self.actor.model.module.parameters() if p.requires_grad]
            with deepspeed.zero.GatheredParameters(
                parameters, modifier_rank=0, enabled=self.strategy.args.ds.zero_stage == 3
            ):
                for p in parameters:
                    scale = p.data.float().std().nan_to_num(0.0).clamp(min=0.1)
                    p.data.add_((0.5 * scale * torch.randn(p.shape, generator=generator)).to(p.dtype))
            return len(parameters)

    return ray.remote(SyncProbe)


def vllm_log_probs(engine, rows: list[list[int]]) -> torch.Tensor:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0)
    outputs = ray.get([engine.generate.remote(row, parameters) for row in rows])
    return torch.tensor(
        [
            [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], row[1:], strict=True)]
            for out, row in zip(outputs, rows, strict=True)
        ]
    )


@pytest.fixture
def our_policy_actor(monkeypatch):
    """Our classes in OpenRLHF's modules, for one test."""
    has = {bindings.SELECTIVE, bindings.LORA}
    for row in bindings.rows(has):
        module = importlib.import_module(row.module)
        monkeypatch.setattr(module, row.name, getattr(module, row.name))  # what is there now comes back afterwards
    bindings.bind(has)


@pytest.mark.long
@pytest.mark.whole_stack
@pytest.mark.parametrize(
    "tied, more",
    [
        pytest.param(True, ["--ds.zero_stage", "2"], id="tied, zero2"),
        pytest.param(False, ["--ds.zero_stage", "3"], id="untied, zero3"),
        pytest.param(True, ["--ds.zero_stage", "3", "--ds.lora.rank", "8"], id="lora, zero3"),
    ],
)
def test_after_a_weight_sync_vllm_agrees_with_the_actor(make_model, our_policy_actor, tied, more):
    """The weights are moved far: a sync that left any of them behind would be off by whole nats, not by rounding."""
    from openrlhf.trainer.ray import create_vllm_engines
    from openrlhf.trainer.ray.launcher import RayActorGroup
    from openrlhf.utils import get_strategy
    from openrlhf.utils.config import hierarchize

    from arlopti_openrlhf.cli.train_ppo_ray import parse

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    model = make_model(tied)
    common = f"--actor.model_name_or_path {model} --actor.num_gpus_per_node 2 --vllm.num_engines 1"
    common += " --vllm.sync_backend gloo --ds.attn_implementation sdpa --train.batch_size 4 --train.micro_batch_size 1"
    args = hierarchize(parse(common.split() + more))
    args.actor.eps_clip_low_high = (0.2, 0.2)
    ray.init(num_gpus=3, num_cpus=6, log_to_driver=False)
    try:
        engines = create_vllm_engines(1, 1, model, 0, False, False, True, 64, None, 0.5)
        actors = RayActorGroup(1, 2, sync_probe())
        ray.get(actors.async_init_model_from_pretrained(get_strategy(args), model, 10, engines))
        rows = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(1))
        ones = torch.ones_like(rows)

        def actor_log_probs():
            refs = actors.async_run_method("forward", rows, ones[:, 1:], ones)
            return ray.get(refs)[0].float()

        start = actor_log_probs()
        assert ray.get(actors.async_run_method("move_weights"))[0] > 0
        moved = actor_log_probs()
        assert (moved - start).abs().mean() > 0.5
        if args.ds.lora.rank:  # the adapters were zero at first, and they alone have moved
            reference = ray.get(actors.async_run_method("forward_reference", rows, ones[:, 1:], ones))[0].float()
            assert torch.equal(reference, start) and torch.equal(actor_log_probs(), moved)
        for _ in range(2):  # the second sync finds vLLM's layers as the first one left them
            ray.get(actors.async_run_method("broadcast_to_vllm"))
            gap = (vllm_log_probs(engines[0], rows.tolist()) - moved).abs()
            # bf16 rounds logits of this size (about 10) by some 0.04.
            assert gap.mean() < 0.05 and gap.max() < 0.5
    finally:
        ray.shutdown()
