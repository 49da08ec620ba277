"""Tensors on the CPU that claim to be on a GPU: what mixes devices is found, kernels and waits are counted.

Values are real. Gradients are not, since flash attention gives zeros. A tensor claims to be on the GPU where Python
has put it there (`to`, `device=`), and a result where its arguments are. PyTorch refuses an operation of two devices,
except for numbers without dimensions and indices on the CPU: such a mixture is recorded. So is whatever makes the host
wait for the device. An operation that makes no view is counted as one kernel.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from arlopti_openrlhf.forward import lm_head
from arlopti_openrlhf.patching import replaced_attribute

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
_MAKERS = (torch.tensor, torch.as_tensor, torch.zeros, torch.ones, torch.empty, torch.full, torch.arange) + (
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
)
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}
_WITHOUT_KERNEL = set(
    "view t transpose slice expand detach alias as_strided split split_with_sizes unsqueeze select squeeze permute "
    "unbind _unsafe_view _reshape_alias diagonal unfold empty empty_like empty_strided new_empty "
    "new_empty_strided".split()
)
_flash = torch.ops.aten._flash_attention_forward.default
_flash_backward = torch.ops.aten._flash_attention_backward.default


class Counts:
    """What was counted: kernels by name, waits by their reason, mixtures of devices."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.mixtures: Counter[str] = Counter()
        self.is_backward = False
        self._claims: dict[int, StorageWeakRef] = {}  # by storage; while it is referred to, its address is its own

    def clear(self) -> None:
        """Begin to count anew."""
        for counter in (self.kernels, self.waits, self.mixtures):
            counter.clear()

    def claim(self, tensor: Tensor) -> Tensor:
        """Let a tensor claim to be on the GPU, with all that share its memory."""
        storage = tensor.untyped_storage()
        self._claims[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def claims(self, tensor: Tensor) -> bool:
        """Return whether a tensor claims to be on the GPU."""
        return tensor.untyped_storage()._cdata in self._claims


@contextmanager
def claimed_gpu():
    """Yield `Counts`. Inside, `torch.cuda.current_device()` is the GPU that tensors claim to be on."""
    counts = Counts()
    replaced = {
        "current_device": lambda: 0,
        "device": lambda index: nullcontext(),
        "get_device_capability": lambda *device: (9, 0),
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=1),
    }
    real = {name: getattr(torch.cuda, name) for name in replaced}
    run_engine = torch.autograd._engine_run_backward

    def engine(*args, **kwargs):  # a function mode is off while it handles `backward`
        counts.is_backward = True
        try:
            with _Functions(counts):
                return run_engine(*args, **kwargs)
        finally:
            counts.is_backward = False

    try:
        for name, value in replaced.items():
            setattr(torch.cuda, name, value)
        torch.autograd._engine_run_backward = engine
        with (
            _Functions(counts),
            _Operations(counts),
            # The LM head takes plain torch, as without Triton, whose kernels would see tensors of the CPU.
            replaced_attribute(lm_head, "_is_fused", lambda device: False),
            replaced_attribute(lm_head, "_arithmetic", lm_head._arithmetic.__wrapped__),  # it keeps its answers
        ):
            yield counts
    finally:
        torch.autograd._engine_run_backward = run_engine
        for name, value in real.items():
            setattr(torch.cuda, name, value)


