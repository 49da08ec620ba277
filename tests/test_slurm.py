"""slurm.sh puts a run that its time limit has ended back into the queue."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLURM = ["bash", str(ROOT / "examples/scripts/slurm.sh")]


TRAINING = """#!/usr/bin/env bash
echo "$@" > arguments
trap 'exit 143' TERM
echo up
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize(("signum", "requeued"), [(signal.SIGUSR1, ["requeue 17"]), (signal.SIGTERM, [])])
def test_the_job_is_queued_again_at_the_time_limit_alone(tmp_path, signum, requeued):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(tmp_path / "requeued"))}\n')
    scontrol.chmod(0o755)
    (tmp_path / "training").write_text(TRAINING)
    (tmp_path / "training").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    with subprocess.Popen(
        [*SLURM, str(tmp_path / "training"), "--train.seed", "1"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stdout.readline() == "up\n"
        process.send_signal(signum)
        assert process.wait(30) == 143
    log = tmp_path / "requeued"
    assert (log.read_text().splitlines() if log.exists() else []) == requeued
    given = "--train.seed 1 --ckpt.load_enable --train.restarts 10\n"
    assert (tmp_path / "arguments").read_text() == given
