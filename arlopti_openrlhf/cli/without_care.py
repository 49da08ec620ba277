"""Runs OpenRLHF's own `train` with the method and nothing else: `arlopti train --ops off`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf import bindings, interrupts, terminal, upstream
from arlopti_openrlhf.cli import command_line, flags, method_checks
from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.ops.checkpoints.files import MANIFEST
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.preflight import check
from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.placement import gpus_placed
from arlopti_openrlhf.update.settings import Settings


def run(flat: argparse.Namespace, differences: Sequence[upstream.Difference]) -> None:
    """Train. Only what the method needs is checked, and upstream gets its own arguments as its parser returns them.

    Args:
        flat: the flags.
        differences: of the versions, which are not fatal.

    Raises:
        SystemExit: with status 2 where the method cannot run with these flags, and after `--dry-run` with status 0.
    """
    # The workers, which load these files, have a working directory of their own.
    vars(flat)["algo.token_method"] = flags.absolute("algo.token_method", vars(flat)["algo.token_method"])
    given = command_line.hierarchize(flat)
    has = method_checks.of_update(given)
    findings = [*flags.refuse_care(flat), *method_checks.check_flags(given), *_check_values(flat)]
    if has:
        rooms = {row.room for row in bindings.rows(has)}
        findings += [Finding("", "", *found) for found in (*differences, *upstream.check_bodies(rooms))]
    check.refuse_if_fatal(findings)
    findings += method_checks.check_methods(given)
    args, of_upstream = command_line.check(flags.without_ours(flat))
    check.refuse_if_fatal([*findings, *of_upstream])
    if findings:
        terminal.say(*check.listed(findings), file=sys.stderr)
    if has:
        terminal.say(method_checks.describe_methods(given))
    if given.dry_run:
        terminal.say("the method can run (--ops off: nothing else is checked). Nothing has been started.")
        sys.exit(0)
    interrupts.leave()
    train(args, gpus_placed(given), has, replace(Settings.of(given), statistics="off"))


def train(args: SimpleNamespace, gpus: int, has: set[str], settings: Settings) -> None:
    """Run upstream's `train`.

    Args:
        args: the nested arguments, as upstream's command hands them to it.
        gpus: that the run places models on.
        has: what the run has (`bindings.bind`). If that is nothing, nothing is bound.
        settings: of the method.
    """
    from arlopti_openrlhf import cpu  # imports PyTorch

    cpu.enable(driver=True)
    cpu.declare_placement(gpus, args.actor.num_nodes * args.actor.num_gpus_per_node)
    if has:
        bindings.bind(has | ({bindings.WITHOUT_CUDA} if cpu.uses_cpu() else set()), args, settings)
    from openrlhf.cli import train_ppo_ray

    train_ppo_ray.train(args)


def _check_values(flat: argparse.Namespace) -> Iterator[Finding]:
    """Give upstream's flags the values that it knows, in place of ours. Yield a finding where there is none."""
    value = vars(flat)
    if value["reward.remote_url"] in REWARDS:
        value["reward.remote_url"] = str(REWARDS[value["reward.remote_url"]].path)
    key = value["logger.wandb.key"]
    written = {"logger.wandb.key": f"${{{key}}}" if key == credentials.WANDB else key}
    for name, text in (written | {"reward.remote_url": value["reward.remote_url"]}).items():
        if unset := credentials.missing(text or ""):
            yield Finding(f"--{name}", value[name], f"{', '.join(unset)} is not set", "set it")
        value[name] = text and credentials.expand(text)
    folder = Path(value["ckpt.path"])
    if value["ckpt.load_enable"] and any(folder.glob(f"*/*/{MANIFEST}")):
        problem = "its checkpoints are of a run with care, whose place in the prompts OpenRLHF cannot load"
        yield Finding("--ckpt.path", str(folder), problem, "leave out --ops off, or give another path")
