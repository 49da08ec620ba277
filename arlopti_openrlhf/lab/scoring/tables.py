"""Show evaluated models side by side: Markdown tables as in the paper, and the same numbers as CSV."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from arlopti_openrlhf import terminal
from arlopti_openrlhf.evaluation.measures import Estimate
from arlopti_openrlhf.lab.scoring.inputs import natural_key


def markdown(results: dict[str, dict]) -> str:
    """Return the paper's tables, then every measure as a row of its own.

    The paper's table has a row per model and a column per source, with the average over the sources where there are
    several. Knights and Knaves, by number of people, has a table of its own, and so has each further way of sampling.

    Args:
        results: {model: its evaluation, as `offline.evaluate` writes it}.
    """
    sources = sorted({source for result in results.values() for source in result["sources"]}, key=natural_key)
    # A reward that returns no scores does not say what is right.
    known = [source for source in sources if any("accuracy" in r["sources"].get(source, {}) for r in results.values())]
    groups: dict[str, list[str]] = {"Knights and Knaves": [], "Others": []}
    for source in known:
        _, at, way = source.partition("@")
        groups.setdefault(f"{'Knights and Knaves' if source.startswith('kk_') else 'Others'}{at}{way}", []).append(
            source
        )
    tables = [_accuracies(title, of_title, results) for title, of_title in groups.items()]
    lines = [["model", "source", "problems", "samples", "t", "measure", "value [95%]"]]
    for *head, n, samples, temperature, measure, estimate in _measures(results, sources):
        digits = 0 if measure == "response_length" else 3
        lines.append([*head, str(n), str(samples), f"{temperature:g}", measure, _cell(estimate, digits)])
    return "\n".join([*filter(None, tables), markdown_table(lines)])


def _measures(results: dict[str, dict], sources: Sequence[str]) -> Iterator[tuple]:
    """Yield model, source, problems, samples, temperature, measure and estimate of each measure."""
    for name, result in results.items():
        for source in sources:
            found = result["sources"].get(source, {})
            for measure, estimate in found.items():
                if isinstance(estimate, dict):
                    yield name, source, found["n"], found["samples"], found["temperature"], measure, estimate


def _accuracies(title: str, sources: list[str], results: dict[str, dict]) -> str:
    if not sources:
        return ""
    with_average = len(sources) > 1
    names = [source.partition("@")[0] for source in sources]
    head = [title.replace("@", ", "), *(re.sub(r"kk_(\d+)ppl", r"\1 people", name) for name in names)]
    lines = [head + (["Avg."] if with_average else [])]
    for name, result in results.items():
        found = [result["sources"].get(source, {}).get("accuracy") for source in sources]
        cells = [_cell(f) if f else "" for f in found]
        if with_average:
            # Over some of the sources it would not compare with the other models'.
            cells.append(f"{sum(f['value'] for f in found) / len(found):.3f}" if all(found) else "")
        lines.append([name, *cells])
    return markdown_table(lines)


def mean_of(results: Sequence[dict]) -> dict:
    """Return the mean of several checkpoints' evaluations on the same problems, as `offline.evaluate` writes one.

    The mean of their intervals is an interval of the mean, and a wide one: it takes their errors to be the same.
    """
    sources: dict[str, dict] = {}
    for source, first in results[0]["sources"].items():
        found = [result["sources"][source] for result in results]
        sources[source] = {
            name: {end: fmean(one[name][end] for one in found) for end in value} if isinstance(value, dict) else value
            for name, value in first.items()
            if all(name in one for one in found)  # a judge's scores may look like rates in some
        }
    return {"sources": sources}


def _cell(estimate: dict, digits: int = 3) -> str:
    return f"{estimate['value']:.{digits}f} [{estimate['low']:.{digits}f}, {estimate['high']:.{digits}f}]"


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first line is its head."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "".join("| " + " | ".join(map(terminal.one_line, line)) + " |\n" for line in lines)


def write_csv(results: dict[str, dict], path: Path) -> None:
    """Write one line per model, source and measure."""
    sources = dict.fromkeys(source for result in results.values() for source in result["sources"])
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "source", "problems", "samples", "temperature", "measure", *Estimate._fields])
        for *spec, estimate in _measures(results, list(sources)):
            writer.writerow([*spec, *estimate.values()])
