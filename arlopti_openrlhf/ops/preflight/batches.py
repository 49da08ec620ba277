"""Checks that samples, micro-batches, optimizer steps and ranks divide each other as OpenRLHF and DeepSpeed ask."""

import math
from collections.abc import Iterator
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.memory import Update
from arlopti_openrlhf.ops.preflight.values import loads_reference, rollout_samples


def check(args: SimpleNamespace, update: Update) -> Iterator[Finding]:
    """Yield what does not divide. Sizes below 1 are for `values` to find."""
    samples, batch, is_dynamic = rollout_samples(args), args.train.batch_size, args.train.dynamic_batch_enable
    model_parallel = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    sizes = (batch, args.train.micro_batch_size, args.rollout.micro_batch_size, samples, model_parallel)
    models = models_by_ranks(args)
    if min(*sizes, *models) < 1:
        return
    for ranks, names in models.items():
        if ranks % model_parallel:
            problem = f"{ranks} ranks are not divided by --ds.ring_attn_size x --ds.tensor_parallel_size"
            yield Finding.of(args, f"{names[0]}.num_gpus_per_node", problem, f"give a multiple of {model_parallel}")
        elif not is_dynamic:
            data_parallel, micro_batch = ranks // model_parallel, args.train.micro_batch_size
            if batch % (micro_batch * data_parallel):  # which DeepSpeed asserts of each model when it starts
                of_names = f"{data_parallel} data-parallel ranks of {', '.join(names)}"
                problem = f"is not divided by --train.micro_batch_size {micro_batch} x {of_names}"
                remedy = f"give a multiple of {micro_batch * data_parallel}"
                yield Finding.of(args, "train.batch_size", problem, remedy)
            yield from _check_rollout(args, update, names, data_parallel)
    if samples % batch and not update.takes_whole_steps:
        # Gradients of the rest are carried over to the next rollout batch.
        problem = f"does not divide the rollout batch of {samples} samples, so steps mix two rollout batches"
        yield Finding.of(args, "train.batch_size", problem, f"give a divisor of {samples}", is_fatal=False)
    if is_dynamic and args.ds.zero_stage == 2 and not update.takes_whole_steps:
        # OpenRLHF tells DeepSpeed that each micro-batch is a step, so the next one clears its gradients.
        problem = "with --train.dynamic_batch_enable, an optimizer step has the gradient of its last micro-batch alone"
        remedy = "give --ds.zero_stage 3, or --actor.update selective"
        yield Finding.of(args, "ds.zero_stage", problem, remedy, is_fatal=False)


def models_by_ranks(args: SimpleNamespace) -> dict[int, list[str]]:
    """Return the models that the run loads with DeepSpeed, by their number of ranks."""
    is_loaded = {
        "actor": True,
        "ref": loads_reference(args),
        "critic": args.critic.model_name_or_path,
        "reward": not args.reward.remote_url,
    }
    by_ranks: dict[int, list[str]] = {}
    for name in filter(is_loaded.get, is_loaded):
        group = vars(args)[name]
        by_ranks.setdefault(group.num_nodes * group.num_gpus_per_node, []).append(name)
    return by_ranks


def _check_rollout(args: SimpleNamespace, update: Update, names: list[str], ranks: int) -> Iterator[Finding]:
    """Check how `RayActorGroup.async_run_method_batch` divides a rollout batch's micro-batches among the ranks."""
    samples, size = rollout_samples(args), args.rollout.micro_batch_size
    chunk = size * math.ceil(math.ceil(samples / size) / ranks)
    of_ranks = [max(0, min(chunk, samples - rank * chunk)) for rank in range(ranks)]
    if len(set(of_ranks)) == 1:
        return
    shares = f"from {min(of_ranks)} to {max(of_ranks)} of the {samples} samples of a rollout batch"
    problem = f"{ranks} ranks of {', '.join(names)} get {shares}"
    multiple = f"--rollout.micro_batch_size x {ranks}"
    remedy = f"let --rollout.batch_size x --rollout.n_samples_per_prompt be a multiple of {multiple}"
    # Stock ranks with unequal numbers of steps never stop waiting for each other. Whole steps leave samples out.
    trains = "critic" in names or ("actor" in names and not update.takes_whole_steps)
    yield Finding.of(args, "rollout.micro_batch_size", problem, remedy, is_fatal=trains or not min(of_ranks))
