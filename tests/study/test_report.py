"""The report's tables equal arithmetic by hand, and it copes with an unfinished study."""

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
from arlopti_testing.study_fakes import of_name, result

from study import comparison, family, report, runs, stored, tables

ROOT = Path(__file__).parents[2]


def report_of(folder: Path) -> str:
    """Run the command on the results in a folder, write its pages there too, and return docs/results.md."""
    marked = f"{report.START}\nstale\n{report.END}\n"
    (folder / "results.md").write_text("Before.\n" + "".join(f"{marked}After {n}.\n" for n in range(1, 4)))
    (folder / "token_methods.md").write_text(f"Before.\n{marked}After.\n")
    command = [sys.executable, "-m", "study.report", "--results", folder, "--docs", folder]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert output.returncode == 0, output.stderr
    page = (folder / "results.md").read_text()
    assert page.startswith("Before.\n") and "stale" not in page
    assert [line for line in page.splitlines() if line.startswith("After")] == [f"After {n}." for n in range(1, 4)]
    for name in ("study.png", "study_family.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    return page


def test_report_of_an_unfinished_study(tmp_path):
    accuracies = {"grpo": (0.50, 0.52, 0.54), "both": (0.55, 0.59), "rpp": (0.4, 0.4), "rpp-ar": (0.45, 0.47)}
    for variant, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            stored.write(result(of_name(f"{variant}-{seed}"), accuracy), tmp_path / stored.AR_LOPTI)
    page = report_of(tmp_path)
    # GRPO: mean 0.52, s = 0.02, 4.303 · 0.02 / √3 = 0.050. By puzzle: 0.03 in each of 3 x 2, 0.03 / √6 = 0.012.
    levels = (tmp_path / "ar_lopti_accuracy.csv").read_text()
    row = "GRPO,GRPO,3 of 5,0.520 ± 0.050,0.520 ± 0.050,0.520 ± 0.050,0.012,0.500 ± 0.000,0.500 ± 0.000"
    assert f"{row},1.500 ± 0.000\n" in levels
    assert "| GRPO | 0.520 ± 0.050 | 0.500 ± 0.000 | 0.500 ± 0.000 |  |  |" in page
    # Both: differences 0.05 and 0.07: mean 0.06, s = 0.0141, t(1) = 12.706, so ± 0.127; t = 6: p = 1 - 2/π · atan 6.
    differences = (tmp_path / "ar_lopti_differences.csv").read_text()
    assert "GRPO,+ AR + Lopti,2 of 5,+0.060 ± 0.127,0.105,0.105,+0.060 ± 0.127," in differences
    assert "GRPO,+ Lopti (η = 0.5),0 of 5,missing," in differences
    assert "| + AR + Lopti | 0.570 ± 0.254 | 0.500 ± 0.000 | 0.500 ± 0.000 | +0.060 ± 0.127 | 0.105 |" in page
    assert "| REINFORCE++ | + AR (α = 0.1) | +0.060 ± 0.127 | 0.105 | 0.105 |" in page
    assert (tmp_path / "ar_lopti_learning_rates.csv").read_text().count("0 of 2") == 3


def test_runs_from_different_warm_starts_are_no_pair():
    results = {f"{v}-{seed}": result(of_name(f"{v}-{seed}")) for v in ("grpo", "ar") for seed in (0, 1)}
    grpo, ar = comparison.rows_of(["grpo", "ar"], results)
    assert comparison.differences(ar, grpo, comparison.accuracy).difference.n == 2
    results["ar-1"]["warm_start_sha256"] = "b"
    grpo, ar = comparison.rows_of(["grpo", "ar"], results)
    assert comparison.differences(ar, grpo, comparison.accuracy).difference.n == 1


def test_report_of_nothing_says_so():
    lines = tables.files({})["ar_lopti_accuracy.csv"]
    assert sum(line[2] == "0 of 5" for line in lines) == 5 and all("missing" in line for line in lines[1:])


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
    page = report_of(tmp_path)
    differences = (tmp_path / "family_differences.csv").read_text()
    # Differences 0.05 and 0.07, as above: p = 0.105, which 30 comparisons leave nothing of. 0.05 twice has p = 0.
    assert "noise,Lopti (η = 0.5) minus GRPO,2 of 5,+0.060 ± 0.127,0.105,1.000," in differences
    assert 'noise,"GRPO, twice as many steps minus GRPO",2 of 5,+0.050 ± 0.000,< 0.001,< 0.001,' in differences
    # 0 and 0.02: mean 0.01, s = 0.0141, so ± 0.127 and t = 1: p = 1/2.
    assert 'noise,"Lopti (η = 0.5) minus GRPO, twice as many steps",2 of 5,+0.010 ± 0.127,0.500,1.000,' in differences
    assert "decisions,AR (α = 0.3) minus GRPO,1 of 5,+0.100,,," in differences
    assert 'noise,"A3PO, mean weight one minus GRPO",0 of 5,missing,' in differences
    # On the other split 0 and 0.02 likewise.
    repeated = (tmp_path / "by_structure_differences.csv").read_text()
    assert "noise,Lopti (η = 0.5) minus GRPO,2 of 5,+0.010 ± 0.127,0.500,1.000," in repeated
    assert "decisions,AR (α = 0.3),1 of 5,0.900,0.000\n" in (tmp_path / "family_weights.csv").read_text()
    for text in (page, (tmp_path / "token_methods.md").read_text()):
        assert "| Lopti (η = 0.5) | missing |  | +0.060 ± 0.127 | 1.000 |" in text
        assert "| AR (α = 0.3) | +0.100 |  | missing |  |" in text and "mean weight" not in text
        assert "| GMTS | missing |  | missing |  |" in text


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


@pytest.mark.parametrize("name", ["results.md", "token_methods.md"])
def test_the_pages_have_the_tables_that_the_command_writes(name, tmp_path):
    page = tmp_path / name
    page.write_text((ROOT / "docs" / name).read_text("utf-8"))
    found = {file: stored.load(planned, stored.RESULTS / file) for file, planned in report.STUDIES.items()}
    report.put(page, *report.page_tables(found)[name])
    assert page.read_text() == (ROOT / "docs" / name).read_text("utf-8"), "python -m study.report"


def test_the_csv_files_are_those_that_the_command_writes():
    found = {file: stored.load(planned, stored.RESULTS / file) for file, planned in report.STUDIES.items()}
    files = report.csv_tables(found, stored.RESULTS)
    assert files.keys() == {path.name for path in stored.RESULTS.glob("*.csv")}
    for name, table in files.items():
        with open(stored.RESULTS / name, newline="", encoding="utf-8") as file:
            assert list(csv.reader(file)) == table, f"{name}: python -m study.report"
