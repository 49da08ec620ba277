"""Chooses the size of micro-batches, and with it how much of their activations the backward pass computes again.

With `--actor.gradient_checkpointing_enable` OpenRLHF keeps the inputs of the layers alone, and the backward pass
computes each layer again. The selective update keeps more where there is room: all activations, or the results of
matrix products and of attention, so that only what is cheap is computed again. The gradients are the same bit for bit.
Smaller micro-batches make room for more, where they save more than they cost.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PretrainedConfig

from arlopti_openrlhf.activation_memory import (
    checkpointed_bytes,
    is_known,
    layer_bytes,
    most_tokens,
    peak_bytes,
    products_bytes,
)
from arlopti_openrlhf.forward.lm_head import BLOCK_ELEMENTS
from arlopti_openrlhf.patching import replaced_attribute
from arlopti_openrlhf.update import partition
from arlopti_openrlhf.update.ranks import Ranks
from arlopti_openrlhf.update.sample import Sample

NONE, SELECTIVE, WHOLE = "none", "selective", "whole"  # what is computed again, the least first
# Per token. A backward pass takes twice as long as a forward pass, and what is neither a product nor attention, which
# `selective` computes again, is taken for a quarter of one.
_TIME = {NONE: 1.0, SELECTIVE: 13 / 12, WHOLE: 4 / 3}
# Tokens that cost as much as a micro-batch does by itself. Some 3,600 kernels take 5 µs each to launch
# (`benchmarks/gpu_counts.py`). In that time an H100 at 0.4 of its peak trains 0.5B weights on 2,400 tokens. Derived,
# not measured.
_A_MICRO_BATCH = 2_000
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
# By name, whatever the device and the kernel. FlexAttention is no operator that could be kept.
_ATTENTION = ("aten::_flash_attention_forward", "aten::_scaled_dot_product_", "flash_attn::", "flash_attn_3::")
_SHARE_OF_FREE = 0.9  # of a device's free memory, which is in pieces
# Bytes of DeepSpeed's buckets: of gradients that are reduced, and with ZeRO-3 of weights that are gathered.
_BUCKETS = 3_000_000_000


class Checkpointing:
    """Sets how much of a model's activations an update keeps, and how many tokens a micro-batch has.

    Args:
        model: Hugging Face's, with checkpointing as OpenRLHF has enabled it, or not.
        args: upstream's nested arguments with our flags.

    Attributes:
        levels: that may be set, the last one as OpenRLHF has it.
        level: what is computed again.
    """

    def __init__(self, model: nn.Module, args: SimpleNamespace) -> None:
        self.model, self.args = model, args
        self.modules = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self.upstreams = [getattr(module, "_gradient_checkpointing_func", None) for module in self.modules]
        self.config: PretrainedConfig = model.config.get_text_config()
        weight = next(model.parameters())
        # In float32 a GPU attends under a mask that no selection sees through.
        selects = self.config._attn_implementation != "flex_attention" and (
            weight.dtype != torch.float32 or weight.device.type == "cpu"
        )
        self.levels = [NONE]
        if args.actor.gradient_checkpointing_enable:
            selects &= not args.actor.gradient_checkpointing_reentrant  # which keeps all or nothing
            selects &= not args.ds.lora.rank  # whose products are not counted
            self.levels = [NONE, SELECTIVE, WHOLE] if selects else [NONE, WHOLE]
            if args.actor.gradient_checkpointing_level == WHOLE or not is_known(self.config):
                self.levels = [WHOLE]
        self.level = self.levels[-1]

    def fit(self, mini_batches: Sequence[Sequence[Sample]], ranks: Ranks, has_stepped: bool) -> int:
        """Set the level at which these samples take the least time. A collective call.

        Args:
            mini_batches: this rank's samples.
            ranks: all of them.
            has_stepped: whether the optimizer has taken a step, and so has its memory.

        Returns:
            How many tokens a micro-batch may cost.
        """
        items = [sample for samples in mini_batches for sample in samples]
        lengths = sorted((len(item.sequences) for item in items), reverse=True)
        longest, of_stock = ranks.max(max(lengths, default=0)), self._tokens_of_stock(lengths, ranks)
        costliest = ranks.max(max(map(partition.cost, partition.by_prompt(items)), default=0))
        keys = ranks.max(partition.keys_per_token(items))
        free = ranks.min(_free_bytes(self.model, self.args, ranks.count, has_stepped))
        budgets = self.budgets(longest, of_stock, costliest, keys, free)

        def work(budget: int) -> float:
            batches = [batch for samples in mini_batches for batch in partition.micro_batches(samples, budget)]
            return float(sum(map(partition.cost, batches)) + _A_MICRO_BATCH * len(batches))

        of_all_ranks = zip(budgets, ranks.sum(*map(work, budgets.values())), strict=True)
        times = {level: _TIME[level] * tokens for level, tokens in of_all_ranks}
        level = min(times, key=times.__getitem__)
        if level != self.level:
            self.set(level)
        return budgets[level]

    def _tokens_of_stock(self, lengths: Sequence[int], ranks: Ranks) -> int:
        """Return how many tokens OpenRLHF's largest micro-batch has on any rank. A collective call.

        Args:
            lengths: of this rank's samples, the longest first.
            ranks: all of them.
        """
        train = self.args.train
        if train.dynamic_batch_enable:
            return train.max_tokens_per_gpu
        largest = lengths[: train.micro_batch_size]
        return ranks.max(sum(largest) if self.args.ds.packing_samples else len(largest) * max(largest, default=0))

    def budgets(self, longest: int, of_stock: int, costliest: int, keys_per_token: int, free: int) -> dict[str, int]:
        """Return how many tokens a micro-batch may cost at each level that can be taken, OpenRLHF's own among them.

        With dynamic batches the user says how many at most. Else the user gives a number of samples, for which
        OpenRLHF takes the memory of their tokens with their logits. The selective update keeps no logits, so in the
        same memory there is room for more tokens, as far as a whole prompt needs them, or for more of their
        activations. These may also take what is free. A model whose layers are not known gets as many tokens as in
        OpenRLHF.

        Args:
            longest: tokens of the longest sequence.
            of_stock: tokens of OpenRLHF's largest micro-batch, with its padding.
            costliest: what the prompt with the most tokens costs with all its responses.
            keys_per_token: of the samples (`partition.keys_per_token`).
            free: bytes.
        """
        config, own = self.config, self.levels[-1]
        if not is_known(config):
            return {own: of_stock}
        is_dynamic = self.args.train.dynamic_batch_enable
        least, most = (of_stock, of_stock) if is_dynamic else (longest, max(of_stock, costliest))
        stock = of_stock * peak_bytes(config, own == WHOLE, keeps_logits=True)
        kept = {
            NONE: layer_bytes(config, keys_per_token),
            SELECTIVE: products_bytes(config),
            WHOLE: checkpointed_bytes(config),
        }
        budgets = {}
        for level in self.levels:
            room = stock if level == own else max(stock, free)
            fitting = most_tokens(config, room, kept[level], keys_per_token, BLOCK_ELEMENTS)
            if fitting >= least or level == own:
                budgets[level] = min(fitting, most)
        return budgets

    def set(self, level: str) -> None:
        """Let the passes that follow keep what `level` says."""
        self.level = level
        for module, of_upstream in zip(self.modules, self.upstreams, strict=True):
            module.gradient_checkpointing = level != NONE
            module._gradient_checkpointing_func = of_upstream if level == WHOLE else _keeping_products()


def _free_bytes(model: nn.Module, args: SimpleNamespace, ranks: int, has_stepped: bool) -> int:
    """Return what activations may take on this rank's GPU, or 0 without one.

    The rest is DeepSpeed's. It holds gradients up to twice, buckets, and Adam's two moments from its first step on.
    Where a critic has the same GPU and trains at the same time, nothing is known to be free.
    """
    trains_critic = args.algo.advantage.estimator == "gae" and args.train.colocate_all and not args.ds.enable_sleep
    if not torch.cuda.is_available() or trains_critic:
        return 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    width = 4 if args.ds.grad_accum_dtype == "fp32" else max(parameter.element_size() for parameter in trained)
    gradients = 2 * width * numbers / (ranks if args.ds.zero_stage == 3 else 1)
    moments = 0 if has_stepped or args.ds.adam_offload else 8 * numbers / ranks
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = _SHARE_OF_FREE * (torch.cuda.mem_get_info()[0] + unused)
    return max(0, int(free - gradients - moments - _BUCKETS))


@functools.cache
def _keeping_products() -> Callable:
    return functools.partial(checkpoint, use_reentrant=False, context_fn=_contexts)


def _contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return what a layer's first run keeps its products in, and what the second takes them from."""
    first, second = create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
    return _unchanged_products(_Products(first)), _unchanged_products(_Products(second))


class _Products(TorchDispatchMode):
    """Shows a selection of PyTorch's what is kept, and nothing else.

    The selection takes for granted that both runs of a layer have the same operations, also those that are not kept.
    With ZeRO-3 DeepSpeed gathers weights among them, at moments of its own.
    """

    def __init__(self, selection: TorchDispatchMode) -> None:
        super().__init__()
        self.selection = selection

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name().partition(".")[0]
        if name in _PRODUCTS or name.startswith(_ATTENTION):
            return self.selection.__torch_dispatch__(operation, types, args, kwargs)
        return operation(*args, **(kwargs or {}))


@contextmanager
def _unchanged_products(products: _Products) -> Iterator[None]:
    """Let nothing change a product that is kept.

    With ZeRO-3 DeepSpeed adds a bias to it in place, behind a view through which PyTorch sees no change. The second
    run would add the bias again.
    """

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = replaced(input, weight)
        return product if bias is None else product + bias

    replaced = F.linear
    with products, replaced_attribute(F, "linear", linear if replaced is zero3_linear_wrap else replaced):
        yield
