"""The whole stack on one machine, GPU or none: puzzles, a small policy, its training with GRPO + AR + Lopti, curves.

python -m arlopti_openrlhf.cli.quickstart --seed 0 --out outputs/quickstart
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from tqdm import tqdm

from arlopti_openrlhf import cpu
from arlopti_openrlhf.data import tiny_policy
from arlopti_openrlhf.data.rows import generate_rows, write_rows
from arlopti_openrlhf.scoring.measures import Z_95, estimate_source
from arlopti_openrlhf.scoring.offline import responses_of

ROOT = Path(__file__).resolve().parents[2]
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, MAX_NEW_TOKENS, EVAL_SAMPLES = 32, 8, 112, 8


class Size(NamedTuple):
    warm_start_steps: int
    steps: int  # of reinforcement learning, PROMPTS_PER_STEP puzzles each
    held_out: int  # puzzles per number of people
    eval_every: int  # steps
    eval_puzzles: int  # held-out puzzles per number of people that are looked at during training


FULL = Size(warm_start_steps=1200, steps=30, held_out=192, eval_every=10, eval_puzzles=32)
REDUCED = Size(warm_start_steps=40, steps=4, held_out=8, eval_every=2, eval_puzzles=4)
PEOPLE = (2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of puzzles, weights and sampling (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/quickstart"),
        help="folder for everything; an earlier quickstart there is replaced (default: outputs/quickstart)",
    )
    parser.add_argument("--reduced", action="store_true", help="a few steps of everything, for a test of the set-up")
    args = parser.parse_args()
    size, out, seed = REDUCED if args.reduced else FULL, args.out, args.seed
    if out.exists() and any(out.iterdir()) and not (out / "quickstart.log").exists():
        parser.error(f"argument --out: {out} holds something else than an earlier quickstart")

    if cpu.uses_cpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # the warm start's Trainer imports DeepSpeed, which would warn
    start = time.time()
    memory = PeakMemory()
    for name in ("data", "model", "checkpoint", "tensorboard", "evaluation"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    log = Log(out / "quickstart.log")
    print(f"Knights-and-Knaves with GRPO + AR + Lopti, seed {seed}. What Ray, vLLM and DeepSpeed say: {log.path}")

    files = write_puzzles(out / "data", size, seed)
    print(f"1/5 puzzles of {' and '.join(map(str, PEOPLE))} people: {files.train}, held out: {files.test}")
    print("2/5 a policy of 1.0M parameters, warm-started by supervised fine-tuning on worked solutions")
    tiny_policy.make_policy(out / "model", people=PEOPLE, seed=seed, steps=size.warm_start_steps)
    before = evaluate_model(out / "model", files.test, out / "evaluation" / "before", log, "3/5 accuracy before")
    train(out, files, size, seed, log)
    after = evaluate_model(out / "checkpoint", files.test, out / "evaluation" / "after", log, "5/5 accuracy after")

    curves = read_curves(out / "tensorboard")
    plot(curves, before, after, out / "curves.png")
    summary = {
        "seed": seed,
        "minutes": round((time.time() - start) / 60, 2),
        "peak_rss_gib": round(memory.stop(), 2),
        "before": {source: before[source] for source in before if source != "all"},
        "after": {source: after[source] for source in after if source != "all"},
        "overall": {"before": before["all"], "after": after["all"]},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(report(summary, out))


# --- the steps -----------------------------------------------------------------------------------------------


class Files(NamedTuple):
    train: Path
    test: Path
    during: Path  # the part of `test` that is looked at during training


def write_puzzles(folder: Path, size: Size, seed: int) -> Files:
    files = Files(*(folder / f"{name}.jsonl" for name in Files._fields))
    train_rows = generate_rows(
        PEOPLE, size.steps * PROMPTS_PER_STEP // len(PEOPLE), held_out=False, seed=seed, names=tiny_policy.NAMES
    )
    test_rows = generate_rows(PEOPLE, size.held_out, held_out=True, seed=seed, names=tiny_policy.NAMES)
    during = test_rows[: size.eval_puzzles * len(PEOPLE)]  # the sources alternate
    for path, rows in zip(files, (train_rows, test_rows, during), strict=True):
        write_rows(rows, path)
    return files


def evaluate_model(model: Path, data: Path, folder: Path, log: "Log", title: str) -> dict[str, dict[str, float]]:
    """By source, and for "all": `n` puzzles, `accuracy` ± `ci95` of the samples, `pass@k`, `greedy` accuracy."""
    command = [sys.executable, "-m", "arlopti_openrlhf.cli.evaluate", f"--model={model}", f"--data={data}"]
    command += [f"--out={folder}", f"--sampling=*:n={EVAL_SAMPLES},t=1", "--greedy"]
    command += [f"--max-new-tokens={MAX_NEW_TOKENS}"]
    with tqdm(total=100, desc=f"{title} (vLLM)", unit="%") as bar:
        log.run(command, lambda line: _advance(bar, re.search(r"Processed prompts: +(\d+)%()", line)))
        bar.update(bar.total - bar.n)
    groups: dict[tuple[str, bool], list] = defaultdict(list)
    for line in open(folder / f"{model.name}.responses.jsonl", encoding="utf-8"):
        record = json.loads(line)
        for source in (record["datasource"], "all"):
            groups[source, record["temperature"] > 0].append(responses_of(record))
    results = {}
    for source in sorted({source for source, _ in groups}):
        sampled, greedy = (estimate_source(groups[source, is_sampled]) for is_sampled in (True, False))
        results[source] = {
            "n": len(groups[source, True]),
            "ci95": Z_95 * sampled["accuracy"].standard_error,
            "greedy": greedy["accuracy"].value,
        } | {name: estimate.value for name, estimate in sampled.items()}
    return results


def train(out: Path, files: Files, size: Size, seed: int, log: "Log") -> None:
    with tqdm(total=size.steps, desc="4/5 GRPO + AR + Lopti", unit="step") as bar:
        bar.set_postfix_str("starting Ray, vLLM and DeepSpeed")
        log.run(
            [sys.executable, "-m", "arlopti_openrlhf.cli.train_ppo_ray", *training_flags(out, files, size, seed)],
            lambda line: _advance(
                bar, re.search(r"Global step (\d+): .*'rollout/reward_mean': (-?[\d.]+)", line), "reward"
            ),
        )


def training_flags(out: Path, files: Files, size: Size, seed: int) -> list[str]:
    """The run's flags, as a user would type them: OpenRLHF's, and the two of this project."""
    flags = f"""
        --algo.ar.alpha 0.3
        --algo.lopti.eta 0.5
        --algo.advantage.estimator group_norm
        --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.001
        --actor.eps_clip_low_high 0.2 0.24
        --actor.dual_clip 10
        --actor.adam.lr 3e-4 --actor.lr_scheduler constant --actor.lr_warmup_ratio 0
        --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --train.colocate_all
        --vllm.num_engines 1 --vllm.enforce_eager --vllm.sync_backend gloo --vllm.gpu_memory_utilization 0.5
        --ds.zero_stage 2 --ds.attn_implementation sdpa
        --rollout.batch_size {PROMPTS_PER_STEP} --rollout.n_samples_per_prompt {SAMPLES_PER_PROMPT}
        --rollout.micro_batch_size 64 --rollout.temperature 1.0 --rollout.max_new_tokens {MAX_NEW_TOKENS}
        --train.batch_size 128 --train.micro_batch_size 32 --train.seed {seed + 1}
        --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 512
        --eval.steps {size.eval_every} --eval.temperature 1.0 --eval.n_samples_per_prompt 4
        --ckpt.best_metric_key none
        --logger.wandb.run_name quickstart
    """.split()
    return flags + [
        f"--actor.model_name_or_path={out / 'model'}",
        f"--data.prompt_dataset={files.train}",
        f"--eval.dataset={files.during}",
        f"--reward.remote_url={ROOT / 'rewards' / 'kk_reward.py'}",
        f"--ckpt.output_dir={out / 'checkpoint'}",
        f"--logger.tensorboard_dir={out / 'tensorboard'}",
    ]


def _advance(bar: tqdm, match: re.Match | None, value_name: str = "") -> None:
    if match:
        if value_name:
            bar.set_postfix({value_name: match[2]}, refresh=False)
        bar.update(max(int(match[1]) - bar.n, 0))


class Log:
    """Runs commands with their output in one file, and shows each line to a function."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("", encoding="utf-8")

    def run(self, command: Sequence[str], on_line) -> None:
        """Raises SystemExit with the end of the output if the command fails."""
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        with open(self.path, "a", encoding="utf-8") as log:
            log.write("\n$ " + " ".join(command) + "\n")
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, errors="replace"
            )
            # Text mode ends lines at "\r" too: progress bars of the command arrive as they are drawn.
            for line in process.stdout:
                log.write(line)
                on_line(line)
        if process.wait() != 0:
            tail = "".join(self.path.read_text(encoding="utf-8").splitlines(keepends=True)[-15:])
            raise SystemExit(
                f"\n{tail}\nquickstart: {command[2]} failed with status {process.returncode}: {self.path}"
            )


