"""A run's folders are its own: another run's checkpoints and model stay, and no two runs write there at once."""

import os
import socket
import subprocess
import sys
import time

import pytest
from arlopti_testing.preflight_command import arguments

from arlopti_openrlhf.cli import command_line, config_file, run_folders

HOLDS = """
import os, sys
from arlopti_testing.preflight_command import arguments
from arlopti_openrlhf.cli import run_folders
with run_folders.held(arguments(sys.argv[1]), os.getpid()):
    print(1, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def check(tmp_path):
    """Return check(flags), what is found of a run with --ckpt.path path and --ckpt.output_dir model."""

    def of(flags: str = "") -> list[str]:
        paths = f"--ckpt.path {tmp_path}/path --ckpt.output_dir {tmp_path}/model"
        return [str(finding) for finding in run_folders.check(arguments(f"{paths} {flags}")) if finding.is_fatal]

    return of


@pytest.fixture
def run_that_goes_on(tmp_path):
    """Return start(flags), which starts a process that holds a run's folders."""
    processes = []

    def start(flags: str) -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [
            sys.executable,
            "-c",
            HOLDS,
            f"--ckpt.path {tmp_path}/path --ckpt.output_dir {tmp_path}/model {flags}",
        ]
        processes.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert processes[-1].stdout.readline() == "1\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def save_checkpoints(path, *names: str) -> None:
    for name in names:
        (path / name).mkdir(parents=True)


def test_nothing_there_and_nothing_made(check, tmp_path):
    assert check() == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (["_actor/global_step6", "_actor/global_step7", "_critic/global_step7"], "global_step7"),
        (["_actor/best_global_step9"], "best_global_step9"),
        (["global_step3_hf"], "global_step3_hf"),
    ],
)
def test_another_runs_checkpoints_are_named_with_both_ways_out(check, tmp_path, names, newest):
    save_checkpoints(tmp_path / "path", *names)
    [error] = check()
    assert error == (
        f"--ckpt.path {tmp_path}/path: it holds another run's checkpoints, up to {newest}; resume that run with "
        "--ckpt.load_enable, or give another path"
    )
    assert check("--ckpt.save_hf --ckpt.disable_ds") == [error]
    assert check("--ckpt.load_enable") == check("--ckpt.disable_ds") == []  # that run saves none there


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_another_runs_model_is_kept(check, tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).touch()
    refused = f"--ckpt.output_dir {tmp_path}/model: it holds another run's model ({name}); resume that run with"
    assert [error.startswith(refused) for error in check()] == [True]
    assert [error.startswith(refused) for error in check("--ckpt.load_enable")] == [True]  # there is nothing to resume

    # A resumed run may replace its own, and no other's.
    save_checkpoints(tmp_path / "path", "_actor/global_step6")
    assert check("--ckpt.load_enable") == []  # a run of OpenRLHF's own keeps no flags
    for kept, count in ((f"{tmp_path}/./model", 0), (f"{tmp_path}/other", 1)):
        flat = command_line.parse(["--ckpt.output_dir", kept])
        config_file.keep(flat, tmp_path / "path")
        assert len(check("--ckpt.load_enable")) == count


def test_a_critics_model_is_kept_too(check, tmp_path):
    (tmp_path / "model_critic").mkdir()
    (tmp_path / "model_critic" / "config.json").touch()
    critic = "--critic.model_name_or_path m --algo.advantage.estimator gae"
    assert check(critic) == []
    [error] = check(f"{critic} --critic.save_value_network")
    assert f"--ckpt.output_dir {tmp_path}/model_critic: it holds another run's model" in error


def test_a_folder_in_use_is_refused_with_its_process_and_host(run_that_goes_on, tmp_path, capsys):
    """Once the first run is killed, its folders are free."""
    first = run_that_goes_on("")
    model, path = f"--ckpt.output_dir {tmp_path}/", f"--ckpt.path {tmp_path}/"
    for flags, named in (
        (f"{model}model {path}elsewhere --ckpt.load_enable", f"{model}model"),
        (f"{model}other {path}path", f"{path}path"),
    ):
        with pytest.raises(SystemExit) as refused, run_folders.held(arguments(flags), os.getpid()):
            pass
        by = f"a run that goes on writes there, process {first.pid} on {socket.gethostname()}"
        assert refused.value.code == 2 and f"error: {named}: {by}" in capsys.readouterr().err
        [finding] = run_folders.check(arguments(flags))
        assert str(finding).startswith(f"{named}: {by}")
    with run_folders.held(arguments(f"{model}other {path}path --ckpt.disable_ds"), os.getpid()):  # no checkpoints
        pass
    first.kill()
    first.communicate()
    with run_folders.held(arguments(f"{model}model {path}path"), os.getpid()):
        pass


def test_one_folder_for_both_is_locked_once(run_that_goes_on, tmp_path):
    """A second lock of a file would be refused, also to the process that holds it."""
    (tmp_path / "path").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "path")
    assert run_that_goes_on(f"--ckpt.output_dir {tmp_path}/link").poll() is None


def run(flags: str, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "arlopti_openrlhf.cli.train_ppo_ray", *flags.split(), *more]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def files_below(folder) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_the_real_command_refuses_before_ray_starts(tiny_model, tiny_data, tmp_path):
    """A new run in another run's folder. Nothing there changes."""
    flags = f"""--actor.model_name_or_path {tiny_model} --data.prompt_dataset {tiny_data} --data.input_key prompt
        --data.label_key label --data.apply_chat_template --data.max_len 96 --reward.remote_url kk
        --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 4 --rollout.batch_size 8
        --rollout.micro_batch_size 4 --train.batch_size 16 --train.micro_batch_size 4 --rollout.max_new_tokens 16
        --vllm.sync_backend gloo --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1
        --train.colocate_all --ckpt.output_dir {tmp_path}/model --ckpt.path {tmp_path}/path"""
    for step in (6, 7, 8):
        save_checkpoints(tmp_path / "path", f"_actor/global_step{step}")
        (tmp_path / "path" / "_actor" / f"global_step{step}" / "weights").write_text("of the other run")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("of the other run")
    before, start = files_below(tmp_path), time.monotonic()
    done = run(flags, "--dry-run")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "another run's checkpoints, up to global_step8" in done.stderr
    assert f"--ckpt.output_dir {tmp_path}/model: it holds another run's model (config.json)" in done.stderr
    assert files_below(tmp_path) == before and time.monotonic() - start < 120
