"""Store the results of runs, one small file each, and tell which runs are done."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from study import runs
from study.runs import ROOT, Run

RESULTS = ROOT / "study" / "results"
STAMP = "configuration.json"  # in the folder of a seed's inputs, once they are made; it says what from


def is_done(run: Run, folder: Path) -> bool:
    """Tell whether there is a result of this run with its present configuration."""
    path = folder / f"{run.name}.json"
    return path.exists() and json.loads(path.read_text("utf-8"))["configuration"] == runs.configuration(run)


def load(wanted: Iterable[Run], folder: Path) -> dict[str, dict]:
    """Return {name: result} of those runs that are done."""
    return {
        run.name: json.loads((folder / f"{run.name}.json").read_text("utf-8"))
        for run in wanted
        if is_done(run, folder)
    }


def refuse_another_warm_start(run: Run, sha256: str, folder: Path) -> None:
    """Refuse to train from a warm start with which the run would make no pair with those that are stored.

    Another kind of CPU may make another warm start from the same seed.

    Raises:
        RuntimeError: a result of the same inputs has another warm start.
    """
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text("utf-8"))
        is_same = result["configuration"]["inputs"] == runs.inputs_configuration(run.condition, run.seed)
        if is_same and result["family"] == run.family and result["warm_start_sha256"] != sha256:
            raise RuntimeError(
                f"its warm start is not {path.stem}'s, as on another kind of CPU, so the two would make no pair: "
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


def write(result: dict, folder: Path) -> None:
    """Write a run's result."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_json(result) + "\n", folder / f"{result['run']}.json")


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
