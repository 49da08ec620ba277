"""A mistake ends each command with one line that names it and exit status 2, and nothing is made or deleted."""

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoTokenizer

from arlopti_openrlhf.cli import bad_input, main
from arlopti_openrlhf.cli.processes import InUse, lock
from arlopti_openrlhf.ops.preflight.model import load_tokenizer

WORDS = {module: word for word, (module, _) in main.COMMANDS.items()}
DATA = [{"prompt": f"puzzle {i}", "label": "(1) Zoey is a knight", "datasource": "kk_1ppl"} for i in range(4)]


@pytest.fixture
def place(tmp_path, tiny_model) -> Path:
    """Return a working folder with a model, data, a file where a folder should be, and broken input."""
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "cut").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "cut" / name).symlink_to(Path(tiny_model) / name)
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("of the user")
    with SummaryWriter(tmp_path / "other_log") as writer:
        writer.add_scalar("loss", 1.0, 1)
    for folder, file in (("full", "train.jsonl"), ("full_lock", "quickstart.lock")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).symlink_to("/dev/full")
    (tmp_path / "finished").mkdir()
    for name in ("quickstart.log", "summary.json", "curves.png"):
        (tmp_path / "finished" / name).touch()
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA))
    (tmp_path / "torn.jsonl").write_text(json.dumps(DATA[0]) + '\n{"prompt": ')
    (tmp_path / "unlabelled.jsonl").write_text('{"prompt": "Hi", "datasource": "kk_2ppl"}\n')
    (tmp_path / "unreadable.jsonl").write_text(json.dumps(DATA[0]) + "\n" + json.dumps(DATA[1] | {"label": "7"}))
    (tmp_path / "numbered.jsonl").write_text(json.dumps(DATA[0] | {"datasource": 5}) + "\n")
    (tmp_path / "text.parquet").write_text("hello")
    pd.DataFrame([DATA[0], DATA[1] | {"label": None}]).to_parquet(tmp_path / "half.parquet")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    return tmp_path


@pytest.fixture
def refused(place, monkeypatch, capsys):
    """refused("COMMAND FLAGS") returns the one line that the command says."""

    def run(command: str) -> str:
        module, *arguments = command.split()
        before = sorted(map(str, place.rglob("*")))
        monkeypatch.chdir(place)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(f"arlopti_openrlhf.cli.{module}").main()
        out, error = capsys.readouterr()
        assert stop.value.code == 2 and out == ""
        assert sorted(map(str, place.rglob("*"))) == before
        [line] = error.splitlines()
        assert line.startswith(f"arlopti {WORDS[module]}: error: ")
        return line

    return run


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "analyze --model model --data data.jsonl --out file",
            "argument --out: file: {}/file is a file, not a folder",
        ),
        ("analyze --model empty --data data.jsonl --out o", "--model empty: no config.json in the directory"),
        ("analyze --model cut --data data.jsonl --out o", "argument --model cut: its weights cannot be loaded"),
        ("analyze --model model --data no.jsonl --out o", "No such file or directory: 'no.jsonl'"),
        ("analyze --model ./nowhere --data no --runs A=empty --out o", "empty: no TensorBoard log"),  # looked at first
        (
            "analyze --runs A=other_log --out o",
            "other_log: its TensorBoard log has no curve of a training run, such as",
        ),
        ("evaluate --model model --data data.jsonl --out file", "{}/file is a file, not a folder"),
        ("evaluate --model model --data empty --out o", "Is a directory: 'empty'"),
        (
            "evaluate --model nope --data data.jsonl --out o",
            "nope: it is neither a folder nor in the hub's cache, and",
        ),
        ("analyze --model nope --data data.jsonl --out o", "nope: it is neither a folder nor in the hub's cache, and"),
        ("evaluate --model model --data data.jsonl --data.label_key answer --out o", "line 1: a row has no answer"),
        ("evaluate --model model --data torn.jsonl --out o", "argument --data: torn.jsonl, line 2: "),
        ("evaluate --model model --data unlabelled.jsonl --out o", "unlabelled.jsonl, line 1: a row has no label"),
        ("evaluate --model model --data unreadable.jsonl --out o", "unreadable.jsonl, line 2: a solution is numbered"),
        (
            "evaluate --model model --data half.parquet --out o",
            "argument --data: half.parquet, row 2: a row has no label",
        ),
        (
            "evaluate --model model --data numbered.jsonl --out o",
            "numbered.jsonl, line 1: its datasource is not text: 5",
        ),
        ("evaluate --model model --data text.parquet --out o", "text.parquet: not a readable parquet file"),
        (
            "evaluate --model model --data data.jsonl --sampling kk_*:n=2,t=1 --sampling aime:n=4,t=1 --out o",
            "argument --sampling: aime matches no source of the data, which are kk_1ppl",
        ),
        ("analyze --model model --data half.parquet --out o", "half.parquet, row 2: a row has no label"),
        ("prepare_data --generate --out file", "{}/file is a file, not a folder"),
        ("prepare_data --generate --train 1 --out full", "No space left on device: 'full/train.jsonl'"),
        ("prepare_data --from data.jsonl --out empty", "argument --out: empty is a folder, not a file"),
        ("prepare_data --from data.jsonl --out file/x.jsonl", "{}/file is a file, not a folder"),
        (
            "prepare_data --from data.jsonl --out o.csv",
            "--out: o.csv: what is converted goes into a .jsonl or .parquet",
        ),
        ("prepare_data --from no.parquet --out o.jsonl", "argument --from: no.parquet: No such file or directory"),
        ("prepare_data --from data.jsonl --exclude empty --out o.jsonl", "argument --exclude: empty: Is a directory"),
        ("prepare_data --from torn.jsonl --out o.jsonl", "torn.jsonl, line 2: "),
        ("prepare_data --from half.parquet --strict --out o.jsonl", "half.parquet, row 2: unreadable: a solution is"),
        ("serve_rewards --grader kk --prot 1", "unrecognized arguments: --prot: did you mean --port?"),
        ("serve_rewards -grader kk", "unrecognized arguments: -grader: did you mean --grader?"),
        ("prepare_data --out o", "one of the arguments --generate --from --dataset is required"),
        ("prepare_data --from binary.jsonl --out o.jsonl", "binary.jsonl: 'utf-8' codec can't decode byte 0xff in"),
        (
            "serve_rewards --grader no.py",
            "argument --grader: no.py is not kk, math, math_boxed or a Python file that exists",
        ),
        ("serve_rewards --grader kk --port 99999", "argument --port: 99999 is no port"),
        ("serve_rewards --grader kk --token-file no", "argument --token-file: "),
        ("serve_rewards --grader kk --token-file binary.jsonl", "argument --token-file: 'utf-8' codec can't decode"),
        ("quickstart --out file", "argument --out: file: {}/file is a file, not a folder"),
        ("quickstart --out full_lock", "argument --out: full_lock/quickstart.lock cannot be written: "),
        ("quickstart --out finished", "finished holds a finished quickstart: give --force to replace it, or another"),
        ("quickstart --out .", "argument --out: . holds something other than an earlier quickstart"),
    ],
)
def test_one_line(place, refused, command, message):
    line = refused(command)
    assert "error: " in line and message.format(place) in line


