"""Runs OpenRLHF's `train_ppo_ray` with AR and Lopti: its own command line as it is, with our flags in its parser.

python -m arlopti_openrlhf.cli.train_ppo_ray [OpenRLHF's flags] --algo.ar.alpha 0.3 --algo.lopti.eta 0.5
"""

import argparse
import importlib.metadata
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from arlopti_openrlhf import cpu
from arlopti_openrlhf.cli.arguments import number
from arlopti_openrlhf.cli.fault_flags import add_fault_flags
from arlopti_openrlhf.grading.reward_files import REWARD_FILES
from arlopti_openrlhf.scoring.sampling import Sampling, parse_sampling

UPSTREAM = "openrlhf.cli.train_ppo_ray"
SUPPORTED = "0.11.2"


def main() -> None:
    _check_version()
    cpu.enable(driver=True)
    # These import openrlhf, which needs enable() first where CUDA or flash-attn is missing.
    from arlopti_openrlhf.run import checkpoints, controller, evaluation, reward_client
    from arlopti_openrlhf.update import policy_actor

    policy_actor.install()

    def install(args: argparse.Namespace) -> None:
        if _is_selective(args):
            policy_actor.install_selective_actor()
        reward_client.install(vars(args)["reward.retry_minutes"])
        evaluation.install(vars(args)["eval.sampling"])
        controller.install()
        checkpoints.install()

    with _our_parser(install):
        runpy.run_module(UPSTREAM, run_name="__main__", alter_sys=True)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse `argv` with the command's real parser and return its flat namespace. Nothing starts.

    Raises:
        SystemExit: with status 2, after one line on standard error, for a flag or a value that is refused.
    """
    cpu.enable(driver=True)

    class Parsed(Exception):  # noqa: N818 (carries the result out of upstream's __main__)
        pass

    def stop(args: argparse.Namespace) -> None:
        raise Parsed(args)

    saved = sys.argv
    sys.argv = [UPSTREAM, *argv]
    try:
        with _our_parser(stop):
            runpy.run_module(UPSTREAM, run_name="__main__")
    except Parsed as parsed:
        return parsed.args[0]
    finally:
        sys.argv = saved
    raise RuntimeError(f"{UPSTREAM} did not parse its command line")


def _check_version() -> None:
    try:
        found = importlib.metadata.version("openrlhf")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != SUPPORTED:
        sys.exit(f"arlopti_openrlhf needs openrlhf {SUPPORTED}, found {found}: pip install openrlhf=={SUPPORTED}")


@contextmanager
def _our_parser(after_parsing: Callable[[argparse.Namespace], None] | None = None) -> Iterator[None]:
    """Add our flags when upstream's parser is asked to parse. It is built under `__main__`, out of reach."""
    parser_class: Any = argparse.ArgumentParser
    upstream_parse_args = parser_class.parse_args

    def parse_args(parser, args=None, namespace=None) -> argparse.Namespace:
        parser_class.parse_args = upstream_parse_args
        parser.prog = "train_ppo_ray"
        # One line, because upstream's usage alone would fill two screens.
        parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
        _add_update_flags(parser)
        _add_run_flags(parser)
        add_fault_flags(parser)
        parsed = parser.parse_args(args, namespace)
        _check_combinations(parser, parsed)
        value = vars(parsed)
        if value["logger.probability_stats"] != "off" and (flag := _needs_stock_update(parsed)):
            print(f"arlopti_openrlhf: --{flag} {value[flag]}: no statistics by probability.", flush=True)
            value["logger.probability_stats"] = "off"
        value["eval.sampling"] = [
            Sampling("*", value["eval.n_samples_per_prompt"], value["eval.temperature"]),
            *value["eval.sampling"],
        ]
        if after_parsing:
            after_parsing(parsed)
        ranks = vars(parsed)["actor.num_nodes"] * vars(parsed)["actor.num_gpus_per_node"]
        cpu.declare_placement(_gpus_placed(parsed), ranks)
        return parsed

    parser_class.parse_args = parse_args
    try:
        yield
    finally:
        parser_class.parse_args = upstream_parse_args


