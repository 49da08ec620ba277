"""Write the analysis as one HTML page that needs nothing else. report.html.j2 has its words and its looks."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from arlopti_openrlhf.lab.analysis import plots


class Table(NamedTuple):
    """A table's cells as text."""

    head: list[str]
    rows: list[list[str]]  # the first cell of each is its head
    caption: str = ""


def page(summaries: dict[str, dict], figures: dict[str, dict[str, Any]], configuration: dict[str, str]) -> str:
    """Return the page, from {model: its summary}, {model: {figure: its data}} and {setting: value} of what was run.

    Figures of all models and runs are under "".
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    columns = {
        "responses": "{responses:,}",
        "mean reward": "{reward:.3f}",
        "accuracy": "{accuracy:.3f}",
        "tokens per response": "{length:.0f}",
        "entropy, nats": "{entropy:.3f}",
        "tokens with π < 0.5": "{low_tokens:.1%}",
        "their share of the gradient": "{low_gradient:.1%}",
    }
    return environment.get_template("report.html.j2").render(
        summary=_table("model", columns, summaries),
        models=[_model(name, summary, figures[name]) for name, summary in summaries.items()],
        pictures=_pictures(figures[""]),
        missing={name: _missing(data) for name, data in figures[""].items() if name in ("fig6", "fig7", "fig8")},
        configuration=Table(["setting", "value"], [[name, value] for name, value in configuration.items()]),
    )


def _table(corner: str, columns: dict[str, str], items: Mapping[str, Any], caption: str = "") -> Table:
    """Return a table with a row for each of the items {name: values}, whose names stand below `corner`.

    Columns are {head: format of a cell}. A cell is "-" where the item lacks one of the values.
    """

    def cell(form: str, values: Any) -> str:
        try:
            return form.format_map(values)
        except (KeyError, TypeError):  # it is not there, or None
            return "-"

    rows = [[name, *(cell(form, values) for form in columns.values())] for name, values in items.items()]
    return Table([corner, *columns], rows, caption)


def _model(name: str, summary: dict, figures: dict[str, Any]) -> dict[str, Any]:
    """Return what the template shows of one model."""
    makers = {"fig1": _quarters_table, "fig3": _direction_table}
    return {
        "name": name,
        "summary": summary,
        "direction": _direction(figures["fig3"]) if "fig3" in figures else "",
        "pictures": _pictures(figures),
        "tables": [make(figures[figure]) for figure, make in makers.items() if figure in figures],
    }


def _pictures(figures: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return {figure: {"light": PNG as base64, "dark": likewise}}."""
    return {
        name: {mode: base64.b64encode(plots.png(name, data, mode == "dark")).decode() for mode in ("light", "dark")}
        for name, data in figures.items()
    }


def _quarters_table(data: dict) -> Table:
    columns = {
        "tokens": "{tokens:,}",
        "gradient norm, all parameters": "{gradient_norm:.3g}",
        "share of the gradient at the logits": "{logit_gradient_share:.1%}",
        "mean |Δπ|, all updated": "{all:.2e}",
        "mean |Δπ|, lowest quarter alone": "{lowest:.2e}",
        "mean |Δπ|, highest quarter alone": "{highest:.2e}",
    }
    groups = {
        f"π {group['name']}": group | {name: change["mean_absolute"][i] for name, change in data["change"].items()}
        for i, group in enumerate(data["groups"])
    }
    return _table("", columns, groups, "Fig. 1 in numbers.")


def _direction_table(data: dict) -> Table:
    heads = [f"{name} ({number:,})" for name, number in zip(data["bins"], data["positive_tokens"], strict=True)]
    columns = {head: f"{{bins[{i}][share]:.3f}} ± {{bins[{i}][ci95]:.3f}}" for i, head in enumerate(heads)}
    methods = {name: {"bins": results} for name, results in data["right_direction"].items()}
    caption = (
        "Fig. 3 in numbers: share of positive tokens whose probability rises, ± 95%. Log-probabilities are exact to "
        f"{data['median_rounding_of_log_probs']:.0e} (median)."
    )
    return _table("", columns, methods, caption)


def _direction(data: dict) -> str:
    """Say in words what Fig. 3 shows of the tokens that the paper is about."""
    band = data["bins"].index("0.75-0.99")
    found = {name: results[band] for name, results in data["right_direction"].items() if results[band]}
    if not found:
        return "No positive token has a probability between 0.75 and 0.99, where the methods should make a difference."
    base, best = found["GRPO"], max(found, key=lambda name: found[name]["share"])
    text = (
        f"Of the positive tokens with π in 0.75-0.99, {base['share']:.0%} (± {base['ci95']:.0%}) become more probable "
        "in one update by GRPO"
    )
    if best == "GRPO":
        return f"{text}, more than by any other setting tried. By this measure, the batch gives no reason to reweight."
    return (
        f"{text}, and {found[best]['share']:.0%} (± {found[best]['ci95']:.0%}) with {best}, the most of those tried."
    )


def _missing(panels: list[dict]) -> list[str]:
    """Say which runs log no curve of a unit at all. A run has one gradient norm, or the two of Lopti's stages."""
    notices = []
    for unit in dict.fromkeys(panel["unit"] for panel in panels):
        alike = [panel for panel in panels if panel["unit"] == unit]
        missing = set.intersection(*(set(panel["missing"]) for panel in alike))
        if missing:
            notices.append(f"{alike[0]['title']}: not logged by {', '.join(sorted(missing))}.")
    return notices
