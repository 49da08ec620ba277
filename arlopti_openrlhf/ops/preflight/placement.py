"""Checks how the run is divided: among clusters and GPUs, and samples among ranks and steps."""

import math
import os
import socket
from collections.abc import Iterator
from operator import attrgetter
from types import SimpleNamespace
from urllib.parse import urlsplit

from arlopti_openrlhf.ops.preflight.finding import Finding, Update
from arlopti_openrlhf.ops.preflight.values import loads_reference, rollout_samples
from arlopti_openrlhf.ray_address import starts_cluster

_ANSWER_SECONDS = 3.0  # that a cluster gets


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what cannot be placed, and of which Ray or NCCL would say nothing, or nothing that names a flag."""
    train = args.train
    if train.colocate_all and not train.colocate_critic_reward:
        has = {"critic": args.critic.model_name_or_path, "reward": not args.reward.remote_url}
        for name in filter(has.get, has):
            if gpus_of(args, name) > (actor := gpus_of(args, "actor")):
                problem = f"with --train.colocate_all, it has {gpus_of(args, name)} ranks on the actor's GPUs"
                yield Finding.of(args, f"{name}.num_gpus_per_node", problem, f"give {actor} at most")
    yield from _check_shared_groups(args)
    from arlopti_openrlhf import cpu  # imports PyTorch
    from arlopti_openrlhf.cpu import refusals

    if not starts_cluster():
        return  # another cluster's policy says it itself
    for flag, value, problem, remedy in refusals.problems(args, syncs=True):
        remedy += ", or start it on a machine with a GPU"  # as a dry run on a login node may mean
        yield Finding(f"--{flag}", value, problem, remedy, is_fatal=not args.dry_run)
    if cpu.uses_cpu():
        return  # it counts as many GPUs as are asked for
    import torch

    gpus, requested = torch.cuda.device_count(), gpus_placed(args)
    if requested > gpus:
        problem = f"the run asks for {requested} GPUs, and this machine has {gpus}: Ray would wait forever"
        remedy = "ask for fewer, share them by --train.colocate_all, or name a cluster in RAY_ADDRESS"
        yield Finding.of(args, "actor.num_gpus_per_node", problem, remedy)
    shares = train.colocate_all and not train.async_enable and not args.vllm.sync_with_ray
    if args.vllm.sync_backend != "nccl" and shares:
        problem = "OpenRLHF then joins policy and vLLM by NCCL, which refuses two ranks on one GPU"
        remedy = "give nccl: with --train.colocate_all the weights stay within the GPU"
        yield Finding.of(args, "vllm.sync_backend", problem, remedy)


def _check_shared_groups(args: SimpleNamespace) -> Iterator[Finding]:
    """Report models that share GPUs and are not on equally many, which OpenRLHF refuses after Ray has started."""
    train, engines = args.train, (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    if (train.colocate_all or train.colocate_actor_ref) and args.algo.kl.init_coef > 0:
        yield from _check_equal(args, "ref", "actor")
    if train.colocate_critic_reward and args.critic.model_name_or_path:
        yield from _check_equal(args, "reward", "critic")
    if train.colocate_all and not train.async_enable and engines != gpus_of(args, "actor"):
        problem = f"the engines have {engines} GPUs, and with --train.colocate_all they share the actor's"
        remedy = f"let it be {gpus_of(args, 'actor')}, times --vllm.tensor_parallel_size"
        yield Finding.of(args, "vllm.num_engines", problem, remedy)


def _check_equal(args: SimpleNamespace, name: str, other: str) -> Iterator[Finding]:
    for flag in ("num_nodes", "num_gpus_per_node"):
        wanted = attrgetter(f"{other}.{flag}")(args)
        if attrgetter(f"{name}.{flag}")(args) != wanted:
            problem = f"it shares GPUs with the {other}, which has --{other}.{flag} {wanted}"
            yield Finding.of(args, f"{name}.{flag}", problem, f"give {wanted}")


def gpus_placed(args: SimpleNamespace) -> int:
    """Return how many GPUs a run asks Ray for with these arguments."""
    actor, engines = gpus_of(args, "actor"), (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    if args.train.colocate_all:
        # OpenRLHF places a critic that shares a reward model's GPUs beside all others even so.
        critic = gpus_of(args, "critic") if args.critic.model_name_or_path and args.train.colocate_critic_reward else 0
        return actor + critic + (engines if args.train.async_enable else 0)
    reference = gpus_of(args, "ref") if loads_reference(args) and not args.train.colocate_actor_ref else 0
    critic = gpus_of(args, "critic") if args.algo.advantage.estimator == "gae" else 0
    shares = args.train.colocate_critic_reward and critic
    asks_model = not (args.reward.remote_url or args.train.agent_func_path)
    return max(1, engines + actor + reference + critic + (gpus_of(args, "reward") if asks_model and not shares else 0))


def gpus_of(args: SimpleNamespace, name: str) -> int:
    group = vars(args)[name]
    return group.num_nodes * group.num_gpus_per_node


def check_cluster(args: SimpleNamespace) -> Iterator[Finding]:
    """Refuse a cluster that RAY_ADDRESS names and that does not answer.

    Without RAY_ADDRESS, refuse to start where a cluster already runs. `ray.init()` would silently join it.
    """
    from ray._private.utils import read_ray_address  # the import of Ray takes half a second

    named = os.environ.get("RAY_ADDRESS")
    address = named or read_ray_address()
    if address in (None, "", "auto", "local"):
        return
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        socket.create_connection((parts.hostname or "", parts.port or 10001), _ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        if named:  # and not one of `ray start` that has ended
            remedy = "start the cluster, correct the address, or unset RAY_ADDRESS to run on this machine alone"
            yield Finding("RAY_ADDRESS", address, f"no Ray cluster answers there ({error})", remedy)
        return
    if not named:
        problem = f"a Ray cluster runs on this machine, at {address}"
        remedy = f"RAY_ADDRESS={address} joins it, RAY_ADDRESS=local starts one for this run alone"
        yield Finding("", "", problem, remedy)


def check_batches(args: SimpleNamespace, update: Update) -> Iterator[Finding]:
    """Yield what OpenRLHF divides so that ranks wait for each other, or that something is left out of a step."""
    samples, batch, is_dynamic = rollout_samples(args), args.train.batch_size, args.train.dynamic_batch_enable
    model_parallel = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    for ranks, names in models_by_ranks(args).items():
        if ranks % model_parallel:  # where DeepSpeed ends without a message
            problem = f"{ranks} ranks are not divided by --ds.ring_attn_size x --ds.tensor_parallel_size"
            yield Finding.of(args, f"{names[0]}.num_gpus_per_node", problem, f"give a multiple of {model_parallel}")
        elif ranks:
            yield from _check_deepspeed(args, names, ranks // model_parallel)
            if not is_dynamic:
                yield from _check_shares(args, update, names, ranks // model_parallel)
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
        by_ranks.setdefault(gpus_of(args, name), []).append(name)
    return by_ranks


def least_shared(args: SimpleNamespace) -> int:
    """Return the least number of samples, of whole prompts, that the ranks of each model can share equally."""
    model_parallel = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    shares = (ranks // model_parallel for ranks in models_by_ranks(args) if ranks)
    return math.lcm(args.rollout.n_samples_per_prompt, *shares)


def _check_deepspeed(args: SimpleNamespace, names: list[str], ranks: int) -> Iterator[Finding]:
    """Report a batch that DeepSpeed cannot divide. Under dynamic batches it divides those of frozen models alone."""
    if args.train.dynamic_batch_enable:
        names = [name for name in names if name not in ("actor", "critic")]
    if names and args.train.batch_size % (args.train.micro_batch_size * ranks):
        problem = f"DeepSpeed divides it into micro-batches of {args.train.micro_batch_size} on {ranks} ranks of "
        remedy = f"give a multiple of {args.train.micro_batch_size * ranks}, or change --train.micro_batch_size"
        yield Finding.of(args, "train.batch_size", problem + ", ".join(names), remedy)


def _check_shares(args: SimpleNamespace, update: Update, names: list[str], ranks: int) -> Iterator[Finding]:
    """Check how the samples of a rollout batch are divided among the ranks (`experience_maker.divide`)."""
    samples, trained = rollout_samples(args), {"actor", "critic"}.intersection(names)
    least = samples // ranks
    if samples % ranks == 0 or (least and not trained):
        return
    problem = f"{ranks} ranks of {', '.join(names)} get from {least} to {least + 1} of a rollout batch's samples"
    remedy = f"let {samples} be a multiple of {ranks}: it is --rollout.batch_size x --rollout.n_samples_per_prompt"
    # Stock ranks with unequal numbers of steps never stop waiting for each other. Whole steps leave samples out.
    trains = "critic" in names or ("actor" in names and not update.takes_whole_steps)
    yield Finding.of(args, "rollout.batch_size", problem, remedy, is_fatal=trains or not least)
