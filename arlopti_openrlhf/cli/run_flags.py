"""The flags of what surrounds the update: rewards, evaluation, statistics."""

import argparse

from arlopti_openrlhf.cli.arguments import number
from arlopti_openrlhf.evaluation.sampling import parse_sampling


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to OpenRLHF's parser, and say what more `--reward.remote_url` takes."""
    for action in parser._actions:
        if action.dest == "reward.remote_url":
            action.metavar = "kk|math|PATH.py|URL,..."
            action.help = (
                "The source of rewards: kk or math for the package's own, a Python file with reward_func(queries, "
                "prompts, labels), or the URLs of reward servers, which take turns. A password or token in a URL is "
                "shown nowhere; ${NAME} there stands for an environment variable."
            )
        if action.dest == "logger.wandb.key":
            action.help = "WANDB_API_KEY for the key in that environment variable, or the key, which is shown nowhere."
    parser.add_argument(
        "--logger.probability_stats",
        choices=["bins", "quartiles", "off"],
        default="bins",
        help="Log statistics of each update's tokens to wandb and TensorBoard, by probability in bins of 0.25 "
        "(default) or by quartile of the rollout batch.",
    )
    parser.add_argument(
        "--logger.console",
        choices=["auto", "progress", "all"],
        default="auto",
        help="What the run shows. progress: one line that says how far it is, with the output of Ray, vLLM and "
        "DeepSpeed in train.log in --ckpt.path. all: everything. auto (default): progress on a terminal, else all.",
    )
    parser.add_argument(
        "--reward.retry_minutes",
        type=number("[0, inf]"),
        default=10.0,
        metavar="FLOAT",
        help="How long a sample waits for a reward server that does not answer before the run stops (default: 10).",
    )
    parser.add_argument(
        "--eval.sampling",
        action="append",
        type=parse_sampling,
        default=[],
        metavar="PATTERN:n=N,t=T",
        help="Samples per problem and temperature for the data sources that match, as in aime:n=16,t=1. The last "
        "match counts. Default: --eval.n_samples_per_prompt and --eval.temperature.",
    )
