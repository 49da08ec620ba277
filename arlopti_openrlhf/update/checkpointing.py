"""Gradient checkpointing as far as memory asks for it.

With `--actor.gradient_checkpointing_enable` OpenRLHF keeps the inputs of the layers alone, and the backward pass
computes each layer again. The selective update keeps more where there is room: all activations, or the results of
matrix products and of attention, so that only what is cheap is computed again. The gradients are the same bit for bit.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from openrlhf.models import Actor
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PretrainedConfig

from arlopti_openrlhf.activation_memory import is_known, peak_bytes, update_bytes
from arlopti_openrlhf.forward.lm_head import BLOCK_ELEMENTS
from arlopti_openrlhf.update import partition
from arlopti_openrlhf.update.mini_batches import MiniBatch
from arlopti_openrlhf.update.ranks import Ranks

NONE, SELECTIVE, WHOLE = "none", "selective", "whole"  # what is computed again, the least first
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
# By name, whatever the device and the kernel. FlexAttention is no operator that could be kept.
_ATTENTION = ("aten::_flash_attention_forward", "aten::_scaled_dot_product_", "flash_attn::", "flash_attn_3::")
_SHARE_OF_FREE = 0.9  # of a device's free memory, which is in pieces


class Checkpointing:
    """Sets how much of a model's activations an update keeps.

    Args:
        model: Hugging Face's, with checkpointing as OpenRLHF has enabled it.
        args: upstream's nested arguments with our flags.

    Attributes:
        level: what is computed again.
    """

    def __init__(self, model: nn.Module, args: SimpleNamespace) -> None:
        self.model, self.args, self.level = model, args, WHOLE
        self.modules = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self.upstreams = [getattr(module, "_gradient_checkpointing_func", None) for module in self.modules]
        self.config: PretrainedConfig = model.config.get_text_config()
        weight = next(model.parameters())
        # In float32 a GPU attends under a mask that no selection sees through.
        selects = self.config._attn_implementation != "flex_attention" and (
            weight.dtype != torch.float32 or weight.device.type == "cpu"
        )
        is_reentrant = args.actor.gradient_checkpointing_reentrant  # which keeps all or nothing
        self.levels = [NONE, SELECTIVE] if selects and not is_reentrant else [NONE]
        if args.actor.gradient_checkpointing_level == WHOLE or not is_known(self.config):
            self.levels = []

    def adapt(self, batches: Sequence[MiniBatch], ranks: Ranks) -> None:
        """Set the level that fits the mini-batches of an epoch and the memory of all ranks. A collective call."""
        if not self.levels:
            return
        micro_batches = [micro_batch for batch in batches for micro_batch in batch.micro_batches]
        computed = ranks.max(max(map(partition.cost, micro_batches), default=0))
        keys = ranks.max(max(map(partition.keys_per_token, micro_batches), default=1))
        longest = ranks.max(max((len(s.sequences) for each in micro_batches for s in each), default=0))
        train = self.args.train
        padded = train.max_tokens_per_gpu if train.dynamic_batch_enable else train.micro_batch_size * longest
        level = self.fitting(computed, keys, padded, ranks.min(_free_bytes(self.model)))
        if level != self.level:
            self.set(level)

    def fitting(self, computed: int, keys_per_token: int, padded: int, free: int) -> str:
        """Return the level at which least is computed again, in the larger of OpenRLHF's own peak and what is free.

        OpenRLHF's peak is the one with checkpointing, which the user has asked for.

        Args:
            computed: tokens of the greatest micro-batch.
            keys_per_token: of it (`partition.keys_per_token`).
            padded: tokens of OpenRLHF's micro-batch.
            free: bytes.
        """
        room = max(padded * peak_bytes(self.config, True, keeps_logits=True), free)
        for level in self.levels:
            of_layer = None if level == NONE else _kept_by_products(self.config)
            if update_bytes(self.config, of_layer, computed, keys_per_token, BLOCK_ELEMENTS) <= room:
                return level
        return WHOLE

    def set(self, level: str) -> None:
        """Let the passes that follow keep what `level` says."""
        self.level = level
        for module, of_upstream in zip(self.modules, self.upstreams, strict=True):
            module.gradient_checkpointing = level != NONE
            module._gradient_checkpointing_func = of_upstream if level == WHOLE else _keeping_products()


def of(actor: Actor, args: SimpleNamespace) -> Checkpointing | None:
    """Return what sets the checkpointing of an actor, or None where OpenRLHF has not enabled it."""
    return Checkpointing(actor.model.module, args) if args.actor.gradient_checkpointing_enable else None


def _free_bytes(model: nn.Module) -> int:
    """Return what activations may take on this rank's GPU, or 0 without one. DeepSpeed holds gradients up to twice."""
    if not torch.cuda.is_available():
        return 0
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    gradients = sum(getattr(each, "ds_numel", each.numel()) * each.element_size() for each in trained)
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return max(0, int(_SHARE_OF_FREE * (torch.cuda.mem_get_info()[0] + unused)) - 2 * gradients)


def _kept_by_products(config: PretrainedConfig) -> float:
    """Return the bytes per token that a layer keeps with `_policy`: its input, its products and attention's result."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    queries, keys = heads * width, (config.num_key_value_heads or heads) * width
    return 6 * config.hidden_size + 4 * config.intermediate_size + 4 * queries + 4 * keys + 4 * heads


@functools.cache
def _keeping_products() -> Callable:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _policy(context, operation, *args, **kwargs) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]
    keeps = name in _PRODUCTS or name.startswith(_ATTENTION)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
