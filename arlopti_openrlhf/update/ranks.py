"""Reduces figures over the data-parallel ranks."""

import torch
from openrlhf.utils.deepspeed import DeepspeedStrategy
from torch import Tensor
from torch import distributed as dist


class Ranks:
    """Reduces figures over the data-parallel ranks. Each method is a collective call, which every rank has to make."""

    def __init__(self, strategy: DeepspeedStrategy) -> None:
        self.dp_group = strategy.ds_device_mesh["dp"].get_group()
        self.count = dist.get_world_size(self.dp_group)

    def sum(self, *values: float) -> list[float]:
        """Return each value's sum over the ranks."""
        return self.sum_tensor(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks of a tensor of any shape, on this rank's device."""
        total = tensor.to(torch.cuda.current_device(), copy=True)
        dist.all_reduce(total, group=self.dp_group)
        return total

    def min(self, value: int) -> int:
        """Return the smallest of the ranks' values."""
        smallest = torch.tensor(value, device=torch.cuda.current_device())
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self.dp_group)
        return int(smallest)

    def max(self, value: int) -> int:
        """Return the largest of the ranks' values."""
        return -self.min(-value)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors (K, N) of all ranks, which may differ in N, one after the other on the CPU."""
        gathered: list = [None] * self.count
        dist.all_gather_object(gathered, tensor.cpu(), group=self.dp_group)
        return torch.cat(gathered, dim=1)
