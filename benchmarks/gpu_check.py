"""One command for a machine with a GPU: is the selective update exact there, and what does it save?

python benchmarks/gpu_check.py [--minutes 10] [--parts "exactness 0.5b" ...] [--out benchmarks/gpu]

It compares the update's arithmetic with float64 (`gpu_arithmetic`) and the selective update with OpenRLHF's own
(`gpu_exactness`), and times both at the full lengths of Knights and Knaves and at long responses, at the shapes of
published models with random weights. Both sides have Liger's kernels, the reference has none. What it has found is
written after each part. It runs where the project is installed, on a GPU with its extra [gpu]. Without a GPU
everything runs at toy size, without Liger.

Exit status: 0, or 1 where a comparison fails or a part breaks, or 2 where liger-kernel is missing.
"""

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpu_tables import closing, exactness_table, headline
from hardware import machine
from update_tables import table

from arlopti_openrlhf import cpu

HERE = Path(__file__).resolve().parent
# The comparison takes two prompts in one micro-batch. Its float32 and three gradients of it have to fit beside stock's
# logits, hence the factor on K&K's lengths. Times take the full lengths, and micro-batches that stock can hold.
EXACTNESS = dict(scale=0.25, prompts=2, micro_batch_size=16, others=False, liger=True)
TIMES = dict(scale=1.0, prompts=8, micro_batch_size=8, rounds=3, liger=True)
LONG = TIMES | dict(prompts=1, micro_batch_size=1, rounds=2, response_length=4096, gradient_checkpointing=True)
Part = tuple[str, str, dict]  # its name, what it does, and with what sizes
PARTS: list[Part] = [
    ("arithmetic", "arithmetic", {}),
    ("exactness 0.5b", "exactness", EXACTNESS | {"shape": "0.5b"}),
    ("exactness 0.5b, without Liger", "exactness", EXACTNESS | {"shape": "0.5b", "liger": False}),
    ("times 0.5b", "times", TIMES | {"shape": "0.5b"}),
    ("times 3b", "times", TIMES | {"shape": "3b", "micro_batch_size": 4, "rounds": 2}),
    ("exactness 3b", "exactness", EXACTNESS | {"shape": "3b"}),
    ("long responses 0.5b", "times", LONG | {"shape": "0.5b"}),
    ("exactness 0.5b, other attention", "exactness", EXACTNESS | {"shape": "0.5b", "others": True}),
    ("times 0.5b, without Liger", "times", TIMES | {"shape": "0.5b", "liger": False, "rounds": 2}),
    # Is it faster than SDPA?
    ("times 0.5b, FlexAttention", "times", TIMES | {"shape": "0.5b", "attention": "flex_attention", "rounds": 2}),
    ("exactness 1.5b", "exactness", EXACTNESS | {"shape": "1.5b"}),
    ("exactness llama-1b", "exactness", EXACTNESS | {"shape": "llama-1b"}),
    ("times 1.5b", "times", TIMES | {"shape": "1.5b"}),
    ("times llama-1b", "times", TIMES | {"shape": "llama-1b"}),
]
TOY = EXACTNESS | dict(scale=0.05, liger=False)
TOY_LONG = LONG | dict(shape="toy", response_length=128, rounds=1, liger=False)
TOY_PARTS: list[Part] = [
    ("arithmetic", "arithmetic", {}),
    ("exactness toy-llama", "exactness", TOY | {"shape": "toy-llama"}),
    ("times toy", "times", TOY | {"shape": "toy", "rounds": 1}),
    ("long responses toy", "times", TOY_LONG),
]

# Runs one part, for so many seconds at most, and returns what it found.
Run = Callable[[dict, float], dict]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="what does not fit in them is skipped")
    names = [name for name, *_ in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="which to run, in this order")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, on the CPU or the GPU")
    parser.add_argument("--out", metavar="PATH", help="write PATH.json; on a GPU benchmarks/gpu")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    toy = args.toy or cpu.uses_cpu()
    parts = TOY_PARTS if toy else [part for name in args.parts for part in PARTS if part[0] == name]
    if any(sizes.get("liger") for *_, sizes in parts) and importlib.util.find_spec("liger_kernel") is None:
        without = "of the extra [gpu], is missing; only 'arithmetic' and parts 'without Liger' run without it"
        parser.error(f"argument --parts: liger-kernel, {without}")
    record = dict(command=shlex.join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]]), machine=machine())
    print(headline(record), flush=True)
    out = args.out or (None if toy else HERE / "gpu")

    def write(found: dict) -> None:
        record.update(found, minutes=(time.monotonic() - end) / 60 + args.minutes)
        if out:
            Path(f"{out}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    write(check(parts, end, run_part, write))
    print(closing(record))
    raise SystemExit(1 if record["failures"] else 0)


def check(parts: list[Part], end: float, run: Run, write: Callable[[dict], object]) -> dict:
    """Run the parts until `end`, of `time.monotonic`, and call `write` after each.

    Returns what was found, what failed and what was skipped.
    """
    found: dict = dict(arithmetic=[], exactness=[], times=[], left_out=[], failures=[], skipped=[], optimizer=None)
    for name, kind, sizes in parts:
        part = dict(name=name, kind=kind, args=sizes, without=[])
        print(f"{name} ...", flush=True)
        start = time.monotonic()
        result = _run_with_less_memory(part, end, run)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        if "error" in result:
            found["failures"].append(f"{name}: {result['error']}")
        elif "skipped" in result:
            found["skipped"].append(f"{name}: {result['skipped']}")
        elif kind == "arithmetic":
            found["arithmetic"] = result["rows"]
            for row in result["rows"]:
                found["failures"] += [f"{row['name']}, {row['dtype']}: {failure}" for failure in row["failures"]]
        elif kind == "exactness":
            found["exactness"] += result["rows"]
            found["left_out"] = result["left_out"]
            for row in result["rows"]:
                what = f"{row['name']}, {row['attention']}, {row['dtype']}"
                found["failures"] += [f"{what}: {failure}" for failure in row["failures"]]
            print(exactness_table(result["rows"]), flush=True)
        else:
            found["times"].append(result)
            print(f"{result['description']}, {result['rounds']} rounds", flush=True)
            print(table(result["variants"], result["floor_gib"]), flush=True)
        found["optimizer"] = result.get("optimizer") or found["optimizer"]
        write(found)
    if not found["arithmetic"] and not found["exactness"] and not found["failures"]:
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
        print(f"{part['name']}: {variant}: out of memory", flush=True)
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
