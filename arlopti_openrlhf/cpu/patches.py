"""Replaces what OpenRLHF cannot run without CUDA or without flash-attn. `arlopti_openrlhf.cpu` decides whether.

Patches to the modules of OpenRLHF and DeepSpeed are made when those are imported, so a process pays for none that it
does not use. Whatever a Ray actor class may capture on the driver must stay importable by name: the class travels by
value, and a captured lambda would carry the driver's choice of device to the workers.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch

from arlopti_openrlhf.cpu import adam, vllm

Patch = Callable[[Any], None]  # of a module that has been executed

_RING_ATTENTION = "openrlhf.models.ring_attn_utils"  # imports flash-attn


def are_made() -> bool:
    """Return whether `make` has run in this process."""
    return any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path)


def make(without_cuda: bool, without_flash_attn: bool, without_bf16: bool) -> None:
    """Replace in this process what does not work here.

    Args:
        without_cuda: redirect `torch.cuda` and what OpenRLHF and DeepSpeed do on CUDA to the CPU.
        without_flash_attn: put SDPA and transformers' padding helpers in place of flash-attn.
        without_bf16: the CPU has no bf16 instructions; only read where `without_cuda`.

    Raises:
        RuntimeError: a module to be patched is imported already.
    """
    patches: dict[str, Patch] = {}
    if without_cuda:
        patches |= _CPU_PATCHES | {name: patch for name, patch in vllm.PATCHES.items() if name not in sys.modules}
    if without_flash_attn:
        patches |= _FLASH_ATTN_PATCHES
    if late := sys.modules.keys() & patches:
        raise RuntimeError(f"arlopti_openrlhf.cpu.enable() must be called before {min(late)} is imported")
    sys.meta_path.insert(0, _PatchOnImport(patches))
    if without_cuda:
        for name in sys.modules.keys() & vllm.PATCHES:
            vllm.PATCHES[name](sys.modules[name])
        _redirect_torch_cuda()
        _name_locks_of_builds()
        if without_bf16:
            _compute_bf16_in_float32()


class _PatchOnImport(importlib.abc.MetaPathFinder):
    """Calls `patches[name](module)` after Python has executed module `name`."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self.patches = patches

    def find_spec(self, name: str, path=None, target=None):
        if name not in self.patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, load: Callable, module: types.ModuleType) -> None:
        with _flash_attn_stand_in() if module.__name__ == _RING_ATTENTION else nullcontext():
            load(module)
        self.patches[module.__name__](module)


# --- PyTorch -------------------------------------------------------------------------------------------------


class _CpuDevice(str):
    """Stands for `torch.cuda.current_device()`: names the CPU in `.to()`, and is valid in upstream's f"cuda:{...}"."""

    def __format__(self, spec: str) -> str:
        return "0"


def _redirect_torch_cuda() -> None:
    torch.cuda.current_device = lambda: _CpuDevice("cpu")
    for name in ("empty_cache", "synchronize", "set_device", "current_stream"):
        # A function of its own for each name: torch.compile keeps a table of these by identity.
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    if torch.cuda.is_available():
        torch.cuda.is_available = lambda: False


def _compute_bf16_in_float32() -> None:
    """Send linear layers and attention of bf16 tensors on the CPU through float32.

    No less exact (products are summed in float32 and the result is rounded to bf16 either way), and several times as
    fast as the emulation, in the backward pass above all.
    """

    from torch.nn.attention.bias import CausalBias

    def upcast(value):
        return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value

    def in_float32(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            masks = [value for value in (*args, *kwargs.values()) if isinstance(value, CausalBias)]
            if masks:  # they compare `call`
                return torch.overrides.handle_torch_function(call, masks, *args, **kwargs)
            computed = args[:2]
            if len(computed) < 2 or any(t.dtype != torch.bfloat16 or t.device.type != "cpu" for t in computed):
                return function(*args, **kwargs)
            kwargs = {name: upcast(value) for name, value in kwargs.items()}
            return function(*map(upcast, args), **kwargs).to(torch.bfloat16)

        return call

    for name in ("linear", "scaled_dot_product_attention"):
        setattr(torch.nn.functional, name, in_float32(getattr(torch.nn.functional, name)))


def _name_locks_of_builds() -> None:
    """Let PyTorch name the lock that a build of its C++ extensions waits for. One of a killed build stays."""
    from torch.utils.file_baton import FileBaton

    FileBaton.__init__ = functools.partialmethod(FileBaton.__init__, warn_after_seconds=10)


# --- without CUDA --------------------------------------------------------------------------------------------


def _patch_replay_buffer(module: Any) -> None:
    # __init__ assigns a "cuda:0" device, which `sample` moves batches to.
    module.NaiveReplayBuffer.target_device = property(lambda self: torch.device("cpu"), lambda self, device: None)


def _patch_strategy(module: Any) -> None:
    init_device_mesh, moving_average = module.init_device_mesh, module.DeepspeedStrategy.moving_average
    module.init_device_mesh = lambda device_type, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs)
    module.DeepspeedStrategy.moving_average = lambda self, model, model_ema, beta=0.992, device="cpu": moving_average(
        self, model, model_ema, beta, "cpu"
    )


