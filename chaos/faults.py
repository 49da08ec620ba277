"""The faults as data: when each comes, what it does, how the start that it hits must end, and what may be lost."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos.training import BAD_STEPS, SAVE_EVERY, STEPS, Training, checkpoints

Act = Callable[[Training, random.Random], None]
Damage = Callable[[Path, random.Random], str]


@dataclass(frozen=True)
class Start:
    """One start of the training and the fault that hits it.

    Attributes:
        act: waits for the moment and does it. None: the fault is in the flags, the environment or the module.
        exits: how the start may end. 0: it survives, and trains to the last step.
        says: what must be in its log, as proof that the cause is named. A process that is killed says nothing.
        lost: how many steps the next start may have to train again.
        flags, environment, module, prefix: see `Training`.
    """

    act: Act | None
    exits: frozenset[int]
    says: str = ""
    lost: int = SAVE_EVERY
    flags: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    module: str = "arlopti_openrlhf.cli.train_ppo_ray"
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A run: starts that faults hit, one after the other, then one that nothing hits and that must finish.

    Attributes:
        damage: what happens to the files before the last start, which must name it in its log (`passes_over`).
    """

    name: str
    starts: tuple[Start, ...]
    ranks: int = 1
    damage: Damage | None = None
    passes_over: str = ""


def after_step(step: int, then: Callable[[Training], None]) -> Act:
    """Act at a random moment of the step after the given one of this start."""

    def act(training: Training, rng: random.Random) -> None:
        training.wait_for(lambda: len(training.steps()) >= step)
        time.sleep(rng.uniform(0, 0.5))
        then(training)

    return act


def while_saving(then: Callable[[Training], None]) -> Act:
    """Act when a second checkpoint is begun."""

    def act(training: Training, rng: random.Random) -> None:
        folder = training.folder / "checkpoints" / "_actor"
        training.wait_for(lambda: checkpoints(training.folder))
        known = set(os.listdir(folder))
        training.wait_for(lambda: set(os.listdir(folder)) - known, every=0.001)
        then(training)

    return act


def send(title: str, signum: signal.Signals) -> Callable[[Training], None]:
    """Return what sends a signal to the process of that title."""
    return lambda training: training.signal(title, signum)


def both(first: Callable[[Training], None], second: Callable[[Training], None]) -> Callable[[Training], None]:
    """Return what does one thing and then the other."""

    def act(training: Training) -> None:
        first(training)
        second(training)

    return act


# What happens to checkpoints while no run looks. Each returns what it did.


def _newest_file(folder: Path, pattern: str, rng: random.Random) -> Path:
    return rng.choice(sorted(checkpoints(folder)[-1].glob(pattern)))


def remove_a_file(folder: Path, rng: random.Random) -> str:
    path = _newest_file(folder, "*.pt", rng)
    path.unlink()
    return f"{path.name} removed"


