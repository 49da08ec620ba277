"""Draw what the methods do and what an update computes: `python docs/drawings.py` writes methods.svg and update.svg.

Weights and groups come from the package's own functions. The probabilities of the tokens are made up.
"""

from pathlib import Path

import torch

from arlopti_openrlhf.token_update import advantage_weights, low_probability_mask

ALPHA, ETA = 0.3, 0.5  # the paper's, for Knights and Knaves
PROMPT, LONGEST = 5, 8  # tokens
PROBABILITIES = (  # of the tokens of four responses to the prompt
    (0.9, 0.3, 0.95, 0.8, 0.2, 0.9, 0.99),
    (0.8, 0.95, 0.4, 0.9, 0.97),
    (0.2, 0.9, 0.85, 0.99, 0.9, 0.3, 0.95, 0.9),
    (0.9, 0.97, 0.1, 0.7),
)
WIDTH, HEIGHT = 366, 316
# A drawing has a background of its own: it follows the system's colours where the page may not.
STYLE = """
text { fill: #1d2a3d; } .paper, .on { fill: #ffffff; } .small { font-size: 11px; fill: #526079; }
.title { font-weight: bold; } .axis, .grpo { stroke: #8a94a6; fill: none; } .grpo { stroke-dasharray: 4 3; }
.ar { stroke: #b35f00; fill: none; } .low { fill: #c2413b; } .high { fill: #3567b0; } .all { fill: #6b7890; }
.model { fill: #d5dbe6; } .nothing { fill: none; stroke: #c3cad6; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9f0; } .paper, .on { fill: #1e2129; } .small { fill: #aab3c5; }
  .ar { stroke: #f0a04b; } .low { fill: #e8746d; } .high { fill: #6f9fe8; } .all { fill: #a3adc0; }
  .model { fill: #434b5c; } .nothing { stroke: #4b5364; }
}
"""


