"""Store the results of runs, one small file each or all as lines of one file, and tell which runs are done."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from study import runs
from study.runs import ROOT, Run

RESULTS = ROOT / "study" / "results"
BY_STRUCTURE = "by_structure.jsonl"  # in the folder of the results; the others there are on an earlier split
STAMP = "configuration.json"  # in the folder of a seed's inputs, once they are made; it says what from


def is_done(run: Run, place: Path) -> bool:
    """Tell whether there is a result of this run with its present configuration."""
    return run.name in load([run], place)


def load(wanted: Iterable[Run], place: Path) -> dict[str, dict]:
    """Return {name: result} of those runs that are done, on whichever split.

    Args:
        wanted: the runs.
        place: a folder with a file for each result, or a .jsonl file with a line for each.
    """
    found = {run.name: run for run in wanted}
    return {
        result["run"]: result
        for result in _all(place)
        if result["run"] in found
        and _on_any_split(result["configuration"]) == _on_any_split(runs.configuration(found[result["run"]]))
    }


def _on_any_split(configuration: dict) -> dict:
    inputs = {name: value for name, value in configuration["inputs"].items() if name != "held_out_by"}
    return configuration | {"inputs": inputs}


def _all(place: Path) -> list[dict]:
    if place.suffix == ".jsonl":
        texts = place.read_text("utf-8").splitlines() if place.exists() else []
    else:
        texts = [path.read_text("utf-8") for path in sorted(place.glob("*.json"))]
    return [json.loads(text) for text in texts]


def refuse_another_split(place: Path) -> None:
    """Refuse to add results to those on an earlier split of the puzzles, with which they would make no pair.

    Raises:
        ValueError: there are such results.
    """
    for result in _all(place):
        if result["configuration"]["inputs"].get("held_out_by") != runs.HELD_OUT_BY:
            raise ValueError(f"{place} has results on an earlier split of the puzzles, such as {result['run']}'s")


def refuse_another_warm_start(run: Run, sha256: str, place: Path) -> None:
    """Refuse to train from a warm start with which the run would make no pair with those that are stored.

    Another kind of CPU may make another warm start from the same seed.

    Raises:
        RuntimeError: a result of the same inputs has another warm start.
    """
    inputs = runs.inputs_configuration(run.condition, run.seed)
    for result in _all(place):
        is_same = result["configuration"]["inputs"] == inputs
        if is_same and result["family"] == run.family and result["warm_start_sha256"] != sha256:
            raise RuntimeError(
                f"its warm start is not {result['run']}'s, as on another kind of CPU, so the two would make no pair: "
                "train it where that was trained, or delete the seed's results"
            )


def agreement_path(condition: str, seed: int, by: str, folder: Path) -> Path:
    """Return the file of what `study.agreement` says of a warm start, with its tokens divided by `by`."""
    return folder / "agreement" / f"{condition}-{seed}-{by}.json"


def load_agreements(condition: str, by: str, folder: Path) -> dict[int, dict]:
    """Return, by seed, what `study.agreement` has found."""
    seeds = sorted({run.seed for run in runs.FAMILY})
    paths = {seed: agreement_path(condition, seed, by, folder) for seed in seeds}
    return {seed: json.loads(path.read_text("utf-8")) for seed, path in paths.items() if path.exists()}


def sha256(path: Path) -> str:
    """Return the beginning of a file's hash."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def write(result: dict, place: Path) -> None:
    """Write a run's result, as a file in a folder or as a line of a .jsonl file."""
    if place.suffix == ".jsonl":
        with open(place, "a", encoding="utf-8") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
    else:
        place.mkdir(parents=True, exist_ok=True)
        write_whole(_json(result) + "\n", place / f"{result['run']}.json")


def write_whole(text: str, path: Path) -> None:
    """Write a file, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def _json(value, depth: int = 0) -> str:
    """Return JSON with a line for each entry down to the third level."""
    if not isinstance(value, dict) or depth == 3:
        return json.dumps(value, ensure_ascii=False)
    pad = " " * depth
    lines = (f"{pad} {json.dumps(key)}: {_json(inner, depth + 1)}" for key, inner in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{pad}}}"
