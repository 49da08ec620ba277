"""Makes the micro-batches of an optimizer step, each while the device works on the one before."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from openrlhf.trainer.ppo_utils.experience import make_experience_batch
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.loss_utils import get_loss_batch_info
from torch import Tensor

from arlopti_openrlhf.forward.selective_actor import SelectiveActor
from arlopti_openrlhf.update.sample import MicroBatch, PassWeights, Sample


def micro_batches(
    divided: Sequence[Sequence[Sample]],
    index: int,
    totals: Sequence[float],
    actor: SelectiveActor,
    strategy: DeepspeedStrategy,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a mini-batch in one pass, on the device, and tell the engine which is the last.

    Args:
        divided: the samples of each on this rank.
        index: of the pass.
        totals: the tokens that the loss divides by, and the responses with any, of all ranks.
        actor: the policy.
        strategy: OpenRLHF's.
    """
    engine, args, size = actor.model, strategy.args, sum(map(len, divided))
    # DeepSpeed divides each loss by this number, however many micro-batches there are.
    divisor = engine.gradient_accumulation_steps()
    num_tokens, responses = (total / divisor for total in totals)
    denominators = get_loss_batch_info(
        strategy, divided[0][0].action_mask, batch_num_tokens=num_tokens, global_batch_size=responses
    )
    balances_experts = args.actor.aux_loss_coef > 1e-8
    for i, samples in enumerate(divided, 1):
        # By itself DeepSpeed takes each `gradient_accumulation_steps` micro-batches for a mini-batch. OpenRLHF sets
        # that to 1 for dynamic batches, and ZeRO-2 would keep only the gradient of the last micro-batch.
        engine.set_gradient_accumulation_boundary(i == len(divided))
        experience = make_experience_batch(samples, args.ds.packing_samples)
        weights, wanted = None, experience.action_mask
        # GSPO's ratio is the sequence's, so it needs the whole response.
        needs_response = args.actor.policy_loss_type == "gspo"
        if all(sample.weights is not None for sample in samples):
            weights = PassWeights.of([sample.weights for sample in samples], index)
            wanted = wanted if needs_response else weights.updated
        selected = (wanted * ~is_idle(experience.advantages, args)[:, None]).to(wanted.dtype)
        layout = actor.lay_out(experience.sequences, selected, experience.attention_mask, balances_experts)
        if weights is not None and needs_response:
            weights = weights.among(layout.places)
        batch = MicroBatch(
            **vars(experience),
            samples=samples,
            weights=weights,
            selected=selected,
            layout=layout,
            plan=layout,
            denominators=denominators,
            share=divisor * len(samples) / size,
        )
        yield batch.to(torch.cuda.current_device())


def is_idle(advantages: Tensor, args: SimpleNamespace) -> Tensor:
    """Return (...,) bool, whether a response with advantages (..., A) has no gradient, so no pass computes it."""
    if args.algo.kl.use_loss or args.actor.entropy_coef is not None:
        return torch.zeros_like(advantages[..., 0]).bool()
    return (advantages == 0).all(dim=-1)
