"""Run a case: start the training, bring about fault after fault, and judge how each start ends and what was lost."""

import math
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from chaos.faults import NOTHING, Case, Fault, name_of
from chaos.training import (
    GRACE_SECONDS,
    PARENT,
    PROMPTS,
    SAVE_EVERY,
    STEPS,
    Training,
    checkpoint_step,
    checkpoints,
    trained_prompts,
)


@dataclass
class Outcome:
    """What a case came to.

    Attributes:
        noticed: seconds from the last fault to the line that names it, or to the end of the start that it hit.
        lost: steps that were trained again.
        wrong: what did not go as it must. Empty: survived.
        exits: the exit status of each start.
    """

    noticed: float = math.nan
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)

    def expect(self, holds: object, otherwise: str) -> None:
        """Note what is wrong where something does not hold."""
        if not holds:
            self.wrong.append(otherwise)


def run_case(
    case: Case, inputs: Path, folder: Path, seed: int, *, steps: int = STEPS, ranks: int = 1, flags: str = ""
) -> Outcome:
    """Run a case in an empty folder. The same seed injects at the same random moments.

    Args:
        steps: what `make_inputs` wrote prompts for.
        ranks: training processes, and engines, at least.
        flags: further flags of every start.
    """
    rng, outcome, trained = random.Random(f"{seed} {name_of(case)}"), Outcome(), list[int]()
    ranks, damage, must_say = max([ranks, *(fault.ranks for fault in case)]), "", ""
    try:
        for number, fault in enumerate((*case, NOTHING), start=1):
            training = _start(fault, inputs, folder, ranks, flags)
            _hit(training, fault, rng, outcome, is_last=number >= len(case))
            # A kill may take the last line of a start with it. The step of that line is in the next one's checkpoint.
            trained += [step for step in training.resumed_from() if step not in trained]
            trained += training.steps()
            outcome.expect(must_say in training.text, f"{training.log.name} does not say that {damage}")
            if outcome.exits[-1] == 0:
                outcome.expect(number >= len(case), f"{training.log.name}: the run ended before its last fault")
                break
            damage, must_say = fault.damage(folder, rng) if fault.damage else "", fault.next_says
        allowed, outcome.lost = sum(fault.lost for fault in case), len(trained) - steps
        outcome.expect(set(trained) == set(range(1, steps + 1)), f"steps {trained}")
        outcome.expect(0 <= outcome.lost <= allowed, f"{outcome.lost} steps lost, at most {allowed}")
        outcome.expect((folder / "final" / "model.safetensors").exists(), "no final model")
        outcome.expect(set(trained_prompts(folder)) == set(range(steps * PROMPTS)), "prompts are missing")
    except (TimeoutError, LookupError, OSError) as error:
        outcome.wrong.append(str(error))
    return outcome


def _start(fault: Fault, inputs: Path, folder: Path, ranks: int, flags: str) -> Training:
    (folder / "faulted").unlink(missing_ok=True)
    # What is in the flags, the environment or the module counts the steps of its start.
    begun = checkpoint_step(checkpoints(folder)[-1]) if checkpoints(folder) else 0
    return Training(
        inputs,
        folder,
        ranks=ranks,
        module=fault.module,
        flags=f"{flags} {fault.flags}",
        step=max(1, fault.step - begun),
        environment=fault.environment,
        prefix=fault.prefix,
    )


def _hit(training: Training, fault: Fault, rng: random.Random, outcome: Outcome, is_last: bool) -> None:
    """Bring the fault about, and judge how the start ends.

    A start that survives its fault goes on to the end, or is asked to end some steps later, for the next fault.
    """
    faulted, name, exits = training.folder / "faulted", training.log.name, fault.exits
    try:
        if fault.does:
            fault.moment(training, fault.step, rng)
            fault.does(training)
            faulted.touch()
        if 0 in exits and not is_last:
            training.wait_for(faulted.exists)
            enough = len(training.steps()) + SAVE_EVERY
            training.wait_for(lambda: training.is_over() or len(training.steps()) >= enough)
            if not training.is_over():
                training.signal(PARENT, signal.SIGTERM)
            exits = exits | {128 + signal.SIGTERM}
        status, said = training.wait(fault.says)
        end, text = time.time(), training.text
        outcome.exits.append(status)
        if fault is not NOTHING:
            outcome.expect(faulted.exists(), f"{name}: the fault did not come")
            outcome.noticed = (said or end) - (faulted.stat().st_mtime if faulted.exists() else math.nan)
        outcome.expect(status in exits, f"{name}: exit status {status}, not {sorted(exits)}")
        outcome.expect(fault.says in text, f"{name} does not say {fault.says!r}")
        is_saved = (training.folder / "final" / "model.safetensors").exists()
        outcome.expect(status == 0 or not is_saved, f"{name}: saved a final model")
    finally:
        _expect_nothing_left(training, outcome)


def _expect_nothing_left(training: Training, outcome: Outcome) -> None:
    """Note processes that are left some time after the run's end, and kill them."""
    until = time.monotonic() + GRACE_SECONDS
    while training.is_over() and training.processes() and time.monotonic() < until:
        time.sleep(0.5)
    if rest := training.kill_rest():
        outcome.wrong.append(f"{training.log.name}: {len(rest)} processes left: {', '.join(rest)}")
