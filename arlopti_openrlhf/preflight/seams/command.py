"""What the training command leans on."""

from arlopti_openrlhf.preflight.seams.kinds import Seam, Signature, Text

COMMAND = "openrlhf.cli.train_ppo_ray"

SEAMS: list[Seam] = [
    Signature(
        "openrlhf.utils.config", "hierarchize", "args", "cli.train_ppo_ray: our flags reach workers as strategy.args"
    ),
    Text(COMMAND, "", 'if __name__ == "__main__":', "cli.train_ppo_ray.main"),
    Text(COMMAND, "", "parser = argparse.ArgumentParser()", "cli.train_ppo_ray._our_parser"),
    Text(COMMAND, "", "args = parser.parse_args()", "cli.train_ppo_ray._our_parser"),
    Text(COMMAND, "", "args = hierarchize(args)", "cli.train_ppo_ray"),
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
        "cli.train_ppo_ray._check_reward_source",
    ),
]