def drawing(label: str, *parts: str) -> str:
    """Return an SVG picture of the parts, with a label for those who do not see it."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
    head += f'font-family="Helvetica, Arial, sans-serif" font-size="12.5" role="img" aria-label="{label}">'
    paper = f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", paper, *parts, "</svg>\n"])


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"/>'


class Plot:
    """Places weights in [0, 1] over π_old in [0, 1]."""

    def __init__(self, top: float, left: float = 46, width: float = 300, height: float = 84) -> None:
        self.top, self.left, self.width, self.height = top, left, width, height

    def at(self, probability: float, weight: float) -> tuple[float, float]:
        return self.left + probability * self.width, self.top + (1 - weight) * self.height

    def axes(self, *probabilities: float) -> list[str]:
        (left, bottom), (right, top) = self.at(0, 0), self.at(1, 1)
        parts = [f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>']
        parts += [text(left - 6, self.at(0, weight)[1] + 4, f"{weight}", "small", "end") for weight in (0, 1)]
        parts += [text(self.at(p, 0)[0], bottom + 15, f"{p}", "small", "middle") for p in probabilities]
        return parts

    def line(self, probabilities: torch.Tensor, weights: torch.Tensor, kind: str) -> str:
        points = [self.at(p, w) for p, w in zip(probabilities.tolist(), weights.tolist(), strict=True)]
        return (
            f'<polyline class="{kind}" stroke-width="2" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        )


def methods() -> str:
    """Draw the weights of AR, and of Lopti in each of its two passes, over π_old."""
    probabilities = torch.linspace(0, 1, 101)
    ar, lopti = Plot(top=44), Plot(top=186)
    weights = advantage_weights(probabilities.log(), ALPHA)
    parts = [text(12, 20, f"AR: the weight α · π_old + 1 − α, α = {ALPHA}", "title"), *ar.axes(0, ETA, 1)]
    parts += [ar.line(probabilities, torch.ones_like(probabilities), "grpo"), ar.line(probabilities, weights, "ar")]
    parts += [text(ar.at(0.5, 0)[0], ar.top - 6, "without a method: 1", "small", "middle")]
    least = weights[0].item()
    parts += [text(ar.left + 12, ar.at(0, least)[1] + 18, f"{least:.1f} for the least likely token", "small")]

    parts += [text(12, 170, f"Lopti: two passes, divided at η = {ETA}", "title"), *lopti.axes(0, ETA, 1)]
    low = low_probability_mask(probabilities.log()[None], torch.ones(1, len(probabilities)), ETA)[0]
    for group, kind, name in ((low, "low", "first pass"), (~low, "high", "second pass")):
        start, end = probabilities[group].min().item(), probabilities[group].max().item()
        (left, top), (right, bottom) = lopti.at(start, 1), lopti.at(end, 0)
        parts += [rectangle(left, top, right - left, bottom - top, kind)]
        parts += [text((left + right) / 2, (top + bottom) / 2 + 4, name, "on", "middle")]
    parts += [text(lopti.at(0.5, 0)[0], HEIGHT - 14, "π_old, the token's probability", "small", "middle")]
    return drawing(
        "The weights of a token over its probability: a line for AR, two steps for Lopti's two passes", *parts
    )


def tokens(left: float, top: float, prompts: str | None, kinds: list[list[str]]) -> list[str]:
    """Draw four responses below each other, after their prompt: one for all where `prompts` is None."""
    side, step = 10, 12.6
    parts = []
    for row, kind_of in enumerate(kinds):
        y = top + row * (step + 1)
        prompt = [prompts or "model"] * PROMPT if prompts or not row else []
        parts += [rectangle(left + i * step, y, side, side, kind) for i, kind in enumerate(prompt)]
        parts += [rectangle(left + 4 + (PROMPT + i) * step, y, side, side, kind) for i, kind in enumerate(kind_of)]
    return parts


def computed(selected: list[list[bool]], kind: str) -> list[list[str]]:
    """Return what a pass does with each token: a log-prob, the model alone, or nothing after the last selected one."""
    rows = []
    for row in selected:
        last = max((i for i, is_selected in enumerate(row) if is_selected), default=-1)
        rows.append([kind if now else "model" if i < last else "nothing" for i, now in enumerate(row)])
    return rows


def update() -> str:
    """Draw which tokens of a prompt and its responses an update computes."""
    low = [
        low_probability_mask(torch.tensor([p]).log(), torch.ones(1, len(p)), ETA)[0].tolist() for p in PROBABILITIES
    ]
    high = [[not is_low for is_low in row] for row in low]
    everything = [[True] * len(row) for row in low]
    blocks = (
        ("stock OpenRLHF", "every prompt, and padding", "all", [["all"] * LONGEST for _ in low]),
        ("here: GRPO, AR", "the prompt once", None, computed(everything, "all")),
        ("Lopti, first pass", "π_old &lt; η", None, computed(low, "low")),
        ("Lopti, second pass", "π_old ≥ η", None, computed(high, "high")),
    )
    parts = [text(12, 20, "What an update computes", "title")]
    parts += [text(WIDTH - 12, 20, "1 prompt, 4 responses", "small", "end")]
    for place, (title, remark, prompts, kinds) in enumerate(blocks):
        left, top = 12 + place % 2 * 180, 46 + place // 2 * 106
        parts += [text(left, top, title), text(left, top + 15, remark, "small")]
        parts += tokens(left, top + 24, prompts, kinds)
    legend = (
        (12, 256, ("all", "low", "high"), "through the model, and a log-prob"),
        (12, 280, ("model",), "through the model"),
        (192, 280, ("nothing",), "not computed"),
    )
    for left, y, kinds_of, words in legend:
        parts += [rectangle(left + i * 13, y, 10, 10, kind) for i, kind in enumerate(kinds_of)]
        parts += [text(left + len(kinds_of) * 13 + 5, y + 9, words, "small")]
    return drawing(
        "The tokens of a prompt and of four responses, and what each pass of an update computes of them", *parts
    )


if __name__ == "__main__":
    for name, picture in (("methods", methods()), ("update", update())):
        Path(__file__).with_name(f"{name}.svg").write_text(picture, "utf-8")
