"""What `gpu_check.py` has found, as Markdown."""

from update_tables import table

ERRORS = {
    "log_prob_max": "log-probs, greatest",
    "log_prob_mean": "log-probs, mean",
    "loss": "loss",
    "gradient_GRPO": "gradient, GRPO",
    "gradient_low": "gradient, Lopti's low stage",
    "gradient_high": "gradient, Lopti's high stage",
}


def headline(record: dict) -> str:
    """Return the machine, its versions, and what is not installed, in two lines."""
    machine = dict(record["machine"])
    facts = ("processor", "bf16_instructions", "products")
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name not in facts)
    absent = ", ".join(record["not_installed"]) or "nothing"
    return f"{machine['processor']}; {versions}.\nNot installed, and not needed: {absent}."


def exactness_row(row: dict) -> str:
    """Return a row of the table of comparisons."""
    errors = [f"{row['selective'][name]:.1e} / {row['plain_bf16'][name]:.1e}" for name in ERRORS]
    verdict = "; ".join(row["failures"]) or "exact"
    cells = [row["name"], str(row["tokens"]), row["attention"], row["dtype"], *errors, verdict]
    return f"| {' | '.join(cells)} |"


def as_markdown(record: dict) -> str:
    """Return the whole record as a page."""
    sections = [_summary(record)]
    if record["exactness"]:
        sections.append(_exactness(record["exactness"]))
    sections += [_times(result) for result in record["times"]]
    return "\n\n".join(sections) + "\n"


def _summary(record: dict) -> str:
    lines = [
        "# The selective update on this machine",
        "",
        f"    {record['command']}",
        "",
        headline(record).replace("\n", " "),
        f"The check took {record['minutes']:.1f} minutes. The optimizer was {record['optimizer'] or 'not built'}.",
        "",
    ]
    exact = sum(not row["failures"] for row in record["exactness"])
    lines.append(f"{exact} of {len(record['exactness'])} comparisons are exact.")
    lists = {"Failed": "failures", "Skipped": "skipped", "Attention that does not run here": "left_out"}
    for title, name in lists.items():
        entries = record[name]
        if entries:
            lines += ["", f"{title}:", "", *(f"- {entry}" for entry in entries)]
    return "\n".join(lines)


def _exactness(rows: list[dict]) -> str:
    factors = {row["dtype"]: row["factor"] for row in rows}
    header = ["shape", "tokens", "attention", "type", *ERRORS.values(), "verdict"]
    return "\n".join(
        [
            "## Exactness",
            "",
            "A cell has two distances from OpenRLHF's update in float32 with SDPA: the selective update's, and that "
            "of OpenRLHF's own in bf16 with the same attention. Log-probs are in nats, and gradients relative, as the "
            "norm of the difference by the norm. A row is exact where the first is at most "
            + " and ".join(f"{factor:g} times the second in {dtype}" for dtype, factor in factors.items())
            + ". The loss, a mean in which rounding cancels, is held to the mean of the log-probs.",
            "",
            f"| {' | '.join(header)} |",
            "|---" * len(header) + "|",
            *map(exactness_row, rows),
        ]
    )


def _times(result: dict) -> str:
    return "\n".join(
        [
            f"## {result['description']}",
            "",
            f"{result['rounds']} rounds, micro-batches of {result['sizes']['micro_batch_size']} responses, "
            f"{result['attention']} attention. Matrix products ran at {result['matrix_flops_per_s'] / 1e12:,.1f} "
            "TFLOP/s. Peak memory is the allocator's on a GPU, and resident memory on a CPU.",
            "",
            table(result["variants"]),
        ]
    )
