"""Runs OpenRLHF's `train_ppo_ray` with token methods: its own command line as it is, with our flags in its parser.

arlopti train [OpenRLHF's flags] --algo.ar.alpha 0.3 --algo.lopti.eta 0.5
"""

from arlopti_openrlhf import interrupts

if __name__ == "__main__":
    interrupts.answer()

import argparse
import copy
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from arlopti_openrlhf import bindings, terminal, upstream
from arlopti_openrlhf.cli import command_line, config_file, flags, method_checks, run_folders, same_run, without_care
from arlopti_openrlhf.cli.command_line import make_parser as make_parser
from arlopti_openrlhf.evaluation.sampling import Sampling
from arlopti_openrlhf.ops.checkpoints import files as checkpoint_files
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.lifecycle.parent import Child, Parent
from arlopti_openrlhf.ops.preflight import check, model_code, values
from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.placement import gpus_placed, least_shared
from arlopti_openrlhf.update.settings import Settings, needs_stock_update


def main() -> None:
    """Run the command: parse here, and check and train in a child (`ops.lifecycle.parent`).

    What can be checked beforehand is, and most of it before anything heavy is imported.

    Raises:
        SystemExit: with status 2 if the run cannot start, and with whatever status it ends.
    """
    versions = list(upstream.check_version())
    check.refuse_if_fatal(_findings(versions))  # before the parser, which is OpenRLHF's own
    flat = command_line.parse(sys.argv[1:])
    if flat.ops == "off":
        without_care.run(flat, versions)
        return
    credentials.hide(flat)
    if flat.dry_run:
        _check(flat, versions)
    given = command_line.hierarchize(flat)
    parent = Parent(given.train.stall_minutes, given.train.restarts, lambda: _how_to_go_on(given))
    sys.exit(parent.run(lambda child, again: _run(flat, versions, child, again)))


def _run(flat: argparse.Namespace, versions: Sequence[upstream.Difference], child: Child, again: bool) -> None:
    """Check a run and train, in the child.

    Args:
        again: the parent has started the run again.
    """
    vars(flat)["ckpt.load_enable"] |= again
    kept = copy.copy(flat)
    args = _check(flat, versions)
    with run_folders.held(args, os.getppid()):
        if checkpoint_files.are_saved(args):
            try:
                vars(kept).update(same_run.stored(args))
                config_file.keep(kept, Path(args.ckpt.path))
            except OSError as error:
                _refuse(f"--ckpt.path: {config_file.KEPT} cannot be written: {error}")
        train(args, child)


def _check(flat: argparse.Namespace, versions: Sequence[upstream.Difference]) -> SimpleNamespace:
    """Check a run, and return the nested arguments, as upstream's command hands them to its `train`.

    Raises:
        SystemExit: with status 2 if the run cannot start, and 0 after `--dry-run`.
    """
    rooms = ["update", "forward", "ops"]
    differences = _findings([*versions, *upstream.check_pins(), *upstream.check_bodies(rooms)])
    check.refuse_if_fatal(differences)
    given, kept = command_line.hierarchize(flat), copy.copy(flat)
    args, upstream_findings = command_line.check(_completed(flat))
    _name_code(args)
    if sys.stderr.isatty():
        terminal.say("checking flags, models, data, reward and machine", file=sys.stderr)
    check.run(
        args,
        [*differences, *_check_flags(given), *run_folders.check(args), *same_run.check(kept, args)],
        upstream_findings,
        method_checks.describe_update(args),
        [same_run.check_checkpoint, method_checks.check_methods],
    )
    return args


def train(args: SimpleNamespace, child: Child) -> None:
    """Run upstream's `train` with the method and with care for the run.

    Args:
        args: the nested arguments, as upstream's command hands them to it.
        child: this process, for its parent.
    """
    from arlopti_openrlhf import cpu  # imports PyTorch

    cpu.enable(driver=True)
    args.rollout.least_shared = least_shared(args)
    from arlopti_openrlhf.ops.lifecycle import child as run_of_child
    from arlopti_openrlhf.ops.lifecycle import cluster

    terminal.say(method_checks.describe_methods(args))
    with run_of_child.of_run(child, args):
        cluster.wrap_init(child.folder, credentials.collect(args.logger.wandb.key, args.reward.remote_url))
        without_care.train(args, gpus_placed(args), _has(args), Settings.of(args))


def _how_to_go_on(args: SimpleNamespace) -> str:
    """Return a line that names the newest checkpoint and the command that resumes from it, or nothing without one."""
    newest = checkpoint_files.newest_of(args)
    words = ["--config", f"{args.ckpt.path}/{config_file.KEPT}", "--ckpt.load_enable"]
    return f"checkpoint: {newest}. To go on: arlopti train {shlex.join(words)}" if newest else ""


def _has(args: SimpleNamespace) -> set[str]:
    """Return what this run with care has that not every run has."""
    is_reference = args.algo.kl.init_coef > 0 and not values.loads_reference(args)
    of_lora = [bindings.LORA, *([bindings.POLICY_IS_REFERENCE] if is_reference else [])]
    return {bindings.CARE, *method_checks.of_update(args), *(of_lora if args.ds.lora.rank else [])}


def _findings(differences: Iterable[upstream.Difference]) -> list[Finding]:
    return [Finding("", "", *difference) for difference in differences]


def _name_code(args: SimpleNamespace) -> None:
    """Name the code of the models before a check runs it, or refuse it."""
    found = list(model_code.check(args))
    check.refuse_if_fatal(found)
    for finding in found:
        terminal.say(f"warning: {finding}", file=sys.stderr)


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
    value = vars(flat)
    args = command_line.hierarchize(flat)
    is_selective = method_checks.is_selective(args)
    value["logger.probability_stats"] = value["logger.probability_stats"] or ("bins" if is_selective else "off")
    if value["actor.update"] is None and method_checks.uses_methods(args) and not is_selective:
        stock_only = needs_stock_update(args)
        why = f"--{stock_only} {value[stock_only]}" if stock_only else "a vision model"
        terminal.say(f"{why}: the update is computed as OpenRLHF does, without statistics by probability.")
    if args.ds.lora.rank and args.algo.kl.init_coef > 0:
        is_policy = "the policy without its adapter is the reference, and no second model is loaded"
        is_loaded = "--ds.load_in_4bit loads the reference apart, since its norms are bf16 and the policy's float32"
        line = is_loaded if values.loads_reference(args) else is_policy
        terminal.say(f"--ds.lora.rank {args.ds.lora.rank}: {line}.")
    value["reward.remote_url"] = value["reward.remote_url"] or None  # OpenRLHF would ask a server without a name
    # The workers, which load these files, have a working directory of their own.
    value["algo.token_method"] = flags.absolute("algo.token_method", value["algo.token_method"])
    everything = Sampling("*", value["eval.n_samples_per_prompt"], value["eval.temperature"])
    value["eval.sampling"] = [everything, *value["eval.sampling"]]
    return flat


if __name__ == "__main__":
    main()
