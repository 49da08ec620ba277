"""Checks that samples, micro-batches, optimizer steps and ranks divide each other as OpenRLHF and DeepSpeed ask."""

from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight.combinations import (
    loads_reference,
    rollout_samples,
    takes_whole_steps,
    trains_in_passes,
)
from arlopti_openrlhf.ops.preflight.finding import Finding


def check(args: SimpleNamespace) -> list[Finding]:
    """Return what does not divide. Sizes below 1 are for `values` to find."""
    sizes = (args.train.batch_size, args.train.micro_batch_size, args.rollout.micro_batch_size, rollout_samples(args))
    model_parallel = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    models = models_by_ranks(args)
    if min(*sizes, model_parallel, *models) < 1:
        return []
    findings = []
    for ranks, names in models.items():
        if ranks % model_parallel:
            problem = f"{ranks} ranks are not divided by --ds.ring_attn_size x --ds.tensor_parallel_size"
            gpus = vars(args)[names[0]].num_gpus_per_node
            findings.append(Finding(f"--{names[0]}.num_gpus_per_node", gpus, problem, _multiple(model_parallel)))
        elif not args.train.dynamic_batch_enable:
            findings += _check_step(args, names, ranks // model_parallel)
            findings += _check_rollout(args, names, ranks // model_parallel)
    return findings + _check_rest(args) + _check_dynamic(args)


def models_by_ranks(args: SimpleNamespace) -> dict[int, list[str]]:
    """Return the models that the run loads with DeepSpeed, by their number of ranks."""
    names = ["actor"]
    if loads_reference(args):
        names.append("ref")
    if args.critic.model_name_or_path:
        names.append("critic")
    if not args.reward.remote_url:
        names.append("reward")
    by_ranks: dict[int, list[str]] = {}
    for name in names:
        group = vars(args)[name]
        by_ranks.setdefault(group.num_nodes * group.num_gpus_per_node, []).append(name)
    return by_ranks


def _multiple(of: int) -> str:
    return f"give a multiple of {of}"


def _check_step(args: SimpleNamespace, names: list[str], ranks: int) -> list[Finding]:
    """Check what DeepSpeed asserts of each model when it starts."""
    batch, micro_batch = args.train.batch_size, args.train.micro_batch_size
    if batch % (micro_batch * ranks) == 0:
        return []
    problem = (
        f"is not divided by --train.micro_batch_size {micro_batch} x {ranks} data-parallel ranks of {', '.join(names)}"
    )
    return [Finding("--train.batch_size", batch, problem, _multiple(micro_batch * ranks))]


def _check_rollout(args: SimpleNamespace, names: list[str], ranks: int) -> list[Finding]:
    """Check how `RayActorGroup.async_run_method_batch` divides a rollout batch's micro-batches among the ranks."""
    samples, size = rollout_samples(args), args.rollout.micro_batch_size
    micro_batches = [min(size, samples - start) for start in range(0, samples, size)]
    chunk = -(-len(micro_batches) // ranks)
    of_ranks = [sum(micro_batches[i * chunk : (i + 1) * chunk]) for i in range(ranks)]
    if len(set(of_ranks)) == 1:
        return []
    problem = (
        f"{ranks} ranks of {', '.join(names)} get from {min(of_ranks)} to {max(of_ranks)} of the {samples} samples of "
        "a rollout batch"
    )
    multiple = f"--rollout.micro_batch_size x {ranks}"
    remedy = f"let --rollout.batch_size x --rollout.n_samples_per_prompt be a multiple of {multiple}"
    # Stock ranks with unequal numbers of steps wait for each other for ever. Ours leave samples out, and say so.
    is_stock = not trains_in_passes(args)
    trains = "critic" in names or ("actor" in names and is_stock)
    return [Finding("--rollout.micro_batch_size", size, problem, remedy, is_fatal=trains or not min(of_ranks))]


def _check_rest(args: SimpleNamespace) -> list[Finding]:
    """Say that gradients are carried over from one rollout batch to the next, or that AR leaves samples out."""
    samples, batch = rollout_samples(args), args.train.batch_size
    if samples % batch == 0 or takes_whole_steps(args):
        return []
    effect = "some of them are left out" if trains_in_passes(args) else "steps mix two rollout batches"
    problem = f"does not divide the rollout batch of {samples} samples, so that {effect}"
    return [Finding("--train.batch_size", batch, problem, f"give a divisor of {samples}", is_fatal=False)]


def _check_dynamic(args: SimpleNamespace) -> list[Finding]:
    """Say what ZeRO-2 loses. OpenRLHF tells DeepSpeed that each micro-batch is a step, so its gradients start anew.

    Our passes tell it where a mini-batch ends.
    """
    if not args.train.dynamic_batch_enable or args.ds.zero_stage != 2 or trains_in_passes(args):
        return []
    problem = "with --train.dynamic_batch_enable, each optimizer step has the gradient of its last micro-batch alone"
    return [
        Finding("--ds.zero_stage", 2, problem, "give --ds.zero_stage 3, or --actor.update selective", is_fatal=False)
    ]
