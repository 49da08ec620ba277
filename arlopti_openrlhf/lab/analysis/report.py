"""Write the analysis as one HTML page that needs nothing else, in light and dark, readable on a phone."""

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

from arlopti_openrlhf.lab.analysis import plots
from arlopti_openrlhf.lab.analysis.shares import MIDDLE

# {figure: (title, what it shows, alternative text)}
_SEEDS = "Mean over seeds; the band is their range."
_CAPTIONS = {
    "agreement": (
        "Which tokens' gradients agree between prompts",
        """The tokens by the sign of their advantage and by probability or entropy, and how many there are. Left:
        their share of the gradient in this batch, signal and noise together. Middle: the cosine of their gradient on
        one half of the prompts with the whole gradient on the other half, over all ways to halve them (dotted: the
        whole gradient's own). Right: how much of the whole's cosine comes from them. Where the interval holds 0, the
        gradient is noise as far as this batch can tell.""",
        """Three panels with one row for each cell of tokens: share of the gradient, cosine with the gradient of other
        prompts, and contribution to the cosine of the whole.""",
    ),
    "fig1": (
        "Fig. 1: what low-probability tokens do to an update",
        """(a) Probabilities of the sampled tokens. (b) Their advantages. (d) Gradient norm of each quarter of the
        probability range, from a backward pass of its own. (c), (e), (f) Change of each token's probability in one
        update by all tokens, by the lowest quarter alone, and by the highest quarter alone. Where (e) looks like (c),
        the low-probability tokens decide what the update does.""",
        """Six panels: histogram of probabilities, advantages and gradient norm by quarter, and three scatter plots of
        the change of probability against probability.""",
    ),
    "fig2": (
        "Fig. 2: one token's gradient grows with 1 - π",
        """Gradient of one token's log π at the output of each layer, as a norm over all positions that it reaches.
        At the logits it has to lie in the cone of Proposition 4.2. Elsewhere the cone holds 90% of the slopes.""",
        "Scatter plots of gradient norm against one minus probability, one panel per layer, each with a cone.",
    ),
    "fig3": (
        "Fig. 3: which positive tokens move in the right direction",
        """Tokens with a positive advantage should become more probable. This is the share that does, after one update
        from the same weights on the same batch. Below the dotted line, most go the wrong way.""",
        """Two panels with lines: share of positive tokens whose probability rises, by probability, for GRPO with AR
        and GRPO with Lopti.""",
    ),
    "fig5": (
        "Fig. 5: words of reasoning, and reward",
        """Six categories of words with their inflected forms (the paper's Table 5). Left: correlation of their
        frequency in a response with its reward, which need not be a cause. Right: how often they occur.""",
        "Two panels by category of words: correlation with reward, and frequency per 1000 words.",
    ),
    "fig6": (
        "Training: reward and accuracy",
        _SEEDS,
        "Curves of training reward and held-out accuracy over training steps.",
    ),
    "fig7": ("Training: length and entropy", _SEEDS, "Curves of response length and entropy over training steps."),
    "fig8": (
        "Training: gradient norm",
        f"Before clipping. Lopti has one norm for each of its two stages. {_SEEDS}",
        "Curves of gradient norms over training steps.",
    ),
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2125; --soft: #5a636d; --paper: #fff; --line: #d9dde2; --box: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --soft: #a3adb8; --paper: #15181c; --line: #353c44; --box: #1f242a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin-top: 2.2rem; } h3 { font-size: 1.05rem; }
.scroll { overflow-x: auto; margin: 1rem 0; border: 1px solid var(--line); border-radius: .4rem; }
figure { margin: 0 0 2rem; } figcaption { margin-top: .5rem; color: var(--soft); font-size: .92rem; }
figure img { display: block; width: 100%; min-width: 38rem; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { white-space: normal; min-width: 5rem; } th:first-child { text-align: left; }
.text td, .text th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
tr:last-child > * { border-bottom: 0; } thead th { background: var(--box); vertical-align: bottom; }
caption { caption-side: top; text-align: left; padding: .5rem .7rem; color: var(--soft); }
.advice, .notice { padding: .2rem 1rem; background: var(--box); border-left: .25rem solid #0072b2; }
.notice { border-color: #d55e00; }
"""


def page(summaries: dict[str, dict], figures: dict[str, dict[str, Any]], configuration: dict[str, str]) -> str:
    """Return the page.

    Args:
        summaries: {model: its summary, from `models.analyze_model`}.
        figures: {model: {figure ("fig1" ...): its data}}. Figures of all models and runs are under "".
        configuration: {setting: value} of what was run.
    """
    body = [
        "<h1>Low-probability tokens in RL: an analysis of "
        + escape(", ".join(summaries) if summaries else "training runs")
        + "</h1>",
        "<p>The measurements of <a href='https://arxiv.org/abs/2505.12929'>Do Not Let Low-Probability Tokens "
        "Over-Dominate in RL for LLMs</a>, on your policy, your data and your runs.</p>",
    ]
    # What was found of each model, with its own figures.
    if summaries:
        body.append(_summary_table(summaries))
    for name, summary in summaries.items():
        if len(summaries) > 1:
            body.append(f"<h2>{escape(name)}</h2>")
        body += [f"<p class='notice'>{escape(notice)}</p>" for notice in summary["notices"]]
        if summary["shares"]:
            body.append(_alpha_and_eta(summary["shares"], figures[name]["fig3"]))
        if summary["agreement"]:
            body.append(_agreement_in_words(summary["agreement"]))
        body += [_figure(figure, data) for figure, data in figures[name].items()]
        if "agreement" in figures[name]:
            body += _agreement_tables(figures[name]["agreement"])
        if "fig1" in figures[name]:
            body.append(_quarters_table(figures[name]["fig1"]))
        if "fig3" in figures[name]:
            body.append(_direction_table(figures[name]["fig3"]))
    # What compares models and runs.
    if figures[""]:
        body.append("<h2>Models and runs side by side</h2>" if len(summaries) > 1 else "<h2>Words and runs</h2>")
    for figure, data in figures[""].items():
        body.append(_figure(figure, data))
        if figure in ("fig6", "fig7", "fig8"):
            body += _missing(data)
    body.append("<h2>What was run</h2>")
    body.append(_table(["setting", "value"], [[k, v] for k, v in configuration.items()], text=True))
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>Low-probability tokens in RL</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _figure(name: str, data: Any) -> str:
    title, caption, alternative = (" ".join(text.split()) for text in _CAPTIONS[name])
    light, dark = (base64.b64encode(plots.png(name, data, dark)).decode() for dark in (False, True))
    return (
        f"<h3>{escape(title)}</h3>\n<figure>\n<div class='scroll' tabindex='0'><picture>"
        f"<source media='(prefers-color-scheme: dark)' srcset='data:image/png;base64,{dark}'>"
        f"<img alt='{escape(alternative, quote=True)}' src='data:image/png;base64,{light}'></picture></div>\n"
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", text: bool = False) -> str:
    kind = " class='text'" if text else ""
    lines = [
        f"<tr><th scope='row'>{escape(row[0])}</th>"
        + "".join(f"<td{kind}>{escape(c)}</td>" for c in row[1:])
        + "</tr>"
        for row in rows
    ]
    return (
        f"<div class='scroll' tabindex='0'><table{' class=text' if text else ''}>"
        + (f"<caption>{escape(caption)}</caption>" if caption else "")
        + "<thead><tr>"
        + "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in head)
        + "</tr></thead><tbody>"
        + "".join(lines)
        + "</tbody></table></div>"
    )


def _summary_table(summaries: dict[str, dict]) -> str:
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
    return _table(["model", *(title for title, _ in columns.values())], rows)


def _alpha_and_eta(shares: dict, directions: dict) -> str:
    lines = [
        f"<p>Tokens with a probability below {MIDDLE} are {shares['low_tokens']:.1%} of this policy's tokens "
        f"and carry {shares['low_gradient']:.1%} of the gradient, taken token by token at the logits.</p>",
        f"<p>{escape(_direction(directions))}</p>",
        "<p>These come from one batch and one set of weights. They do not say that low-probability tokens should be "
        "lowered. Whether their gradient is noise is another question, which the agreement between prompts answers as "
        "far as this batch allows. Only training tells which α and η train best.</p>",
        "</section>",
        _shares_table(
            "α",
            shares["low_gradient_by_alpha"],
            f"AR: share of the gradient that tokens with π < {MIDDLE} have.",
        ),
        _shares_table("η", shares["low_gradient_by_eta"], "Lopti: share of the gradient that its first step has."),
    ]
    return "<section class='advice'>\n<h3>What α and η do on this policy</h3>\n" + "\n".join(lines)


def _agreement_in_words(sentences: Sequence[str]) -> str:
    lines = [
        "<section class='advice'>\n<h3>Noise, signal and the token methods, on this batch</h3>",
        *(f"<p>{escape(sentence)}</p>" for sentence in sentences),
        "<p>This is one batch, one set of weights and the plain gradient, without AdamW's scaling of each parameter. "
        "A cell may agree, and this batch be too small to show it. What a method does to entropy, exploration or "
        "later steps is not in it. In this project's study of seven methods it could not be shown to predict which of "
        "them trains best (docs/study_family.md).</p>",
        "</section>",
    ]
    return "\n".join(lines)


def _agreement_tables(data: dict) -> list[str]:
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
    tables = [_table(head, rows, "The agreement in numbers.")]
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
        tables.append(_table(head, methods, caption))
    return tables


def _shares_table(symbol: str, shares: dict[str, float], caption: str) -> str:
    return _table([symbol, *shares], [["share", *(f"{share:.1%}" for share in shares.values())]], caption)


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


def _quarters_table(data: dict) -> str:
    rows = []
    for i, group in enumerate(data["groups"]):
        changes = [data["change"][name]["mean_absolute"][i] for name in ("all", "lowest", "highest")]
        rows.append(
            [f"π {group['name']}", f"{group['tokens']:,}", _number(group["gradient_norm"], "{:.3g}")]
            + [f"{group['logit_gradient_share']:.1%}", *(_number(c, "{:.2e}") for c in changes)]
        )
    head = ["", "tokens", "gradient norm, all parameters", "share of the gradient at the logits"]
    head += [f"mean |Δπ|, {name}" for name in ("all updated", "lowest quarter alone", "highest quarter alone")]
    return _table(head, rows, "Fig. 1 in numbers.")


def _direction_table(data: dict) -> str:
    rows = [
        [name, *(f"{r['share']:.3f} ± {r['ci95']:.3f}" if r else "-" for r in results)]
        for name, results in data["right_direction"].items()
    ]
    head = ["", *(f"{b} ({n:,})" for b, n in zip(data["bins"], data["positive_tokens"], strict=True))]
    caption = (
        "Fig. 3 in numbers: share of positive tokens whose probability rises, ± 95%. Log-probabilities are exact to "
        f"{data['median_rounding_of_log_probs']:.0e} (median)."
    )
    return _table(head, rows, caption)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _missing(panels: list[dict]) -> list[str]:
    """Say which runs log no curve of a unit at all. A run has one gradient norm, or the two of Lopti's stages."""
    notices = []
    for unit in dict.fromkeys(panel["unit"] for panel in panels):
        alike = [panel for panel in panels if panel["unit"] == unit]
        missing = set.intersection(*(set(panel["missing"]) for panel in alike))
        if missing:
            text = f"{alike[0]['title']}: not logged by {', '.join(sorted(missing))}."
            notices.append(f"<p class='notice'>{escape(text)}</p>")
    return notices