class PeakMemory:
    """The most memory that this process and all it started held at once, in GiB: the sum of their resident sets.

    An upper bound: pages that several processes share are counted in each of them.
    """

    def __init__(self) -> None:
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(2):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return self.peak / 2**30


# --- what came out -------------------------------------------------------------------------------------------


def read_curves(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Every scalar of the run's TensorBoard log: name → (steps, values)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(folder.glob("*/"))), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    return {name: ([e.step for e in series], [e.value for e in series]) for name, series in scalars.items()}


def plot(curves: dict, before: dict, after: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    (reward, accuracy), (share, norm) = axes
    reward.plot(*curves["train/rollout/reward_mean"], color="C0")
    reward.set(title="mean reward of the rollouts")
    last_step = curves["train/rollout/reward_mean"][0][-1]
    for i, source in enumerate(sorted(set(before) - {"all"})):
        steps, values = curves.get(f"eval/{source}/accuracy", ([], []))
        accuracy.plot(steps, values, ".-", color=f"C{i}", alpha=0.5, label=f"{source}, during")
        for step, measured in ((0, before), (last_step, after)):
            accuracy.errorbar(
                step, measured[source]["accuracy"], measured[source]["ci95"], fmt="o", color=f"C{i}", capsize=3
            )
    accuracy.set(title="held-out accuracy, sampled (bars: 95%)", ylim=(0, None))
    accuracy.legend(frameon=False, loc="upper left")
    share.plot(*curves["train/lopti/low_share"], color="C3")
    share.set(title="share of tokens with probability < η", xlabel="step", ylim=(0, None))
    for group, color in (("low", "C3"), ("high", "C2")):
        # A run of a few steps may never see one of the groups.
        norm.plot(
            *curves.get(f"train/lopti/{group}/actor_grad_norm", ([], [])),
            color=color,
            label=f"{group}-probability stage",
        )
    norm.set(title="gradient norm of each stage", xlabel="step", ylim=(0, None))
    norm.legend(frameon=False, loc="lower left")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def report(summary: dict, out: Path) -> str:
    overall = summary["overall"]
    before, after = (summary[when] | {"all": overall[when]} for when in ("before", "after"))
    pass_k = f"pass@{EVAL_SAMPLES}"
    lines = [
        "",
        f"{'held out':<9} {'puzzles':>7}   {'sampled, before':>16} {'after':>14}   {'greedy':>13}   {pass_k:>13}",
    ]
    for source in sorted(before, key=lambda s: (s == "all", s)):
        b, a = before[source], after[source]
        lines.append(
            f"{source:<9} {b['n']:>7}   {b['accuracy']:>8.3f} ± {b['ci95']:.3f}"
            f" {a['accuracy']:>6.3f} ± {a['ci95']:.3f}"
            f"   {b['greedy']:.3f} → {a['greedy']:.3f}   {b[pass_k]:.3f} → {a[pass_k]:.3f}"
        )
    rise = after["all"]["accuracy"] - before["all"]["accuracy"]
    standard_error = (before["all"]["ci95"] ** 2 + after["all"]["ci95"] ** 2) ** 0.5 / Z_95
    lines += [
        "",
        f"Sampled accuracy changed by {rise:+.3f}, {rise / max(standard_error, 1e-9):.1f} standard errors (clustered "
        f"by puzzle), in {summary['minutes']:.1f} minutes and {summary['peak_rss_gib']:.1f} GiB.",
        f"Curves:  {out / 'curves.png'}",
        f"Trained: {out / 'checkpoint'}",
        "Next:    SEED=1 make quickstart",
        f"         {os.path.relpath(Path(sys.executable).with_name('tensorboard'))} --logdir {out / 'tensorboard'}",
        "         examples/scripts/train_kk.sh    # the paper's run, on 4 GPUs",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
