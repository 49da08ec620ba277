"""What `arlopti quickstart` trains: the data, the policy, the reward and the flags of each task."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from arlopti_openrlhf.lab.data import sums
from arlopti_openrlhf.lab.scoring.inputs import Row

PEOPLE = (2, 3)


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
    make_policy: Callable[["Plan", Path], None]  # (plan, folder to write)
    full: Size
    reduced: Size
    prompts_per_step: int
    max_len: int  # tokens of prompt and answer
    max_new_tokens: int
    eval_samples: int  # per problem, before and after
    folder: str  # in outputs/, before the seed
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


def _tiny_policy(plan: Plan, folder: Path) -> None:
    from arlopti_openrlhf.lab.data import tiny_policy

    tiny_policy.make_policy(folder, people=PEOPLE, seed=plan.seed, steps=plan.size.warm_start_steps)


def _smollm2(plan: Plan, folder: Path) -> None:
    from arlopti_openrlhf.lab import pretrained

    try:
        pretrained.make_smollm2(folder)
    except pretrained.ModelError as error:  # such as no network
        raise SystemExit(f"arlopti quickstart: error: {error}") from None


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
        folder="quickstart",
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
        folder="sums",
        flags="""
            --reward.remote_url math
            --algo.kl.init_coef 0
            --actor.adam.lr 3e-5
            --rollout.micro_batch_size 64 --train.batch_size 64 --train.micro_batch_size 16
        """,
    ),
)
TASKS = {task.name: task for task in _TASKS}
