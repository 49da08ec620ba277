"""A model's code is named before it runs, and one flag refuses it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from arlopti_testing.preflight_command import FITTING
from transformers import Qwen2Config

from arlopti_openrlhf.cli import command_line
from arlopti_openrlhf.ops.preflight import model_code


def findings(*flags: str) -> list:
    return list(model_code.check(command_line.hierarchize(command_line.parse(flags))))


@pytest.fixture
def model(tmp_path) -> Path:
    """Write a model whose configuration is a file of its own, which says so when it runs."""
    folder = tmp_path / "model"
    Qwen2Config(hidden_size=8, num_hidden_layers=1).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "there--other.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "tokens.Fast"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "broken.json").write_text("{")
    ran = f"open({str(tmp_path / 'ran')!r}, 'w')"
    (folder / "own.py").write_text(f"{ran}\nfrom transformers import Qwen2Config as Config\n")
    return folder


def test_the_files_of_a_model_and_of_its_tokenizer(model):
    assert model_code.code_of(model) == ["own.py", "there--other.py", "tokens.py"]
    (found,) = findings("--actor.model_name_or_path", str(model))
    assert not found.is_fatal and "it brings code, which runs when it is loaded: own.py, there--other.py" in str(found)
    (found,) = findings("--actor.model_name_or_path", str(model), "--train.no_remote_code")
    assert found.is_fatal and found.remedy == "--train.no_remote_code forbids that"


def test_a_model_without_code_and_one_that_is_not_here(tiny_model):
    assert findings("--actor.model_name_or_path", tiny_model, "--train.no_remote_code") == []
    there = ("--actor.model_name_or_path", tiny_model, "--critic.model_name_or_path", "nobody/nothing")
    assert findings(*there) == []
    (found,) = findings(*there, "--train.no_remote_code")
    assert found.is_fatal and found.flag == "--critic.model_name_or_path" and "not on this machine" in found.problem


@pytest.mark.parametrize("flag", [pytest.param("", marks=pytest.mark.long), "--train.no_remote_code"])
def test_a_dry_run_names_the_code_first_and_runs_none_that_is_forbidden(flag, model, tmp_path):
    command = [sys.executable, "-m", "arlopti_openrlhf.cli.train_ppo_ray", *FITTING, "--dry-run"]
    more = f"--actor.model_name_or_path {model} {flag}".split()
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stderr.splitlines() if "own.py" in line]
    assert done.returncode == 2 and "it brings code, which runs when it is loaded: own.py" in lines[0]
    assert (tmp_path / "ran").exists() == (not flag)
