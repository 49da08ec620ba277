"""supervise.sh starts a training again until it is done, and slurm.sh puts it back into the queue."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUPERVISE = ["bash", str(ROOT / "examples/scripts/supervise.sh")]
SLURM = ["bash", str(ROOT / "examples/scripts/slurm.sh")]


@pytest.fixture
def training(tmp_path):
    """Return training(*statuses), a command that ends with these, one at each start, and lists its arguments."""

    def make(*statuses: int | str) -> list[str]:
        (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
        script = tmp_path / "training"
        script.write_text(
            f"""#!/usr/bin/env bash
            cd {shlex.quote(str(tmp_path))}
            echo "$@" >> starts
            status=$(head -1 statuses); sed -i 1d statuses
            case $status in
              waits)
                trap 'exit 143' TERM; trap 'exit 130' INT; trap 'exit 129' HUP
                echo up; while true; do sleep 0.05; done ;;
              killed) kill -9 $$ ;;
            esac
            exit $status
            """
        )
        script.chmod(0o755)
        return [str(script), "--train.seed", "1"]

    return make


def starts(tmp_path) -> list[str]:
    return (tmp_path / "starts").read_text().splitlines()


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PAUSE": "0"} | variables
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("statuses", "status", "count"),
    [
        ([0], 0, 1),
        ([1, "killed", 4, 0], 0, 4),
        ([1, 2], 2, 2),  # refused
        ([3], 3, 1),  # diverged
        ([6], 6, 1),  # nothing trained
        ([143], 143, 1),
        ([129], 129, 1),
        ([1, 1, 1, 1, 0], 1, 4),  # RESTARTS
    ],
)
def test_a_training_is_started_again_where_that_may_help(training, tmp_path, statuses, status, count):
    done = run(SUPERVISE + training(*statuses), RESTARTS="3")
    assert done.returncode == status, done.stderr
    assert starts(tmp_path) == ["--train.seed 1 --ckpt.load_enable"] * count


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signals_are_handed_on(training, tmp_path, signum, status):
    with subprocess.Popen(SUPERVISE + training("waits", 0), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        process.send_signal(signum)
        assert process.wait(30) == status
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(("signum", "requeued"), [(signal.SIGUSR1, ["requeue 17"]), (signal.SIGTERM, [])])
def test_slurm_queues_the_job_again_at_the_time_limit_alone(training, tmp_path, signum, requeued):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(tmp_path / "requeued"))}\n')
    scontrol.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    with subprocess.Popen(
        SLURM + training("waits"), env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        process.send_signal(signum)
        assert process.wait(30) == 143
    log = tmp_path / "requeued"
    assert (log.read_text().splitlines() if log.exists() else []) == requeued
