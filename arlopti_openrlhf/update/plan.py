"""Plans how a rollout batch is computed: its mini-batches, their micro-batches, and which layers are computed twice.

A micro-batch costs the tokens that the selective forward pass computes for it: each prompt once, and each response.
OpenRLHF divides by the number of samples, or in dynamic batches by their lengths, and so takes most prompts apart.

With `--actor.gradient_checkpointing_enable` OpenRLHF keeps only the inputs of the layers, and the backward pass
computes each layer again. The selective update may keep all activations instead. Then memory holds fewer tokens at a
time. Both follow from one budget of memory, and the plan takes whichever should be faster. The gradients are the same
bit for bit.
"""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from openrlhf.utils.logging_utils import init_logger

from arlopti_openrlhf.activation_memory import is_known, most_tokens, peak_bytes
from arlopti_openrlhf.forward.lm_head import BLOCK_ELEMENTS
from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.update.optimizer_steps import taken, whole_mini_batches
from arlopti_openrlhf.update.ranks import Ranks
from arlopti_openrlhf.update.sample import Sample, by_prompt
from arlopti_openrlhf.update.settings import Settings

logger = init_logger(__name__)

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
_UNKNOWN = 2**62  # stands for the bytes that are free if nothing tells


class MiniBatch(NamedTuple):
    """This rank's samples of one optimizer step."""

    micro_batches: list[list[Sample]]

    @property
    def samples(self) -> list[Sample]:
        return [sample for micro_batch in self.micro_batches for sample in micro_batch]


