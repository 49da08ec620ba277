"""One command for a machine with a GPU: is the selective update exact there, and what does it save?

python benchmarks/gpu_check.py [--minutes 8] [--out benchmarks/gpu]

It compares the selective update with OpenRLHF's own (`gpu_exactness`), and times both at the full lengths of Knights
and Knaves, at the shapes of published models with random weights. It needs torch, transformers, accelerate, peft and
the packages that `gpu_wheels.py` gathers, but no Ray, no vLLM and no flash-attn. Without a GPU all runs at toy size.

Exit status: 0, or 1 where a comparison fails or a part breaks, or 2 where a package is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpu_tables import as_markdown, exactness_row, headline
from gpu_wheels import GIVEN, PACKAGES
from missing_packages import NOT_NEEDED, missing

HERE = Path(__file__).resolve().parent
# The comparison takes two prompts in one micro-batch. Its float32 and three gradients of it have to fit beside stock's
# logits, hence the factor on K&K's lengths. Times take the full lengths, and micro-batches that stock can hold.
EXACTNESS = dict(scale=0.25, prompts=2, micro_batch_size=16)
TIMES = dict(scale=1.0, prompts=8, micro_batch_size=8, rounds=3)
PARTS = [
    ("exactness", "0.5b", EXACTNESS),
    ("times", "0.5b", TIMES),
    ("times", "0.5b", TIMES | {"attention": "flex_attention", "rounds": 2}),  # is it faster than SDPA by segments?
    ("exactness", "3b", EXACTNESS),
    ("times", "3b", TIMES | {"micro_batch_size": 4}),
    ("exactness", "1.5b", EXACTNESS),
    ("exactness", "llama-1b", EXACTNESS),
    ("times", "1.5b", TIMES),
    ("times", "llama-1b", TIMES),
]
TOY = dict(scale=0.05, prompts=2, micro_batch_size=16)
TOY_PARTS = [("exactness", "toy-llama", TOY), ("times", "toy", TOY | {"rounds": 1})]

# Runs one part, for so many seconds at most, and returns what it found.
Run = Callable[[dict, float], dict]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="what does not fit in them is skipped")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, on the CPU or the GPU")
    parser.add_argument("--out", metavar="PATH", help="write PATH.json and PATH.md; on a GPU benchmarks/gpu")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    if absent := missing([*GIVEN, *PACKAGES.values()]):
        absent = ", ".join(absent)
        print(f"gpu_check: error: not installed: {absent} (see benchmarks/gpu_wheels.py)", file=sys.stderr)
        raise SystemExit(2)
    # The project itself need not be installed, here or in the processes of the parts.
    sys.path.insert(0, str(HERE.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    from hardware import machine

    from arlopti_openrlhf import cpu

    toy = args.toy or cpu.uses_cpu()
    without = missing((*NOT_NEEDED, "flash_attn"))
    record = dict(
        command=" ".join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]]),
        machine=machine(),
        not_installed=without,
    )
    print(headline(record), flush=True)
    record |= check(TOY_PARTS if toy else PARTS, end, run_part)
    record["minutes"] = (time.monotonic() - end) / 60 + args.minutes
    text = as_markdown(record)
    print(text)
    out = args.out or (None if toy else HERE / "gpu")
    if out:
        Path(f"{out}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        Path(f"{out}.md").write_text(text, encoding="utf-8")
    raise SystemExit(1 if record["failures"] else 0)


def check(parts: list[tuple[str, str, dict]], end: float, run: Run) -> dict:
    """Run the parts until `end`, of `time.monotonic`. Returns what was found, what failed and what was skipped."""
    found: dict = dict(exactness=[], times=[], left_out=[], failures=[], skipped=[], optimizer=None)
    for kind, shape, sizes in parts:
        name = f"{kind} at {shape}"
        part = dict(kind=kind, args=dict(shape=shape, **sizes), without=[])
        print(f"{name} ...", flush=True)
        result = _run_with_less_memory(part, end, run)
        if "error" in result:
            found["failures"].append(f"{name}: {result['error']}")
        elif "skipped" in result:
            found["skipped"].append(f"{name}: {result['skipped']}")
        elif kind == "exactness":
            found["exactness"] += result["rows"]
            found["left_out"] = result["left_out"]
            for row in result["rows"]:
                what = f"{row['name']}, {row['attention']}, {row['dtype']}"
                found["failures"] += [f"{what}: {failure}" for failure in row["failures"]]
                print(exactness_row(row), flush=True)
        else:
            found["times"].append(result)
            print(f"times: {result['description']}: {result['rounds']} rounds", flush=True)
        found["optimizer"] = result.get("optimizer", found["optimizer"])
    if not found["exactness"] and not found["failures"]:
        found["failures"].append("nothing was compared")
    return found


def _run_with_less_memory(part: dict, end: float, run: Run) -> dict:
    """Run a part. Where a variant runs out of memory, run it again without that variant, and say so in the result.

    After such an error an engine of DeepSpeed is of no more use, so it takes another process.
    """
    while True:
        seconds = end - time.monotonic()
        if seconds <= 0:
            return {"skipped": "no time left"}
        part["end"] = time.time() + seconds
        result = run(part, seconds)
        variant = result.get("out_of_memory")
        if variant is None:
            return result | {"without": part["without"], "sizes": part["args"]}
        if variant == "all":
            return {"skipped": "out of memory"}
        print(f"{part['kind']} at {part['args']['shape']}: {variant}: out of memory", flush=True)
        part["without"].append(variant)


def run_part(part: dict, seconds: float) -> dict:
    """Run a part in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, str(HERE / "gpu_part.py"), json.dumps(part), str(result)]
        try:
            with log.open("w") as file:
                subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"skipped": "no time left in the middle of it"}
        if result.exists():
            return json.loads(result.read_text(encoding="utf-8"))
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        print(text[-3000:], flush=True)
        return {"error": text.splitlines()[-1] if text else "ended without a word"}


if __name__ == "__main__":
    main()
