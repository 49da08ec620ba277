"""Move a policy's weights and put them back: log-probs, gradients of chosen tokens, optimizer steps, updates.

The loss is OpenRLHF's `PolicyLoss`, through the actor that training uses, with the paper's clipping. There is no KL
term: its gradient is zero where the policy is its own reference.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from openrlhf.models import PolicyLoss
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.lab.analysis.rollouts import Batch

MINI_BATCHES = 4  # whose gradients give AdamW's second moments
_EPSILON = 1e-8  # AdamW's


class Tokens(NamedTuple):
    """What the policy predicts at every response token, (B, A) each, 0 outside the response."""

    log_probs: Tensor  # log π, at the sampling temperature
    squared_rest: Tensor  # Σ_{j≠o} P_j²
    entropy: Tensor  # nats


class Policy:
    """A model with float32 weights, on the GPU where there is one, and its weights at the start.

    It takes 16 bytes per parameter there. bf16 weights do not resolve one update of a training. `temperature` is that
    of sampling. A forward and backward pass takes `micro_batch_tokens` padded tokens. `step` has the two optimizers,
    "adamw" and "sgd".
    """

    def __init__(self, model: str, temperature: float, micro_batch_tokens: int, optimizer: str) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.actor = SelectiveActor(causal_lm, temperature=temperature).to(self.device).eval()
        # Upstream sets the two only where it loads the model itself.
        self.actor.packing_samples = self.actor.is_vlm = False
        self.model: nn.Module = self.actor.model
        self.temperature, self.micro_batch_tokens, self.optimizer = temperature, micro_batch_tokens, optimizer
        self.parameters = [p for p in self.actor.parameters() if p.requires_grad]
        self.start = [p.detach().cpu().clone() for p in self.parameters]
        self.loss = PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.24, dual_clip=10.0)

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Tensor:
        """Return (B, A) log π of the response tokens, 0 elsewhere."""
        result = torch.zeros(batch.action_mask.shape)
        for rows, *inputs in self._micro_batches(batch, torch.arange(len(result)), batch.action_mask):
            values = self.actor(*inputs)
            result[rows, : values.shape[1]] = values.cpu()
        return result

    @torch.no_grad()
    def tokens(self, batch: Batch) -> Tokens:
        """Return the statistics of every response token."""
        results = Tokens(*(torch.zeros(batch.action_mask.shape) for _ in Tokens._fields))
        for rows, *inputs in self._micro_batches(batch, torch.arange(len(batch.sequences)), batch.action_mask):
            log_probs, output = self.actor(*inputs, return_output=True, return_statistics=True)
            entropy, squared_rest = output.statistics
            for result, values in zip(results, (log_probs, squared_rest, entropy), strict=True):
                result[rows, : values.shape[1]] = values.cpu()
        return results

    def gradient(
        self,
        batch: Batch,
        old_log_probs: Tensor,
        advantages: Tensor,
        selected: Tensor,
        moments: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return ∂L/∂θ of the selected tokens, with the denominator of the whole batch.

        At one θ the gradients of groups that partition the response add up to the whole gradient. `old_log_probs`,
        `advantages` and `selected` are (B, A). The mean square of the mini-batches' gradients is added to `moments`,
        one per parameter.
        """
        # A token without advantage has no gradient.
        selected = selected & batch.action_mask & (advantages != 0)
        total = self.zeros()
        for prompts in batch.prompts.unique().tensor_split(MINI_BATCHES):
            with_gradient = (torch.isin(batch.prompts, prompts) & selected.any(dim=1)).nonzero()[:, 0]
            for rows, sequences, mask, attention_mask in self._micro_batches(batch, with_gradient, selected):
                loss, *_ = self.loss(
                    self.actor(sequences, mask, attention_mask),
                    old_log_probs[rows, : mask.shape[1]].to(self.device),
                    advantages[rows, : mask.shape[1]].to(self.device),
                    action_mask=mask,
                    batch_num_tokens=batch.action_mask.sum().item(),
                )
                loss.backward()
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
        """Return one tensor of zeros per parameter."""
        return [torch.zeros_like(p, requires_grad=False) for p in self.parameters]

    @torch.no_grad()
    def step(self, gradient: Sequence[Tensor], moments: Sequence[Tensor], learning_rate: float) -> None:
        """Take one optimizer step.

        "sgd": θ ← θ - lr · g. "adamw": θ ← θ - lr · g / (√v + ε), AdamW's step in a running training whose second
        moments are v = `moments`. The very first step of AdamW would be lr · sign(g), as large for a tiny gradient as
        for a large one. Momentum is left out: it spreads a gradient over later steps, with the same sum.
        """
        for p, g, v in zip(self.parameters, gradient, moments, strict=True):
            p.sub_(self.direction(g, v), alpha=learning_rate)

    def direction(self, gradient: Tensor, moment: Tensor) -> Tensor:
        """Return what one parameter's step multiplies with the learning rate."""
        return gradient / (moment.sqrt() + _EPSILON) if self.optimizer == "adamw" else gradient

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the weights that the model came with."""
        for p, start in zip(self.parameters, self.start, strict=True):
            p.copy_(start)

    def log_probs_after_update(
        self,
        batch: Batch,
        old_log_probs: Tensor,
        advantages: Tensor,
        stages: Sequence[Tensor],
        learning_rate: float,
        moments: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return (B, A) log π after one update, which takes one optimizer step per stage. Then undo the update.

        `old_log_probs`, `advantages` and each stage's mask are (B, A). Without AdamW's second moments, they are those
        of a training that always makes this update: the mean over its stages.
        """
        if moments is None:
            # Of all stages at the start. The first one last, since its gradient is the first step's.
            own_moments = self.zeros()
            for stage in reversed(stages):
                gradient = self.gradient(batch, old_log_probs, advantages, stage, own_moments)
            moments = [moment.div_(len(stages)) for moment in own_moments]
        else:
            gradient = self.gradient(batch, old_log_probs, advantages, stages[0])
        self.step(gradient, moments, learning_rate)
        # Every further stage sees the weights that the one before has moved.
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
        """Find the learning rate at which one step along `gradient` changes the response tokens' log π by `change`.

        `change` is the root mean square over the tokens. `old_log_probs` (B, A) are those before the step.
        """
        # The first guess moves the weights by 1e-4 of their own norm.
        size = sum(self.direction(g, v).square().sum().item() for g, v in zip(gradient, moments, strict=True))
        weights = sum(p.detach().square().sum().item() for p in self.parameters)
        learning_rate = 1e-4 * (weights / size) ** 0.5
        # Twice, as the change is linear in the step only near the one that is wanted.
        for _ in range(2):
            self.step(gradient, moments, learning_rate)
            moved = (self.log_probs(batch) - old_log_probs)[batch.action_mask].square().mean().sqrt().item()
            self.restore()
            learning_rate *= change / moved
        return learning_rate

    def _micro_batches(self, batch: Batch, rows: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the numbers of each micro-batch's rows, and their sequences, part of `mask` and attention mask."""
        lengths = batch.attention_mask.sum(dim=1)
        for piece in micro_batches(rows, lengths, self.micro_batch_tokens):
            length = int(lengths[piece].max())
            inputs = batch.sequences[piece, :length], mask[piece, : length - 1], batch.attention_mask[piece, :length]
            yield piece, *(tensor.to(self.device) for tensor in inputs)


def micro_batches(rows: Tensor, lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Yield the numbers (N,) of rows, in order, in pieces of at most `max_tokens` padded tokens, or of one row.

    `lengths` (B,) are the tokens of all rows.
    """
    start = 0
    for stop in range(1, len(rows) + 1):
        # The next row may be the longest one so far.
        if stop == len(rows) or int(lengths[rows[start : stop + 1]].max()) * (stop + 1 - start) > max_tokens:
            yield rows[start:stop]
            start = stop
