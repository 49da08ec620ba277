"""Checks how the run is divided: among clusters and GPUs, and samples among ranks, micro-batches and steps."""

import math
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from urllib.parse import urlsplit

from arlopti_openrlhf.ops.preflight.finding import Finding, Update
from arlopti_openrlhf.ops.preflight.values import loads_reference, rollout_samples
from arlopti_openrlhf.ray_address import starts_cluster

_ANSWER_SECONDS = 3.0  # that a cluster gets


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what cannot be placed. The first part is upstream's, which asserts it after Ray has started."""
    train, actor, engines = args.train, _gpus(args, "actor"), _gpus_of_engines(args)
    if train.colocate_all and not train.async_enable and engines and engines != actor:
        product = f"engines x --vllm.tensor_parallel_size {args.vllm.tensor_parallel_size}"
        problem = f"with --train.colocate_all, {product} take {engines} GPUs, and the actor has {actor}"
        remedy = "let both be equal (--actor.num_nodes x --actor.num_gpus_per_node), or leave --train.colocate_all out"
        yield Finding.of(args, "vllm.num_engines", problem, remedy)
    shares, shape = train.colocate_all or train.colocate_actor_ref, _shape(args, "ref")
    if shares and args.algo.kl.init_coef > 0 and _shape(args, "actor") != shape:
        flag = "--train.colocate_all" if train.colocate_all else "--train.colocate_actor_ref"
        problem = f"with {flag}, the reference model ({shape}) has to be placed as the actor"
        remedy = f"give it --actor.num_nodes x --actor.num_gpus_per_node = {_shape(args, 'actor')}"
        yield Finding.of(args, "ref.num_gpus_per_node", problem, remedy)
    has_critic, shape = bool(args.critic.model_name_or_path), _shape(args, "critic")
    if has_critic and train.colocate_critic_reward and shape != _shape(args, "reward"):
        reward = f"reward model ({_shape(args, 'reward')})"
        problem = f"with --train.colocate_critic_reward, critic and {reward} are placed alike"
        remedy = f"give --reward.num_nodes x --reward.num_gpus_per_node = {shape}"
        yield Finding.of(args, "critic.num_gpus_per_node", problem, remedy)
    elif train.colocate_all and not train.colocate_critic_reward:
        for name in (["critic"] if has_critic else []) + ([] if args.reward.remote_url else ["reward"]):
            if _gpus(args, name) > actor:
                problem = f"with --train.colocate_all, it has {_gpus(args, name)} ranks on the actor's GPUs"
                yield Finding.of(args, f"{name}.num_gpus_per_node", problem, f"give {actor} at most")
    if starts_cluster():
        yield from _check_machine(args)


def gpus_placed(args: SimpleNamespace) -> int:
    """Return how many GPUs a run asks Ray for with these arguments."""
    actor, engines = _gpus(args, "actor"), _gpus_of_engines(args)
    if args.train.colocate_all:
        # OpenRLHF places a critic that shares a reward model's GPUs beside all others even so.
        critic = _gpus(args, "critic") if args.critic.model_name_or_path and args.train.colocate_critic_reward else 0
        return actor + critic + (engines if args.train.async_enable else 0)
    reference = _gpus(args, "ref") if loads_reference(args) and not args.train.colocate_actor_ref else 0
    critic = _gpus(args, "critic") if args.algo.advantage.estimator == "gae" else 0
    shares = args.train.colocate_critic_reward and critic
    asks_model = not (args.reward.remote_url or args.train.agent_func_path)
    return max(1, engines + actor + reference + critic + (_gpus(args, "reward") if asks_model and not shares else 0))


def _gpus(args: SimpleNamespace, name: str) -> int:
    group = vars(args)[name]
    return group.num_nodes * group.num_gpus_per_node


def _gpus_of_engines(args: SimpleNamespace) -> int:
    return (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size


def _shape(args: SimpleNamespace, name: str) -> str:
    group = vars(args)[name]
    return f"{group.num_nodes} x {group.num_gpus_per_node}"


def _check_machine(args: SimpleNamespace) -> Iterator[Finding]:
    """Check this machine, on which a cluster of the run's own would place it. Another's policy says so itself."""
    import torch

    from arlopti_openrlhf import cpu

    if not cpu.uses_cpu():
        gpus, requested = torch.cuda.device_count(), gpus_placed(args)
        if requested > gpus:
            problem = f"the run asks for {requested} GPUs, and this machine has {gpus}: Ray would wait forever"
            remedy = "ask for fewer, share them by --train.colocate_all, or name a cluster in RAY_ADDRESS"
            yield Finding.of(args, "actor.num_gpus_per_node", problem, remedy)
        shares = args.train.colocate_all and not args.train.async_enable and not args.vllm.sync_with_ray
        if args.vllm.sync_backend != "nccl" and shares:
            problem = "OpenRLHF then joins policy and vLLM by NCCL, which refuses two ranks on one GPU"
            remedy = "give nccl: with --train.colocate_all the weights stay within the GPU"
            yield Finding.of(args, "vllm.sync_backend", problem, remedy)
        return
    if args.vllm.sync_backend != "gloo":
        problem = "there is no CUDA device on this machine, and weights travel between CPUs by gloo"
        yield Finding.of(args, "vllm.sync_backend", problem, "give gloo")
    if args.ds.attn_implementation == "flex_attention":
        problem = "there is no CUDA device on this machine, and FlexAttention has no backward pass on a CPU"
        yield Finding.of(args, "ds.attn_implementation", problem, "give sdpa")
    if args.ds.use_liger_kernel:
        problem = "there is no CUDA device on this machine, and Liger's kernels run on a GPU only"
        yield Finding.of(args, "ds.use_liger_kernel", problem, "leave the flag out")


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
    """Yield what does not divide as OpenRLHF and DeepSpeed ask. Sizes below 1 are for `values` to find."""
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
            yield from _check_shares(args, update, names, data_parallel)
    if samples > 0 and samples % batch and not update.takes_whole_steps:
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
        by_ranks.setdefault(_gpus(args, name), []).append(name)
    return by_ranks


def _check_shares(args: SimpleNamespace, update: Update, names: list[str], ranks: int) -> Iterator[Finding]:
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
