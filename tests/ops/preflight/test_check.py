"""All findings come in one list with an exit status, and a check that fails is a finding."""

import importlib
import json
import os
import subprocess
import sys
import time

import pytest
from arlopti_testing.preflight_command import FITTING, arguments
from arlopti_testing.processes import cpu_seconds_of_children

from arlopti_openrlhf.cli import command_line
from arlopti_openrlhf.cli.method_checks import check_flags, describe_update
from arlopti_openrlhf.ops.preflight import check, rehearsal
from arlopti_openrlhf.ops.preflight.finding import Finding

FATAL = Finding("--a", 1, "is wrong", "mend it")
CHECKS = """
import os, time
from arlopti_openrlhf.ops.preflight.finding import Finding

def warns(args):
    print("unseen")
    yield Finding("--b", 2, "looks wrong", "look", is_fatal=False)
    yield "a line for the user"

def refuses(args):
    yield Finding("--a", 1, "is wrong", "mend it")

def fails(args):
    raise KeyError("x")
    yield

def dies(args):
    os.write(2, b"cannot go on")
    os._exit(7)

def hangs(args):
    time.sleep(600)

def looks(args):
    import datasets, transformers.utils.hub
    yield f"offline {datasets.config.HF_HUB_OFFLINE} {transformers.utils.hub.is_offline_mode()} {dict(os.environ)}"
"""


