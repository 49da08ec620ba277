"""What `gpu_check.py` prints of what it has found."""

ERRORS = {
    "log_prob_max": "log-probs, greatest",
    "log_prob_mean": "log-probs, mean",
    "loss": "loss",
    "gradient_GRPO": "gradient, GRPO",
    "gradient_low": "gradient, Lopti's low stage",
    "gradient_high": "gradient, Lopti's high stage",
}


def headline(record: dict) -> str:
    """Return the machine and its versions in a line."""
    machine = dict(record["machine"])
    facts = ("processor", "bf16_instructions", "products")
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name not in facts)
    return f"{machine['processor']}; {versions}."


def exactness_table(rows: list[dict]) -> str:
    """Return Markdown, a row for each comparison.

    A cell has two distances from OpenRLHF's update in float32: the selective update's, and that of OpenRLHF's in bf16.
    Log-probs are in nats, and gradients relative.
    """
    header = ["shape", "tokens", "attention", "type", *ERRORS.values(), "verdict"]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        errors = [f"{row['selective'][name]:.1e} / {row['plain_bf16'][name]:.1e}" for name in ERRORS]
        verdict = "; ".join(row["failures"]) or "exact"
        lines.append([row["name"], str(row["tokens"]), row["attention"], row["dtype"], *errors, verdict])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def closing(record: dict) -> str:
    """Return how many comparisons are exact, and what failed, was skipped or does not run here."""
    exact = sum(not row["failures"] for row in record["exactness"])
    lines = [f"{exact} of {len(record['exactness'])} comparisons are exact; {record['minutes']:.1f} minutes"]
    for title, name in (("failed", "failures"), ("skipped", "skipped"), ("left out", "left_out")):
        lines += [f"{title}: {entry}" for entry in record[name]]
    return "\n".join(lines)
