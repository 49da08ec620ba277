"""What `study.replicate` trains: its arms, how much of everything, and the flags and the puzzles of each run."""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from arlopti_openrlhf import cpu
from arlopti_openrlhf.cli.quickstart_tasks import TASKS
from arlopti_openrlhf.lab.data.preparation import generate_rows, write_rows
from arlopti_openrlhf.lab.scoring.inputs import Row
from study.replicate_report import BASE

HELD_OUT_BY = "structure"  # what tells held-out puzzles from training puzzles
SAMPLES = 8


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
_RANDOM = "--algo.token_method study/random_groups.py --algo.token_method_args random_groups.seed={seed}"
_SLOW, _FAST = "--actor.adam.lr 1e-5", "--actor.adam.lr 2e-5"
_UNCLIPPED = f"{_SLOW} --actor.max_norm 1000"
# What explains Lopti's early lead at 135M. Seeds 0 and 1 chose each arm's rate of 1e-5, 2e-5 and 4e-5.
EXPLANATIONS = {
    BASE: Arm("GRPO", "none", flags=_FAST),
    "double-steps": Arm("GRPO, twice as many steps", "none", mini_batches=4, flags=_SLOW),
    "two-epochs": Arm("GRPO, two epochs", "none", flags=f"{_SLOW} --train.max_epochs 2"),
    "lopti": Arm("Lopti (η = 0.5)", "lopti", flags=_SLOW),
    "random-groups": Arm("random groups", "none", flags=f"{_RANDOM} {_FAST}"),
    "double-steps-unclipped": Arm("GRPO, twice as many steps, not clipped", "none", mini_batches=4, flags=_UNCLIPPED),
    "lopti-unclipped": Arm("Lopti, not clipped", "lopti", flags=_UNCLIPPED),
    "random-groups-unclipped": Arm("random groups, not clipped", "none", flags=f"{_RANDOM} {_UNCLIPPED}"),
}


class Size(NamedTuple):
    """How much of everything a run does."""

    people: tuple[int, ...]  # in Knights and Knaves; none for a quickstart's task
    prompts: int  # per step
    steps: int
    held_out: int  # puzzles for each number of people
    max_new_tokens: int
    max_len: int  # tokens of prompt and answer
    save_steps: int
    epochs: int = 5  # how often each puzzle is trained
    evaluations: int = 5  # at equal distances, beside that before all steps
    temperature: float = 0.7
    flags: str = ""
    on_gpu: int = 1  # the launch script's SLEEP and LIGER
    task: str = ""  # the quickstart's, each of whose runs is one process
    arms: dict[str, Arm] = ARMS
    short_lines: bool = False  # whether the prompt asks for one short line, and has two examples


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
    flags="--ds.attn_implementation sdpa --vllm.enforce_eager --train.micro_batch_size 16 "
    f"--vllm.sync_backend {'gloo' if cpu.uses_cpu() else 'nccl'}",
    on_gpu=0,
)


_SMALL_FLAGS = "--ds.attn_implementation sdpa --ds.zero_stage 2 --vllm.enforce_eager --vllm.sync_backend gloo"


_SUMS = TASKS["sums"]
# Of the quickstart's task, each run in one process.
SMALL = {
    "sums": Size(
        people=(),
        prompts=_SUMS.prompts_per_step,
        steps=40,
        held_out=123,
        max_new_tokens=_SUMS.max_new_tokens,
        max_len=_SUMS.max_len,
        save_steps=8,
        epochs=1,
        temperature=1.0,
        flags=f"{_SMALL_FLAGS} {_SUMS.flags}",
        on_gpu=0,
        task="sums",
    )
}
SMALL["lines"] = SMALL["sums"]._replace(
    steps=8, evaluations=1, max_new_tokens=32, max_len=256, arms=EXPLANATIONS, short_lines=True
)
# With these 2% of the untrained model's answers are cut off at 32 tokens, without them 77%.
_SHORT_LINES = [
    ("system", "Answer with one short line."),
    *[("user", "Calculate 40 - 15."), ("assistant", "40 minus 15 makes 25.")],
    *[("user", "Calculate 20 * 4."), ("assistant", "20 times 4 makes 80.")],
]


def ask_for_short_line(row: Row) -> Row:
    """Return a row of sums that asks for one short line, as two examples before it do."""
    turns = [{"role": role, "content": content} for role, content in _SHORT_LINES]
    return row | {"prompt": [*turns, *row["prompt"]]}