@pytest.mark.parametrize(
    "command", ["analyze --model ./no --data no", "evaluate --model ./no --data no", "quickstart"]
)
def test_the_commands_refuse_before_they_import_what_takes_long(place, command):
    """They run as users run them, but without PyTorch."""
    (place / "torch.py").write_text("raise AssertionError('imported')")
    words = [sys.executable, "-m", "arlopti_openrlhf", *command.split(), "--out", "file"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.endswith("file is a file, not a folder\n"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_a_model_of_which_the_tokenizer_is_another_ones(tmp_path, tiny_model, capsys):
    """Tokens without an embedding are refused if they are the tokenizer's own, as in training, or else a warning."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra {i}>" for i in range(62)])
    tokenizer.save_pretrained(folder)
    parser = bad_input.Parser(prog="command")
    bad_input.check_models(parser, "--model", [str(folder)])
    error = capsys.readouterr().err
    assert f"command: warning: --model {folder}: its tokenizer has ids up to 321, but the model has 320" in error
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<extra 61>"}))
    load_tokenizer.cache_clear()
    with pytest.raises(SystemExit) as stop:
        bad_input.check_models(parser, "--model", [str(folder)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "error: argument --model" in error and "'<extra 61>' is 321" in error


@pytest.mark.parametrize("command", ["evaluate --model model --data data.jsonl", "prepare_data --generate"])
def test_a_folder_that_cannot_be_written(place, refused, monkeypatch, command):
    """The tests may run as root, to whom every folder is open. So the permission is what is faked."""
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(place))
    assert refused(f"{command} --out o").endswith(f"argument --out: o: no permission to write in {place}")


def test_a_second_quickstart_in_one_folder(place, refused):
    """It names the first one's process, and deletes nothing. Once the first is killed, the folder is free."""
    out = place / "out"
    (out / "model").mkdir(parents=True)
    (out / "quickstart.log").write_text("of the first")
    code = (
        "import sys; from arlopti_openrlhf.cli.processes import *; f = lock(Path(sys.argv[1])); print(1, flush=True);"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", f"{code} sys.stdin.read()", out / "quickstart.lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    first.stdout.readline()
    line = refused("quickstart --reduced --out out")
    assert f"argument --out: another quickstart writes to out, process {first.pid} on {socket.gethostname()}" in line
    with pytest.raises(InUse, match=str(first.pid)):
        lock(out / "quickstart.lock")
    first.kill()
    first.communicate()
    lock(out / "quickstart.lock").close()
