"""log π_old of a rollout batch without a forward pass of its own where the update's first pass gives it.

OpenRLHF computes `experience.action_log_probs` while it makes the experiences. The first pass of an update runs with
the same weights, so its forward gives them too. Until then they are NaN, which shows where they are read too early.
"""

import functools
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from openrlhf.models import Actor
from openrlhf.trainer.ppo_utils.experience import make_experience_batch
from torch import Tensor, nn

from arlopti_openrlhf import upstream
from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.forward.transfer import on_device
from arlopti_openrlhf.update.plan import Planner
from arlopti_openrlhf.update.sample import MicroBatch, Sample, stand_in

_MAKER = "openrlhf.trainer.ppo_utils.experience_maker"
# They read log π_old for a KL term in the reward alone. Those of a fork may read it for anything.
_READERS = (
    ("RemoteExperienceMaker.make_experience", "a34b51e990de9776"),
    ("RemoteExperienceMaker.compute_advantages_and_returns", "1ca04eaeb7190ec8"),
)


def needed_before(args: SimpleNamespace) -> bool:
    """Return whether the experience maker reads log π_old, before the update."""
    is_in_the_reward = args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss
    return is_in_the_reward or not _readers_are_known()


@functools.cache
def _readers_are_known() -> bool:
    return all(upstream.is_known(_MAKER, *reader) for reader in _READERS)


def is_random(actor: Actor) -> bool:
    """Return whether the model drops or jitters anything while it trains, so that two forwards differ."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in actor.modules()) or any(
        isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name)
        for name, value in actor.hf_config.to_dict().items()
    )


def unknown(action_mask: Tensor) -> Tensor:
    """Return (B, A) NaN, which stands for log-probs that are not known yet."""
    return torch.full(action_mask.shape, torch.nan)


def given_by(log_probs: Tensor, batch: MicroBatch) -> Tensor:
    """Return (B, A) log π_old, from log-probs (B, A) that a micro-batch's forward has given before θ moved.

    Log π_old of response tokens that the forward did not select is known.
    """
    old = torch.where(batch.selected.bool(), log_probs.detach(), batch.action_log_probs)
    return old.masked_fill(~batch.action_mask.bool(), 0.0)


def store(samples: Sequence[Sample], old_log_probs: Tensor, entropies: Tensor | None = None) -> None:
    """Give single samples their rows of a micro-batch's tensors (B, A), on the CPU, without padding.

    Args:
        samples: the micro-batch's.
        old_log_probs: log π_old.
        entropies: for the samples that have none.
    """
    for sample, row in zip(samples, old_log_probs.cpu(), strict=True):
        sample.action_log_probs = row[: len(sample.action_mask)]
    if entropies is not None:
        for sample, row in zip(samples, entropies.cpu(), strict=True):
            if sample.entropies is None:
                sample.entropies = row[: len(sample.action_mask)]


@torch.no_grad()
def compute(actor: SelectiveActor, items: Sequence[Sample], planner: Planner, with_entropies: bool = False) -> None:
    """Fill `action_log_probs` of single samples by forward passes, as upstream's experience maker would have.

    A sample without a response token is not computed. A collective call: under ZeRO-3 the ranks compute together, and
    one that has nothing left computes a stand-in.

    Args:
        actor: the policy, a text model.
        items: single samples.
        planner: says which samples share a pass.
        with_entropies: whether each sample gets its entropies too.
    """
    for sample in items:
        if not sample.action_mask.any():
            sample.action_log_probs = torch.zeros(sample.action_mask.shape)
    batches = planner.without_gradient([sample for sample in items if sample.action_mask.any()])
    actor.eval()
    for i in range(planner.ranks.max(len(batches))):
        samples = batches[i] if i < len(batches) else [stand_in()]
        batch = make_experience_batch(samples)
        layout = actor.lay_out(batch.sequences, batch.action_mask, batch.attention_mask)
        batch, layout = on_device([batch, layout], torch.cuda.current_device())
        log_probs, output = actor(
            batch.sequences,
            batch.action_mask,
            batch.attention_mask,
            return_output=True,
            return_statistics=with_entropies,
            layout=layout,
        )
        store(samples, log_probs, output.statistics[0] if with_entropies else None)
    actor.train()
