"""The evaluation command works with vLLM on a tiny model, and puts several models side by side."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from arlopti_testing.engine_fakes import generate_right_sums, problems

from arlopti_openrlhf.cli import evaluate
from arlopti_openrlhf.lab.scoring import offline
from arlopti_openrlhf.lab.scoring.inputs import rows_of

FLAGS = ["--sampling", "*:n=4,t=1", "--sampling", "kk_*:n=1,t=0", "--greedy", "--max-new-tokens", "12"]


@pytest.mark.long
@pytest.mark.whole_stack
@pytest.mark.timeout(600)
def test_a_model(make_model, tmp_path):
    """Run the command, with vLLM."""
    (tmp_path / "base").symlink_to(make_model())
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in problems()))
    command = [sys.executable, "-m", "arlopti_openrlhf", "evaluate", "--model", str(tmp_path / "base"), *FLAGS]
    command += ["--data", str(data), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "INFO" not in result.stdout + result.stderr  # vLLM's log
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
    """Evaluate each model in a process of its own, which here is this one."""
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in problems()))
    asked, processes = [], []
    monkeypatch.setattr(offline, "load_engine", lambda model, seed: None)
    monkeypatch.setattr(offline, "generate", generate_right_sums(asked))
    monkeypatch.setattr("huggingface_hub.model_info", lambda name, timeout: None)

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
        evaluate.main()

    def run(command):
        processes.append(command)
        assert command[1:5] == ["-P", "-m", "arlopti_openrlhf", "evaluate"]
        main(*command[5:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(evaluate.subprocess, "run", run)
    main("--model", "org/base", "trained", "--data", str(data), "--out", str(out), "--seed", "3", *FLAGS)
    assert len(processes) == 2 and len(asked) == 2 * 16
    for name in ("base", "trained"):
        assert json.loads((out / f"{name}.json").read_text())["sources"]["sums"]["accuracy"]["value"] == 1
    table = (out / "table.md").read_text()
    assert "| base | 1.000 [" in table and "| trained | 1.000 [" in table and capsys.readouterr().out.endswith(table)


def test_the_last_checkpoints_in_two_ways_and_their_mean(tmp_path, tiny_model, monkeypatch):
    """As the paper's tables: puzzles greedily and at temperature 1, and the mean over three checkpoints."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems()))
    (tmp_path / "run").mkdir()
    for step in (9, 10, 11, 12):
        (tmp_path / f"run/step{step}").symlink_to(tiny_model)
    monkeypatch.setattr(offline, "load_engine", lambda model, seed: None)
    monkeypatch.setattr(offline, "generate", generate_right_sums([]))

    def main(*flags):
        monkeypatch.setattr(sys, "argv", ["evaluate", *flags])
        evaluate.main()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(evaluate.subprocess, "run", lambda command: main(*command[command.index("evaluate") + 1 :]))
    own = ["--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out"), "--last", "3"]
    main("--model", str(tmp_path / "run"), *own, "--sampling", "kk_*:n=1,t=0", "--sampling", "kk_*:n=2,t=1")
    table = (tmp_path / "out/table.md").read_text()
    rows = [line.split("|")[1].strip() for line in table.splitlines() if "[0.000, " in line and "accuracy" not in line]
    assert rows[:4] == ["step10", "step11", "step12", "run, mean of 3"] == rows[4:8]
    assert "| Knights and Knaves, n=2,t=1 | 2 people |" in table and "| run, mean of 3 | 1.000 [" in table
    with pytest.raises(SystemExit, match="2"):
        main("--model", str(tmp_path / "run/step9"), *own)


