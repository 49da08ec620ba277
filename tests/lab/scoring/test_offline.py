"""An offline evaluation continues where it stopped, and starts anew with other settings."""

import json
from decimal import Decimal

from arlopti_testing.engine_fakes import generate_right_sums, problems

from arlopti_openrlhf.evaluation.sampling import parse_sampling
from arlopti_openrlhf.grading.sources import grade
from arlopti_openrlhf.lab.scoring import offline


def test_sources_have_their_grader():
    label = "(1) Zoey is a knight"
    assert grade("kk_2ppl", "", [f"<think></think><answer>{label}</answer>"], label) == [(3.0, 1.0, True)]
    boxed, bare = "It is \\boxed{025}", "It is 25"
    assert grade("aime", "", [boxed, bare], "25") == [(1.0, 1.0, True), (1.0, 1.0, False)]
    # As in a training: a thought that the template began, and that has no end, is graded.
    assert grade("aime", "How many? <think>", [boxed], "25") == [(1.0, 1.0, True)]


def test_an_interrupted_evaluation_continues(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(offline, "load_engine", lambda model, seed: None)
    monkeypatch.setattr(offline, "generate", generate_right_sums(asked))
    specs = [parse_sampling(text) for text in ("*:n=8,t=1", "*:n=4,t=1", "kk_*:n=1,t=0")]
    settings = offline.ScoringSettings(specs, greedy=True, max_new_tokens=12, seed=0)

    def run(settings=settings) -> tuple[int, dict]:
        asked.clear()
        offline.evaluate("base", "base", problems(), settings, tmp_path)
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
    path.write_bytes("".join(lines[:4]).encode() + b"\0\xff\n" + "".join(lines[5:]).encode())  # as after a power loss
    assert run() == (12, first)
    assert path.read_text().splitlines(keepends=True)[:4] == lines[:4]
    assert run(settings._replace(seed=1))[0] == 16  # other settings make another evaluation
    offline.evaluate("base", "base", problems() * 3, settings, tmp_path)  # repeated rows are no other problems
    repeated = json.loads((tmp_path / "base.json").read_text())["sources"]["sums"]
    assert repeated["n"] == first["sums"]["n"] and repeated["accuracy"] == first["sums"]["accuracy"]
    of_parquet = [row | {"label": Decimal(row["label"])} for row in problems()[:6]]  # decimal128
    offline.evaluate("base", "base", of_parquet, settings, tmp_path)
    renamed = [row | {"datasource": "aime"} for row in problems()[:6]]  # another row of the table, if no other grader
    offline.evaluate("base", "base", renamed, settings, tmp_path)
    assert [*json.loads((tmp_path / "base.json").read_text())["sources"]] == ["aime"]
