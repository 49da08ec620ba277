"""Run the whole stack on one machine, with or without a GPU: puzzles, a small policy, GRPO + AR + Lopti, curves.

arlopti quickstart --seed 0
"""

from arlopti_openrlhf import interrupts

if __name__ == "__main__":
    interrupts.answer()

import errno
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from arlopti_openrlhf.cli.bad_input import Parser, check_out, command_parser
from arlopti_openrlhf.cli.processes import InUse, Log, PeakMemory, lock
from arlopti_openrlhf.lab.analysis.curves import read_scalars
from arlopti_openrlhf.lab.scoring.waiting import ticking

_LOCK = "quickstart.lock"  # in the folder: held by the quickstart that writes there
PEOPLE = (2, 3)
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, MAX_NEW_TOKENS, EVAL_SAMPLES = 32, 8, 112, 8


class Size(NamedTuple):
    """How much of everything a quickstart does."""

    warm_start_steps: int
    steps: int  # of reinforcement learning, with PROMPTS_PER_STEP puzzles each
    held_out: int  # puzzles for each number of people
    eval_every: int  # steps
    eval_puzzles: int  # held-out puzzles for each number of people in the evaluations during training


FULL = Size(warm_start_steps=1200, steps=30, held_out=192, eval_every=10, eval_puzzles=32)
REDUCED = Size(warm_start_steps=40, steps=4, held_out=8, eval_every=2, eval_puzzles=4)


