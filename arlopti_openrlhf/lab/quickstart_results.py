"""Show what came out of a quickstart: accuracies, the picture of its curves, some answers, and the closing text."""

import json
import os
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from arlopti_openrlhf import terminal
from arlopti_openrlhf.evaluation.measures import Z_95, estimate_source
from arlopti_openrlhf.lab.analysis.curves import FIGURES, Series, panels
from arlopti_openrlhf.lab.scoring.offline import responses_of

_CURVES = (
    *FIGURES["fig6"],
    ("low-probability tokens", "share of tokens with probability < η", r"train/lopti/low_share"),
    *FIGURES["fig8"][1:],
)


def read_records(responses: Path) -> list[dict]:
    """Return the lines of an evaluation's MODEL.responses.jsonl, of each prompt and temperature the last."""
    with open(responses, encoding="utf-8") as lines:
        records = list(map(json.loads, lines))
    return list({(record["prompt"], record["temperature"]): record for record in records}.values())


def accuracies(records: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Return the measures of an evaluation with `--greedy` by source, and of all sources together as "all".

    Each has `n` problems, `accuracy` and its `ci95` (half-width), `pass@k` and `greedy` accuracy.
    """
    groups: dict[tuple[str, bool], dict[str, list]] = defaultdict(dict)
    for record in records:
        for source in (record["datasource"], "all"):
            groups[source, record["temperature"] > 0][record["prompt"]] = [responses_of(record)]
    results = {}
    for source in sorted({source for source, _ in groups}):
        sampled, greedy = (estimate_source(groups[source, is_sampled]) for is_sampled in (True, False))
        results[source] = {
            "n": len(groups[source, True]),
            "ci95": Z_95 * sampled["accuracy"].standard_error,
            "greedy": greedy["accuracy"].value,
        } | {name: estimate.value for name, estimate in sampled.items()}
    return results


def sample_answers(before: Sequence[dict], after: Sequence[dict]) -> str:
    """Return two problems with their greedy answers: the first that is solved since, and the first that is not."""
    answers = [
        {record["prompt"]: record["responses"][0] for record in records if not record["temperature"]}
        for records in (before, after)
    ]
    lines = []
    for title, wanted in (("A problem that it has learned to solve", [0, 1]), ("One that it does not solve", [0, 0])):
        for prompt in answers[0]:
            if [answer[prompt]["score"] for answer in answers] == wanted:
                turn, _, begun = prompt.rpartition("<|im_end|>\n<|im_start|>assistant\n")
                lines += ["", f"{title}:", _wrapped(turn.rpartition("<|im_start|>user\n")[2])]
                for when, answer in zip(("before", "after"), answers, strict=True):
                    lines.append(_wrapped(f"{when}: {begun}{answer[prompt]['text']}"))
                break
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(terminal.one_line(" ".join(text.split())), 110, initial_indent="  ", subsequent_indent="    ")


def plot(scalars: dict[str, Series], path: Path) -> None:
    """Draw a training's reward, accuracy, share of low-probability tokens and gradient norms as PNG."""
    from arlopti_openrlhf.lab.analysis import plots

    path.write_bytes(plots.png("fig6", panels({"this run": [scalars]}, _CURVES)))


def report(summary: dict, out: Path, pass_k: str, task: str, is_reduced: bool = False) -> str:
    """Return what summary.json holds as text, with `pass_k` next to the accuracy, and what to do after the task.

    A reduced quickstart has learned nothing, so it says that the set-up works, and no difference.
    """
    overall = summary["overall"]
    before, after = (summary[when] | {"all": overall[when]} for when in ("before", "after"))
    lines = [
        "",
        f"{'held out':<9} {'problems':>8}   {'sampled, before':>16} {'after':>14}   {'greedy':>13}   {pass_k:>13}",
    ]
    for source in sorted(before, key=lambda s: (s == "all", s)):
        b, a = before[source], after[source]
        lines.append(
            f"{source:<9} {b['n']:>8}   {b['accuracy']:>8.3f} ± {b['ci95']:.3f}"
            f" {a['accuracy']:>6.3f} ± {a['ci95']:.3f}"
            f"   {b['greedy']:.3f} → {a['greedy']:.3f}   {b[pass_k]:.3f} → {a[pass_k]:.3f}"
        )
    rise = after["all"]["accuracy"] - before["all"]["accuracy"]
    standard_error = (before["all"]["ci95"] ** 2 + after["all"]["ci95"] ** 2) ** 0.5 / Z_95
    outcome = f"Sampled accuracy changed by {rise:+.3f}, {rise / max(standard_error, 1e-9):.1f} standard errors"
    outcome += " (clustered by problem)"
    if is_reduced:
        outcome = "The set-up works. So few steps teach nothing, whatever the accuracies"
    commands, seed = Path(os.path.relpath(Path(sys.executable).parent)), summary["seed"] + 1
    since = " since it was resumed" if summary["resumed"] else ""
    lines += [
        "",
        f"{outcome}. It took {summary['minutes']:.1f} minutes{since} and {summary['peak_rss_gib']:.1f} GiB.",
        *([f"Curves:  {out / 'curves.png'}"] if (out / "curves.png").exists() else []),
        f"Trained: {out / 'checkpoint'}",
        f"Next:    {commands / 'arlopti'} quickstart --task {task} --seed {seed}    # leaves this one as it is",
        f"         {commands / 'tensorboard'} --logdir {out / 'tensorboard'}",
    ]
    if task == "tiny":
        lines.append(
            f"         {commands / 'arlopti'} quickstart --task sums    # a pretrained model learns to calculate"
        )
    if Path("examples/scripts/train_kk.sh").exists():  # in a checkout
        lines.append("         examples/scripts/train_kk.sh    # the paper's run, on 4 GPUs")
    return "\n".join(lines)
