"""One table of faults: what each does, when it comes, how the start that it hits must end, and what may be lost."""

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos.training import BAD_STEPS, DRIVER, PARENT, SAVE_EVERY, Training, checkpoints

Does = Callable[[Training], None]
Moment = Callable[[Training, int, random.Random], None]
Damage = Callable[[Path, random.Random], str]


def after_step(training: Training, step: int, rng: random.Random) -> None:
    """Wait for a random moment after a step of the run."""
    training.wait_for(lambda: max(training.steps(), default=0) >= step)
    time.sleep(rng.uniform(0, 0.5))


def while_saving(training: Training, step: int, rng: random.Random) -> None:
    """Wait until a checkpoint is begun, after a step of the run, where there is one already."""
    folder = training.folder / "checkpoints" / "_actor"
    training.wait_for(lambda: checkpoints(training.folder) and max(training.steps(), default=0) >= step)
    known = set(os.listdir(folder))
    training.wait_for(lambda: set(os.listdir(folder)) - known, every=0.001)


@dataclass(frozen=True)
class Fault:
    """A row: one start of the training, and the fault that hits it.

    Attributes:
        does: what is done to the running start. None: the fault is in the flags, the environment or the module.
        exits: how the start may end. 0: it survives, and goes on training.
        says: what must be in its log, as proof that the cause is named. A process that is killed says nothing.
        lost: how many steps the next start may have to train again.
        step: the run's step after which it comes. What has no `does` finds it in CHAOS_STEP, counted from where the
            start begins.
        moment: waits for the moment, from that step on.
        keeps_updates: whether the run, resumed, takes the very updates that it would have taken without the fault.
        damage: what happens to the files once the start has ended. It returns what it did.
        next_says: what the next start must say of that.
        ranks: training processes, and engines, that it needs.
        flags, environment, module, prefix: see `Training`.
    """

    name: str
    does: Does | None
    exits: frozenset[int]
    says: str = ""
    lost: float = SAVE_EVERY
    step: int = 3
    moment: Moment = after_step
    keeps_updates: bool = True
    damage: Damage | None = None
    next_says: str = ""
    ranks: int = 1
    flags: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    module: str = "arlopti_openrlhf.cli.train_ppo_ray"
    prefix: tuple[str, ...] = ()


NOTHING = Fault("nothing", None, frozenset({0}))  # the start at a case's end, which must finish
Case = tuple[Fault, ...]  # one run, which faults hit one after the other


def name_of(case: Case) -> str:
    """Return a case's name: those of its faults."""
    return ", then ".join(fault.name for fault in case)


def send(title: str, signum: signal.Signals) -> Does:
    """Return what sends a signal to the process of that title."""
    return lambda training: training.signal(title, signum)


# What happens to checkpoints while no run looks.


def _newest_file(folder: Path, pattern: str, rng: random.Random) -> Path:
    return rng.choice(sorted(checkpoints(folder)[-1].glob(pattern)))


def remove_a_file(folder: Path, rng: random.Random) -> str:
    path = _newest_file(folder, "*.pt", rng)
    path.unlink()
    return f"{path.name} removed"


