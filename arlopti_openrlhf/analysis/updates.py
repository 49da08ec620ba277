"""A policy that is updated and put back: gradients of chosen tokens, one update, what it did to every token.

The loss is OpenRLHF's `PolicyLoss` through the training's own actor, with the paper's clipping and without a KL term,
whose gradient is zero where the policy is its own reference.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from openrlhf.models import PolicyLoss
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from arlopti_openrlhf.analysis.rollouts import Batch
from arlopti_openrlhf.forward.selective_actor import SelectiveActor, replaced_attribute
from arlopti_openrlhf.update.trainer import GroupPolicyLoss

MINI_BATCHES = 4  # whose gradients give AdamW's second moments
_EPSILON = 1e-8  # AdamW's


class Tokens(NamedTuple):
    """Of every response token under the policy, each (B, A), 0 elsewhere."""

    log_probs: Tensor  # log π, at the sampling temperature
    squared_rest: Tensor  # Σ_{j≠o} P_j²
    entropy: Tensor  # nats


class Policy:
    """A model with float32 weights, on the GPU where there is one. 16 bytes per parameter there.

    Float32, as one update of a training is smaller than what bf16 weights resolve.

    Args:
        model: Hugging Face directory or name.
        temperature: the sampling temperature.
        micro_batch_tokens: padded tokens of one forward and backward pass.
        optimizer: "adamw" or "sgd", see `step`.
    """

    def __init__(self, model: str, temperature: float, micro_batch_tokens: int, optimizer: str) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.actor = SelectiveActor(causal_lm, temperature=temperature).to(self.device).eval()
        self.actor.packing_samples = self.actor.is_vlm = False
        self.temperature, self.micro_batch_tokens, self.optimizer = temperature, micro_batch_tokens, optimizer
        self.parameters = [p for p in self.actor.parameters() if p.requires_grad]
        self.start = [p.detach().cpu().clone() for p in self.parameters]
        self.loss = GroupPolicyLoss(PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.24, dual_clip=10.0))

    @property
    def model(self) -> nn.Module:
        """Hugging Face's causal LM."""
        return self.actor.model

    def micro_batches(self, rows: Tensor, lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
        """`rows`, in order, in pieces of at most `max_tokens` padded tokens, or of one row."""
        piece, longest = [], 0
        for row in rows.tolist():
            longest = max(longest, int(lengths[row]))
            if piece and longest * (len(piece) + 1) > max_tokens:
                yield torch.tensor(piece)
                piece, longest = [], int(lengths[row])
            piece.append(row)
        if piece:
            yield torch.tensor(piece)

    def _inputs(self, batch: Batch, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = int(batch.attention_mask[rows].sum(dim=1).max())
        tensors = batch.sequences[rows, :length], mask[rows, : length - 1], batch.attention_mask[rows, :length]
        return tuple(t.to(self.device) for t in tensors)

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Tensor:
        """(B, A) log π of the response tokens, 0 elsewhere."""
        result = torch.zeros(batch.action_mask.shape)
        lengths = batch.attention_mask.sum(dim=1)
        for rows in self.micro_batches(torch.arange(len(lengths)), lengths, self.micro_batch_tokens):
            values = self.actor(*self._inputs(batch, rows, batch.action_mask))
            result[rows, : values.shape[1]] = values.cpu()
        return result

    @torch.no_grad()
    def tokens(self, batch: Batch) -> Tokens:
        """The statistics of every response token."""
        results = [torch.zeros(batch.action_mask.shape) for _ in Tokens._fields]
        lengths = batch.attention_mask.sum(dim=1)
        with replaced_attribute(self.actor, "records_statistics", True):
            for rows in self.micro_batches(torch.arange(len(lengths)), lengths, self.micro_batch_tokens):
                log_probs = self.actor(*self._inputs(batch, rows, batch.action_mask))
                entropy, squared_rest = self.actor.statistics
                for result, values in zip(results, (log_probs, squared_rest, entropy), strict=True):
                    result[rows, : values.shape[1]] = values.cpu()
        return Tokens(*results)

    def gradient(
        self,
        batch: Batch,
        old_log_probs: Tensor,
        advantages: Tensor,
        selected: Tensor,
        moments: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """∂L/∂θ of the selected tokens, with the denominator of the whole batch.

        At one θ the gradients of groups that partition the response add up to the whole gradient.

        Args:
            batch: the rollouts.
            old_log_probs: (B, A) log π_old.
            advantages: (B, A), reweighted or not.
            selected: (B, A) bool, the tokens that are updated.
            moments: per parameter, what the mean square of the mini-batches' gradients is added to.
        """
        selected = selected & batch.action_mask & (advantages != 0)
        lengths = batch.attention_mask.sum(dim=1)
        total = self.zeros()
        for prompts in batch.prompts.unique().tensor_split(MINI_BATCHES):
            rows = (torch.isin(batch.prompts, prompts) & selected.any(dim=1)).nonzero()[:, 0]
            for micro in self.micro_batches(rows, lengths, self.micro_batch_tokens):
                self._backward(batch, old_log_probs, advantages, selected, micro)
            for i, p in enumerate(self.parameters):
                if p.grad is None:  # nothing selected here, or an expert without tokens
                    continue
                total[i] += p.grad
                if moments:
                    # Divided by its own tokens alone, a mini-batch's gradient would be MINI_BATCHES times as large.
                    moments[i].addcmul_(p.grad, p.grad, value=MINI_BATCHES)
                p.grad = None
        return total

    def zeros(self) -> list[Tensor]:
        """One per parameter."""
        return [torch.zeros_like(p, requires_grad=False) for p in self.parameters]

    def _backward(self, batch: Batch, old_log_probs: Tensor, advantages: Tensor, selected: Tensor, rows: Tensor):
        sequences, mask, attention_mask = self._inputs(batch, rows, selected)
        width = mask.shape[1]
        self.loss.response_mask = batch.action_mask[rows, :width].to(self.device)
        self.loss.num_tokens = mask.sum()
        loss, *_ = self.loss(
            self.actor(sequences, mask, attention_mask),
            old_log_probs[rows, :width].to(self.device),
            advantages[rows, :width].to(self.device),
            action_mask=mask,
            batch_num_tokens=batch.action_mask.sum().item(),
        )
        loss.backward()

    @torch.no_grad()
    def step(self, gradient: Sequence[Tensor], moments: Sequence[Tensor], learning_rate: float) -> None:
        """One optimizer step.

        "sgd": θ ← θ - lr · g. "adamw": θ ← θ - lr · g / (√v + ε), AdamW's step in a running training whose second
        moments are v = `moments`. The very first step of AdamW would be lr · sign(g), as large for a tiny gradient as
        for a large one. Momentum is left out: it spreads a gradient over later steps, with the same sum.
        """
        for p, g, v in zip(self.parameters, gradient, moments, strict=True):
            p.sub_(self._direction(g, v), alpha=learning_rate)

    def _direction(self, gradient: Tensor, moment: Tensor) -> Tensor:
        return gradient / (moment.sqrt() + _EPSILON) if self.optimizer == "adamw" else gradient

    @torch.no_grad()
    def restore(self) -> None:
        """The weights that the model came with."""
        for p, start in zip(self.parameters, self.start, strict=True):
            p.copy_(start)

    def updated(
        self,
        batch: Batch,
        old_log_probs: Tensor,
        advantages: Tensor,
        stages: Sequence[Tensor],
        learning_rate: float,
        moments: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """(B, A) log π after one update by one optimizer step per stage, each stage a (B, A) mask. Then it is undone.

        Args:
            moments: AdamW's second moments. By default those of a training that always makes this update: the mean
                over its stages.
        """
        own_moments = self.zeros() if moments is None else None
        # The first stage last: its gradient is the first step's.
        for stage in reversed(stages if own_moments else stages[:1]):
            gradient = self.gradient(batch, old_log_probs, advantages, stage, own_moments)
        moments = moments or [m.div_(len(stages)) for m in own_moments]
        self.step(gradient, moments, learning_rate)
        for stage in stages[1:]:
            self.step(self.gradient(batch, old_log_probs, advantages, stage), moments, learning_rate)
        log_probs = self.log_probs(batch)
        self.restore()
        return log_probs

    def learning_rate_of(
        self,
        batch: Batch,
        old_log_probs: Tensor,
        gradient: Sequence[Tensor],
        moments: Sequence[Tensor],
        change: float,
    ) -> float:
        """At which one step along `gradient` changes the response tokens' log π by `change`, as root mean square."""
        size = sum(self._direction(g, v).square().sum().item() for g, v in zip(gradient, moments, strict=True))
        weights = sum(p.detach().square().sum().item() for p in self.parameters)
        learning_rate = 1e-4 * (weights / size) ** 0.5
        for _ in range(2):  # the change is linear in the step only near the one that is wanted
            self.step(gradient, moments, learning_rate)
            moved = (self.log_probs(batch) - old_log_probs)[batch.action_mask].square().mean().sqrt().item()
            self.restore()
            learning_rate *= change / moved
        return learning_rate