def main() -> None:
    """Run the command. A folder of something else ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args()
    size, seed = REDUCED if args.reduced else FULL, args.seed
    out = args.out or Path(f"outputs/quickstart-{seed}")  # so that another seed leaves this one's run alone
    check_out(parser, out)
    if out.exists() and not (out / "quickstart.log").exists() and {path.name for path in out.iterdir()} - {_LOCK}:
        parser.error(f"argument --out: {out} holds something other than an earlier quickstart")
    if (out / "summary.json").exists() and not args.force:
        parser.error(
            f"argument --out: {out} holds a finished quickstart: give --force to replace it, or another folder"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = lock(out / _LOCK)
    except InUse as process:
        parser.error(f"argument --out: another quickstart writes to {out}, process {process}: wait, or give another")
    except OSError as error:  # such as a full disk
        parser.error(f"argument --out: {out / _LOCK} cannot be written: {error.strerror}")
    try:
        run(out, size, seed, args.reduced)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        parser.exit(1, f"{parser.prog}: error: {error.filename or out} cannot be written: {error.strerror}\n")
    held.close()


def run(out: Path, size: Size, seed: int, is_reduced: bool) -> None:
    """Train in the folder, measure, and say what came out."""
    start = time.time()
    memory = PeakMemory()
    log = begin(out)
    print(f"Knights and Knaves with GRPO + AR + Lopti, seed {seed}. The output of Ray, vLLM and DeepSpeed: {log.path}")
    if is_reduced:
        print("--reduced tests the set-up. Its few steps teach the policy nothing.")

    # Imports PyTorch and transformers, which takes seconds that a typing mistake should not cost.
    from arlopti_openrlhf.lab import quickstart_results

    # The five steps, each shown as it begins.
    files = write_puzzles(out / "data", size, seed)
    print(f"1/5 puzzles of {' and '.join(map(str, PEOPLE))} people: {files.train}, held out: {files.test}")
    print("2/5 a policy of 1.0M parameters, warm-started by supervised fine-tuning on worked solutions")
    make_policy(out / "model", size, seed)
    first = evaluate_model(out / "model", files.test, out / "evaluation" / "before", log, "3/5 accuracy before")
    train(out, files, size, seed, log)
    last = evaluate_model(out / "checkpoint", files.test, out / "evaluation" / "after", log, "5/5 accuracy after")

    # What came out, as a picture, as JSON and as text.
    records = [quickstart_results.read_records(path) for path in (first, last)]
    before, after = map(quickstart_results.accuracies, records)
    quickstart_results.plot(read_scalars(out / "tensorboard"), before, after, out / "curves.png")
    summary = {
        "seed": seed,
        "minutes": round((time.time() - start) / 60, 2),
        "peak_rss_gib": round(memory.gib, 2),
        "before": {source: before[source] for source in before if source != "all"},
        "after": {source: after[source] for source in after if source != "all"},
        "overall": {"before": before["all"], "after": after["all"]},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(quickstart_results.sample_answers(*records))
    print(quickstart_results.report(summary, out, f"pass@{EVAL_SAMPLES}", is_reduced))


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = command_parser("quickstart", __doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the puzzles, the weights and sampling (default: 0)")
    add("--out", type=Path, help="folder for everything (default: outputs/quickstart-SEED)")
    add("--force", action="store_true", help="replace a finished quickstart in that folder")
    add("--reduced", action="store_true", help="a few steps of everything, which test the set-up and teach nothing")
    return parser


def begin(out: Path) -> Log:
    """Empty the folder of an earlier quickstart, which evaluations and TensorBoard would continue. Return the log."""
    for name in ("data", "model", "checkpoint", "checkpoints", "tensorboard", "evaluation"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("summary.json", "curves.png"):
        (out / name).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    return Log(out / "quickstart.log")


class Files(NamedTuple):
    """Where the puzzles are."""

    train: Path
    test: Path
    during: Path  # the part of `test` for the evaluations during training


def write_puzzles(folder: Path, size: Size, seed: int) -> Files:
    """Write new training and held-out puzzles."""
    from arlopti_openrlhf.lab.data import tiny_policy
    from arlopti_openrlhf.lab.data.preparation import generate_rows, write_rows

    files = Files(*(folder / f"{name}.jsonl" for name in Files._fields))
    count = size.steps * PROMPTS_PER_STEP // len(PEOPLE)
    train_rows = generate_rows(PEOPLE, count, held_out=False, seed=seed, names=tiny_policy.NAMES)
    test_rows = generate_rows(PEOPLE, size.held_out, held_out=True, seed=seed, names=tiny_policy.NAMES)
    during = test_rows[: size.eval_puzzles * len(PEOPLE)]  # the sources alternate
    for path, rows in zip(files, (train_rows, test_rows, during), strict=True):
        write_rows(rows, path)
    return files


def make_policy(folder: Path, size: Size, seed: int) -> None:
    """Make a policy of 1.0M parameters that has seen worked solutions."""
    from arlopti_openrlhf import cpu
    from arlopti_openrlhf.lab.data import tiny_policy

    if cpu.uses_cpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saving the policy imports DeepSpeed, which would warn
    tiny_policy.make_policy(folder, people=PEOPLE, seed=seed, steps=size.warm_start_steps)


def evaluate_model(model: Path, data: Path, folder: Path, log: Log, title: str) -> Path:
    """Evaluate a model with `cli.evaluate`, and return the file with its responses."""
    flags = [f"--model={model}", f"--data={data}", f"--out={folder}", f"--sampling=*:n={EVAL_SAMPLES},t=1"]
    flags += ["--greedy", f"--max-new-tokens={MAX_NEW_TOKENS}"]
    with tqdm(total=100, desc=f"{title} (vLLM)", unit="%") as bar:
        bar.set_postfix_str("starting vLLM, usually a minute")
        _run("evaluate", flags, log, bar, r"Processed prompts: +(\d+)%")
        bar.update(bar.total - bar.n)
    return folder / f"{model.name}.responses.jsonl"


def train(out: Path, files: Files, size: Size, seed: int, log: Log) -> None:
    """Train the model in `out` with GRPO + AR + Lopti."""
    with tqdm(total=size.steps, desc="4/5 GRPO + AR + Lopti", unit="step") as bar:
        bar.set_postfix_str("starting Ray, vLLM and DeepSpeed, usually one to two minutes")
        progress = r"Global step (\d+): .*'rollout/reward_mean': (?P<reward>-?[\d.]+)"
        _run("train", training_flags(out, files, size, seed), log, bar, progress)


def _run(command: str, flags: list[str], log: Log, bar: tqdm, progress: str) -> None:
    """Run one of the commands. A line that matches `progress` moves the bar there, and shows the named groups."""

    def advance(line: str) -> None:
        if match := re.search(progress, line):
            bar.set_postfix(match.groupdict(), refresh=False)
            bar.update(max(int(match[1]) - bar.n, 0))

    with ticking(bar):
        log.run(f"arlopti {command}", [sys.executable, "-m", "arlopti_openrlhf", command, *flags], advance)


def training_flags(out: Path, files: Files, size: Size, seed: int) -> list[str]:
    """Return the run's flags, as a user would type them: OpenRLHF's, and this project's two."""
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
        "--reward.remote_url=kk",
        f"--ckpt.output_dir={out / 'checkpoint'}",
        f"--ckpt.path={out / 'checkpoints'}",
        f"--logger.tensorboard_dir={out / 'tensorboard'}",
    ]


if __name__ == "__main__":
    main()