class Planner:
    """Plans the epochs of rollout batches, and sets which layers are computed again.

    Args:
        actor: the policy, with gradient checkpointing as OpenRLHF has enabled it, or not.
        args: upstream's nested arguments.
        settings: the choice of the level, and whether micro-batches take what is free.
        ranks: the data-parallel ranks.

    Attributes:
        levels: available levels of gradient checkpointing. The last is OpenRLHF's own.
        level: the current one.
    """

    def __init__(self, actor: SelectiveActor, args: SimpleNamespace, settings: Settings, ranks: Ranks) -> None:
        self.actor, self.args, self.ranks, self.fills_memory = actor, args, ranks, settings.fills_memory
        model = actor.model.module
        self.modules = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self.config = model.config.get_text_config()
        self.levels = [NONE]
        if args.actor.gradient_checkpointing_enable:
            is_free = settings.checkpointing != WHOLE and self.knows_layers
            self.levels = [NONE, WHOLE] if is_free else [WHOLE]
        self.level = self.levels[-1]
        self._is_described = False

    @property
    def knows_layers(self) -> bool:
        """Whether the bytes that the layers keep are known. LoRA's dropout adds half, as its float32 under ZeRO-3."""
        ds = self.args.ds
        return is_known(self.config) and not (ds.lora.rank and (ds.lora.dropout or ds.zero_stage == 3))

    def epoch(self, samples: list[Sample]) -> list[MiniBatch]:
        """Return this rank's mini-batches of one epoch, as many as on every other. A collective call.

        Samples of a prompt stay together, so that they can share its computation. Upstream shuffles, but not dynamic
        batches.
        """
        train = self.args.train
        if not train.dynamic_batch_enable:
            prompts = by_prompt(samples)
            samples = [sample for i in torch.randperm(len(prompts)).tolist() for sample in prompts[i]]
        size = train.batch_size // self.ranks.count
        samples = whole_mini_batches(samples, size, self.ranks)
        whole = [samples[start : start + size] for start in range(0, len(samples), size)]
        if reason := self._reason_not_to_share():
            budget = train.max_tokens_per_gpu if train.dynamic_batch_enable else train.micro_batch_size
            price: Callable = tokens if train.dynamic_batch_enable else len
        else:
            budget, price = self._fit(whole), cost
        planned = []
        for own in whole:
            # Each rank makes as many, because ZeRO reduces gradients in each.
            count = self.ranks.max(len(divide(own, budget, price)))
            planned.append(MiniBatch(divide(own, budget, price, count)))
        if planned and not self._is_described:
            self._is_described = True
            self._describe(planned[0].micro_batches, budget, reason)
        return planned

    def without_gradient(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Return the micro-batches of a forward pass without a backward pass. A collective call.

        It holds the activations of one layer at a time, so what OpenRLHF's micro-batch takes has room for more tokens.
        """
        if self.args.train.dynamic_batch_enable:
            return divide(samples, self.args.rollout.max_tokens_per_gpu, tokens)
        if self._reason_not_to_share():
            return divide(samples, self.args.rollout.micro_batch_size, len)
        of_stock = self._tokens_of_stock(samples)
        keys = self.ranks.max(keys_per_token(samples))
        room = min(self._bytes_of_stock(of_stock), self._free())
        fitting = self._fitting(room, WHOLE, keys, of_stock)
        return divide(samples, max(fitting, of_stock), cost)

    def _reason_not_to_share(self) -> str | None:
        """Return why the ranks do not share prompts, or None if they do. A collective call."""
        if self.args.actor.aux_loss_coef > 1e-8:
            return "the experts' balancing loss counts every token (--actor.aux_loss_coef)"
        shortcuts = self.actor.shortcuts
        reason = shortcuts.reason_not_to_share if shortcuts else "the model has not been checked"
        return None if self.ranks.min(reason is None) else reason or "another rank's model does not"

    def _fit(self, mini_batches: Sequence[Sequence[Sample]]) -> int:
        """Set the level at which these samples take the least time. A collective call.

        Returns:
            How many tokens a micro-batch may cost.
        """
        samples = [sample for own in mini_batches for sample in own]
        longest = self.ranks.max(max((sample.length for sample in samples), default=0))
        of_stock = self._tokens_of_stock(samples)
        costliest = self.ranks.max(max(map(cost, by_prompt(samples)), default=0))
        keys = self.ranks.max(keys_per_token(samples))
        free = self._free()
        budgets = {level: self.budget(level, of_stock, costliest, keys, free) for level in self.levels}
        # OpenRLHF's own level is always possible. The other must hold the longest sample, or all that the user set.
        least = of_stock if self.args.train.dynamic_batch_enable else longest
        possible = [level for level in self.levels if level == self.levels[-1] or budgets[level] >= least]

        def work(level: str) -> float:
            batches = [batch for own in mini_batches for batch in divide(own, budgets[level], cost)]
            return float(sum(map(cost, batches)) + _A_MICRO_BATCH * len(batches))

        work_of_all_ranks = zip(possible, self.ranks.sum(*map(work, possible)), strict=True)
        times = {level: _TIME[level] * tokens for level, tokens in work_of_all_ranks}
        level = min(times, key=times.__getitem__)
        if level != self.level:
            self.set(level)
        return budgets[level]

    def _free(self) -> int:
        return self.ranks.min(_free_bytes(self.actor, self.args, self.ranks.count))

    def _tokens_of_stock(self, samples: Sequence[Sample]) -> int:
        """Return how many tokens OpenRLHF's largest micro-batch has on any rank. A collective call."""
        train = self.args.train
        if train.dynamic_batch_enable:
            return train.max_tokens_per_gpu
        largest = sorted((sample.length for sample in samples), reverse=True)[: train.micro_batch_size]
        is_packed = self.args.ds.packing_samples
        return self.ranks.max(sum(largest) if is_packed else len(largest) * max(largest, default=0))

    def budget(self, level: str, of_stock: int, costliest: int, keys_per_token: int, free: int) -> int:
        """Return how many tokens a micro-batch may cost at this level.

        With dynamic batches the user sets the maximum. Otherwise the user sets a number of samples, and OpenRLHF uses
        the memory of their tokens with their logits. The selective update keeps no logits, so the same memory has room
        for more tokens, up to those of a whole prompt. It may not be there: what is free is the limit, but OpenRLHF's
        own level takes as many tokens as OpenRLHF in any case. Another level may use all that is free, and so may
        everything with `fills_memory`, which knows no other maximum. If nothing tells what is free, OpenRLHF's memory
        is taken for granted. A model of a type whose layers are not known gets as many tokens as in OpenRLHF.

        Args:
            level: one of `levels`.
            of_stock: tokens of OpenRLHF's largest micro-batch, with its padding.
            costliest: what the prompt with the most tokens costs with all its responses.
            keys_per_token: of the samples (`keys_per_token`).
            free: bytes, or `_UNKNOWN`.
        """
        stock, is_own = self._bytes_of_stock(of_stock), level == self.levels[-1]
        room = free if free < _UNKNOWN and (self.fills_memory or not is_own) else min(stock, free)
        fitting = self._fitting(room, level, keys_per_token, of_stock)
        if is_own:
            fitting = max(fitting, min(of_stock, self._fitting(stock, level, keys_per_token, of_stock)))
        if self.fills_memory:
            return fitting
        return min(fitting, of_stock if self.args.train.dynamic_batch_enable else max(of_stock, costliest))

    def _bytes_of_stock(self, of_stock: int) -> float:
        """Return what OpenRLHF's largest micro-batch takes, with its logits; 0 for a model that is not known."""
        recomputes, liger = self.levels[-1] == WHOLE, self.args.ds.use_liger_kernel
        return of_stock * peak_bytes(self.config, recomputes, True, liger) if self.knows_layers else 0

    def _fitting(self, room: float, level: str, keys_per_token: int, of_stock: int) -> int:
        """Return how many tokens fit into so many bytes, or OpenRLHF's number for a model that is not known."""
        if not self.knows_layers:
            return of_stock
        liger = self.args.ds.use_liger_kernel
        return most_tokens(self.config, room, level == WHOLE, keys_per_token, BLOCK_ELEMENTS, liger)

    def set(self, level: str) -> None:
        """Let the passes that follow compute again what `level` says."""
        self.level = level
        for module in self.modules:
            module.gradient_checkpointing = level == WHOLE

    def _describe(self, batches: Sequence[Sequence[Sample]], budget: int, reason: str | None) -> None:
        """Log how many tokens of a mini-batch are computed, and why not fewer."""
        samples = [sample for batch in batches for sample in batch]
        total, made = tokens(samples), f"in {len(batches)} micro-batch{'es' if len(batches) > 1 else ''}"
        prompts = len(by_prompt(samples))
        divided = sum(len(by_prompt(batch)) for batch in batches) - prompts
        if reason:
            said = f"all {total:,} tokens are computed {made}, because {reason}"
        else:
            said = f"{sum(map(cost, batches)):,} of {total:,} tokens are computed, {made} of at most {budget:,}"
            if divided:
                said += f". {prompts} prompts are computed {prompts + divided} times, because some have more responses"
        if self.args.actor.gradient_checkpointing_enable:
            said += f"; gradient checkpointing: {self.level}"
        logger.info(f"selective update, first mini-batch of this rank: {said}")
        if self.fills_memory and (reason or not self.knows_layers):
            why = reason or "the size of the model's layers is not known"
            logger.warning(f"--actor.fill_memory has no effect: {why}")


def in_order(mini_batches: Sequence[MiniBatch], passes: int, scope: str) -> list[tuple[MiniBatch, int]]:
    """Return the mini-batches of one epoch, each with the index of its pass.

    With scope `batch`, the published order, all mini-batches take their first pass, then all the second. With
    `minibatch` each one takes both before the next.
    """
    if scope == "batch":
        return [(mini_batch, i) for i in range(passes) for mini_batch in mini_batches]
    return [(mini_batch, i) for mini_batch in mini_batches for i in range(passes)]


def tokens(samples: Sequence[Sample]) -> int:
    """Return how many tokens samples have."""
    return sum(sample.length for sample in samples)


def cost(samples: Sequence[Sample]) -> int:
    """Return how many tokens a forward pass of these samples computes: each prompt once, and each response."""
    prompts = {sample.prompt: sample.prompt_length for sample in samples}
    return sum(prompts.values()) + sum(sample.length - sample.prompt_length for sample in samples)


def keys_per_token(samples: Sequence[Sample]) -> int:
    """Return how many keys attention keeps for each token that is computed, at most, rounded up.

    A shared prompt keeps its own, and each response keeps those of the prompt and its own. The shortest responses of a
    prompt have the most for a token.
    """
    most = 1.0
    for group in by_prompt(samples):
        prompt = computed = group[0].prompt_length
        for count, length in enumerate(sorted(sample.length - prompt for sample in group), 1):
            computed += length
            if count > 1:
                most = max(most, 1 + count * prompt / computed)
    return math.ceil(most)


def divide(samples: Sequence[Sample], budget: int, price: Callable = cost, count: int = 1) -> list[list[Sample]]:
    """Divide samples into micro-batches within a budget.

    A prompt's samples are divided only if they exceed the budget by themselves. One sample may exceed it.

    Args:
        samples: of a mini-batch.
        budget: of each micro-batch.
        price: what samples take of it: `cost`, `tokens` or `len`.
        count: how many micro-batches to make at least, of as many samples. Costly ones are halved for it.
    """
    parts: list[list[Sample]] = []
    for group in by_prompt(samples) if price is cost else [[sample] for sample in samples]:
        parts.append([])
        for sample in group:
            if parts[-1] and price([*parts[-1], sample]) > budget:
                parts.append([])
            parts[-1].append(sample)
    batches: list[list[Sample]] = []
    room: list[int] = []
    # First fit, the most expensive first.
    for part in sorted(parts, key=price, reverse=True):
        taken = price(part)
        i = next((i for i, left in enumerate(room) if taken <= left), len(batches))
        if i == len(batches):
            batches.append([])
            room.append(budget)
        batches[i] += part
        room[i] -= taken
    while 0 < len(batches) < count:
        prices = [price(batch) if len(batch) > 1 else 0 for batch in batches]
        largest = batches.pop(prices.index(max(prices)))
        batches += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return batches


def _free_bytes(actor: SelectiveActor, args: SimpleNamespace, ranks: int) -> int:
    """Return what activations may take on this rank's GPU, or `_UNKNOWN` without one.

    If a critic has the same GPU and trains at the same time, it is not known either.
    """
    trains_critic = args.algo.advantage.estimator == "gae" and args.train.colocate_all and not args.ds.enable_sleep
    if not torch.cuda.is_available() or trains_critic:
        return _UNKNOWN
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = _SHARE_OF_FREE * (torch.cuda.mem_get_info()[0] + unused)
    return max(0, int(free - _deepspeed_bytes(actor, args, ranks)))


def _deepspeed_bytes(actor: SelectiveActor, args: SimpleNamespace, ranks: int) -> float:
    """Return what DeepSpeed allocates on this rank during an update, at most.

    That is up to twice the gradients, its buckets, and Adam's two moments in its first step.
    """
    trained = [parameter for parameter in actor.model.module.parameters() if parameter.requires_grad]
    numbers = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    width = 4 if args.ds.grad_accum_dtype == "fp32" else max(parameter.element_size() for parameter in trained)
    gradients = 2 * width * numbers / (ranks if args.ds.zero_stage == 3 else 1)
    has_moments = taken(actor.model) > 0 or args.ds.adam_offload
    return gradients + (0 if has_moments else 8 * numbers / ranks) + _BUCKETS