def truncate_a_file(folder: Path, rng: random.Random) -> str:
    path = _newest_file(folder, "*.pt", rng)
    os.truncate(path, path.stat().st_size // 2)
    return f"{path.name} cut in half"


# Processes by the titles that Ray and vLLM give them.
CORE, RANK, CONTROLLER = "VLLM::EngineCore", "ray::PolicyModelActor", "ray::PPOTrainer"
KILLED, FAILED, DIVERGED, STALLED = frozenset({-9}), frozenset({1, 4}), frozenset({3}), frozenset({4})
TERM, INT, KILL, STOP = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP


def killed(title: str, what: str, ranks: int = 1) -> Fault:
    """Return a start one of whose processes is killed."""
    return Fault(f"kill -9 of {what}", send(title, KILL), FAILED, says="arlopti_openrlhf: ", ranks=ranks)


def halted(title: str, what: str) -> Fault:
    """Return a start one of whose processes is halted, so that it answers nothing and does not end."""
    return Fault(f"{what} halted", send(title, STOP), STALLED, says="no progress for")


def interrupted(signum: signal.Signals, when: str = "", moment: Moment = after_step) -> Fault:
    """Return a start that is asked to end. Nothing of its steps may be lost."""
    exits = frozenset({128 + signum})
    return Fault(f"{signum.name}{when}", send(PARENT, signum), exits, says=signum.name, lost=0, moment=moment)


def damaged(what: str, damage: Damage, next_says: str = "passed over") -> Fault:
    """Return a start that is killed, and then its newest checkpoint is damaged."""
    lost = 2 * SAVE_EVERY
    return Fault(what, send(PARENT, KILL), KILLED, lost=lost, step=5, damage=damage, next_says=next_says)


def reward(what: str, body: str, says: str) -> Fault:
    """Return a start whose reward function does `body` in the middle of the run."""
    environment = {"CHAOS_REWARD": body}
    return Fault(f"reward function {what}", None, FAILED, says, flags="--reward.timeout_seconds 10",
                 environment=environment)  # fmt: skip


def poisoned(what: str, fault: str, exits: frozenset[int], keeps_updates: bool) -> Fault:
    """Return a start with a fault inside its policy's process. No step that it spoils may be saved."""
    lost, environment = SAVE_EVERY + BAD_STEPS, {"CHAOS_FAULT": fault}
    return Fault(what, None, exits, "not finite", lost, keeps_updates=keeps_updates, environment=environment,
                 module="chaos.inject")  # fmt: skip


def close_the_terminal(training: Training) -> None:
    """Send SIGHUP to the command's process group, as a terminal does."""
    os.killpg(training.process.pid, signal.SIGHUP)


def signal_the_group(training: Training) -> None:
    """Send SIGTERM to the command, and then to its process group, as `timeout` does."""
    os.kill(training.process.pid, TERM)
    os.killpg(training.process.pid, TERM)


def halt_the_parent(training: Training) -> None:
    """Halt the parent, as Ctrl-Z does, while the run takes two steps."""
    steps = len(training.steps())
    training.signal(PARENT, STOP)
    try:
        training.wait_for(lambda: len(training.steps()) >= steps + 2)
    finally:
        training.signal(PARENT, signal.SIGCONT)


def fill(name: str) -> Does:
    """Return what fills the file system that the start has mounted there, which only its processes see."""

    def does(training: Training) -> None:
        path = Path(f"/proc/{training.process.pid}/root{training.folder / name / 'filling'}")
        with open(path, "wb", buffering=0) as file:
            try:
                while file.write(bytes(2**16)):
                    pass
            except OSError:
                return

    return does


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the checkpoints and the model of a run's folder, and its flags, with what they hold."""
    found = [*folder.glob("checkpoints/*/global_step*/*"), *folder.glob("checkpoints/*.*"), *folder.glob("final/*")]
    return {str(path): path.read_bytes() for path in found if path.is_file()}


def must_be_refused(command: Any, says: str, environment: dict[str, str] | None = None) -> None:
    """Run a training that has to be refused.

    Raises:
        LookupError: it ends otherwise, or says nothing of the cause.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    if done.returncode != 2 or says not in done.stderr:
        raise LookupError(f"not refused: exit status {done.returncode}, {done.stderr[-300:]}")


def start_it_again(training: Training) -> None:
    """Start the same command, with the same folders, beside the run."""
    says = f"a run that goes on writes there, process {training.process.pid} on "
    training.signal(DRIVER, STOP)  # it would be over before the other's checks are
    try:
        must_be_refused(training.process.args, says, training.environment)
    finally:
        training.signal(DRIVER, signal.SIGCONT)


def start_a_new_run(folder: Path, rng: random.Random) -> str:
    """Start a run with the same folders that is not to resume. Nothing there may change."""
    flags = (folder / "checkpoints" / "config.yaml").read_text("utf-8")
    (folder / "new.yaml").write_text(flags.replace("  load_enable: true", "  load_enable: false"), "utf-8")
    command = [sys.executable, "-m", "arlopti_openrlhf.cli.train_ppo_ray", "--config", f"{folder}/new.yaml"]
    before = files_of(folder)
    must_be_refused(command, "it holds another run's checkpoints")
    if files_of(folder) != before:
        raise LookupError("a run that was refused has changed files")
    return "a new run was refused"


def mounted(name: str, options: str) -> tuple[str, ...]:
    """Return what gives a start a file system there, in a namespace of its own. What it holds is gone with it."""
    folder = f'"$CHAOS_FOLDER/{name}"'
    script = f'mkdir -p {folder} && mount -t tmpfs -o {options} none {folder} && exec "$@"'
    return ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")


def beginning_with(script: str, *namespace: str) -> tuple[str, ...]:
    """Return what runs a shell script before a start, in namespaces of its own if some are given."""
    own = ("unshare", "--map-root-user", *namespace) if namespace else ()
    return (*own, "sh", "-c", f'touch "$CHAOS_FOLDER/faulted" && {script}', "sh")


def refused(what: str, script: str, says: str, *namespace: str) -> Fault:
    """Return a start on a machine that lacks something. It is refused before Ray starts."""
    prefix = beginning_with(f'{script} && exec "$@"', *namespace)
    return Fault(what, None, frozenset({2}), says, lost=0, prefix=prefix)


FAULTS = (
    Fault("kill -9 of the parent", send(PARENT, KILL), KILLED),
    Fault("kill -9 of the driver", send(DRIVER, KILL), frozenset({137}), "SIGKILL has ended its driver"),
    killed(CORE, "vLLM's engine core"),
    damaged("newest checkpoint torn", remove_a_file),
    poisoned("NaN in the weights", "nan-weights", DIVERGED, keeps_updates=True),
    interrupted(TERM),
    halted(CORE, "vLLM's engine core"),
    killed(RANK, "one rank of two", ranks=2),
    killed(CONTROLLER, "the controller"),
    Fault("kill -9 while a checkpoint is written", send(PARENT, KILL), KILLED, moment=while_saving),
    interrupted(INT),
    interrupted(TERM, " while a checkpoint is written", while_saving),
    damaged("a checkpoint's file cut in half", truncate_a_file),
    damaged("a new run in another run's folder", start_a_new_run, next_says="resumes from"),
    Fault("a second run in the folder of one that goes on", start_it_again, frozenset({0}), lost=0),
    poisoned("NaN in one sample's advantages", "nan-advantages", frozenset({0}), keeps_updates=False),
    Fault("SIGTERM to the process group", signal_the_group, frozenset({143}), "SIGTERM", lost=0),
    Fault("the parent halted", halt_the_parent, frozenset({0}), lost=0),
    Fault("the terminal closes", close_the_terminal, frozenset({129}), "SIGHUP", lost=0),
    Fault("disk full while saving", fill("checkpoints"), frozenset({0, 1}), "No space left", lost=math.inf,
          prefix=mounted("checkpoints", "size=200m")),
    Fault("disk full for TensorBoard", fill("tensorboard"), frozenset({0}), "TensorBoard has failed", lost=0,
          prefix=mounted("tensorboard", "size=200k")),
    reward("never returns", "while True: pass", "gave no result after 10 s"),
    Fault("the update hangs", None, STALLED, "no progress for", environment={"CHAOS_FAULT": "hang"},
          module="chaos.inject"),
)  # fmt: skip

# Those of the machine. The nemesis draws none, since they are refused.
OF_THE_MACHINE = (
    refused("shared memory as in Docker", "mount -t tmpfs -o size=64m none /dev/shm", "--shm-size", "--mount"),
)  # fmt: skip


def row(name: str, **changes: Any) -> Fault:
    """Return the fault of that name, with changes."""
    return replace(next(fault for fault in FAULTS if fault.name == name), **changes)


_DRIVER = row("kill -9 of the driver")
CASES: tuple[Case, ...] = (
    *((fault,) for fault in (*FAULTS, *OF_THE_MACHINE)),
    (_DRIVER, row("SIGTERM"), row("a checkpoint's file cut in half", step=4)),
)
