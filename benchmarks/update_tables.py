"""The benchmark's results as a table and as a chart."""


def table(results: dict[str, dict | None]) -> str:
    """Return Markdown, a row for each variant. None stands for a variant that ran out of memory."""
    lines = ["| | time | seconds (min - max) | tokens/s | MFU | peak memory | GiB |", "|---|---|---|---|---|---|---|"]
    for variant, r in results.items():
        if r is None:
            lines.append(f"| {variant} | out of memory | | | | | |")
            continue
        lines.append(
            f"| {variant} | {_ratio(r['time_ratio'])} "
            f"| {r['seconds']:.2f} ({r['spread'][0]:.2f} - {r['spread'][1]:.2f}) | {r['tokens_per_s']:,.0f} "
            f"| {r['mfu']:.2f} | {_ratio(r['memory_ratio'])} | {r['memory_gib']:.1f} |"
        )
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(results: dict[str, dict], path: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.5))
    for offset, name, label in ((-0.2, "time_ratio", "time"), (0.2, "memory_ratio", "peak memory")):
        bars = axes.bar(
            [i + offset for i in range(len(results))], [r[name] for r in results.values()], 0.38, label=label
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(results)), results.keys())
    axes.set_ylabel("stock GRPO = 1")
    axes.set_title(title, fontsize=8)
    axes.set_ylim(0, 1.25)
    axes.legend(frameon=False, loc="upper right", ncol=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
