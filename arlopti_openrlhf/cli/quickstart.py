"""Run the whole stack on one machine, with or without a GPU: data, a policy, GRPO + AR + Lopti, curves.

    arlopti quickstart --seed 0
    arlopti quickstart --task sums

The task `tiny` makes a policy of 1.0M parameters and trains it on Knights and Knaves. `sums` fetches a pretrained
model, SmolLM2-135M-Instruct, and trains it to calculate. The same command resumes a run that ended early.
"""

import json
import os
import shutil
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from arlopti_openrlhf import __version__
from arlopti_openrlhf.cli.bad_input import Parser, check_out, command_parser
from arlopti_openrlhf.cli.processes import InUse, Log, PeakMemory, lock
from arlopti_openrlhf.cli.quickstart_tasks import TASKS, Plan
from arlopti_openrlhf.lab.analysis.curves import read_scalars

_LOCK = "quickstart.lock"  # in the folder: held by the quickstart that writes there
_SETTINGS = "settings.json"  # in the folder: what the quickstart there does
_FOLDERS = ("data", "model", "model.partial", "checkpoint", "checkpoints", "tensorboard", "evaluation")


def main() -> None:
    """Run the command. A folder of something else ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args()
    task = TASKS[args.task]
    # So that another task or seed leaves this one's run alone.
    out = args.out or Path(f"outputs/{task.folder}-{args.seed}")
    check_out(parser, out)
    known = {_LOCK, _SETTINGS}
    if out.exists() and not (out / "quickstart.log").exists() and {path.name for path in out.iterdir()} - known:
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
        plan = Plan(out, task, task.reduced if args.reduced else task.full, args.seed)
        if not args.force and _settings_in(out) not in (None, settings(plan)):
            parser.error(
                f"argument --out: {out} holds another quickstart: give --force to replace it, or another folder"
            )
        run(plan, args.force)
    finally:
        held.close()


def run(plan: Plan, anew: bool = False) -> None:
    """Train in the folder, measure, and say what came out."""
    start = time.time()
    memory = PeakMemory()
    out, task = plan.out, plan.task
    log, resumes = begin(plan, anew)
    is_reduced = plan.size == task.reduced
    print(f"{task.title} with GRPO + AR + Lopti, seed {plan.seed}. The output of Ray, vLLM and DeepSpeed: {log.path}")
    if resumes:
        print(f"Resumes the run in {out}. --force would begin anew.")
    if is_reduced:
        print("--reduced tests the set-up. Its few steps teach the policy nothing.")
    if not (draws := find_spec("matplotlib")):
        print("matplotlib is not installed (it comes with the extra `analyze`), so there will be no curves.png.")

    # Imports PyTorch and transformers, which takes seconds that a typing mistake should not cost.
    from arlopti_openrlhf.lab import quickstart_results

    # The five steps, each shown as it begins.
    write_problems(plan)
    print(f"1/5 {task.data}: {plan.files.train}, held out: {plan.files.test}")
    print(f"2/5 {task.policy}")
    make_policy(plan)
    first = evaluate_model(plan, "model", log, "3/5 accuracy before")
    train(plan, log)
    last = evaluate_model(plan, "checkpoint", log, "5/5 accuracy after")

    # What came out, as a picture, as JSON and as text.
    records = [quickstart_results.read_records(path) for path in (first, last)]
    before, after = map(quickstart_results.accuracies, records)
    if draws:
        quickstart_results.plot(read_scalars(out / "tensorboard"), out / "curves.png")
    summary = {
        "seed": plan.seed,
        "minutes": round((time.time() - start) / 60, 2),
        "resumed": resumes,
        "peak_rss_gib": round(memory.gib, 2),
        "before": {source: before[source] for source in before if source != "all"},
        "after": {source: after[source] for source in after if source != "all"},
        "overall": {"before": before["all"], "after": after["all"]},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(quickstart_results.sample_answers(*records))
    print(quickstart_results.report(summary, out, f"pass@{task.eval_samples}", task.name, is_reduced))


def make_parser() -> Parser:
    """Return the command's parser."""
    parser = command_parser("quickstart", __doc__)
    add = parser.add_argument
    add("--task", choices=TASKS, default="tiny", help="what to train (default: tiny)")
    add("--seed", type=int, default=0, help="seed of the data, the weights and sampling (default: 0)")
    folder = "folder for everything (default: outputs/quickstart-SEED, or sums-SEED)"
    add("--out", type=Path, help=folder)
    add("--force", action="store_true", help="begin anew, in place of what is in that folder")
    add("--reduced", action="store_true", help="a few steps of everything, which test the set-up and teach nothing")
    return parser


def begin(plan: Plan, anew: bool = False) -> tuple[Log, bool]:
    """Return the log, and whether the folder holds a part of the same quickstart, which is resumed.

    Otherwise the folder is emptied, because evaluations and TensorBoard would continue what is there.
    """
    out, resumes = plan.out, not anew and _settings_in(plan.out) == settings(plan)
    if not resumes:
        for name in _FOLDERS:
            shutil.rmtree(out / name, ignore_errors=True)
        for name in ("summary.json", "curves.png", "trained", "quickstart.log"):
            (out / name).unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / _SETTINGS).write_text(json.dumps(settings(plan)) + "\n", encoding="utf-8")
    return Log(out / "quickstart.log", continues=resumes), resumes


