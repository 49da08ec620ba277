"""What `arlopti quickstart` trains: the data, the policy, the reward and the flags of each task."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from arlopti_openrlhf.cli.processes import Log
from arlopti_openrlhf.lab.data import sums
from arlopti_openrlhf.lab.scoring.inputs import Row

PEOPLE = (2, 3)
_SFT_BATCH, _SFT_MICRO_BATCH, _SFT_SAVE_STEPS = 16, 4, 4


class Size(NamedTuple):
    """How much of everything a quickstart does."""

    steps: int  # of reinforcement learning
    held_out: int  # problems
    eval_every: int  # steps
    eval_problems: int  # held-out problems in the evaluations during training
    warm_start_steps: int = 0  # of supervised fine-tuning


class Task(NamedTuple):
    """What one kind of quickstart does."""

    name: str
    title: str
    data: str  # what its problems are
    policy: str  # where its policy comes from
    make_rows: Callable[..., list[Row]]  # (count, *, held_out, seed)
    make_policy: Callable[["Plan", Path, Log], None]  # (plan, folder to write, log of other programs)
    full: Size
    reduced: Size
    prompts_per_step: int
    max_len: int  # tokens of prompt and answer
    max_new_tokens: int
    eval_samples: int  # per problem, before and after
    rewards: str  # what they range over
    folder: str  # in outputs/, before the seed
    command: str  # of make
    flags: str  # of the training, beside those of all tasks


class Files(NamedTuple):
    """Where the problems are."""

    train: Path
    test: Path
    during: Path  # the part of `test` for the evaluations during training


class Plan(NamedTuple):
    """What one quickstart does, and where."""

    out: Path
    task: Task
    size: Size
    seed: int

    @property
    def files(self) -> Files:
        return Files(*(self.out / "data" / f"{name}.jsonl" for name in Files._fields))


def _puzzles_of_few_names(count: int, **options) -> list[Row]:
    from arlopti_openrlhf.lab.data import tiny_policy
    from arlopti_openrlhf.lab.data.preparation import generate_rows

    return generate_rows(PEOPLE, count // len(PEOPLE), names=tiny_policy.NAMES, **options)


def _puzzles_without_instruction(count: int, **options) -> list[Row]:
    """Make puzzles of two people without the published system text, which is half of a prompt."""
    from arlopti_openrlhf.lab.data.preparation import generate_rows

    rows = generate_rows((2,), count, **options)
    return [row | {"prompt": [turn for turn in row["prompt"] if turn["role"] != "system"]} for row in rows]


def _tiny_policy(plan: Plan, folder: Path, log: Log) -> None:
    from arlopti_openrlhf.lab.data import tiny_policy

    tiny_policy.make_policy(folder, people=PEOPLE, seed=plan.seed, steps=plan.size.warm_start_steps)


def _smollm2(plan: Plan, folder: Path, log: Log) -> None:
    from arlopti_openrlhf.lab import pretrained

    try:
        pretrained.make_smollm2(folder)
    except pretrained.ModelError as error:  # such as no network
        raise SystemExit(f"arlopti quickstart: error: {error}") from None


def _taught_smollm2(plan: Plan, folder: Path, log: Log) -> None:
    """Fine-tune SmolLM2 on worked solutions, by OpenRLHF's train_sft."""
    from transformers import AutoTokenizer

    from arlopti_openrlhf.lab.data import knights_knaves
    from arlopti_openrlhf.lab.data.preparation import render, write_rows

    pretrained, solved = plan.out / "pretrained", plan.out / "data" / "solved.jsonl"
    checkpoints = pretrained / "checkpoints"
    _smollm2(plan, pretrained, log)
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    tokenizer.chat_template = knights_knaves.CHAT_TEMPLATE  # answers begin inside <think>, as the published ones do
    tokenizer.save_pretrained(pretrained)
    count = plan.size.warm_start_steps * _SFT_BATCH
    rows = _puzzles_without_instruction(count, held_out=False, seed=plan.seed + 1_000_000, solutions=True)
    write_rows(render(rows, str(pretrained)), solved)
    flags = f"""
        --data.input_key prompt --data.output_key response --data.input_template {{}} --data.max_len 512
        --adam.lr 2e-4 --train.batch_size {_SFT_BATCH} --train.micro_batch_size {_SFT_MICRO_BATCH}
        --train.max_epochs 1 --train.seed {plan.seed} --ds.zero_stage 2 --ds.attn_implementation sdpa
        --ckpt.save_steps {_SFT_SAVE_STEPS} --ckpt.max_num 2 --ckpt.load_enable
    """.split()
    flags += [f"--model.model_name_or_path={pretrained}", f"--data.dataset={solved}"]
    flags += [f"--ckpt.output_dir={folder}", f"--ckpt.path={checkpoints}"]
    with tqdm(total=len(rows) // _SFT_MICRO_BATCH, desc="2/5 supervised fine-tuning", unit="micro-batch") as bar:
        progress = r"Train step of epoch 0: .*?(\d+)/\d+ \[.*gpt_loss=(?P<loss>[\d.]+)"
        log.follow("arlopti_openrlhf.lab.train_sft", flags, bar, progress)
    shutil.rmtree(checkpoints, ignore_errors=True)


_TASKS = (
    Task(
        name="tiny",
        title="Knights and Knaves",
        data="puzzles of 2 and 3 people",
        policy="a policy of 1.0M parameters, warm-started by supervised fine-tuning on worked solutions",
        make_rows=_puzzles_of_few_names,
        make_policy=_tiny_policy,
        full=Size(steps=30, held_out=384, eval_every=10, eval_problems=64, warm_start_steps=1200),
        reduced=Size(steps=4, held_out=16, eval_every=2, eval_problems=8, warm_start_steps=40),
        prompts_per_step=32,
        max_len=512,
        max_new_tokens=112,
        eval_samples=8,
        rewards="from −3 to 3",
        folder="quickstart",
        command="make quickstart",
        flags="""
            --reward.remote_url kk
            --algo.kl.init_coef 0.001
            --actor.adam.lr 3e-4
            --rollout.micro_batch_size 64 --train.batch_size 128 --train.micro_batch_size 32
        """,
    ),
    # The pretrained model has no reference, which would take a sixth of a step. KL changes nothing in so few.
    Task(
        name="sums",
        title="Sums of small numbers",
        data="sums, differences and products of numbers from 1 to 12",
        policy="SmolLM2-135M-Instruct, pretrained",
        make_rows=sums.generate_rows,
        make_policy=_smollm2,
        full=Size(steps=20, held_out=123, eval_every=5, eval_problems=32),
        reduced=Size(steps=2, held_out=8, eval_every=2, eval_problems=4),
        prompts_per_step=8,
        max_len=128,
        max_new_tokens=24,
        eval_samples=4,
        rewards="0 or 1",
        folder="sums",
        command="make pretrained",
        flags="""
            --reward.remote_url math
            --algo.kl.init_coef 0
            --actor.adam.lr 3e-5
            --rollout.micro_batch_size 64 --train.batch_size 64 --train.micro_batch_size 16
        """,
    ),
    Task(
        name="puzzles",
        title="Knights and Knaves",
        data="puzzles of 2 people",
        policy="SmolLM2-135M-Instruct, fine-tuned on worked solutions in sentences",
        make_rows=_puzzles_without_instruction,
        make_policy=_taught_smollm2,
        full=Size(steps=12, held_out=64, eval_every=6, eval_problems=12, warm_start_steps=24),
        reduced=Size(steps=2, held_out=8, eval_every=2, eval_problems=4, warm_start_steps=1),
        prompts_per_step=4,
        max_len=512,
        max_new_tokens=256,
        eval_samples=4,
        rewards="from −3 to 3",
        folder="puzzles",
        command="make pretrained TASK=puzzles",
        flags="""
            --reward.remote_url kk
            --algo.kl.init_coef 0
            --actor.adam.lr 3e-5
            --rollout.micro_batch_size 16 --train.batch_size 32 --train.micro_batch_size 8
        """,
    ),
)
TASKS = {task.name: task for task in _TASKS}
