"""What an RL step costs, phase by phase: stock GRPO beside AR + Lopti, as the quickstart trains.

python benchmarks/whole_step.py [--task tiny] [--rounds 2] [--steps 8] [--json step.json] [-- FLAGS OF THE TRAINING]

Each variant is a run of the training command with the quickstart's policy, problems and flags. The runs take turns, so
that a slow hour hits both. The seconds are those that the runs log as `timing/...`. The first step of a run warms up
and does not count.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from arlopti_openrlhf import cpu
from arlopti_openrlhf.cli import quickstart
from arlopti_openrlhf.cli.processes import Log
from arlopti_openrlhf.cli.quickstart_tasks import TASKS, Plan
from arlopti_openrlhf.lab.analysis.curves import Series, read_scalars

# What a run logs -> what it is called here.
PHASES = {
    "generation": "generation and reward",
    "make_experience": "old and reference log-probs",
    "ppo_train": "update",
    "broadcast": "weight sync",
    "step_total": "step",
}
STOCK, OURS = "stock GRPO", "AR + Lopti"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="tiny", help="the quickstart's (default: tiny)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each variant (default: 2)")
    parser.add_argument("--steps", type=int, default=8, help="of each run; the first does not count (default: 8)")
    folder = "folder; a policy in it is kept (default: outputs/whole_step-TASK)"
    parser.add_argument("--out", type=Path, help=folder)
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="of the training command, for both variants, after --")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("argument --steps: the first step does not count, so give at least 2")
    task, out = TASKS[args.task], args.out or Path(f"outputs/whole_step-{args.task}")
    out.mkdir(parents=True, exist_ok=True)
    plan = Plan(out, task, task.full._replace(steps=args.steps), seed=0)
    quickstart.make_policy(plan)
    quickstart.write_problems(plan)
    runs: dict[str, list[dict]] = {STOCK: [], OURS: []}
    for number in range(args.rounds):
        for variant in runs:
            folder = out / f"{variant.replace(' ', '')}-{time.strftime('%H%M%S')}"
            folder.mkdir()
            flags = flags_of(variant, quickstart.training_flags(plan))
            flags += ["--eval.steps=-1", "--ckpt.save_steps=-1"]
            flags += [f"--logger.tensorboard_dir={folder}", f"--ckpt.output_dir={folder}/checkpoint"]
            flags += [f"--ckpt.path={folder}/checkpoints", *args.flags]
            start = time.monotonic()
            command = [sys.executable, "-m", "arlopti_openrlhf.cli.train_ppo_ray", *flags]
            Log(folder / "run.log").run(variant, command, lambda line: None)
            run = seconds_by_phase(read_scalars(folder))
            total = sum(run["step"])
            runs[variant].append(run | {"start and end": [time.monotonic() - start - total], "load": os.getloadavg()})
            print(f"round {number + 1}, {variant}: {statistics.median(run['step'][1:]):.2f} s a step", flush=True)
    print(table(runs))
    if args.json:
        record = {"cores": os.cpu_count(), "on_cpu": cpu.uses_cpu(), "flags": args.flags, "seconds": runs}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def flags_of(variant: str, flags: Sequence[str]) -> list[str]:
    """Return the quickstart's flags for a variant. They are those of AR + Lopti."""
    if variant == OURS:
        return list(flags)
    rest, left_out = [], {"--algo.ar.alpha", "--algo.lopti.eta"}
    for before, flag in zip(["", *flags], flags, strict=False):
        if flag not in left_out and before not in left_out:
            rest.append(flag)
    return [*rest, "--actor.update=stock"]


def seconds_by_phase(scalars: dict[str, Series]) -> dict[str, list[float]]:
    """Return the seconds of each phase in each step of a run, the first step included.

    Raises:
        ValueError: the run has not logged a phase.
    """
    seconds = {}
    for name, phase in PHASES.items():
        found = scalars.get(f"train/timing/{name}")
        if not found:
            raise ValueError(f"the run has not logged timing/{name}")
        seconds[phase] = list(found.values())
    return seconds


def table(runs: dict[str, list[dict]]) -> str:
    """Return Markdown: a row per phase, a column per variant, and the ratio of the last variant to the first.

    A run's figure is the median over its steps but the first. A variant's is the median over its runs, which stand in
    brackets.
    """
    variants = list(runs)
    lines = [f"| seconds | {' | '.join(variants)} | ratio |", "|---|" + "---|" * (len(variants) + 1)]
    for phase in [*PHASES.values(), "start and end"]:
        medians = []
        cells = []
        for variant in variants:
            each = [statistics.median(run[phase][1:] or run[phase]) for run in runs[variant]]
            medians.append(statistics.median(each))
            cells.append(f"{medians[-1]:.2f} ({', '.join(f'{value:.2f}' for value in each)})")
        lines.append(f"| {phase} | {' | '.join(cells)} | {medians[-1] / medians[0]:.2f} |")
    loads = [run["load"][0] for of_variant in runs.values() for run in of_variant]
    return "\n".join([*lines, "", f"load of the machine (mean over a minute): {min(loads):.1f} to {max(loads):.1f}"])


if __name__ == "__main__":
    main()
