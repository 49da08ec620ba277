"""The flags of a run that survives faults: pre-flight, limits on waiting, checkpoints, alarms."""

import argparse

from arlopti_openrlhf.cli.arguments import integer, number, positive


def add_fault_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to OpenRLHF's parser."""
    group = parser.add_argument_group("faults")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Check everything that can be checked beforehand, list all findings and exit: status 0 where the run can "
        "start, 2 where it cannot. Nothing is started.",
    )
    group.add_argument(
        "--train.deterministic",
        action="store_true",
        help="Samples enter the batch by prompt, each request to vLLM has its own seed, and each engine starts on its "
        "whole list at once. On the CPU of one machine, two runs of one seed are then equal bit for bit, and so is a "
        "run that is resumed. On GPUs the order and the seeds hold, but kernels may differ in the last bits. Not with "
        "--train.async_enable or --train.agent_func_path.",
    )
    group.add_argument(
        "--train.stall_minutes",
        type=number("(0, 10080]"),
        default=10.0,
        metavar="FLOAT",
        help="The run stops with its cause (exit status 4) when a part of it gives no sign of life for so long, or "
        "when none makes progress: no module computed, no token generated, nothing read or written, no call finished "
        "(default: 10, a week at most).",
    )
    group.add_argument(
        "--train.max_bad_steps",
        type=integer(1),
        default=3,
        metavar="INT",
        help="A step whose loss or gradient is not finite is refused. After so many in a row the run stops "
        "(exit status 3), with the last good checkpoint and without a final model (default: 3).",
    )
    group.add_argument(
        "--ckpt.load_changed",
        action="store_true",
        help="Resume although what a place in the prompts or in the learning rate's schedule counts in has changed: "
        "batch sizes, samples per prompt, epochs, the seed, Lopti's passes, or the prompts. Without it such a run is "
        "refused (exit status 2).",
    )
    group.add_argument(
        "--ckpt.save_minutes",
        type=positive(float),
        metavar="FLOAT",
        help="Save a checkpoint after the first step that ends so many minutes after the last one, beside "
        "--ckpt.save_steps. Off by default.",
    )
    group.add_argument(
        "--reward.timeout_seconds",
        type=number("(0, 604800]"),
        default=300.0,
        metavar="FLOAT",
        help="Wall-clock limit of one call of a reward function. A call that takes longer is ended, and the run stops "
        "with its query (default: 300; a week at most).",
    )
    group.add_argument(
        "--alarm.flat_reward_steps",
        type=integer(1),
        default=20,
        metavar="INT",
        help="Alarm after so many steps in a row without a reward above the lowest one (default: 20).",
    )
    group.add_argument(
        "--alarm.grad_norm_factor",
        type=number("(1, inf)"),
        default=10.0,
        metavar="FLOAT",
        help="Alarm where the gradient norm exceeds so many times its median over the last 100 steps (default: 10).",
    )
    group.add_argument(
        "--alarm.rollout_gap",
        type=positive(float),
        default=0.1,
        metavar="FLOAT",
        help="Alarm where the mean |log-prob| difference between vLLM and the actor exceeds this, in nats "
        "(default: 0.1).",
    )