def overwrite_64_bytes(folder: Path, rng: random.Random) -> str:
    path = _newest_file(folder, "*optim_states.pt", rng)
    with open(path, "r+b") as file:
        file.seek(rng.randrange(path.stat().st_size // 4, path.stat().st_size * 3 // 4))
        file.write(b"\x7f" * 64)
    return f"64 bytes of {path.name} overwritten"


def truncate_a_file(folder: Path, rng: random.Random) -> str:
    path = _newest_file(folder, "*.pt", rng)
    os.truncate(path, path.stat().st_size // 2)
    return f"{path.name} cut in half"


def empty_the_folder(folder: Path, rng: random.Random) -> str:
    newest = checkpoints(folder)[-1]
    shutil.rmtree(newest)
    newest.mkdir()
    return f"{newest.name} emptied"


def remove_latest(folder: Path, rng: random.Random) -> str:
    (folder / "checkpoints" / "_actor" / "latest").unlink()
    return "`latest` removed"


# Processes by the titles that Ray and vLLM give them.
ENGINE, CORE, RANK, CONTROLLER = "ray::RolloutRayActor", "VLLM::EngineCore", "ray::PolicyActor", "ray::PPOTrainer"
KILLED, FAILED, DIVERGED, STALLED = frozenset({-9}), frozenset({1, 4}), frozenset({3}), frozenset({4})
TERM, INT, KILL, STOP = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP


def killed(title: str, step: int = 3) -> Start:
    """Return a start one of whose processes is killed."""
    if title == "driver":
        return Start(after_step(step, send(title, KILL)), KILLED)
    return Start(after_step(step, send(title, KILL)), FAILED, says="arlopti_openrlhf: ")


def halted(title: str, step: int = 3) -> Start:
    """Return a start one of whose processes is halted, so that it answers nothing and does not end."""
    return Start(after_step(step, send(title, STOP)), STALLED, says="no sign of life")


def interrupted(signum: signal.Signals, act: Act | None = None) -> Start:
    """Return a start that is asked to end. Nothing of its steps may be lost."""
    return Start(act or after_step(3, send("driver", signum)), frozenset({128 + signum}), says=signum.name, lost=0)


def reward(body: str, says: str) -> Start:
    """Return a start whose reward function does `body` in the middle of the run."""
    return Start(None, FAILED, says, flags="--reward.timeout_seconds 10", environment={"CHAOS_REWARD": body})


def poisoned(fault: str, exits: frozenset[int], update: int = 4) -> Start:
    """Return a start with a fault inside its policy's process. No step that it spoils may be saved."""
    return Start(
        None,
        exits,
        says="not finite",
        lost=SAVE_EVERY + BAD_STEPS,
        environment={"CHAOS_FAULT": f"{fault}@{update}"},
        module="chaos.inject",
    )


def fill_the_disk(training: Training) -> None:
    """Fill the file system that the start has mounted for its checkpoints, which only its processes see."""
    path = Path(f"/proc/{training.process.pid}/root{training.folder / 'checkpoints' / 'filling'}")
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(2**20)):
                pass
        except OSError:
            return


# The user's own mount of 200 MiB, in a namespace of its own. The checkpoints are gone with it.
_MOUNT = (
    'mkdir -p "$CHAOS_FOLDER/checkpoints" && mount -t tmpfs -o size=200m none "$CHAOS_FOLDER/checkpoints" && exec "$@"'
)
DISK_FULL = Start(
    after_step(3, fill_the_disk),
    frozenset({0, 1}),
    says="No space left",
    lost=STEPS,
    prefix=("unshare", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh"),
)


def interrupted_after(step: int) -> Start:
    """Return a start that gets SIGTERM after a step of its own."""
    return interrupted(TERM, after_step(step, send("driver", TERM)))


# One run that five faults hit, for CI: starting the stack takes most of the time.
SHORT = (
    Case(
        "kill -9, vLLM's engine core halted, NaN in the weights, SIGTERM, kill -9 and the newest checkpoint torn",
        (
            killed("driver"),
            halted(CORE, 1),
            poisoned("nan-weights", DIVERGED, update=2),
            interrupted_after(1),
            killed("driver", 2),
        ),
        damage=remove_a_file,
        passes_over="passed over",
    ),
)
CASES = (
    Case("kill -9 of the driver", (killed("driver"),)),
    Case("kill -9 of vLLM's engine core", (killed(CORE),)),
    Case("newest checkpoint torn", (killed("driver", 5),), damage=remove_a_file, passes_over="passed over"),
    Case("NaN in the weights", (poisoned("nan-weights", DIVERGED),)),
    Case("SIGTERM", (interrupted(TERM),)),
    Case("vLLM's engine core halted", (halted(CORE),)),
    Case("kill -9 of the engine's actor", (killed(ENGINE),)),
    Case("kill -9 of one rank of two", (killed(RANK),), ranks=2),
    Case("kill -9 of the controller", (killed(CONTROLLER),)),
    Case("kill -9 of Ray's raylet", (killed("raylet"),)),
    Case("kill -9 of Ray's GCS", (killed("gcs_server"),)),
    Case("kill -9 while a checkpoint is written", (Start(while_saving(send("driver", KILL)), KILLED),)),
    Case("kill -9 while the only checkpoint is replaced", (
        Start(while_saving(send("driver", KILL)), KILLED, flags="--ckpt.max_num 1"),)),
    Case("SIGINT", (interrupted(INT),)),
    Case("SIGTERM while a checkpoint is written", (interrupted(TERM, while_saving(send("driver", TERM))),)),
    Case("one rank of two halted", (halted(RANK),), ranks=2),
    Case("the engine's actor halted", (halted(ENGINE),)),
    Case("64 bytes of the optimizer's state overwritten", (killed("driver", 5),), damage=overwrite_64_bytes,
         passes_over="passed over"),
    Case("a checkpoint's file cut in half", (killed("driver", 5),), damage=truncate_a_file, passes_over="passed over"),
    Case("newest checkpoint's folder emptied", (killed("driver", 5),), damage=empty_the_folder,
         passes_over="passed over"),
    Case("`latest` removed", (killed("driver", 5),), damage=remove_latest),
    Case("NaN in one sample's advantages", (poisoned("nan-advantages", frozenset({0})),)),
    Case("disk full while saving", (DISK_FULL,)),
    Case("reward function never returns", (reward("while True: pass", "gave no result after 10 s"),)),
    Case("reward function raises", (reward("raise KeyError('lost')", "KeyError"),)),
    Case("reward function ends its process", (reward("os._exit(7)", "ended with status 7"),)),
    # Combinations.
    Case("killed twice", (killed("driver"), killed(CORE, 1))),
    Case("killed, then SIGTERM at once, then torn", (
        killed("driver"), interrupted_after(1)),
         damage=truncate_a_file, passes_over="passed over"),
    Case("engine core halted, then SIGTERM", (
        Start(after_step(3, both(send(CORE, STOP), send("driver", TERM))), frozenset({143, 4})),)),
    Case("killed in a save, newest then damaged", (
        Start(while_saving(send("driver", KILL)), KILLED), killed("driver", 3)),
         damage=overwrite_64_bytes, passes_over="passed over"),
)  # fmt: skip
