"""Write the analysis as one HTML page that needs nothing else. report.html.j2 has its words and its looks."""

import base64
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from arlopti_openrlhf.lab.analysis import plots
from arlopti_openrlhf.lab.analysis.shares import MIDDLE


class Table(NamedTuple):
    """Holds a table's cells as text."""

    head: list[str]
    rows: list[list[str]]  # the first cell of each is its head
    caption: str = ""


def page(summaries: dict[str, dict], figures: dict[str, dict[str, Any]], configuration: dict[str, str]) -> str:
    """Return the page.

    Args:
        summaries: {model: its summary, from `models.analyze_model`}.
        figures: {model: {figure ("fig1" ...): its data}}. Figures of all models and runs are under "".
        configuration: {setting: value} of what was run.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2").render(
        middle=MIDDLE,
        summary=_summary_table(summaries),
        models=[_model(name, summary, figures[name]) for name, summary in summaries.items()],
        pictures=_pictures(figures[""]),
        missing={name: _missing(data) for name, data in figures[""].items() if name in ("fig6", "fig7", "fig8")},
        configuration=Table(["setting", "value"], [[name, value] for name, value in configuration.items()]),
    )


def _model(name: str, summary: dict, figures: dict[str, Any]) -> dict[str, Any]:
    """Return what the template shows of one model."""
    shares, tables = [], []
    if summary["shares"]:
        low, first = summary["shares"]["low_gradient_by_alpha"], summary["shares"]["low_gradient_by_eta"]
        shares = [
            _shares_table("α", low, f"AR: share of the gradient that tokens with π < {MIDDLE} have."),
            _shares_table("η", first, "Lopti: share of the gradient that its first step has."),
        ]
    if "agreement" in figures:
        tables += _agreement_tables(figures["agreement"])
    if "fig1" in figures:
        tables.append(_quarters_table(figures["fig1"]))
    if "fig3" in figures:
        tables.append(_direction_table(figures["fig3"]))
    return {
        "name": name,
        "summary": summary,
        "direction": _direction(figures["fig3"]) if "fig3" in figures else "",
        "shares": shares,
        "pictures": _pictures(figures),
        "tables": tables,
    }


def _pictures(figures: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return {figure: {"light": PNG as base64, "dark": likewise}}."""
    return {
        name: {mode: base64.b64encode(plots.png(name, data, mode == "dark")).decode() for mode in ("light", "dark")}
        for name, data in figures.items()
    }


def _summary_table(summaries: dict[str, dict]) -> Table:
    columns = {
        "responses": ("responses", "{:,}"),
        "reward": ("mean reward", "{:.3f}"),
        "accuracy": ("accuracy", "{:.3f}"),
        "length": ("tokens per response", "{:.0f}"),
        "entropy": ("entropy, nats", "{:.3f}"),
        "low_tokens": (f"tokens with π < {MIDDLE}", "{:.1%}"),
        "low_gradient": ("their share of the gradient", "{:.1%}"),
    }
    rows = [
        [name] + [form.format(summary[key]) if summary[key] is not None else "-" for key, (_, form) in columns.items()]
        for name, summary in summaries.items()
    ]
    return Table(["model", *(title for title, _ in columns.values())], rows)


def _agreement_tables(data: dict) -> list[Table]:
    rows = []
    whole = {"name": "all", "tokens": None, "logit_share": None, "found": ""} | (data["whole"] or {})
    for cell in [*data["cells"], whole]:
        known = "cosine" in cell
        rows.append(
            [cell["name"], _number(cell["tokens"], "{:,}"), _number(cell["logit_share"], "{:.1%}")]
            + [f"{cell[key]:.3f}" if known else "-" for key in ("share", "norm")]
            + [f"{cell['cosine']:.3f} ({cell['low']:.3f} to {cell['high']:.3f})" if known else "-"]
            + [f"{cell['contribution']:.4f}" if known else "-", cell["found"]]
        )
    head = ["", "tokens", "share at the logits", "share ⟨g_c, g⟩ / ‖g‖²", "norm ‖g_c‖ / ‖g‖"]
    head += ["cosine with other prompts (95%)", "contribution", ""]
    tables = [Table(head, rows, "The agreement in numbers.")]
    methods = [
        [name, found["lowers"]]
        + [f"{found[key]:.1%}" for key in ("noise", "signal", "agreeing_before", "agreeing_after")]
        + [_number(weight, "{:.2f}") for weight in found["weights"]]
        for name, found in data["methods"].items()
    ]
    if methods:
        caption = (
            "What each token method does at its default constants: which cells' share of the gradient at the logits "
            "it lowers, by how much, and its mean weight in each cell."
        )
        if data["left_out"]:
            caption += " Left out: " + "; ".join(data["left_out"].values()) + "."
        head = ["", "lowers", "noise by", "signal by", "cells that agree have", "and with the method"]
        head += [cell["name"] for cell in data["cells"]]
        tables.append(Table(head, methods, caption))
    return tables


def _shares_table(symbol: str, shares: dict[str, float], caption: str) -> Table:
    return Table([symbol, *shares], [["share", *(f"{share:.1%}" for share in shares.values())]], caption)


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


def _quarters_table(data: dict) -> Table:
    rows = []
    for i, group in enumerate(data["groups"]):
        changes = [data["change"][name]["mean_absolute"][i] for name in ("all", "lowest", "highest")]
        rows.append(
            [f"π {group['name']}", f"{group['tokens']:,}", _number(group["gradient_norm"], "{:.3g}")]
            + [f"{group['logit_gradient_share']:.1%}", *(_number(c, "{:.2e}") for c in changes)]
        )
    head = ["", "tokens", "gradient norm, all parameters", "share of the gradient at the logits"]
    head += [f"mean |Δπ|, {name}" for name in ("all updated", "lowest quarter alone", "highest quarter alone")]
    return Table(head, rows, "Fig. 1 in numbers.")


def _direction_table(data: dict) -> Table:
    rows = [
        [name, *(f"{r['share']:.3f} ± {r['ci95']:.3f}" if r else "-" for r in results)]
        for name, results in data["right_direction"].items()
    ]
    head = ["", *(f"{b} ({n:,})" for b, n in zip(data["bins"], data["positive_tokens"], strict=True))]
    caption = (
        "Fig. 3 in numbers: share of positive tokens whose probability rises, ± 95%. Log-probabilities are exact to "
        f"{data['median_rounding_of_log_probs']:.0e} (median)."
    )
    return Table(head, rows, caption)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _missing(panels: list[dict]) -> list[str]:
    """Say which runs log no curve of a unit at all. A run has one gradient norm, or the two of Lopti's stages."""
    notices = []
    for unit in dict.fromkeys(panel["unit"] for panel in panels):
        alike = [panel for panel in panels if panel["unit"] == unit]
        missing = set.intersection(*(set(panel["missing"]) for panel in alike))
        if missing:
            notices.append(f"{alike[0]['title']}: not logged by {', '.join(sorted(missing))}.")
    return notices
