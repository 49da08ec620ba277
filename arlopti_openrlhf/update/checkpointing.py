"""Chooses the size of micro-batches, and with it how much of their activations the backward pass computes again.

With `--actor.gradient_checkpointing_enable` OpenRLHF keeps the inputs of the layers alone, and the backward pass
computes each layer again. The selective update keeps more where there is room: all activations, or the results of
matrix products and of attention, so that only what is cheap is computed again. The gradients are the same bit for bit.
Smaller micro-batches make room for more, where they save more than they cost.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import nn
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
            is_reentrant = args.actor.gradient_checkpointing_reentrant  # which keeps all or nothing
            self.levels = [NONE, SELECTIVE, WHOLE] if selects and not is_reentrant else [NONE, WHOLE]
            if args.actor.gradient_checkpointing_level == WHOLE or not is_known(self.config):
                self.levels = [WHOLE]
        self.level = self.levels[-1]

    def fit(self, mini_batches: Sequence[Sequence[Sample]], ranks: Ranks) -> int:
        """Set the level at which these samples take the least time. A collective call.

        Returns:
            How many tokens a micro-batch may cost.
        """
        items = [sample for samples in mini_batches for sample in samples]
        longest = ranks.max(max((len(item.sequences) for item in items), default=0))
        costliest = ranks.max(max(map(partition.cost, partition.by_prompt(items)), default=0))
        keys = ranks.max(partition.keys_per_token(items))
        budgets = self.budgets(longest, costliest, keys, ranks.min(_free_bytes(self.model)))

        def work(budget: int) -> float:
            batches = [batch for samples in mini_batches for batch in partition.micro_batches(samples, budget)]
            return float(sum(map(partition.cost, batches)) + _A_MICRO_BATCH * len(batches))

        of_all_ranks = zip(budgets, ranks.sum(*map(work, budgets.values())), strict=True)
        times = {level: _TIME[level] * tokens for level, tokens in of_all_ranks}
        level = min(times, key=times.__getitem__)
        if level != self.level:
            self.set(level)
        return budgets[level]

    def budgets(self, longest: int, costliest: int, keys_per_token: int, free: int) -> dict[str, int]:
        """Return how many tokens a micro-batch may cost at each level that can be taken, OpenRLHF's own among them.

        With dynamic batches the user says so. Else the user gives a number of samples, for which OpenRLHF takes the
        memory of their tokens, padded to the longest, with their logits. The selective update keeps no logits, so in
        the same memory there is room for more tokens, as far as a whole prompt needs them, or for more of their
        activations. These may also take what is free. A model whose layers are not known gets as many tokens as in
        OpenRLHF.

        Args:
            longest: tokens of the longest sequence.
            costliest: what the prompt with the most tokens costs with all its responses.
            keys_per_token: of the samples (`partition.keys_per_token`).
            free: bytes.
        """
        config, own, train = self.config, self.levels[-1], self.args.train
        is_dynamic = train.dynamic_batch_enable
        padded = train.max_tokens_per_gpu if is_dynamic else train.micro_batch_size * longest
        if not is_known(config):
            return {own: padded}
        least, most = (padded, padded) if is_dynamic else (longest, max(padded, costliest))
        stock = padded * peak_bytes(config, own == WHOLE, keeps_logits=True)
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
                budgets[level] = most if is_dynamic else min(fitting, most)
        return budgets

    def set(self, level: str) -> None:
        """Let the passes that follow keep what `level` says."""
        self.level = level
        for module, of_upstream in zip(self.modules, self.upstreams, strict=True):
            module.gradient_checkpointing = level != NONE
            module._gradient_checkpointing_func = of_upstream if level == WHOLE else _keeping_products()


def _free_bytes(model: nn.Module) -> int:
    """Return what activations may take on this rank's GPU, or 0 without one. DeepSpeed holds gradients up to twice."""
    if not torch.cuda.is_available():
        return 0
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    gradients = sum(getattr(each, "ds_numel", each.numel()) * each.element_size() for each in trained)
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return max(0, int(_SHARE_OF_FREE * (torch.cuda.mem_get_info()[0] + unused)) - 2 * gradients)


@functools.cache
def _keeping_products() -> Callable:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _policy(context, operation, *args, **kwargs) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]
    keeps = name in _PRODUCTS or name.startswith(_ATTENTION)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