def _add_update_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("token-level update (arXiv 2505.12929)")
    group.add_argument(
        "--algo.ar.alpha",
        type=number(0, 1, include_low=True, include_high=True),
        default=0.0,
        metavar="FLOAT",
        help="α of Advantage Reweighting (Eq. 4), in [0, 1]. 0 is off (default). The paper takes 0.3 for K&K and 0.1 "
        "for math.",
    )
    group.add_argument(
        "--algo.lopti.eta",
        type=number(0, 1),
        metavar="FLOAT",
        help="η of Lopti, in (0, 1): tokens of a lower probability are updated apart from the rest. Off by default. "
        "The paper takes 0.5.",
    )
    group.add_argument(
        "--algo.lopti.quantile",
        type=number(0, 1),
        metavar="FLOAT",
        help="Share of the tokens in the low group, in (0, 1). η follows from each rollout batch, over all ranks.",
    )
    group.add_argument(
        "--algo.lopti.scope",
        choices=["batch", "minibatch"],
        default="batch",
        help="batch (default) updates all mini-batches of an epoch with the first group and then all with the second. "
        "minibatch updates both groups within each mini-batch.",
    )
    group.add_argument(
        "--algo.lopti.order",
        choices=["low_first", "high_first"],
        default="low_first",
        help="Which group is updated first (default: low_first). high_first is the ablation of Fig. 6b.",
    )
    group.add_argument(
        "--algo.lopti.groups",
        choices=["both", "low", "high"],
        default="both",
        help="Update both groups (default), or only one, which is the ablation of Fig. 6a.",
    )
    group.add_argument(
        "--actor.update",
        choices=["stock", "selective"],
        help="stock computes the update as OpenRLHF does, with logits of every position, each prompt once per "
        "response, and old log-probs in a pass of their own. selective computes only what the update needs, with "
        "equal gradients. Default: selective with AR or Lopti, else stock, to the last bit.",
    )


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if action.dest == "reward.remote_url":
            action.metavar = "kk|math|PATH.py|URL,..."
            action.help = (
                "The source of rewards: kk or math for the package's own, a Python file with reward_func(queries, "
                "prompts, labels), or the URLs of reward servers, which take turns."
            )
    parser.add_argument(
        "--logger.probability_stats",
        choices=["bins", "quartiles", "off"],
        default="bins",
        help="Log statistics of each update's tokens to wandb and TensorBoard, by probability in bins of 0.25 "
        "(default) or by quartile of the rollout batch.",
    )
    parser.add_argument(
        "--reward.retry_minutes",
        type=number(0, include_low=True, include_high=True),
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


def _check_combinations(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    value = vars(args)
    _check_reward_source(parser, value)
    eta, quantile = value["algo.lopti.eta"], value["algo.lopti.quantile"]
    if eta is not None and quantile is not None:
        parser.error(
            f"argument --algo.lopti.quantile: {quantile} given together with --algo.lopti.eta {eta}: "
            "give one of the two, in (0, 1)"
        )
    for flag in ("scope", "order", "groups"):
        name = f"algo.lopti.{flag}"
        if eta is None and quantile is None and value[name] != parser.get_default(name):
            parser.error(
                f"argument --{name}: {value[name]} needs --algo.lopti.eta or --algo.lopti.quantile, in (0, 1)"
            )
    rollout, batch = value["rollout.batch_size"] * value["rollout.n_samples_per_prompt"], value["train.batch_size"]
    if (eta is not None or quantile is not None) and (rollout < batch or rollout % batch):
        parser.error(
            f"argument --train.batch_size: {batch} does not divide the rollout batch, which Lopti needs: "
            f"it must be a divisor of --rollout.batch_size x --rollout.n_samples_per_prompt = {rollout}"
        )
    schedule = value["actor.lr_scheduler"]
    if (eta is not None or quantile is not None) and schedule in _NOT_BY_STEPS:
        parser.error(
            f"argument --actor.lr_scheduler: {schedule} does not follow from the number of steps, which Lopti doubles"
        )
    evaluates = value["eval.dataset"] and value["eval.steps"] != -1
    if value["eval.sampling"] and not evaluates:
        parser.error("argument --eval.sampling: needs --eval.dataset and --eval.steps")
    if evaluates and not value["reward.remote_url"] and not value["train.agent_func_path"]:
        parser.error(
            "argument --eval.dataset: needs --reward.remote_url or --train.agent_func_path: OpenRLHF's evaluation "
            "asks no reward model"
        )
    stock_only = _needs_stock_update(args)
    if value["actor.update"] == "selective" and stock_only:
        parser.error(
            f"argument --actor.update: selective needs --{stock_only} {_NEEDS_STOCK_UPDATE[stock_only]}, "
            f"which is {value[stock_only]}"
        )
    if value["algo.lopti.groups"] != "both" and value["algo.lopti.order"] != "low_first":
        parser.error(
            f"argument --algo.lopti.order: {value['algo.lopti.order']} needs both groups, "
            f"--algo.lopti.groups is {value['algo.lopti.groups']}"
        )


def _check_reward_source(parser: argparse.ArgumentParser, value: dict) -> None:
    """Refuse what could give no reward. OpenRLHF would find that out only after the first rollout."""
    if not value["reward.remote_url"] or value["train.agent_func_path"]:
        return
    first, *others = value["reward.remote_url"].split(",")
    is_file = first in REWARD_FILES or first.endswith(".py")
    if (is_file and others) or not (is_file or all("://" in source for source in (first, *others))):
        parser.error(
            f"argument --reward.remote_url: {value['reward.remote_url']} is not {', '.join(REWARD_FILES)}, "
            "one Python file, or URLs with commas between them"
        )


# Schedules that look at the loss.
_NOT_BY_STEPS = ("greedy", "reduce_lr_on_plateau")
# Flags that the selective update and the statistics cannot serve, with the value at which each is off.
_NEEDS_STOCK_UPDATE = {"ds.tensor_parallel_size": 1, "ds.ring_attn_size": 1, "ds.deepcompile": False}


def _needs_stock_update(args: argparse.Namespace) -> str | None:
    """Return the first flag that only OpenRLHF's own update can serve."""
    return next((flag for flag, off in _NEEDS_STOCK_UPDATE.items() if vars(args)[flag] != off), None)


def _is_selective(args: argparse.Namespace) -> bool:
    """Return whether the update computes only what it needs. Print why not where AR or Lopti would have it."""
    value = vars(args)
    if value["actor.update"] is not None:
        return value["actor.update"] == "selective"
    if not value["algo.ar.alpha"] and value["algo.lopti.eta"] is None and value["algo.lopti.quantile"] is None:
        return False
    flag = _needs_stock_update(args)
    if flag:
        print(f"arlopti_openrlhf: --{flag} {value[flag]}: the update is computed as OpenRLHF does.", flush=True)
    return flag is None


def _gpus_placed(args: argparse.Namespace) -> int:
    """Return how many GPUs upstream's `train` asks Ray for with these flags."""
    value = vars(args)

    def group(name: str) -> int:
        return value[f"{name}.num_nodes"] * value[f"{name}.num_gpus_per_node"]

    engines = (value["vllm.num_engines"] or 0) * value["vllm.tensor_parallel_size"]
    reference = group("ref") if value["algo.kl.init_coef"] > 0 else 0
    critic = group("critic") if value["algo.advantage.estimator"] == "gae" else 0
    reward = 0 if value["reward.remote_url"] or value["train.agent_func_path"] else group("reward")
    if value["train.colocate_all"]:
        return group("actor") + (engines if value["train.async_enable"] else 0)
    if value["train.colocate_actor_ref"]:
        reference = 0
    if value["train.colocate_critic_reward"] and critic:
        reward = 0
    return max(1, engines + group("actor") + reference + critic + reward)


if __name__ == "__main__":
    main()
