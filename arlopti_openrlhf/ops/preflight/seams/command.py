"""What the training command leans on."""

from arlopti_openrlhf.ops.preflight.seams.kinds import Seam, Signature, Text

COMMAND = "openrlhf.cli.train_ppo_ray"

# The command's statements run from its source, in `cli.command_line`.
SEAMS: list[Seam] = [
    Signature("openrlhf.utils.config", "hierarchize", "args", "cli.command_line.hierarchize"),
    Text("openrlhf.utils.config", "", "from types import SimpleNamespace", "cli.command_line.hierarchize"),
    Signature(COMMAND, "train", "args", "cli.train_ppo_ray.train"),
    Text(COMMAND, "", 'if __name__ == "__main__":', "cli.command_line._block"),
    Text(COMMAND, "", "parser = argparse.ArgumentParser()", "cli.command_line.parse"),
    Text(COMMAND, "", "args = parser.parse_args()", "cli.command_line._block"),
    Text(
        COMMAND,
        "",
        "from openrlhf.utils.config import hierarchize args = hierarchize(args)",
        "cli.command_line.check: provides it, and flags reach workers as strategy.args",
    ),
    Text(
        COMMAND,
        "train",
        "remote_rm_url=args.reward.remote_url,",
        "cli.train_ppo_ray: kk and math reach the engines as they are",
    ),
    Text(
        COMMAND,
        "",
        'args.reward.remote_url = args.reward.remote_url.split(",")',
        "ops.preflight.combinations._check_reward_source",
    ),
    # What is asked of the GPUs, and of the samples.
    Text(
        COMMAND,
        "train",
        "args.actor.num_nodes * args.actor.num_gpus_per_node "
        "== args.vllm.num_engines * args.vllm.tensor_parallel_size",
        "ops.preflight.placement.check: says it before Ray starts",
    ),
    Text(
        COMMAND,
        "train",
        "args.actor.num_nodes == args.ref.num_nodes and args.actor.num_gpus_per_node == args.ref.num_gpus_per_node",
        "ops.preflight.placement.check: says it before Ray starts",
    ),
    Text(
        COMMAND,
        "train",
        "args.critic.num_nodes == args.reward.num_nodes "
        "and args.critic.num_gpus_per_node == args.reward.num_gpus_per_node",
        "ops.preflight.placement.check: says it before Ray starts",
    ),
    Text(
        "openrlhf.trainer.ray.launcher",
        "RayActorGroup._initiate_actors",
        "placement_group_bundle_index=rank",
        "ops.preflight.placement.check: a model has no more ranks than its group has GPUs",
    ),
    Text(
        "openrlhf.trainer.ray.launcher",
        "RayActorGroup.async_run_method_batch",
        "chunk_size = total_length // effective_actors if total_length % effective_actors != 0: chunk_size += 1",
        "ops.preflight.batches.check",
    ),
    Text(
        "openrlhf.utils.deepspeed.deepspeed",
        "",
        'ds_config["train_batch_size"] = self.train_batch_size * self.ring_attn_size * self.ds_tensor_parallel_size',
        "ops.preflight.batches.check",
    ),
]
