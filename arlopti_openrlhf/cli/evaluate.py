"""Accuracy of models per data source, by vLLM offline (GPU or CPU), as a table.

    python -m arlopti_openrlhf.cli.evaluate --model BASE TRAINED --data kk_test.jsonl aime.jsonl --out results \\
        --sampling "*:n=8,t=1" --sampling "kk_*:n=1,t=0" --sampling "aime:n=16,t=1"

Writes results/MODEL.responses.jsonl with every response, results/MODEL.json with the measures, results/table.md and
results/table.csv. An evaluation that was interrupted continues where it stopped.
"""

import argparse
import csv
import hashlib
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from arlopti_openrlhf.grading import kk_reward
from arlopti_openrlhf.grading.sources import grade
from arlopti_openrlhf.scoring.generation import generate, load_engine
from arlopti_openrlhf.scoring.measures import Estimate, Response, estimate_source
from arlopti_openrlhf.scoring.sampling import Sampling, parse_sampling, sampling_of

Row = dict[str, Any]
_CHUNK = 4096  # responses that are generated before they are written


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    names = [_name(model) for model in args.model]
    if len(set(names)) < len(names):
        parser.error(f"argument --model: two models have one name: {', '.join(names)}")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        rows = [json.loads(line) for file in args.data for line in open(file, encoding="utf-8")]
    except (OSError, ValueError) as error:
        parser.error(f"argument --data: {error}")
    missing = {name for row in rows for name in ("prompt", "label", "datasource") if name not in row}
    if not rows or missing:
        parser.error(f"argument --data: {'no rows' if not rows else 'rows without ' + ', '.join(sorted(missing))}")
    if len(args.model) > 1:
        # A process for each: an engine does not give back all that it holds.
        for model in args.model:
            flags = [f"--{n}={v}" for n, v in vars(args).items() if n in ("max_new_tokens", "seed")]
            flags = [flag.replace("_", "-", 2) for flag in flags] + [f"--sampling={_spec(s)}" for s in args.sampling]
            flags += ["--greedy"] if args.greedy else []
            command = [sys.executable, "-m", "arlopti_openrlhf.cli.evaluate", "--model", model, "--out", str(out)]
            if subprocess.run([*command, "--data", *args.data, *flags]).returncode:
                parser.exit(1, f"evaluate: {model} could not be evaluated\n")
    else:
        evaluate(args.model[0], rows, args, out)
    results = {name: json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in names}
    (out / "table.md").write_text(markdown(results), encoding="utf-8")
    write_csv(results, out / "table.csv")
    print(markdown(results), end="")


def make_parser() -> argparse.ArgumentParser:
    """The command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m arlopti_openrlhf.cli.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", required=True, help="Hugging Face directories or names")
    parser.add_argument("--data", nargs="+", required=True, help="JSONL of prepare_data: prompt, label, datasource")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument(
        "--sampling",
        action="append",
        type=parse_sampling,
        default=[Sampling("*", 8, 1.0)],
        metavar="PATTERN:n=N,t=T",
        help="samples per problem and temperature of the sources that match; the last that matches counts "
        '(default: "*:n=8,t=1")',
    )
    parser.add_argument("--greedy", action="store_true", help="also answer each problem once at temperature 0")
    parser.add_argument("--max-new-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def evaluate(model: str, rows: Sequence[Row], args: argparse.Namespace, out: Path) -> None:
    """Answers and grades every row, and writes the model's two files."""
    name = _name(model)
    path = out / f"{name}.responses.jsonl"
    jobs = []
    for i, row in enumerate(rows):
        sampling = sampling_of(row["datasource"], args.sampling)
        jobs.append((i, sampling.n, sampling.temperature))
        if args.greedy and sampling.temperature:
            jobs.append((i, 1, 0.0))

    settings = [_version(model), args.max_new_tokens, args.seed]

    def key(job: tuple[int, int, float]) -> str:
        i, n, temperature = job
        text = json.dumps([rows[i]["prompt"], rows[i]["label"], i, n, temperature, settings])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    done = {record["key"]: record for record in _records(path)}
    open_jobs = [job for job in jobs if key(job) not in done]
    if done:
        print(f"{name}: {len(jobs) - len(open_jobs)} of {len(jobs)} problems are answered already", flush=True)
    if open_jobs:
        answer = _engine(model, args)
        with open(path, "a", encoding="utf-8") as file:
            for chunk in _chunks(open_jobs):
                for job, prompt, responses in answer(rows, chunk):
                    record = _graded(rows[job[0]], job, prompt, responses) | {"key": key(job)}
                    done[record["key"]] = record
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
    groups: dict[tuple[str, bool], list[list[Response]]] = defaultdict(list)
    for job in jobs:
        record = done[key(job)]
        is_extra = args.greedy and not job[2] and sampling_of(record["datasource"], args.sampling).temperature > 0
        groups[record["datasource"], is_extra].append(responses_of(record))
    sources = sorted({source for source, _ in groups}, key=_natural)
    result: dict[str, dict] = {}
    for source in sources:
        spec = sampling_of(source, args.sampling)
        result[source] = {"n": len(groups[source, False]), "samples": spec.n, "temperature": spec.temperature}
        result[source] |= {name: e._asdict() for name, e in estimate_source(groups[source, False]).items()}
        if (source, True) in groups:
            result[source]["greedy"] = estimate_source(groups[source, True])["accuracy"]._asdict()
    (out / f"{name}.json").write_text(json.dumps({"model": model, "sources": result}, indent=1) + "\n", "utf-8")


