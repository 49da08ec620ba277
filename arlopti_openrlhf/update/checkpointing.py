"""Chooses the size of micro-batches, and with it whether the backward pass computes the layers again.

With `--actor.gradient_checkpointing_enable` OpenRLHF keeps only the inputs of the layers, and the backward pass
computes each layer again. The selective update may keep all activations instead. Then memory holds fewer tokens at a
time, so the update takes whichever of the two should be faster. The gradients are the same bit for bit.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import nn
from transformers import PretrainedConfig

from arlopti_openrlhf.activation_memory import is_known, most_tokens, peak_bytes
from arlopti_openrlhf.forward.lm_head import BLOCK_ELEMENTS
from arlopti_openrlhf.update import partition
from arlopti_openrlhf.update.ranks import Ranks
from arlopti_openrlhf.update.sample import Sample
from arlopti_openrlhf.update.settings import Settings

NONE, WHOLE = "none", "whole"  # which layers the backward pass computes again
# Per token. Layers that are computed again take one more forward pass, a third of what they take otherwise (counted by
# `benchmarks/operations.py`). The LM head takes no more. At 10M weights an update took 1.1 to 1.3 times as long.
_TIME = {NONE: 1.0, WHOLE: 4 / 3}
# Tokens that cost as much as a micro-batch does by itself. While an H200 trained AR + Lopti, it waited 0.12 s per
# micro-batch for the host. In that time it trains 3,500 tokens at 3B (17,600 at 0.5B; `benchmarks/gpu.json`).
_A_MICRO_BATCH = 3_500
# A margin. Activations are counted to 5% (`tests/test_activation_memory.py`), and free memory is in pieces.
_SHARE_OF_FREE = 0.9
# Bytes of DeepSpeed's buckets, each of 500M numbers in 16 bits: more than what it allocates in addition to gradients
# (`test_deepspeed_takes_no_more`).
_BUCKETS = 3_000_000_000


class Checkpointing:
    """Sets whether an update computes the model's layers again, and how many tokens a micro-batch has.

    Args:
        model: Hugging Face's, with checkpointing as OpenRLHF has enabled it, or not.
        args: upstream's nested arguments.
        settings: the choice of the level, and whether micro-batches take what is free.

    Attributes:
        levels: available levels. The last is OpenRLHF's own.
        level: the current one.
    """

    def __init__(self, model: nn.Module, args: SimpleNamespace, settings: Settings) -> None:
        self.model, self.args, self.fills_memory = model, args, settings.fills_memory
        self.modules = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self.config: PretrainedConfig = model.config.get_text_config()
        self.levels = [NONE]
        if args.actor.gradient_checkpointing_enable:
            is_free = settings.checkpointing != WHOLE and is_known(self.config)
            self.levels = [NONE, WHOLE] if is_free else [WHOLE]
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
        budgets = {level: self.budget(level, of_stock, costliest, keys, free) for level in self.levels}
        # OpenRLHF's own level is always possible. The other must hold the longest sample, or all that the user set.
        least = of_stock if self.args.train.dynamic_batch_enable else longest
        possible = [level for level in self.levels if level == self.levels[-1] or budgets[level] >= least]

        def work(level: str) -> float:
            batches = [b for samples in mini_batches for b in partition.micro_batches(samples, budgets[level])]
            return float(sum(map(partition.cost, batches)) + _A_MICRO_BATCH * len(batches))

        work_of_all_ranks = zip(possible, ranks.sum(*map(work, possible)), strict=True)
        times = {level: _TIME[level] * tokens for level, tokens in work_of_all_ranks}
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

    def budget(self, level: str, of_stock: int, costliest: int, keys_per_token: int, free: int) -> int:
        """Return how many tokens a micro-batch may cost at this level.

        With dynamic batches the user sets the maximum. Otherwise the user sets a number of samples, and OpenRLHF uses
        the memory of their tokens with their logits. The selective update keeps no logits, so the same memory has room
        for more tokens, up to those of a whole prompt, or for all activations. These may also use free memory, and so
        may everything with `fills_memory`, which knows no other maximum. A model of a type whose layers are not known
        gets as many tokens as in OpenRLHF.

        Args:
            level: one of `levels`.
            of_stock: tokens of OpenRLHF's largest micro-batch, with its padding.
            costliest: what the prompt with the most tokens costs with all its responses.
            keys_per_token: of the samples (`partition.keys_per_token`).
            free: bytes.
        """
        if not is_known(self.config):
            return of_stock
        own, liger = self.levels[-1], self.args.ds.use_liger_kernel
        stock = of_stock * peak_bytes(self.config, own == WHOLE, True, liger)
        room = stock if level == own and not self.fills_memory else max(stock, free)
        fitting = most_tokens(self.config, room, level == WHOLE, keys_per_token, BLOCK_ELEMENTS, liger)
        if self.fills_memory:
            return fitting
        return min(fitting, of_stock if self.args.train.dynamic_batch_enable else max(of_stock, costliest))

    def set(self, level: str) -> None:
        """Let the passes that follow compute again what `level` says."""
        self.level = level
        for module in self.modules:
            module.gradient_checkpointing = level == WHOLE


def _free_bytes(model: nn.Module, args: SimpleNamespace, ranks: int, has_stepped: bool) -> int:
    """Return what activations may take on this rank's GPU, or 0 without one.

    If a critic has the same GPU and trains at the same time, nothing is known to be free.
    """
    trains_critic = args.algo.advantage.estimator == "gae" and args.train.colocate_all and not args.ds.enable_sleep
    if not torch.cuda.is_available() or trains_critic:
        return 0
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = _SHARE_OF_FREE * (torch.cuda.mem_get_info()[0] + unused)
    return max(0, int(free - _deepspeed_bytes(model, args, ranks, has_stepped)))


def _deepspeed_bytes(model: nn.Module, args: SimpleNamespace, ranks: int, has_stepped: bool) -> float:
    """Return what DeepSpeed allocates on this rank during an update, at most.

    That is up to twice the gradients, its buckets, and Adam's two moments in its first step.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    width = 4 if args.ds.grad_accum_dtype == "fp32" else max(parameter.element_size() for parameter in trained)
    gradients = 2 * width * numbers / (ranks if args.ds.zero_stage == 3 else 1)
    moments = 0 if has_stepped or args.ds.adam_offload else 8 * numbers / ranks
    return gradients + moments + _BUCKETS