def _patch_deepspeed_comm(module: Any) -> None:
    """Let every all-gather be complete when it returns.

    ZeRO-3 starts one per parameter and waits for the last alone (`_allgather_params_coalesced`). That is enough on a
    CUDA stream, which keeps the order. Gloo's threads finish in any order, so the forward pass would use weights
    that have not arrived.
    """

    def completed(all_gather: Callable) -> Callable:
        @functools.wraps(all_gather)
        def call(*args, **kwargs):
            work = all_gather(*args, **kwargs)
            if work is not None:
                work.wait()
            return work

        return call

    for name in ("all_gather", "all_gather_into_tensor"):
        setattr(module.TorchBackend, name, completed(getattr(module.TorchBackend, name)))


class _GlooGroup:
    """Syncs weights over gloo, with the `broadcast` of upstream's `PyNcclCommunicator`."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: Any) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        self.group = stateless_init_torch_distributed_process_group(host, port, rank, world_size, "gloo")

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = src, 0, timedelta(minutes=30)
        # torch.distributed.broadcast wants a rank of the default group, which this one's members do not share.
        self.group.broadcast([tensor.contiguous()], options).wait()


def _patch_distributed_util(module: Any) -> None:
    module.stateless_init_process_group = _GlooGroup


def _patch_worker_wrap(module: Any) -> None:
    module.WorkerWrap.update_weight = _update_weight


def _update_weight(self, name: str, dtype: torch.dtype, shape: torch.Size, empty_cache: bool = False) -> None:
    """Receive one weight, as `WorkerWrap.update_weight` does, and load all with the last, which `empty_cache` marks.

    On the CPU vLLM repacks the weights of its layers after loading, and the repacked layers take no single weight.
    """
    if dtype != self.model_config.dtype:
        raise ValueError(f"weight {name} comes in {dtype}, the engine holds {self.model_config.dtype}")
    weight = torch.empty(shape, dtype=dtype)
    self._model_update_group.broadcast(weight, src=0)
    received = self.__dict__.setdefault("_received_weights", [])
    received.append((name, weight))
    if not empty_cache:
        return
    self.model_runner.reload_weights(weights_iterator=iter(received))
    received.clear()
    _repack_tied_heads(self.model_runner.get_model())


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Renew the packed copy of a tied LM head. No weight is sent for it, so vLLM's reload leaves it as it was."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = {id(m.weight) for m in model.modules() if type(m) is VocabParallelEmbedding}
    for head in model.modules():
        if isinstance(head, ParallelLMHead) and id(head.weight) in embeddings:
            head.quant_method.process_weights_after_loading(head)


_CPU_PATCHES = {
    "deepspeed.comm.torch": _patch_deepspeed_comm,
    **adam.PATCHES,
    "openrlhf.trainer.ppo_utils.replay_buffer": _patch_replay_buffer,
    "openrlhf.utils.deepspeed.deepspeed": _patch_strategy,
    "openrlhf.utils.distributed_util": _patch_distributed_util,
    "openrlhf.trainer.ray.vllm_worker_wrap": _patch_worker_wrap,
}


# --- without flash-attn --------------------------------------------------------------------------------------


@contextmanager
def _flash_attn_stand_in() -> Iterator[None]:
    """Provide what `_RING_ATTENTION` imports from flash-attn, while it is imported.

    A lasting entry in `sys.modules` would tell transformers and vLLM that flash-attn is installed.
    """
    from einops import rearrange
    from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

    def index_first_axis(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return tensor[indices]

    def all_gather(*args, **kwargs):
        raise RuntimeError("--ds.ring_attn_size > 1 needs flash-attn, which is not installed")

    stand_in = types.ModuleType("flash_attn")
    functions = dict(index_first_axis=index_first_axis, pad_input=_pad_input, unpad_input=_unpad_input)
    vars(stand_in).update(functions, rearrange=rearrange, all_gather=all_gather)
    names = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")
    sys.modules.update(dict.fromkeys(names, stand_in))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _with_sdpa(function: Callable) -> Callable:
    """Return `function` with SDPA in place of flash attention.

    Packed sequences stay separate, because transformers builds a block-diagonal mask where position ids restart.
    """

    @functools.wraps(function)
    def call(*args, attn_implementation="flash_attention_2", **kwargs):
        if "flash_attention" in attn_implementation:
            attn_implementation = "sdpa"
        return function(*args, attn_implementation=attn_implementation, **kwargs)

    return call


def _patch_actor(module: Any) -> None:
    module.Actor.__init__ = _with_sdpa(module.Actor.__init__)


def _patch_model(module: Any) -> None:
    module.get_llm_for_sequence_regression = _with_sdpa(module.get_llm_for_sequence_regression)


_FLASH_ATTN_PATCHES = {
    _RING_ATTENTION: lambda module: None,  # it is the import that needs help
    "openrlhf.models.actor": _patch_actor,
    "openrlhf.models.model": _patch_model,
}
