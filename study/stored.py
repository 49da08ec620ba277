"""Store the results of runs as lines of JSON, one file for each study, and tell which runs are done."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from study import runs
from study.runs import ROOT, Run

RESULTS = ROOT / "study" / "results"
AR_LOPTI, FAMILY, AGREEMENT = "ar_lopti.jsonl", "family.jsonl", "agreement.jsonl"
# On puzzles held out by structure. The runs of the other files are on an earlier split.
BY_STRUCTURE, NEXT = "by_structure.jsonl", "next.jsonl"
STAMP = "configuration.json"  # in the folder of a seed's inputs, once they are made; it says what from


def is_done(run: Run, path: Path) -> bool:
    """Tell whether there is a result of this run with its present configuration."""
    return run.name in load([run], path)


def load(wanted: Iterable[Run], path: Path) -> dict[str, dict]:
    """Return {name: result} of those runs that are done, on whichever split.

    Args:
        wanted: the runs.
        path: a .jsonl file with a line for each result.
    """
    found = {run.name: run for run in wanted}
    return {
        result["run"]: result
        for result in _lines(path)
        if result["run"] in found
        and _on_any_split(result["configuration"]) == _on_any_split(runs.configuration(found[result["run"]]))
    }


def _on_any_split(configuration: dict) -> dict:
    inputs = {name: value for name, value in configuration["inputs"].items() if name != "held_out_by"}
    return configuration | {"inputs": inputs}


def _lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def refuse_another_split(path: Path) -> None:
    """Refuse to add results to those on an earlier split of the puzzles, with which they would make no pair.

    Raises:
        ValueError: there are such results.
    """
    for result in _lines(path):
        if result["configuration"]["inputs"].get("held_out_by") != runs.HELD_OUT_BY:
            raise ValueError(f"{path} has results on an earlier split of the puzzles, such as {result['run']}'s")


def refuse_another_warm_start(run: Run, sha256: str, path: Path) -> None:
    """Refuse to train from a warm start with which the run would make no pair with those that are stored.

    Another kind of CPU may make another warm start from the same seed.

    Raises:
        RuntimeError: a result of the same inputs has another warm start.
    """
    inputs = runs.inputs_configuration(run.condition, run.seed)
    for result in _lines(path):
        is_same = result["configuration"]["inputs"] == inputs
        if is_same and result["family"] == run.family and result["warm_start_sha256"] != sha256:
            raise RuntimeError(
                f"its warm start is not {result['run']}'s, as on another kind of CPU, so the two would make no pair: "
                "train it where that was trained, or delete the lines of the seed's results"
            )


def load_agreements(condition: str, by: str, path: Path) -> dict[int, dict]:
    """Return, by seed, what `study.warm_start_agreement` says of a condition, with the tokens divided by `by`."""
    return {found["seed"]: found for found in _lines(path) if (found["condition"], found["by"]) == (condition, by)}


def sha256(path: Path) -> str:
    """Return the beginning of a file's hash."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def write(result: dict, path: Path) -> None:
    """Append a result to a file, as one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(result, ensure_ascii=False) + "\n")


def write_whole(text: str, path: Path) -> None:
    """Write a file, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)
