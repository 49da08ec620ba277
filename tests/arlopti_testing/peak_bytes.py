"""Counts the memory of tensors while they live."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, as long as they live. `peak` is the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result
