"""Hit one deterministic run with faults drawn at random, and compare it with the run that nothing hit."""

import hashlib
import json
import random
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from chaos import training
from chaos.cases import run_case
from chaos.faults import FAULTS, Case
from chaos.training import make_inputs
from torch.utils._pytree import tree_leaves

import arlopti_openrlhf

STEPS, RANKS, DRAWN, FLAGS = 30, 2, 8, "--train.deterministic"
MODEL = Path("final/model.safetensors")
# A start that survives its fault trains some steps more, and its lines are read up to a second late: five steps.
_MOMENTS = range(2, STEPS - 10)


@dataclass
class Record:
    """What a seed came to.

    Attributes:
        faults: names, each with the step of the run after which it came, in their order.
        exits: the exit status of each start. The last is that of the start that nothing hit.
        trained_again: steps that were lost and trained again.
        is_equal: whether weights and optimizer's state are those of the run that nothing hit, bit for bit.
        wrong: what did not go as it must. Empty: survived.
    """

    seed: int
    faults: list[tuple[str, int]]
    exits: list[int] = field(default_factory=list)
    trained_again: int = 0
    minutes: float = 0
    is_equal: bool = False
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(asdict(self))


def draw(seed: int, count: int = DRAWN) -> Case:
    """Return some of the faults that keep the updates as they were, in random order at random steps."""
    rng = random.Random(seed)
    faults = rng.sample([fault for fault in FAULTS if fault.keeps_updates], count)
    return tuple(
        replace(fault, step=step) for fault, step in zip(faults, sorted(rng.sample(_MOMENTS, count)), strict=True)
    )


def run(out: Path, seed: int, count: int = DRAWN) -> Record:
    """Run a seed in `out`, and add its record to `out/nemesis.jsonl`. The run that nothing hits is made once."""
    case, folder, unbroken = draw(seed, count), out / f"seed{seed}", _unbroken(out)
    record = Record(seed, [(fault.name, fault.step) for fault in case])
    shutil.rmtree(folder, ignore_errors=True)
    before, begin = hashes(unbroken), time.monotonic()
    outcome = run_case(case, unbroken / "inputs", folder, seed, steps=STEPS, ranks=RANKS, flags=FLAGS)
    record.minutes = round((time.monotonic() - begin) / 60, 1)
    record.exits, record.trained_again = outcome.exits, outcome.lost
    is_complete = (folder / MODEL).exists()
    different = differences(unbroken / "run", folder) if is_complete else []
    record.is_equal = is_complete and not different
    after = hashes(unbroken)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    record.wrong = [*outcome.wrong, *different, *(f"{path} has changed" for path in changed)]
    with open(out / "nemesis.jsonl", "a", encoding="utf-8") as file:
        file.write(record.line() + "\n")
    return record


def _unbroken(out: Path) -> Path:
    """Return the folder with the inputs and the run that nothing hits. It is made anew where the code is another."""
    sources = [*Path(arlopti_openrlhf.__file__).parent.rglob("*.py"), Path(training.__file__)]
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()
    folder = out / f"unbroken-{code[:12]}"
    if not (folder / "run" / MODEL).exists():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "inputs").mkdir(parents=True)
        make_inputs(folder / "inputs", STEPS)
        outcome = run_case((), folder / "inputs", folder / "run", 0, steps=STEPS, ranks=RANKS, flags=FLAGS)
        if outcome.wrong:
            raise RuntimeError(f"the run that nothing hits: {'; '.join(outcome.wrong)}")
    return folder


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def differences(one: Path, other: Path) -> list[str]:
    """Return what differs in the bits of two runs' final weights, and of their optimizer's last state."""
    found = [] if (one / MODEL).read_bytes() == (other / MODEL).read_bytes() else [f"{MODEL} differs"]
    last = Path("checkpoints") / "_actor" / f"global_step{STEPS}"
    names = {path.name for folder in (one, other) for path in (folder / last).glob("*optim_states.pt")}
    for name in sorted(names):
        if not _are_equal(one / last / name, other / last / name):
            found.append(f"{name} differs")
    return found if names else [*found, f"no optimizer's state in {last}"]


def _are_equal(one: Path, other: Path) -> bool:
    """Return whether two files are equal, or hold equal tensors: what torch.save writes around them may differ."""
    if not (one.exists() and other.exists()):
        return False
    if one.read_bytes() == other.read_bytes():
        return True
    ours, theirs = (
        [leaf for leaf in tree_leaves(torch.load(path, weights_only=False)) if torch.is_tensor(leaf)]
        for path in (one, other)
    )
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