def _engine(model: str, args: argparse.Namespace) -> Callable[[Sequence[Row], list], Iterator]:
    """answer(rows, jobs) gives (job, prompt text, vLLM's outputs) for each job."""
    engine = load_engine(model, args.seed)
    from vllm import SamplingParams

    def answer(rows: Sequence[Row], jobs: list) -> Iterator:
        parameters = [
            SamplingParams(
                max_tokens=args.max_new_tokens,
                skip_special_tokens=False,
                n=n,
                temperature=temperature,
            )
            for _, n, temperature in jobs
        ]
        answered = generate(engine, [rows[i]["prompt"] for i, _, _ in jobs], parameters)
        for job, (prompt, output) in zip(jobs, answered, strict=True):
            yield job, prompt, output.outputs

    return answer


def _graded(row: Row, job: tuple[int, int, float], prompt: str, outputs) -> dict:
    responses = []
    for output in outputs:
        turn = kk_reward.assistant_turn(prompt + output.text, prompt)
        result = grade(row["datasource"], turn, row["label"])
        responses.append(
            {
                "text": output.text,
                "score": result.score,
                "well_formed": result.well_formed,
                "tokens": len(output.token_ids),
                "truncated": output.finish_reason == "length",
            }
        )
    return {
        "datasource": row["datasource"],
        "prompt": prompt,
        "label": row["label"],
        "temperature": job[2],
        "responses": responses,
    }


def responses_of(record: dict) -> list[Response]:
    """The responses of one line of a MODEL.responses.jsonl."""
    return [Response(r["score"], r["well_formed"], r["tokens"], r["truncated"]) for r in record["responses"]]


def _records(path: Path) -> Iterator[dict]:
    """What an earlier run wrote; a last line that was cut off is cut out."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[-1]:
        path.write_text("".join(line + "\n" for line in lines[:-1]), encoding="utf-8")
    for line in lines[:-1]:
        yield json.loads(line)


def _chunks(jobs: list[tuple[int, int, float]]) -> Iterator[list]:
    chunk, responses = [], 0
    for job in jobs:
        chunk.append(job)
        responses += job[1]
        if responses >= _CHUNK:
            yield chunk
            chunk, responses = [], 0
    if chunk:
        yield chunk


def _name(model: str) -> str:
    """A model's name in files and tables: its directory's, or the part behind the organisation's."""
    return Path(model).absolute().name if Path(model).exists() else model.rsplit("/", 1)[-1]


def _version(model: str) -> list:
    """Of a local model its files' sizes and times: other weights in the same place are another model."""
    files = sorted(Path(model).glob("*")) if Path(model).is_dir() else []
    return [model, [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]]


def _spec(sampling: Sampling) -> str:
    return f"{sampling.pattern}:n={sampling.n},t={sampling.temperature:g}"


def _natural(source: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", source)]


# --- the tables ----------------------------------------------------------------------------------------------


def markdown(results: dict[str, dict]) -> str:
    """The paper's table: a row per model, a column per source, and averages over the sources (K&K: by people)."""
    sources = sorted({source for result in results.values() for source in result["sources"]}, key=_natural)
    puzzles = [source for source in sources if source.startswith("kk_")]
    others = [source for source in sources if source not in puzzles]
    tables = []
    for title, columns in (("Knights and Knaves", puzzles), ("Others", others)):
        if not columns:
            continue
        average = len(columns) > 1
        head = [title, *(re.sub(r"kk_(\d+)ppl", r"\1 people", source) for source in columns)]
        lines = [head + (["Avg."] if average else [])]
        for name, result in results.items():
            found = [result["sources"].get(source) for source in columns]
            cells = [_cell(f["accuracy"]) if f else "" for f in found]
            if average:
                cells.append(f"{sum(f['accuracy']['value'] for f in found) / len(found):.3f}" if all(found) else "")
            lines.append([name, *cells])
        tables.append(_table(lines))
    lines = [["model", "source", "problems", "samples", "t", "measure", "value [95%]"]]
    for name, result in results.items():
        for source in sources:
            found = result["sources"].get(source, {})
            for measured, estimate in found.items():
                if isinstance(estimate, dict):
                    spec = [str(found["n"]), str(found["samples"]), f"{found['temperature']:g}"]
                    digits = 0 if measured == "response_length" else 3
                    lines.append([name, source, *spec, measured, _cell(estimate, digits)])
    return "\n".join([*tables, _table(lines)])


def _cell(estimate: dict, digits: int = 3) -> str:
    return f"{estimate['value']:.{digits}f} [{estimate['low']:.{digits}f}, {estimate['high']:.{digits}f}]"


def _table(lines: list[list[str]]) -> str:
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def write_csv(results: dict[str, dict], path: Path) -> None:
    """One line per model, source and measure."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "source", "problems", "samples", "temperature", "measure", *Estimate._fields])
        for name, result in results.items():
            for source, found in result["sources"].items():
                for measured, estimate in found.items():
                    if isinstance(estimate, dict):
                        writer.writerow(
                            [name, source, found["n"], found["samples"], found["temperature"], measured]
                            + list(estimate.values())
                        )


if __name__ == "__main__":
    main()