def settings(plan: Plan) -> list[str]:
    """Return what has to be the same in a run that is resumed."""
    return [__version__, *map(str, plan.size), *training_flags(plan)]


def _settings_in(out: Path) -> list[str] | None:
    with suppress(OSError, ValueError):  # not there, or spoilt by a full disk
        return json.loads((out / _SETTINGS).read_text("utf-8"))
    return None


def write_problems(plan: Plan) -> None:
    """Write training and held-out problems."""
    from arlopti_openrlhf.lab.data.preparation import write_rows

    task, size = plan.task, plan.size
    train_rows = task.make_rows(size.steps * task.prompts_per_step, held_out=False, seed=plan.seed)
    test_rows = task.make_rows(size.held_out, held_out=True, seed=plan.seed)
    for path, rows in zip(plan.files, (train_rows, test_rows, test_rows[: size.eval_problems]), strict=True):
        write_rows(rows, path)


def make_policy(plan: Plan) -> None:
    """Make the task's policy, unless it is there."""
    from arlopti_openrlhf import cpu

    folder, partial = plan.out / "model", plan.out / "model.partial"
    if folder.exists():
        return
    if cpu.uses_cpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saving the policy imports DeepSpeed, which would warn
    shutil.rmtree(partial, ignore_errors=True)
    plan.task.make_policy(plan, partial)
    partial.rename(folder)


def evaluate_model(plan: Plan, model: str, log: Log, title: str) -> Path:
    """Evaluate "model" or "checkpoint" with `cli.evaluate`, and return the file with its responses."""
    task, folder = plan.task, plan.out / "evaluation"
    flags = [f"--model={plan.out / model}", f"--data={plan.files.test}", f"--out={folder}", "--greedy"]
    flags += [f"--sampling=*:n={task.eval_samples},t=1", f"--max-new-tokens={task.max_new_tokens}"]
    with tqdm(total=100, desc=f"{title} (vLLM)", unit="%") as bar:
        bar.set_postfix_str("starting vLLM, usually a minute")
        log.follow("arlopti_openrlhf evaluate", flags, bar, r"Processed prompts: +(\d+)%")
    return folder / f"{model}.responses.jsonl"


def train(plan: Plan, log: Log) -> None:
    """Train "model" into "checkpoint" with GRPO + AR + Lopti, from the newest of the run's checkpoints on."""
    trained = plan.out / "trained"
    with tqdm(total=plan.size.steps, desc="4/5 GRPO + AR + Lopti", unit="step") as bar:
        if not trained.exists():
            bar.set_postfix_str("starting Ray, vLLM and DeepSpeed, usually one to two minutes")
            progress = r"Global step (\d+): .*'rollout/reward_mean': (?P<reward>-?[\d.]+)"
            log.follow("arlopti_openrlhf train", training_flags(plan), bar, progress)
            trained.touch()
            # They have the optimizer's state, and are seven times the model.
            shutil.rmtree(plan.out / "checkpoints", ignore_errors=True)
        bar.update(bar.total - bar.n)


def training_flags(plan: Plan) -> list[str]:
    """Return the run's flags, as a user would type them: OpenRLHF's, and this project's two."""
    from arlopti_openrlhf import cpu

    out, task, every = plan.out, plan.task, plan.size.eval_every
    # NCCL, which OpenRLHF would use for "gloo" on a GPU too, refuses two ranks on one GPU. With "nccl" policy and vLLM
    # share the GPU's memory instead.
    backend = "gloo" if cpu.uses_cpu() else "nccl"
    flags = f"""
        --algo.ar.alpha 0.3
        --algo.lopti.eta 0.5
        --algo.advantage.estimator group_norm
        --algo.kl.use_loss --algo.kl.estimator k3
        --actor.eps_clip_low_high 0.2 0.24
        --actor.dual_clip 10
        --actor.lr_scheduler constant --actor.lr_warmup_ratio 0
        --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --train.colocate_all
        --vllm.num_engines 1 --vllm.enforce_eager --vllm.sync_backend {backend} --vllm.gpu_memory_utilization 0.5
        --ds.zero_stage 2 --ds.attn_implementation sdpa
        --rollout.batch_size {task.prompts_per_step} --rollout.n_samples_per_prompt 8
        --rollout.temperature 1.0 --rollout.max_new_tokens {task.max_new_tokens}
        --train.seed {plan.seed + 1}
        --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len {task.max_len}
        --eval.steps {every} --eval.temperature 1.0 --eval.n_samples_per_prompt 4
        --ckpt.best_metric_key none --ckpt.save_steps {every} --ckpt.max_num 1 --ckpt.load_enable
        --logger.wandb.run_name quickstart
        {task.flags}
    """.split()
    return flags + [
        f"--actor.model_name_or_path={out / 'model'}",
        f"--data.prompt_dataset={plan.files.train}",
        f"--eval.dataset={plan.files.during}",
        f"--ckpt.output_dir={out / 'checkpoint'}",
        f"--ckpt.path={out / 'checkpoints'}",
        f"--logger.tensorboard_dir={out / 'tensorboard'}",
    ]
