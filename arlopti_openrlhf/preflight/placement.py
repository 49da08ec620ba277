"""Checks what the run asks of the GPUs against the GPUs that are there."""

from types import SimpleNamespace


def gpus_placed(args: SimpleNamespace) -> int:
    """Return how many GPUs upstream's `train` asks Ray for with these arguments."""

    def group(name: str) -> int:
        return vars(args)[name].num_nodes * vars(args)[name].num_gpus_per_node

    engines = (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size
    reference = group("ref") if args.algo.kl.init_coef > 0 else 0
    critic = group("critic") if args.algo.advantage.estimator == "gae" else 0
    reward = 0 if args.reward.remote_url or args.train.agent_func_path else group("reward")
    if args.train.colocate_all:
        return group("actor") + (engines if args.train.async_enable else 0)
    if args.train.colocate_actor_ref:
        reference = 0
    if args.train.colocate_critic_reward and critic:
        reward = 0
    return max(1, engines + group("actor") + reference + critic + reward)
