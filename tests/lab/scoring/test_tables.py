"""An evaluation's tables are those of the paper, and hold every measure."""

import csv

import pytest

from arlopti_openrlhf.lab.scoring.tables import markdown, mean_of, write_csv


def test_tables(tmp_path):
    def estimate(value):
        return {"value": value, "low": value - 0.1, "high": value + 0.1, "standard_error": 0.05}

    def found(value):
        return {"n": 100, "samples": 1, "temperature": 0.0, "accuracy": estimate(value)}

    mean = mean_of([{"sources": {"aime": found(value)}} for value in (0.25, 0.5, 0.75)])["sources"]["aime"]
    assert mean["n"] == 100 and mean["accuracy"] == pytest.approx(estimate(0.5))
    both = {"base": {"sources": {"kk_3ppl": found(0.3), "kk_3ppl@n=1,t=1": found(0.2), "kk_4ppl@n=1,t=1": found(0.4)}}}
    assert "| Knights and Knaves | 3 people |\n" in markdown(both)
    assert "| Knights and Knaves, n=1,t=1 | 3 people | 4 people | Avg. |" in markdown(both)
    results = {
        "base": {"sources": {"kk_10ppl": found(0.1), "kk_3ppl": found(0.3), "aime": found(0.2)}},
        "trained": {"sources": {"kk_10ppl": found(0.5), "kk_3ppl": found(0.9)}},
    }
    text = markdown(results)
    assert "| Knights and Knaves | 3 people | 10 people | Avg. |" in text
    assert "| base | 0.300 [0.200, 0.400] | 0.100 [0.000, 0.200] | 0.200 |" in text
    assert "| trained | 0.900 [0.800, 1.000] | 0.500 [0.400, 0.600] | 0.700 |" in text
    assert "| Others | aime |" in text and "| trained |  |" in text
    write_csv(results, tmp_path / "table.csv")
    rows = list(csv.DictReader(open(tmp_path / "table.csv")))
    assert len(rows) == 5 and rows[0]["model"] == "base" and float(rows[0]["value"]) == 0.1
