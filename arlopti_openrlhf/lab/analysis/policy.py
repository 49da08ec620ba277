"""Hold a policy whose weights can be moved and put back: log-probs, gradients of chosen tokens, optimizer steps.

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
    """Says what the policy predicts at every response token. Each is (B, A), 0 outside the response."""

    log_probs: Tensor  # log π, at the sampling temperature
    squared_rest: Tensor  # Σ_{j≠o} P_j²
    entropy: Tensor  # nats


class Policy:
    """Holds a model with float32 weights, on the GPU where there is one, and its weights at the start.

    It takes 16 bytes per parameter there. bf16 weights do not resolve one update of a training.

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
        # Upstream sets the two only where it loads the model itself.
        self.actor.packing_samples = self.actor.is_vlm = False
        self.temperature, self.micro_batch_tokens, self.optimizer = temperature, micro_batch_tokens, optimizer
        self.parameters = [p for p in self.actor.parameters() if p.requires_grad]
        self.start = [p.detach().cpu().clone() for p in self.parameters]
        self.loss = PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.24, dual_clip=10.0)

    @property
    def model(self) -> nn.Module:
        """Return Hugging Face's causal LM."""
        return self.actor.model

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Tensor:
        """Return (B, A) log π of the response tokens, 0 elsewhere."""
        result = torch.zeros(batch.action_mask.shape)
        for rows in self._micro_batches(batch, torch.arange(len(result))):
            values = self.actor(*self._inputs(batch, rows, batch.action_mask))
            result[rows, : values.shape[1]] = values.cpu()
        return result

    @torch.no_grad()
    def tokens(self, batch: Batch) -> Tokens:
        """Return the statistics of every response token."""
        results = Tokens(*(torch.zeros(batch.action_mask.shape) for _ in Tokens._fields))
        for rows in self._micro_batches(batch, torch.arange(len(batch.sequences))):
            inputs = self._inputs(batch, rows, batch.action_mask)
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

        At one θ the gradients of groups that partition the response add up to the whole gradient.

        Args:
            batch: the rollouts.
            old_log_probs: (B, A) log π_old.
            advantages: (B, A), reweighted or not.
            selected: (B, A) bool, the tokens to update.
            moments: one per parameter. The mean square of the mini-batches' gradients is added to them.
        """
        # A token without advantage has no gradient.
        selected = selected & batch.action_mask & (advantages != 0)
        total = self.zeros()
        for prompts in batch.prompts.unique().tensor_split(MINI_BATCHES):
            rows = (torch.isin(batch.prompts, prompts) & selected.any(dim=1)).nonzero()[:, 0]
            for micro_batch in self._micro_batches(batch, rows):
                self._backward(batch, old_log_probs, advantages, selected, micro_batch)
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

    def _micro_batches(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        return micro_batches(rows, batch.attention_mask.sum(dim=1), self.micro_batch_tokens)

    def _inputs(self, batch: Batch, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = int(batch.attention_mask[rows].sum(dim=1).max())
        sequences, attention_mask = batch.sequences[rows, :length], batch.attention_mask[rows, :length]
        mask = mask[rows, : length - 1]
        return sequences.to(self.device), mask.to(self.device), attention_mask.to(self.device)

    def _backward(
        self, batch: Batch, old_log_probs: Tensor, advantages: Tensor, selected: Tensor, rows: Tensor
    ) -> None:
        sequences, mask, attention_mask = self._inputs(batch, rows, selected)
        width = mask.shape[1]
        loss, *_ = self.loss(
            self.actor(sequences, mask, attention_mask),
            old_log_probs[rows, :width].to(self.device),
            advantages[rows, :width].to(self.device),
            action_mask=mask,
            batch_num_tokens=batch.action_mask.sum().item(),
        )
        loss.backward()


def micro_batches(rows: Tensor, lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Yield `rows`, in order, in pieces of at most `max_tokens` padded tokens, or of one row.

    Args:
        rows: (N,) numbers of rows.
        lengths: (B,) tokens of every row.
        max_tokens: the limit.
    """
    piece: list[int] = []
    longest = 0
    for row in rows.tolist():
        length = int(lengths[row])
        if piece and max(longest, length) * (len(piece) + 1) > max_tokens:
            yield torch.tensor(piece)
            piece, longest = [], 0
        piece.append(row)
        longest = max(longest, length)
    if piece:
        yield torch.tensor(piece)