class _Operations(TorchDispatchMode):
    """Sees each operation below autograd."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[-1]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [self.counts.claims(x) for x in tensors]
        if not any(there):
            result = function(*args, **kwargs)
            # The zeros that autograd makes for what has no gradient. It asks no function mode.
            return self.counts.claim(result) if name == "zeros" and self.counts.is_backward else result
        self._look(function, name, args, tensors, there)
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            result = _stand_in(function, args, kwargs)
        in_place = name.endswith("_") and not there[0]
        if not in_place and name != "_local_scalar_dense":
            tree_map_only(Tensor, lambda x: self.counts.claim(x), result)
        return result

    def _look(self, function, name: str, args, tensors: list[Tensor], there: list[bool]) -> None:
        counts = self.counts
        if name not in _WITHOUT_KERNEL:
            counts.kernels[name] += 3 if function is _flash_backward else 1
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1] if x is not None
        )
        if name in _WAITING or by_mask or (name == "copy_" and not all(there)):
            counts.waits[name] += 1
        elif not all(there):
            # Indices on the CPU are copied, for which the host waits. Numbers travel with the kernel.
            if name.startswith(("index", "_index_put")):
                counts.waits[name] += 1
            elif any(x.dim() for x, is_there in zip(tensors, there, strict=True) if not is_there):
                shapes = [f"{tuple(x.shape)} {'GPU' if y else 'CPU'}" for x, y in zip(tensors, there, strict=True)]
                counts.mixtures[f"{name}: {', '.join(shapes)}"] += 1


class _Functions(TorchFunctionMode):
    """Sees what names a device, or asks for it."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if function is torch.device and isinstance(args[0], int):
            return GPU
        if function == Tensor.device.__get__:
            return GPU if self.counts.claims(args[0]) else CPU
        if function == Tensor.is_cuda.__get__:
            return self.counts.claims(args[0])
        if function is Tensor.tolist and self.counts.claims(args[0]):
            self.counts.waits["tolist"] += 1
            with torch.utils._python_dispatch._disable_current_modes():
                return function(*args)
        if function in (Tensor.cpu, Tensor.cuda):
            return self._moved(Tensor.to, args[0], CPU if function is Tensor.cpu else GPU, (), {})
        if function is Tensor.to:
            return self._to(*args, **kwargs)
        if function in _MAKERS and kwargs.get("device") is not None:
            return self._made(function, args, kwargs)
        return function(*args, **kwargs)

    def _to(self, tensor: Tensor, *rest, **kwargs) -> Tensor:
        rest_of_it = list(rest)
        target = _device(kwargs.pop("device", None))
        if target is None and rest_of_it and isinstance(rest_of_it[0], Tensor):
            target, rest_of_it[0] = (GPU if self.counts.claims(rest_of_it[0]) else CPU), rest_of_it[0].dtype
        elif target is None and rest_of_it and (target := _device(rest_of_it[0])) is not None:
            rest_of_it.pop(0)
        return self._moved(Tensor.to, tensor, target, rest_of_it, kwargs)

    def _moved(self, function: Callable, tensor: Tensor, target: torch.device | None, args, kwargs: dict) -> Tensor:
        there = self.counts.claims(tensor)
        if target is None or there == (target.type == "cuda"):
            return function(tensor, *args, **kwargs) if args or kwargs else tensor
        if not kwargs.pop("non_blocking", False):
            self.counts.waits["copy to the GPU" if target == GPU else "copy to the host"] += 1
        self.counts.kernels["copy"] += 1
        copied = _copy(tensor)
        if target == GPU:
            self.counts.claim(copied)
        return function(copied, *args, **kwargs) if args or kwargs else copied

    def _made(self, function: Callable, args, kwargs: dict) -> Tensor:
        target = _device(kwargs.pop("device"))
        if function is torch.as_tensor and isinstance(args[0], Tensor):
            return self._moved(Tensor.to, args[0], target, (), kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            made = function(*args, **kwargs)
        if target is not None and target.type == "cuda":
            if function in (torch.tensor, torch.as_tensor):
                self.counts.waits["copy to the GPU"] += 1
            self.counts.kernels[function.__name__] += function not in (torch.empty, torch.empty_like)
            return self.counts.claim(made)
        return made


def _device(value: Any) -> torch.device | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return GPU
    return torch.device(value) if isinstance(value, torch.device | str) else None


class _Copy(torch.autograd.Function):
    """A copy whose gradient goes back to where it came from."""

    @staticmethod
    def forward(ctx, tensor):
        with torch.utils._python_dispatch._disable_current_modes():
            return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _copy(tensor: Tensor) -> Tensor:
    return _Copy.apply(tensor) if tensor.requires_grad else _Copy.forward(None, tensor)


def _stand_in(function, args, kwargs) -> Any:
    """Compute an operation, some of which PyTorch has for a GPU alone."""
    if function is _flash:
        output = _flash_forward(*args[:9], kwargs["scale"])
        empty = torch.zeros((), dtype=torch.long)
        return output, output.new_zeros(output.shape[1], output.shape[0]).float(), empty, empty, output.new_empty(0)
    if function is _flash_backward:
        return tuple(map(torch.zeros_like, args[1:4]))  # no step is taken
    if function is torch.ops.aten.mm.dtype:
        return args[0].to(args[2]) @ args[1].to(args[2])
    return function(*args, **kwargs)


def _flash_forward(query, key, value, query_starts, key_starts, longest, longest_key, dropout, is_causal, scale):
    """Return what flash attention of variable lengths does. Its causal mask ends in the bottom right corner."""
    assert is_causal and not dropout
    outputs = []
    starts = (x.tolist() for x in (query_starts[:-1], query_starts[1:], key_starts[:-1], key_starts[1:]))
    for q0, q1, k0, k1 in zip(*starts, strict=True):
        assert q1 - q0 <= longest and k1 - k0 <= longest_key
        parts = (x[start:stop].transpose(0, 1) for x, start, stop in ((query, q0, q1), (key, k0, k1), (value, k0, k1)))
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        attend = torch.nn.functional.scaled_dot_product_attention
        outputs.append(attend(*parts, attn_mask=seen, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(outputs)
