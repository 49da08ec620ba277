"""Move a policy's weights and put them back: log-probs, gradients of chosen tokens, optimizer steps, updates.

The loss is OpenRLHF's `PolicyLoss`, through the actor that training uses, with the paper's clipping. There is no KL
term: its gradient is zero where the policy is its own reference.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from openrlhf.models import PolicyLoss
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.lab.analysis.rollouts import Batch

MINI_BATCHES = 4  # whose gradients give AdamW's second moments
SEARCHES = 2  # for a learning rate: the change is linear in the step only near the one that is wanted
_EPSILON = 1e-8  # AdamW's


class Tokens(NamedTuple):
    """What the policy predicts at every response token, (B, A) each, 0 outside the response."""

    log_probs: Tensor  # log π, at the sampling temperature
    squared_rest: Tensor  # Σ_{j≠o} P_j²
    entropy: Tensor  # nats


class Update(NamedTuple):
    """GRPO's update of the batch, from which the other updates differ."""

    gradient: list[Tensor]  # ∂L/∂θ before it, one tensor per parameter
    moments: list[Tensor]  # AdamW's second moments
    learning_rate: float
    log_probs: Tensor  # (B, A) log π after it


class Policy:
    """A model with float32 weights, on the GPU if there is one, and its weights at the start.

    bf16 weights do not resolve one update of a training. `memory` counts the bytes per parameter.

    Args:
        model: a Hugging Face directory or name.
        temperature: that of sampling.
        micro_batch_tokens: most tokens of one forward and backward pass, unless one response has more.
        optimizer: of `step`, "adamw" or "sgd".
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
    def log_probs(self, batch: Batch, selected: Tensor | None = None) -> Tensor:
        """Return (B, A) log π of the selected tokens, or of all response tokens, 0 elsewhere."""
        selected = batch.action_mask if selected is None else selected
        result = torch.zeros(selected.shape)
        for rows, *inputs in self._micro_batches(batch, selected):
            values = self.actor(*inputs)
            result[rows, : values.shape[1]] = values.cpu()
        return result

    @torch.no_grad()
    def tokens(self, batch: Batch) -> Tokens:
        """Return the statistics of every response token."""
        results = Tokens(*(torch.zeros(batch.action_mask.shape) for _ in Tokens._fields))
        for rows, *inputs in self._micro_batches(batch, batch.action_mask):
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
        if moments is None:
            self._backward(batch, old_log_probs, advantages, selected)
            return take_gradient(self.parameters)
        total = self.zeros()
        for prompts in batch.prompts.unique().tensor_split(MINI_BATCHES):
            self._backward(batch, old_log_probs, advantages, selected & torch.isin(batch.prompts, prompts)[:, None])
            for all_of_it, part, moment in zip(total, take_gradient(self.parameters), moments, strict=True):
                all_of_it += part
                # Divided by its own tokens alone, a mini-batch's gradient would be MINI_BATCHES times as large.
                moment.addcmul_(part, part, value=MINI_BATCHES)
        return total

    def _backward(self, batch: Batch, old_log_probs: Tensor, advantages: Tensor, selected: Tensor) -> None:
        """Add the gradient of the selected tokens to the parameters' `grad`."""
        for rows, sequences, mask, attention_mask in self._micro_batches(batch, selected):
            width = mask.shape[1]
            loss, *_ = self.loss(
                self.actor(sequences, mask, attention_mask),
                old_log_probs[rows, :width].to(self.device),
                advantages[rows, :width].to(self.device),
                action_mask=mask,
                batch_num_tokens=batch.action_mask.sum().item(),
            )
            loss.backward()

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
        selected: Tensor | None = None,
    ) -> Tensor:
        """Return (B, A) log π after one update, which takes one optimizer step per stage. Then undo the update.

        `old_log_probs`, `advantages`, each stage's mask and `selected`, as in `log_probs`, are (B, A). AdamW's second
        moments are those of a training that always makes this update: the mean over its stages.
        """
        # The moments are of all stages at the start. The first one comes last, since its gradient is the first step's.
        moments, gradient = self.zeros(), None
        for stage in reversed(stages):
            del gradient  # as large as the model
            gradient = self.gradient(batch, old_log_probs, advantages, stage, moments)
        moments = [moment.div_(len(stages)) for moment in moments]
        self.step(gradient, moments, learning_rate)
        # Every further stage sees the weights that the one before has moved.
        for stage in stages[1:]:
            del gradient
            gradient = self.gradient(batch, old_log_probs, advantages, stage)
            self.step(gradient, moments, learning_rate)
        log_probs = self.log_probs(batch, selected)
        self.restore()
        return log_probs

    def log_probs_after_step(
        self, batch: Batch, gradient: Sequence[Tensor], moments: Sequence[Tensor], learning_rate: float
    ) -> Tensor:
        """Return (B, A) log π after one optimizer step along the gradient. Then undo the step."""
        self.step(gradient, moments, learning_rate)
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
        for _ in range(SEARCHES):
            after = self.log_probs_after_step(batch, gradient, moments, learning_rate)
            moved = (after - old_log_probs)[batch.action_mask].square().mean().sqrt().item()
            learning_rate *= change / moved
        return learning_rate

    def _micro_batches(self, batch: Batch, selected: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the numbers of each micro-batch's rows, and their sequences, part of `selected` and attention mask.

        Rows in which nothing is selected are left out. A terminal shows a bar.
        """
        lengths = batch.attention_mask.sum(dim=1)
        shares = self.actor.check(batch.sequences, batch.attention_mask).reason_not_to_share is None
        rows = selected.any(dim=1).nonzero()[:, 0]
        pieces = list(micro_batches(batch, rows, self.micro_batch_tokens, shares))
        for piece in tqdm(pieces, unit="micro-batch", leave=False, disable=None):
            length = int(lengths[piece].max())
            inputs = (
                batch.sequences[piece, :length],
                selected[piece, : length - 1],
                batch.attention_mask[piece, :length],
            )
            yield piece, *(tensor.to(self.device) for tensor in inputs)


def take_gradient(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the parameters' `grad`, and leave none. An expert without tokens has 0."""
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return gradient


def micro_batches(batch: Batch, rows: Tensor, max_tokens: int, shares: bool = True) -> Iterator[Tensor]:
    """Yield rows (N,), in order, in pieces of at most `max_tokens` tokens or of one row.

    If the forward pass `shares` prompts, a prompt counts once for its neighbouring responses.
    """
    responses = batch.action_mask.sum(dim=1).tolist()
    lengths, prompts = batch.attention_mask.sum(dim=1).tolist(), batch.prompts.tolist()
    start, total, numbers = 0, 0, rows.tolist()
    for i, row in enumerate(numbers):
        is_neighbour = shares and i > start and prompts[row] == prompts[numbers[i - 1]]
        cost = responses[row] if is_neighbour else lengths[row]
        if i > start and total + cost > max_tokens:
            yield rows[start:i]
            start, total, cost = i, 0, lengths[row]
        total += cost
    if numbers:
        yield rows[start:]


def padded_pieces(rows: Tensor, lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Yield the numbers (N,) of rows, in order, in pieces of at most `max_tokens` padded tokens, or of one row.

    `lengths` (B,) are the tokens of all rows.
    """
    start = 0
    for stop in range(1, len(rows) + 1):
        # The next row may be the longest one so far.
        if stop == len(rows) or int(lengths[rows[start : stop + 1]].max()) * (stop + 1 - start) > max_tokens:
            yield rows[start:stop]
            start = stop