@pytest.fixture
def listed(monkeypatch, capfd, tmp_path):
    """listed(names of checks, FLAGS, findings of the flags) returns the exit status, and the lines of both outputs."""
    (tmp_path / "own_checks.py").write_text(CHECKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_checks", raising=False)
    own_checks = importlib.import_module("own_checks")
    monkeypatch.setattr(check, "THOROUGH", ())

    def run(names="", flags="", findings=()) -> tuple[int, list[str], list[str]]:
        args, status = arguments(flags), 0
        try:
            check.run(args, findings, [], describe_update(args), [vars(own_checks)[name] for name in names.split()])
        except SystemExit as stopped:
            status = stopped.code
        done = capfd.readouterr()
        return status, done.err.splitlines(), done.out.splitlines()

    return run


def test_warnings_are_printed_and_the_run_continues(listed, monkeypatch):
    """Models and data are not downloaded, and a reward may download its own. An error in a check is a warning."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    status, errors, lines = listed("fails warns looks")
    assert status == 0 and errors[0].endswith("can start: errors 0, warnings 2")
    assert errors[1].startswith("  warning: a check failed: KeyError: 'x' (")
    assert (
        errors[2:] == ["  warning: --b 2: looks wrong; look"] and lines[0] == "arlopti_openrlhf: a line for the user"
    )
    assert "offline True True " in lines[1] and "HF_HUB_OFFLINE" not in lines[1]


def test_what_is_fatal_comes_first_and_stops_the_run(listed):
    status, errors, lines = listed("warns refuses")
    assert status == 2 and errors[0].endswith("cannot start: errors 1, warnings 1")
    assert errors[1:] == ["  error: --a 1: is wrong; mend it", "  warning: --b 2: looks wrong; look"] and not lines


def test_after_a_mistake_in_the_flags_nothing_else_is_looked_at(listed):
    start = time.monotonic()
    assert listed("hangs", "--dry-run", [FATAL])[0] == 2 and time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("warns dies refuses", "its process ended with status 7: cannot go on; "),
        ("warns hangs refuses", "no answer after 2 s; "),
    ],
)
def test_a_check_without_an_answer_stops_nothing(listed, monkeypatch, names, said):
    """It ends in a process of its own, so a crash there costs only what would have been found."""
    if "hangs" in names:
        monkeypatch.setattr(rehearsal, "_SECONDS", 2.0)
        names = names.removeprefix("warns ")  # the start of the process counts for the first one
    status, errors, _ = listed(names)
    assert status == 0 and any(f"warning: a check failed: {said}" in line for line in errors)
    assert any("looks wrong" in line for line in errors) == ("warns" in names)


@pytest.mark.parametrize(
    "flags",
    [
        "--data.max_samples -5",
        "--rollout.n_samples_per_prompt 0",
        "--rollout.n_samples_per_prompt -1",
        "--rollout.batch_size 0",
        "--rollout.batch_size -3",
        "--train.batch_size 0",
        "--train.micro_batch_size 0",
        "--rollout.micro_batch_size 0",
        "--actor.num_gpus_per_node 0",
        "--vllm.tensor_parallel_size 0",
        "--ds.ring_attn_size 0",
    ],
)
def test_nothing_is_divided_by_a_refused_value(flags, capsys):
    flat = command_line.parse([*FITTING, *flags.split(), "--algo.ar.alpha", "0.3", "--dry-run"])
    of_flags = list(check_flags(command_line.hierarchize(flat)))
    args, upstream = command_line.check(flat)
    with pytest.raises(SystemExit):
        check.run(args, of_flags, upstream, describe_update(args))
    _, *lines = capsys.readouterr().err.splitlines()
    [line] = lines  # and nothing that follows from it
    assert line.startswith(f"  error: {flags}: is not in ")


def run(flags: str, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "arlopti_openrlhf.cli.train_ppo_ray", *flags.split(), *more]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_without_a_flag_each_is_named_that_a_run_needs(capsys):
    """OpenRLHF's own check raises an AttributeError for the reward."""
    flat = command_line.parse([])
    args, upstream = command_line.check(flat)
    with pytest.raises(SystemExit):
        check.run(args, check_flags(command_line.hierarchize(flat)), upstream, describe_update(args))
    _, *lines = capsys.readouterr().err.splitlines()
    named = ["actor.model_name_or_path", "data.prompt_dataset", "vllm.num_engines", "reward.remote_url"]
    assert [line.split()[1] for line in lines] == [f"--{name}" for name in named]


@pytest.fixture(scope="module")
def fitting(tiny_model, tiny_data, tmp_path_factory) -> str:
    out = tmp_path_factory.mktemp("out")
    return f"""--actor.model_name_or_path {tiny_model} --data.prompt_dataset {tiny_data} --data.input_key prompt
        --data.label_key label --data.apply_chat_template --data.max_len 96 --reward.remote_url kk
        --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 4 --rollout.batch_size 8
        --rollout.micro_batch_size 4 --train.batch_size 16 --train.micro_batch_size 4 --rollout.max_new_tokens 16
        --vllm.sync_backend gloo --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1
        --train.colocate_all --ckpt.output_dir {out}/final --ckpt.path {out}/ckpt --dry-run"""


def test_a_run_that_can_start(fitting):
    before = cpu_seconds_of_children()
    done = run(fitting)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "the run can start. Nothing has been started." in done.stdout
    assert (
        "arlopti_openrlhf: the first prompt as the model gets it: 34 tokens\n  '<|im_start|>user\\npuzzle 0"
        in done.stdout
    )
    assert cpu_seconds_of_children() - before < 60  # 5 s on an idle core


def test_mistakes_of_every_kind_in_one_list(fitting, tmp_path):
    """The data, the reward function, a folder: each is named once, and the flags before them."""
    (tmp_path / "reward.py").write_text("def reward(queries): pass\n")
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "x" * 500, "label": "none"}) + "\n")
    flags = f"""--ckpt.output_dir /proc/x --data.label_key solution --reward.remote_url {tmp_path}/reward.py
        --data.prompt_dataset {tmp_path}/data.jsonl"""
    for more, expected in (
        ("", ["--ckpt.output_dir", "--data.label_key", "--data.max_len", "--train.batch_size", "--reward.remote_url"]),
        ("--actor.adam.lr -1 --rollout.max_new_tokens 0", ["--rollout.max_new_tokens", "--actor.adam.lr"]),
    ):
        done = run(fitting, *flags.split(), *more.split())
        assert done.returncode == 2 and "Traceback" not in done.stderr
        errors = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("  error: ")]
        assert list(dict.fromkeys(errors)) == expected, done.stderr  # /proc has no disk, too
