"""Checks what the run asks of GPUs against what goes together, and against the GPUs that are there."""

from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight.clusters import starts_cluster
from arlopti_openrlhf.ops.preflight.combinations import loads_reference
from arlopti_openrlhf.ops.preflight.finding import Finding


def check(args: SimpleNamespace) -> list[Finding]:
    """Return what cannot be placed. The first part is upstream's, which asserts it after Ray has started."""
    findings = [*_check_actor_and_engines(args), *_check_reference(args), *_check_critic(args)]
    return findings + (_check_machine(args) if starts_cluster() else [])


def gpus_placed(args: SimpleNamespace) -> int:
    """Return how many GPUs a run asks Ray for with these arguments."""
    engines = (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    reference = _gpus(args, "ref") if loads_reference(args) else 0
    critic = _gpus(args, "critic") if args.algo.advantage.estimator == "gae" else 0
    reward = 0 if args.reward.remote_url or args.train.agent_func_path else _gpus(args, "reward")
    if args.train.colocate_all:
        return _gpus(args, "actor") + (engines if args.train.async_enable else 0)
    if args.train.colocate_actor_ref:
        reference = 0
    if args.train.colocate_critic_reward and critic:
        reward = 0
    return max(1, engines + _gpus(args, "actor") + reference + critic + reward)


def _gpus(args: SimpleNamespace, name: str) -> int:
    group = vars(args)[name]
    return group.num_nodes * group.num_gpus_per_node


def _shape(args: SimpleNamespace, name: str) -> str:
    group = vars(args)[name]
    return f"{group.num_nodes} x {group.num_gpus_per_node}"


def _check_actor_and_engines(args: SimpleNamespace) -> list[Finding]:
    engines = (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    if not args.train.colocate_all or args.train.async_enable or not engines or engines == _gpus(args, "actor"):
        return []
    problem = (
        f"with --train.colocate_all, engines x --vllm.tensor_parallel_size {args.vllm.tensor_parallel_size} take "
        f"{engines} GPUs, and the actor has {_gpus(args, 'actor')}"
    )
    remedy = "let both be equal (--actor.num_nodes x --actor.num_gpus_per_node), or leave --train.colocate_all out"
    return [Finding("--vllm.num_engines", args.vllm.num_engines, problem, remedy)]


def _check_reference(args: SimpleNamespace) -> list[Finding]:
    shares = args.train.colocate_all or args.train.colocate_actor_ref
    if not shares or args.algo.kl.init_coef <= 0 or _shape(args, "actor") == _shape(args, "ref"):
        return []
    flag = "--train.colocate_all" if args.train.colocate_all else "--train.colocate_actor_ref"
    problem = f"with {flag}, the reference model ({_shape(args, 'ref')}) has to be placed as the actor"
    remedy = f"give it --actor.num_nodes x --actor.num_gpus_per_node = {_shape(args, 'actor')}"
    return [Finding("--ref.num_gpus_per_node", args.ref.num_gpus_per_node, problem, remedy)]


def _check_critic(args: SimpleNamespace) -> list[Finding]:
    """Check the models that share GPUs with the critic, or with the actor beside it."""
    findings = []
    has_critic = bool(args.critic.model_name_or_path)
    if has_critic and args.train.colocate_critic_reward and _shape(args, "critic") != _shape(args, "reward"):
        problem = (
            f"with --train.colocate_critic_reward, critic and reward model ({_shape(args, 'reward')}) are placed alike"
        )
        remedy = f"give --reward.num_nodes x --reward.num_gpus_per_node = {_shape(args, 'critic')}"
        findings.append(Finding("--critic.num_gpus_per_node", args.critic.num_gpus_per_node, problem, remedy))
    elif args.train.colocate_all and not args.train.colocate_critic_reward:
        for name in (["critic"] if has_critic else []) + ([] if args.reward.remote_url else ["reward"]):
            if _gpus(args, name) > _gpus(args, "actor"):
                problem = f"with --train.colocate_all, it has {_gpus(args, name)} ranks on the actor's GPUs"
                remedy = f"give {_gpus(args, 'actor')} at most"
                gpus = vars(args)[name].num_gpus_per_node
                findings.append(Finding(f"--{name}.num_gpus_per_node", gpus, problem, remedy))
    return findings


def _check_machine(args: SimpleNamespace) -> list[Finding]:
    """Check this machine's GPUs, on which a cluster of the run's own would place it."""
    import torch

    from arlopti_openrlhf import cpu

    if cpu.uses_cpu():
        return _check_cpu(args)
    there, asked = torch.cuda.device_count(), gpus_placed(args)
    if asked <= there:
        return []
    problem = f"the run asks for {asked} GPUs, and this machine has {there}: Ray would wait for more for ever"
    remedy = "ask for fewer, share them by --train.colocate_all, or name a cluster in RAY_ADDRESS"
    return [Finding("--actor.num_gpus_per_node", args.actor.num_gpus_per_node, problem, remedy)]


def _check_cpu(args: SimpleNamespace) -> list[Finding]:
    """Check what a machine without a GPU cannot do. Another machine's policy says so itself, when it starts."""
    findings = []
    backend, attention = args.vllm.sync_backend, args.ds.attn_implementation
    if backend != "gloo":
        problem = "there is no CUDA device on this machine, and weights travel between CPUs by gloo"
        findings.append(Finding("--vllm.sync_backend", backend, problem, "give gloo"))
    if attention == "flex_attention":
        problem = "there is no CUDA device on this machine, and FlexAttention has no backward pass on a CPU"
        findings.append(Finding("--ds.attn_implementation", attention, problem, "give sdpa"))
    return findings
