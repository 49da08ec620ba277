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


NOT_SHOWN = """## What this does not show

One GPU has no communication: not ZeRO-3's gathering, not the reduction of gradients, not two ranks that wait for each
other. Neither vLLM, the weight sync nor a whole RL step runs. Without flash-attn, packed stock GRPO has its place in
PyTorch's kernels. Weights are random, so the numbers say nothing of what is learnt, and their rounding is not that of
trained weights."""


def headline(record: dict) -> str:
    """Return the machine and its versions in a line."""
    machine = dict(record["machine"])
    facts = ("processor", "bf16_instructions", "products")
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name not in facts)
    return f"{machine['processor']}; {versions}."


def exactness_row(row: dict) -> str:
    """Return a row of the table of comparisons."""
    errors = [f"{row['selective'][name]:.1e} / {row['plain_bf16'][name]:.1e}" for name in ERRORS]
    verdict = "; ".join(row["failures"]) or "exact"
    cells = [row["name"], str(row["tokens"]), row["attention"], row["dtype"], *errors, verdict]
    return f"| {' | '.join(cells)} |"


def as_markdown(record: dict) -> str:
    """Return the whole record as a page."""
    sections = [_summary(record)]
    if record["arithmetic"]:
        sections.append(_arithmetic(record["arithmetic"]))
    if record["exactness"]:
        sections.append(_exactness(record["exactness"]))
    sections += [_times(result) for result in record["times"]]
    sections.append(NOT_SHOWN)
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


def _arithmetic(rows: list[dict]) -> str:
    lines = [
        "## Arithmetic",
        "",
        "Distances from float64 on the CPU: the norm of the difference by the norm.",
        "",
        "| | type | distances | verdict |",
        "|---|---|---|---|",
    ]
    for row in rows:
        distances = ", ".join(f"{name} {value:.1e}" for name, value in row["distances"].items())
        lines.append(f"| {row['name']} | {row['dtype']} | {distances} | {'; '.join(row['failures']) or 'exact'} |")
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
            f"TFLOP/s. Peak memory is the allocator's on a GPU, and resident memory on a CPU. An update of next to no "
            f"tokens takes {result['floor_gib']:.1f} GiB, which the memory in brackets leaves out.",
            "",
            table(result["variants"], result["floor_gib"]),
            "",
            _profile(result["profile"]),
        ]
    )


def _profile(profile: dict | None) -> str:
    if profile is None:
        return "No update was profiled."
    top = "; ".join(f"`{event['name'][:60]}` {event['ms']:.1f} ms in {event['calls']}" for event in profile["top"])
    if profile["busy_share"] is None:
        return f"An update of AR + Lopti takes longest in {top}."
    return (
        f"In an update of AR + Lopti the GPU runs {profile['kernels']:,} kernels and is busy for "
        f"{profile['busy_share']:.0%} of the time, with gaps of at most {profile['longest_gap_ms']:.1f} ms. The "
        f"longest: {top}."
    )
