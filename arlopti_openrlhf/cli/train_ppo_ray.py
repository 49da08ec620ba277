"""Runs OpenRLHF's `train_ppo_ray` with token methods: its own command line as it is, with our flags in its parser.

arlopti train [OpenRLHF's flags] --algo.ar.alpha 0.3 --algo.lopti.eta 0.5
"""

from arlopti_openrlhf import interrupts

if __name__ == "__main__":
    interrupts.answer()

import argparse
import copy
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from arlopti_openrlhf.cli import command_line, config_file, flags, method_checks, run_folders, same_run
from arlopti_openrlhf.cli.command_line import make_parser as make_parser
from arlopti_openrlhf.evaluation.sampling import Sampling
from arlopti_openrlhf.ops.checkpoints import files as checkpoint_files
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.preflight import check, model_code, values
from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.placement import gpus_placed
from arlopti_openrlhf.ops.preflight.upstream import check as check_openrlhf


def main() -> None:
    """Run the command. What can be checked beforehand is, and most of it before anything heavy is imported.

    Raises:
        SystemExit: with status 2 where the run cannot start, and 0 after `--help` and `--dry-run`.
    """
    of_openrlhf = list(check_openrlhf())
    check.refuse_if_fatal(of_openrlhf)  # before the parser, which is OpenRLHF's own
    flat = command_line.parse(sys.argv[1:])
    credentials.hide(flat)
    given, kept = command_line.hierarchize(flat), copy.copy(flat)
    args, upstream_findings = command_line.check(_completed(flat))
    _name_code(args)
    if sys.stderr.isatty():
        print("arlopti_openrlhf: checking flags, models, data, reward and machine", file=sys.stderr, flush=True)
    check.run(
        args,
        [*of_openrlhf, *_check_flags(given), *run_folders.check(args), *same_run.check(kept, args)],
        upstream_findings,
        method_checks.describe_update(args),
        [same_run.check_checkpoint, method_checks.check_methods],
    )
    with run_folders.held(args):
        if checkpoint_files.are_saved(args):
            try:
                config_file.keep(kept, Path(args.ckpt.path))
                same_run.keep_digests(kept, Path(args.ckpt.path))
            except OSError as error:
                _refuse(f"--ckpt.path: {config_file.KEPT} cannot be written: {error}")
        train(args)


def train(args: SimpleNamespace) -> None:
    """Run upstream's `train` with our classes in place of its own.

    Args:
        args: the nested arguments, as upstream's command hands them to it.
    """
    from arlopti_openrlhf import cpu
    from arlopti_openrlhf.ops.lifecycle import streams

    streams.protect()
    cpu.enable(driver=True)
    from arlopti_openrlhf.ops.lifecycle.console import LOG, Console, is_wanted

    print(f"arlopti_openrlhf: {method_checks.describe_methods(args)}", flush=True)
    try:
        console = Console(Path(args.ckpt.path, LOG)) if is_wanted(args.logger.console) else None
    except OSError as error:
        _refuse(f"--ckpt.path: {LOG} cannot be written: {error}")
    with console or nullcontext():
        cpu.declare_placement(gpus_placed(args), args.actor.num_nodes * args.actor.num_gpus_per_node)
        # These import openrlhf, which needs enable() first where CUDA or flash-attn is missing.
        from arlopti_openrlhf.cpu import refusals
        from arlopti_openrlhf.ops import controller
        from arlopti_openrlhf.ops.checkpoints import saving as checkpoints
        from arlopti_openrlhf.ops.health import guard
        from arlopti_openrlhf.ops.lifecycle import driver, heartbeat, progress, watch
        from arlopti_openrlhf.ops.rollouts import agents, engine, experience_maker, prompts, reward_client, samples
        from arlopti_openrlhf.update import policy_actor

        policy_actor.install()
        refusals.install()
        guard.install()
        if method_checks.is_selective(args):
            policy_actor.install_selective_actor()
        reward_client.install(args.reward.retry_minutes, args.reward.timeout_seconds)
        agents.install()
        engine.install()
        prompts.install()
        samples.install(args.eval.sampling)
        controller.install()
        checkpoints.install()
        heartbeat.install()  # after all other changes to the actors
        # Last, because it binds the policy's Ray actor when it is imported.
        from openrlhf.cli import train_ppo_ray as upstream

        if args.algo.kl.init_coef > 0 and not values.loads_reference(args):
            experience_maker.install_reference(upstream)
        text = partial(progress.closing_text, args, log=console.log if console else None)
        run = driver.Driver(console, text, args.train.stall_minutes)
        with run.ending():
            run.start(credentials.collect(args.logger.wandb.key, args.reward.remote_url))
            watch.start(run.end, 60 * args.train.stall_minutes)
            upstream.train(args)


def _name_code(args: SimpleNamespace) -> None:
    """Name the code of the models before a check runs it, or refuse it."""
    found = list(model_code.check(args))
    check.refuse_if_fatal(found)
    for finding in found:
        print(f"arlopti_openrlhf: warning: {finding}", file=sys.stderr, flush=True)


def _refuse(problem: object) -> NoReturn:
    print(f"arlopti train: error: argument {problem}", file=sys.stderr)
    sys.exit(2)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse `argv` with the command's real parser and return its flat namespace. Nothing starts.

    Raises:
        SystemExit: with status 2, after one line on standard error, for a flag, a value or a combination of flags that
            is refused.
    """
    flat = command_line.parse(argv)
    for finding in _check_flags(command_line.hierarchize(flat)):
        _refuse(finding)
    return _completed(flat)


def _check_flags(given: SimpleNamespace) -> list[Finding]:
    """Return what cannot go together in the nested arguments as the user gave them."""
    return [*values.check_combinations(given), *method_checks.check_flags(given)]


def _completed(flat: argparse.Namespace) -> argparse.Namespace:
    """Fill in what follows from other flags, and say so where a user would not expect it."""
    value, lines = vars(flat), []
    args = command_line.hierarchize(flat)
    if stock_only := method_checks.needs_stock_update(args):
        flag = f"--{stock_only} {value[stock_only]}"
        if value["logger.probability_stats"] != "off":
            lines.append(f"{flag}: no statistics by probability.")
            value["logger.probability_stats"] = "off"
        if value["actor.update"] is None and method_checks.uses_methods(args):
            lines.append(f"{flag}: the update is computed as OpenRLHF does.")
    if args.ds.lora.rank and args.algo.kl.init_coef > 0:
        is_policy = "the policy without its adapter is the reference, and no second model is loaded"
        is_loaded = "--ds.load_in_4bit loads the reference apart, since its norms are bf16 and the policy's float32"
        line = is_loaded if values.loads_reference(args) else is_policy
        lines.append(f"--ds.lora.rank {args.ds.lora.rank}: {line}.")
    for line in lines:
        print(f"arlopti_openrlhf: {line}", flush=True)
    value["reward.remote_url"] = value["reward.remote_url"] or None  # OpenRLHF would ask a server without a name
    # The workers, which load these files, have a working directory of their own.
    value["algo.token_method"] = flags.absolute("algo.token_method", value["algo.token_method"])
    everything = Sampling("*", value["eval.n_samples_per_prompt"], value["eval.temperature"])
    value["eval.sampling"] = [everything, *value["eval.sampling"]]
    return flat


if __name__ == "__main__":
    main()