class Experiment(NamedTuple):
    """What all runs have in common."""

    model: str
    gpus: int
    size: Size
    out: Path
    extra: tuple[str, ...] = ()  # flags that win over all others

    @property
    def epochs(self) -> int:
        """Return how often each puzzle is trained."""
        return min(self.size.epochs, self.size.steps)

    @property
    def evaluations(self) -> int:
        """Return how often the policy is evaluated, beside once before all steps."""
        return min(self.size.evaluations, self.size.steps)

    @property
    def sources(self) -> list[str]:
        """Return the names of the held-out sets."""
        if self.size.task:
            return [row["datasource"] for row in TASKS[self.size.task].make_rows(1, held_out=True, seed=0)]
        return [f"kk_{people}ppl" for people in self.size.people]

    def puzzles(self, seed: int) -> Path:
        """Return the folder with the puzzles of a seed."""
        return self.out / f"puzzles-{seed}"

    def flags(self, arm: Arm, seed: int) -> list[str]:
        """Return what the launch script gets behind its own flags, which it wins over."""
        size, gpus = self.size, self.gpus
        own = f"""
            {size.flags}
            --actor.update selective --actor.num_gpus_per_node {gpus} --ref.num_gpus_per_node {gpus}
            --vllm.num_engines {gpus}
            --rollout.batch_size {size.prompts} --rollout.n_samples_per_prompt {SAMPLES}
            --rollout.temperature {size.temperature} --rollout.max_new_tokens {size.max_new_tokens}
            --data.max_len {size.max_len}
            --train.batch_size {size.prompts * SAMPLES // arm.mini_batches} --train.num_episodes {self.epochs}
            --train.seed {seed + 1}
            --eval.n_samples_per_prompt {SAMPLES} --eval.temperature {size.temperature}
            --eval.steps {size.steps // self.evaluations}
            --ckpt.save_steps {size.save_steps} --ckpt.max_num 2 --ckpt.best_metric_key none
            {arm.flags.format(seed=seed + 1)}
        """
        return [*own.split(), *self.extra]

    def configuration(self, arm: str, seed: int) -> dict:
        """Return what is trained on what, with which flags. A row with another configuration is not this run's."""
        return {
            "model": self.model,
            "method": self.size.arms[arm].method,
            "flags": " ".join(self.flags(self.size.arms[arm], seed)),
            "people": list(self.size.people),
            "steps": self.size.steps,
            "held_out": self.size.held_out,
            "held_out_by": HELD_OUT_BY,
            "liger": bool(self.size.on_gpu),
        }

    def hours(self, step_seconds: float) -> float:
        """Return how long a run takes. The answers of an evaluation count as those of a step do, and take less."""
        answers = (self.evaluations + 1) * self.size.held_out * len(self.sources)
        return step_seconds * (self.size.steps + answers / self.size.prompts) / 3600


def seed_range(text: str) -> range:
    """Return the seeds that are asked for: "3" is the first three, "3-5" is 3, 4 and 5.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    if found := re.fullmatch(r"(?:(\d+)-)?(\d+)", text, re.ASCII):
        first, last = found.groups()
        asked = range(int(first), int(last) + 1) if first else range(int(last))
        if asked:
            return asked
    raise argparse.ArgumentTypeError(f"{text} is neither a number of seeds nor a range such as 3-5")


def write_puzzles(seed: int, x: Experiment) -> None:
    """Write a seed's puzzles. Those held out share no structure with the others (`lab.data.structures`)."""
    size, each = x.size, len(x.sources)
    count = size.steps * size.prompts // x.epochs
    for name, held_out, of_each in (("train", False, -(-count // each)), ("test", True, size.held_out)):
        if size.people:
            rows = generate_rows(size.people, of_each, held_out=held_out, seed=seed, prompt_format="text")
        else:
            rows = TASKS[size.task].make_rows(of_each, held_out=held_out, seed=seed)
        if size.short_lines:
            rows = [ask_for_short_line(row) for row in rows]
        write_rows(rows if held_out else rows[:count], x.puzzles(seed) / f"{name}.jsonl")


def make_policy(folder: Path, size: Size) -> None:
    """Make the policy of a toy or of sums, unless it is there."""
    from arlopti_openrlhf.lab import pretrained
    from arlopti_openrlhf.lab.data import tiny_policy

    if folder.exists():
        return
    partial_folder = folder.with_name("model.partial")
    if size.task:
        pretrained.make_smollm2(partial_folder)
    else:
        tiny_policy.make_policy(partial_folder, people=size.people, steps=40)
    partial_folder.rename(folder)
