"""The evaluation command, with vLLM on a tiny model; its tables and sampling rules without."""

import argparse
import csv
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from arlopti_openrlhf.cli import evaluate
from arlopti_openrlhf.cli.evaluate import markdown
from arlopti_openrlhf.grading.sources import grade
from arlopti_openrlhf.scoring.sampling import Sampling, parse_sampling, sampling_of


def test_sampling():
    assert parse_sampling("aime:n=16,t=1.0") == Sampling("aime", 16, 1.0)
    specs = [parse_sampling(text) for text in ("*:n=4,t=0.6", "kk_*:n=1,t=0")]
    assert sampling_of("kk_3ppl", specs) == Sampling("kk_*", 1, 0.0)
    assert sampling_of("aime", specs) == Sampling("*", 4, 0.6)
    for text in ("aime", "aime:n=0,t=1", "aime:t=1,n=2", "aime:n=4,t=0", ":n=1,t=0", "aime:n=1,t=x"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_sampling(text)


def test_sources_have_their_grader():
    label = "(1) Zoey is a knight"
    assert grade("kk_2ppl", f"<think></think><answer>{label}</answer>", label) == (3.0, 1.0, True)
    assert grade("aime", "It is \\boxed{025}", "25") == (1.0, 1.0, True)
    assert grade("aime", "It is 25", "25") == (1.0, 1.0, False)


def test_tables(tmp_path):
    def estimate(value):
        return {"value": value, "low": value - 0.1, "high": value + 0.1, "standard_error": 0.05}

    def found(value):
        return {"n": 100, "samples": 1, "temperature": 0.0, "accuracy": estimate(value)}

    results = {
        "base": {"sources": {"kk_10ppl": found(0.1), "kk_3ppl": found(0.3), "aime": found(0.2)}},
        "trained": {"sources": {"kk_10ppl": found(0.5), "kk_3ppl": found(0.9)}},
    }
    text = markdown(results)
    assert "| Knights and Knaves | 3 people | 10 people | Avg. |" in text
    assert "| base | 0.300 [0.200, 0.400] | 0.100 [0.000, 0.200] | 0.200 |" in text
    assert "| trained | 0.900 [0.800, 1.000] | 0.500 [0.400, 0.600] | 0.700 |" in text
    assert "| Others | aime |" in text and "| trained |  |" in text
    evaluate.write_csv(results, tmp_path / "table.csv")
    rows = list(csv.DictReader(open(tmp_path / "table.csv")))
    assert len(rows) == 5 and rows[0]["model"] == "base" and float(rows[0]["value"]) == 0.1


def problems() -> list[dict]:
    sums = [{"prompt": f"{i} + {i} = ", "label": str(2 * i), "datasource": "sums"} for i in range(6)]
    label = "(1) Zoey is a knight\n(2) Liam is a knave"
    puzzle = [{"role": "user", "content": "puzzle"}]
    return sums + [{"prompt": puzzle, "label": label, "datasource": "kk_2ppl"} for _ in range(4)]


FLAGS = ["--sampling", "*:n=4,t=1", "--sampling", "kk_*:n=1,t=0", "--greedy", "--max-new-tokens", "12"]


def engine_that_knows(asked):
    """In vLLM's place: answers every sum rightly, and lists what it was asked."""

    def engine(model, args):
        def answer(rows, jobs):
            asked.extend(jobs)
            for i, n, temperature in jobs:
                text = f"\\boxed{{{rows[i]['label']}}}"
                output = SimpleNamespace(text=text, token_ids=[1, 2, 3], finish_reason="stop")
                yield (i, n, temperature), "prompt", [output] * n

        return answer

    return engine


@pytest.mark.timeout(600)
def test_a_model(make_model, tmp_path):
    """With vLLM."""
    (tmp_path / "base").symlink_to(make_model())
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in problems()))
    command = [sys.executable, "-m", "arlopti_openrlhf.cli.evaluate", "--model", str(tmp_path / "base"), *FLAGS]
    command += ["--data", str(data), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "| Knights and Knaves | 2 people |" in result.stdout and "| Others | sums |" in result.stdout
    assert result.stdout.endswith((out / "table.md").read_text())
    records = [json.loads(line) for line in (out / "base.responses.jsonl").read_text().splitlines()]
    assert len(records) == 6 + 6 + 4  # sums sampled and greedy, puzzles greedy alone
    assert {len(r["responses"]) for r in records if r["temperature"] == 1} == {4}
    assert len({r["text"] for record in records for r in record["responses"]}) > 8
    measured = json.loads((out / "base.json").read_text())["sources"]
    assert set(measured["sums"]) >= {"n", "accuracy", "pass@2", "pass@4", "greedy", "truncated"}
    assert "greedy" not in measured["kk_2ppl"] and measured["kk_2ppl"]["samples"] == 1


def test_models_side_by_side(tmp_path, monkeypatch, capsys):
    """Each in a process of its own, which here is this one."""
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in problems()))
    asked, processes = [], []
    monkeypatch.setattr(evaluate, "_engine", engine_that_knows(asked))

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
        evaluate.main()

    def run(command):
        processes.append(command)
        main(*command[3:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(evaluate.subprocess, "run", run)
    main("--model", "org/base", "trained", "--data", str(data), "--out", str(out), "--seed", "3", *FLAGS)
    assert len(processes) == 2 and len(asked) == 2 * 16
    for name in ("base", "trained"):
        assert json.loads((out / f"{name}.json").read_text())["sources"]["sums"]["accuracy"]["value"] == 1
    table = (out / "table.md").read_text()
    assert "| base | 1.000 [" in table and "| trained | 1.000 [" in table and capsys.readouterr().out.endswith(table)


def test_an_interrupted_evaluation_continues(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(evaluate, "_engine", engine_that_knows(asked))
    args = evaluate.make_parser().parse_args(["--model", "base", "--data", "x", "--out", "x", *FLAGS])

    def run() -> tuple[int, dict]:
        asked.clear()
        evaluate.evaluate("base", problems(), args, tmp_path)
        return len(asked), json.loads((tmp_path / "base.json").read_text())["sources"]

    count, first = run()
    assert count == 16 and first["sums"]["accuracy"]["value"] == 1 and first["kk_2ppl"]["accuracy"]["value"] == 0
    assert run() == (0, first)
    assert "base: 16 of 16 problems are answered already" in capsys.readouterr().out
    path = tmp_path / "base.responses.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:40])  # some lines are gone, and one is cut
    assert run() == (11, first)
    assert path.read_text().splitlines(keepends=True)[:5] == lines[:5]
    args.seed = 1  # other settings: another evaluation
    assert run()[0] == 16
