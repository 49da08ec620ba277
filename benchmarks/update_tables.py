"""The benchmark's results as tables and as a chart."""


def table(results: dict[str, dict | None], floor_gib: float) -> str:
    """Return Markdown, a row for each variant. None stands for a variant that ran out of memory.

    `floor_gib` is what an update of next to no tokens takes. Memory without it is in brackets.
    """
    lines = [
        "| | time | beside packed | seconds (min - max) | tokens/s | peak memory | beside packed | GiB |",
        "|---" * 8 + "|",
    ]
    for variant, r in results.items():
        if r is None:
            lines.append(f"| {variant} | out of memory |" + " |" * 6)
            continue
        lines.append(
            f"| {variant} | {_number(r['time_ratio'], 2)} | {_number(r['packed_time_ratio'], 2)} "
            f"| {r['seconds']:.2f} ({r['spread'][0]:.2f} - {r['spread'][1]:.2f}) | {r['tokens_per_s']:,.0f} "
            f"| {_number(r['memory_ratio'], 2)} | {_number(r['packed_memory_ratio'], 2)} "
            f"| {_number(r['memory_gib'], 1)} ({_number(r['memory_gib'] and r['memory_gib'] - floor_gib, 1)}) |"
        )
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def draw(results: dict[str, dict], path: str, title: str) -> None:
    """Draw time and peak memory of each variant beside stock's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 + 0.6 * len(results)))
    for offset, name, label in ((0.2, "time_ratio", "time"), (-0.2, "memory_ratio", "peak memory")):
        rows = [(i, r[name]) for i, r in enumerate(reversed(results.values())) if r[name] is not None]
        bars = axes.barh([i + offset for i, _ in rows], [value for _, value in rows], 0.38, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(results)), reversed(results.keys()))
    axes.set_xlabel("stock GRPO = 1")
    axes.set_title(title, fontsize=8, loc="right", wrap=True)
    axes.set_xlim(
        0, 1.15 * max(1, *(r[name] or 0 for r in results.values() for name in ("time_ratio", "memory_ratio")))
    )
    axes.legend(frameon=False, loc="upper center", ncol=2, bbox_to_anchor=(0.5, -0.18))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