def test_a_template_that_refuses_the_prompts_ends_it_before_vllm_loads(tmp_path, tiny_model, monkeypatch, capsys):
    """Gemma's refuses a system turn, which Knights-and-Knaves prompts have."""
    model, data = shutil.copytree(tiny_model, tmp_path / "model"), tmp_path / "data.jsonl"
    (model / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    turns = [{"role": "system", "content": "Reason."}, {"role": "user", "content": "1+1?"}]
    data.write_text(json.dumps({"prompt": turns, "label": "2", "datasource": "sums"}) + "\n")
    monkeypatch.setattr(sys, "argv", ["evaluate", "--model", str(model), "--data", str(data), "--out", str(tmp_path)])
    monkeypatch.setattr(offline, "load_engine", lambda model, seed: pytest.fail("the engine was loaded"))
    with pytest.raises(SystemExit, match="2"):
        evaluate.main()
    assert f"--model: {model}: its chat template does not render the prompts: System role" in capsys.readouterr().err


REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    assert queries == ["prompt\\\\boxed{%d}<end>" % (int(labels[0]) if labels[0].isdigit() else 0)], queries
    return {"rewards": [-2.0]} SCORES
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(flags) evaluates a model that answers every sum rightly, and returns its measures by source."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems()))
    monkeypatch.setattr(offline, "load_engine", lambda model, seed: None)
    monkeypatch.setattr(offline, "generate", generate_right_sums([]))
    monkeypatch.setattr("huggingface_hub.model_info", lambda name, timeout: None)

    def run(*flags: str) -> dict:
        own = ["--model", "org/base", "--data", str(tmp_path / "data.jsonl"), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["evaluate", *own, *FLAGS, *flags])
        evaluate.main()
        return json.loads((tmp_path / "out" / "base.json").read_text())["sources"]

    return run


@pytest.mark.parametrize(("scores", "measure"), [("", "reward"), (" | {'scores': [0.25]}", "accuracy")])
def test_an_own_reward_grades_as_in_a_training(scores, measure, run, tmp_path, capsys):
    """It sees the token that ends a response. Rewards without scores do not say what is right."""
    by_rule = run()
    said = capsys.readouterr()
    assert "no rule for sums: graded as math. --reward takes another" in said.err and "cut off" not in said.err
    (tmp_path / "reward.py").write_text(REWARD.replace("SCORES", scores))
    measured = run("--reward", str(tmp_path / "reward.py"))
    assert measured["sums"][measure]["value"] == (-2 if measure == "reward" else 0.25)
    assert ("accuracy" in measured["sums"]) == ("pass@4" in measured["sums"]) == (measure == "accuracy")
    said = capsys.readouterr()
    assert "no rule for" not in said.err and f"| sums | 6 | 4 | 1 | {measure} |" in said.out
    assert run() == by_rule  # and none of the reward's answers


def test_rows_have_the_keys_of_a_training(run, tmp_path):
    """Without a datasource they are of OpenRLHF's, "default"."""
    rows = [{"question": row["prompt"], "answer": row["label"], "datasource": row["datasource"]} for row in problems()]
    for row in rows:
        if row["datasource"] == "sums":
            del row["datasource"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = run("--data.input_key", "question", "--data.label_key", "answer")
    assert measured.keys() == {"kk_2ppl", "default"} and measured["default"]["accuracy"]["value"] == 1


def test_prompts_that_are_text_are_rendered_as_in_a_training(tmp_path):
    rows = [{"prompt": "1 + 1?", "label": "2"}, {"prompt": [{"role": "user", "content": "2?"}], "label": "2"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_model = ["--model", "m", "--out", "o", "--data", str(tmp_path / "data.jsonl")]
    for flags, first in (
        ([], "1 + 1?"),
        (["--data.input_template", "Q: {}"], "Q: 1 + 1?"),
        (["--data.apply_chat_template"], [{"role": "user", "content": "1 + 1?"}]),
    ):
        args = evaluate.make_parser().parse_args([*of_model, *flags])
        assert [row["prompt"] for row in rows_of(args)] == [first, rows[1]["prompt"]]
        again = evaluate.make_parser().parse_args(evaluate.command_for("m", args)[5:])
        assert (again.is_message, again.input_template) == (args.is_message, args.input_template)


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("reward.py", 1, "reward_func raised KeyError: 'lost' (line 2)\\nlabel: "),
        ("gone.py", 2, "argument --reward: {}/gone.py: its import fails: FileNotFoundError: there is no such file: "),
        ("torn.py", 2, "argument --reward: {}/torn.py: its import fails: SyntaxError: invalid syntax (torn.py"),
        ("other.py", 2, "argument --reward: {}/other.py: its import fails: ModuleNotFoundError: No module"),
        (
            "reward",
            2,
            "argument --reward: {}/reward is no source of rewards; give kk, math, math_boxed, one Python file, or "
            "URLs",
        ),
    ],
)
def test_a_reward_that_cannot_grade(source, status, said, run, tmp_path, capsys):
    (tmp_path / "reward.py").write_text("def reward_func(*args):\n    raise KeyError('lost')\n")
    (tmp_path / "torn.py").write_text("def reward_func(:\n")
    (tmp_path / "other.py").write_text("import lost\n\ndef reward_func(*args):\n    return 1\n")
    with pytest.raises(SystemExit) as stopped:
        run("--reward.remote_url", str(tmp_path / source))
    assert stopped.value.code == status
    assert said.format(tmp_path) in capsys.readouterr().err
