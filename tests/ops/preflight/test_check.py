"""All findings come in one list with an exit status, and a check that fails is a finding."""

import json
import os
import re
import subprocess
import sys

import pytest
from arlopti_testing.preflight_command import FITTING, arguments
from arlopti_testing.processes import cpu_seconds_of_children

from arlopti_openrlhf.cli import command_line
from arlopti_openrlhf.cli.method_checks import check_flags, describe_update
from arlopti_openrlhf.ops.preflight import check
from arlopti_openrlhf.ops.preflight.finding import Finding

FATAL, WARNING = Finding("--a", 1, "is wrong", "mend it"), Finding("--b", 2, "looks wrong", "look", is_fatal=False)


@pytest.fixture
def listed(monkeypatch, capsys):
    """listed(FLAGS, findings of the flags, of upstream, a thorough check) returns the exit status and the lines."""
    monkeypatch.setattr(check, "THOROUGH", ())

    def run(flags="", findings=(), upstream=(), thorough=lambda args: []) -> tuple[int, list[str]]:
        args, status = arguments(flags), 0
        try:
            check.run(args, findings, upstream, describe_update(args), [thorough])
        except SystemExit as stopped:
            status = stopped.code
        return status, capsys.readouterr().err.splitlines()

    return run


def test_warnings_are_printed_and_the_run_continues(listed):
    status, lines = listed(findings=[WARNING])
    assert status == 0 and lines[0].endswith("can start: errors 0, warnings 1")
    assert lines[1:] == ["  warning: --b 2: looks wrong; look"]


def test_what_is_fatal_comes_first_and_stops_the_run(listed):
    status, lines = listed(findings=[WARNING], thorough=lambda args: [FATAL])
    assert status == 2 and lines[0].endswith("cannot start: errors 1, warnings 1")
    assert lines[1:] == ["  error: --a 1: is wrong; mend it", "  warning: --b 2: looks wrong; look"]


def test_after_a_mistake_in_the_flags_nothing_else_is_looked_at(listed):
    looked = []
    status, _ = listed("--dry-run", [FATAL], thorough=lambda args: looked.append("thorough") or [])
    assert status == 2 and looked == []


def test_a_check_that_fails_stops_nothing(listed):
    def fails(args):
        yield WARNING
        raise KeyError("x")

    status, lines = listed(thorough=fails)
    assert status == 0 and lines[1] == "  warning: --b 2: looks wrong; look"
    assert "warning: a check failed: KeyError: 'x' (" in lines[2] and len(lines) == 3


@pytest.mark.parametrize(
    "flags",
    [
        "--data.max_samples -5",
        "--rollout.n_samples_per_prompt 0",
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
    assert any(line.startswith(f"  error: {flags}: is not in ") for line in lines)
    assert not any("a check failed" in line for line in lines)


def run(flags: str, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "arlopti_openrlhf.cli.train_ppo_ray", *flags.split(), *more]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


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
    assert re.search(r"estimated peak memory per GPU of the actor: \d\.\d MiB \(weights 0\.2 MiB, ", done.stdout)
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
