"""The report's tables equal arithmetic by hand, and it copes with an unfinished study."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from arlopti_testing.study_fakes import of_name, result

from study import comparison, family, report, runs, stored, tables

ROOT = Path(__file__).parents[2]


def test_report_of_an_unfinished_study(tmp_path):
    accuracies = {"grpo": (0.50, 0.52, 0.54), "both": (0.55, 0.59)}
    for variant, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            stored.write(result(of_name(f"{variant}-{seed}"), accuracy), tmp_path / stored.AR_LOPTI)
    (tmp_path / "study.md").write_text(f"Before.\n{report.START}\nstale\n{report.END}\nAfter.\n")
    command = [sys.executable, "-m", "study.report", "--results", tmp_path, "--docs", tmp_path]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert output.returncode == 0, output.stderr
    page = (tmp_path / "study.md").read_text()
    assert page.startswith("Before.\n") and page.endswith("\nAfter.\n") and "stale" not in page
    # GRPO: mean 0.52, s = 0.02, 4.303 · 0.02 / √3 = 0.050. By puzzle: 0.03 in each of 3 x 2, 0.03 / √6 = 0.012.
    row = "| GRPO | 3 of 5 | 0.520 ± 0.050 | 0.520 ± 0.050 | 0.520 ± 0.050 | 0.012 | 0.500 ± 0.000 | 0.500 ± 0.000 |"
    assert f"{row} 1.500 ± 0.000 |" in page
    # Both: differences 0.05 and 0.07: mean 0.06, s = 0.0141, t(1) = 12.706, so ± 0.127; t = 6: p = 1 - 2/π · atan 6.
    assert "| + AR + Lopti | 2 of 5 | +0.060 ± 0.127 | 0.105 | 0.105 | +0.060 ± 0.127 |" in page
    assert "| + Lopti (η = 0.5) | 0 of 5 | missing |" in page
    assert "Runs that are missing: ar-0, lopti-0, ar-1," in page
    assert "Run on: some CPU, 2 cores, runs at a time: 1." in page
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_runs_from_different_warm_starts_are_no_pair():
    results = {f"{v}-{seed}": result(of_name(f"{v}-{seed}")) for v in ("grpo", "ar") for seed in (0, 1)}
    grpo, ar = comparison.rows_of(["grpo", "ar"], results)
    assert comparison.differences(ar, grpo, comparison.accuracy).difference.n == 2
    results["ar-1"]["warm_start_sha256"] = "b"
    grpo, ar = comparison.rows_of(["grpo", "ar"], results)
    assert comparison.differences(ar, grpo, comparison.accuracy).difference.n == 1


def test_report_of_nothing_says_so():
    page = tables.tables({})
    assert page.count("0 of 5") >= 5 and "Run on: nothing yet." in page


def test_report_of_an_unfinished_family(tmp_path):
    accuracies = {
        "noise-grpo": (0.50, 0.52, 0.54),
        "noise-lopti": (0.55, 0.59),
        "noise-double-steps": (0.55, 0.57),
        "decisions-grpo": (0.4,),
        "decisions-ar": (0.5,),
    }
    for variant, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            made = result(of_name(f"{variant}-{seed}"), accuracy)
            made["curves"] |= {"mean_weight": [0.8, 1.0], "zero_share": [0.0, 0.0]} if variant.endswith("-ar") else {}
            stored.write(made, tmp_path / stored.FAMILY)
    for variant, values in {"noise-grpo": (0.30, 0.32), "noise-lopti": (0.30, 0.34)}.items():
        for seed, accuracy in enumerate(values):
            stored.write(result(of_name(f"{variant}-{seed}"), accuracy), tmp_path / stored.BY_STRUCTURE)
    for name in ("study_family.md", "token_methods.md"):
        (tmp_path / name).write_text(f"Before.\n{report.START}\nstale\n{report.END}\nAfter.\n")
    command = [sys.executable, "-m", "study.report", "--family", "--results", tmp_path, "--docs", tmp_path]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert output.returncode == 0, output.stderr
    page = (tmp_path / "study_family.md").read_text()
    differences = {c: (tmp_path / f"family_{c}_differences.csv").read_text() for c in runs.CONDITIONS}
    assert all(f"[15 rows](../study/results/family_{c}_differences.csv)" in page for c in runs.CONDITIONS)
    assert "**9 of 150 runs are done (seed 0: 5 of 30, seed 1: 3 of 30, seed 2: 1 of 30, seed 3: 0 of 30," in page
    # Differences 0.05 and 0.07, as above: p = 0.105, which 30 comparisons leave nothing of. 0.05 twice has p = 0.
    assert "Lopti (η = 0.5) minus GRPO,2 of 5,+0.060 ± 0.127,0.105,1.000," in differences["noise"]
    assert '"GRPO, twice as many steps minus GRPO",2 of 5,+0.050 ± 0.000,< 0.001,< 0.001,' in differences["noise"]
    # 0 and 0.02: mean 0.01, s = 0.0141, so ± 0.127 and t = 1: p = 1/2.
    assert (
        '"Lopti (η = 0.5) minus GRPO, twice as many steps",2 of 5,+0.010 ± 0.127,0.500,1.000,' in differences["noise"]
    )
    assert "AR (α = 0.3) minus GRPO,1 of 5,+0.100,,," in differences["decisions"]
    assert '"A3PO, mean weight one minus GRPO",0 of 5,missing,' in differences["noise"]
    # On the other split 0 and 0.02 likewise, beside what they were.
    assert "**4 of 30 runs are done (seed 0: 2 of 6, seed 1: 2 of 6, seed 2: 0 of 6," in page
    assert "| Lopti (η = 0.5) minus GRPO, as told | 2 of 5 | +0.060 ± 0.127 | 0.105 |  |" in page
    assert "| Lopti (η = 0.5) minus GRPO, by structure | 2 of 5 | +0.010 ± 0.127 | 0.500 | 1.000 |" in page
    assert "| AR (α = 0.3) | 1 of 5 | 0.900 | 0.000 |" in page
    assert (tmp_path / "study_family.png").read_bytes().startswith(b"\x89PNG")
    short = (tmp_path / "token_methods.md").read_text()
    assert short.startswith("Before.\n") and short.endswith("\nAfter.\n") and "stale" not in short
    assert "| Lopti (η = 0.5) | missing (0 of 5) | +0.060 ± 0.127 (2 of 5) |" in short
    assert "| AR (α = 0.3) | +0.100 (1 of 5) | missing (0 of 5) |" in short and "mean weight" not in short


def test_all_comparisons_of_both_conditions_are_corrected_together():
    """30 of them: 14 with GRPO and one with doubled GRPO in each. One p of 0.001 becomes 0.03, whatever is missing."""
    assert len(family.COMPARISONS) == 30
    results = {}
    for seed, (grpo, ar) in enumerate([(0.1, 0.2), (0.1, 0.21), (0.1, 0.19), (0.1, 0.2)]):
        results |= {
            f"noise-{n}-{seed}": result(of_name(f"noise-{n}-{seed}"), a) for n, a in (("grpo", grpo), ("ar", ar))
        }
    corrected = family.corrected_p(results)
    (index,) = [i for i, p in enumerate(corrected) if not math.isnan(p)]
    assert family.COMPARISONS[index] == (runs.NOISE, "ar", "grpo")
    assert corrected[index] == pytest.approx(30 * family.compare(family.COMPARISONS[index], results).p)


@pytest.mark.parametrize(
    ("zero_share", "shown"),
    [
        (None, ["0.300", "1.500"]),  # as of a run without a token method
        ([0.002, 0.016], ["0.300", "1.500"]),
        ([0.002, 0.020], ["-", "-"]),
    ],
)
def test_statistics_of_a_part_of_the_tokens_are_not_shown(zero_share, shown):
    """A method may leave out one token in a hundred on average."""
    made = result(of_name("noise-stapo-0"))
    made["curves"] |= {"low_share": [0.4, 0.3], "entropy": [2.0, 1.5]}
    made["curves"] |= {"zero_share": zero_share} if zero_share else {}
    (row,) = comparison.rows_of(["noise-stapo"], {"noise-stapo-0": made})
    titles, cells = tables.stability_table([row])
    first = titles.index("share of p < 0.5, last")
    assert titles[first + 1] == "entropy, last" and cells[first : first + 2] == shown


@pytest.mark.parametrize("name", ["study.md", "study_family.md", "token_methods.md"])
def test_the_page_has_its_marks(name):
    page = (ROOT / "docs" / name).read_text("utf-8")
    assert page.count(report.START) == page.count(report.END) == 1
