"""Look for inputs that break the graders, the reward server or the preparation of data.

    make fuzz ARGS='--seconds 60 --seed 0'

Real-looking inputs are changed at random, from the seed. A failure is printed with its input, and kept in
fuzz/corpus, which tests/test_fuzz.py replays. The exit status is 1 if there was one.
"""

import argparse
import hashlib
import itertools
import json
import random
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz.mutations import mutated
from fuzz.targets import SERVER, TARGETS

CORPUS = Path(__file__).with_name("corpus")
HANGS_AFTER = 30  # seconds; the targets have shorter limits of their own


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.run", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long to look (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--target", choices=TARGETS, nargs="+", default=list(TARGETS), help="default: all")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="folder that failures are kept in")
    args = parser.parse_args(argv)
    counts = dict.fromkeys(args.target, 0)
    failures = set()
    end = time.monotonic() + args.seconds
    try:
        for i, name in enumerate(itertools.cycle(args.target)):
            if time.monotonic() > end:
                break
            # Each input has a generator of its own: one alone can be made again.
            rng = random.Random(f"{args.seed}/{name}/{i}")
            target = TARGETS[name]
            case = mutated(rng, rng.choice(target.seeds), target.seeds)
            counts[name] += 1
            error = failure(name, case)
            where = error and error.strip().splitlines()[-1][:80]
            if error and (name, where) not in failures:
                failures.add((name, where))
                path = keep(args.corpus, name, case)
                print(f"{name}, seed {args.seed}, input {i}, kept as {path}:\n{json.dumps(case)[:2000]}\n{error}")
    finally:
        SERVER.close()
    print(
        f"seed {args.seed}: {', '.join(f'{name} {n}' for name, n in counts.items())} inputs, {len(failures)} failures"
    )
    return bool(failures)


def failure(name: str, case: Any) -> str | None:
    """Return the traceback of what a target does with an input, or None."""
    TARGETS[name].start()
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(HANGS_AFTER)
    try:
        TARGETS[name].check(case)
    except Exception:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    return None


def keep(folder: Path, name: str, case: Any) -> Path:
    """Write an input into the corpus, under a name made from it."""
    text = json.dumps({"target": name, "input": case}, indent=1) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    path.write_text(text, encoding="utf-8")
    return path


def _hangs(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"still at it after {HANGS_AFTER} s")


if __name__ == "__main__":
    raise SystemExit(main())
