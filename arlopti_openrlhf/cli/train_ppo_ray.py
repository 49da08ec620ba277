"""OpenRLHF's `train_ppo_ray` with AR and Lopti: its own command line, run as it is, with our flags in its parser.

python -m arlopti_openrlhf.cli.train_ppo_ray [OpenRLHF's flags] --algo.ar.alpha 0.3 --algo.lopti.eta 0.5
"""

import argparse
import importlib.metadata
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from arlopti_openrlhf import cpu
from arlopti_openrlhf.scoring.sampling import Sampling, parse_sampling

UPSTREAM = "openrlhf.cli.train_ppo_ray"
SUPPORTED = "0.11.2"


def main() -> None:
    _check_version()
    cpu.enable()
    # Behind enable(): both import openrlhf, which cannot be imported without CUDA and flash-attn before it.
    from arlopti_openrlhf.run import controller, evaluation, reward_client
    from arlopti_openrlhf.update import policy_actor

    def install(args: argparse.Namespace) -> None:
        policy_actor.install(selective=_is_selective(args))
        reward_client.install(vars(args)["reward.retry_minutes"])
        evaluation.install(vars(args)["eval.sampling"])
        controller.install()

    with _our_parser(install):
        runpy.run_module(UPSTREAM, run_name="__main__", alter_sys=True)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses `argv` with the command's real parser and returns its flat namespace; starts nothing.

    Raises:
        SystemExit: with status 2, after one line on standard error, for a flag or a value that is refused.
    """
    cpu.enable()

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
    """Upstream builds its parser under `__main__`, out of reach: our flags join it when it is asked to parse."""
    upstream_parse_args = argparse.ArgumentParser.parse_args

    def parse_args(parser, args=None, namespace=None) -> argparse.Namespace:
        argparse.ArgumentParser.parse_args = upstream_parse_args
        parser.prog = "train_ppo_ray"
        # One line: upstream's usage alone would fill two screens.
        parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
        _add_flags(parser)
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

    argparse.ArgumentParser.parse_args = parse_args
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = upstream_parse_args


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("token-level update (arXiv 2505.12929)")
    group.add_argument(
        "--algo.ar.alpha",
        type=_number(0, 1, closed=True),
        default=0.0,
        metavar="FLOAT",
        help="Advantage Reweighting: α of Eq. 4, in [0, 1]; 0 is off. The paper: 0.3 for K&K, 0.1 for math.",
    )
    group.add_argument(
        "--algo.lopti.eta",
        type=_number(0, 1),
        metavar="FLOAT",
        help="Lopti: tokens with probability < η, in (0, 1), are updated apart from the rest; off by default. "
        "The paper: 0.5.",
    )
    group.add_argument(
        "--algo.lopti.quantile",
        type=_number(0, 1),
        metavar="FLOAT",
        help="Lopti with η chosen per rollout batch, over all ranks, so that this share of its tokens, in (0, 1), is "
        "low.",
    )
    group.add_argument(
        "--algo.lopti.scope",
        choices=["batch", "minibatch"],
        default="batch",
        help="batch (default): all mini-batches of an epoch with the first group, then all with the second; "
        "minibatch: both groups within each mini-batch.",
    )
    group.add_argument(
        "--algo.lopti.order",
        choices=["low_first", "high_first"],
        default="low_first",
        help="Which group is updated first (default: low_first); high_first is the ablation of Fig. 6b.",
    )
    group.add_argument(
        "--algo.lopti.groups",
        choices=["both", "low", "high"],
        default="both",
        help="Update both groups (default), or only one: the ablation of Fig. 6a.",
    )
    group.add_argument(
        "--actor.update",
        choices=["stock", "selective"],
        help="How the update is computed: as OpenRLHF does (logits of every position, each prompt once per response, "
        "old log-probs in a pass of their own), or none of what it does not need, at equal gradients. Default: "
        "selective with AR or Lopti, else stock, to the last bit.",
    )
    parser.add_argument(
        "--logger.probability_stats",
        choices=["bins", "quartiles", "off"],
        default="bins",
        help="Statistics of each update's tokens by their probability, in bins of 0.25 (default) or in quartiles of "
        "the rollout batch, to wandb and TensorBoard.",
    )
    parser.add_argument(
        "--reward.retry_minutes",
        type=_number(0, float("inf"), closed=True),
        default=10.0,
        metavar="FLOAT",
        help="How long a sample waits for a reward server that does not answer, before the run stops (default: 10).",
    )
    parser.add_argument(
        "--eval.sampling",
        action="append",
        type=parse_sampling,
        default=[],
        metavar="PATTERN:n=N,t=T",
        help="Samples per problem and temperature of the data sources that match, as in aime:n=16,t=1; the last that "
        "matches counts. Default: --eval.n_samples_per_prompt and --eval.temperature.",
    )


def _number(low: float, high: float, closed: bool = False) -> Callable[[str], float]:
    interval = f"[{low}, {high}]" if closed else f"({low}, {high})"

    def parse_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low <= value <= high if closed else low < value < high):
            raise argparse.ArgumentTypeError(f"{text} is not in {interval}")
        return value

    return parse_number


def _check_combinations(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    value = vars(args)
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
    evaluates = value["eval.dataset"] and value["eval.steps"] != -1
    if value["eval.sampling"] and not evaluates:
        parser.error("argument --eval.sampling: needs --eval.dataset and --eval.steps")
    if evaluates and not value["reward.remote_url"] and not value["train.agent_func_path"]:
        parser.error(
            "argument --eval.dataset: needs --reward.remote_url or --train.agent_func_path: OpenRLHF's evaluation "
            "asks no reward model"
        )
    flag = _needs_stock_update(args)
    if value["actor.update"] == "selective" and flag:
        parser.error(
            f"argument --actor.update: selective needs --{flag} {_NEEDS_STOCK_UPDATE[flag]}, which is {value[flag]}"
        )
    if value["algo.lopti.groups"] != "both" and value["algo.lopti.order"] != "low_first":
        parser.error(
            f"argument --algo.lopti.order: {value['algo.lopti.order']} needs both groups, "
            f"--algo.lopti.groups is {value['algo.lopti.groups']}"
        )


# The selective update and the statistics are not made for them: flag and the value at which it is off.
_NEEDS_STOCK_UPDATE = {"ds.tensor_parallel_size": 1, "ds.ring_attn_size": 1, "ds.deepcompile": False}


def _needs_stock_update(args: argparse.Namespace) -> str | None:
    """The first flag that only OpenRLHF's own update can serve."""
    return next((flag for flag, off in _NEEDS_STOCK_UPDATE.items() if vars(args)[flag] != off), None)


def _is_selective(args: argparse.Namespace) -> bool:
    """Whether the update computes only what it needs; says why not, where the methods would have it."""
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
    """GPUs that upstream's `train` asks Ray for with these flags."""
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
