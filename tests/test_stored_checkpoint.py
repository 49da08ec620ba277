"""A run that an earlier commit has begun is resumed on the whole stack, and its checkpoints hold no class of ours."""

import subprocess
from pathlib import Path

import pytest
from arlopti_testing.stored_run import STEP, command, environment, unpack
from torch.serialization import get_unsafe_globals_in_checkpoint

DATA = Path(__file__).parent / "ops" / "checkpoints" / "data"


@pytest.mark.whole_stack
@pytest.mark.parametrize(
    "commit",
    [
        "43337b6",  # a class of ours in the client state, and no version in the manifest
        pytest.param("4ed8aad", marks=pytest.mark.long),  # the same, from a module that is elsewhere now
    ],
)
def test_a_run_of_an_earlier_commit_is_resumed(commit, tmp_path):
    unpack(DATA / f"{commit}.tar.gz", tmp_path)
    done = subprocess.run(
        command(tmp_path), env=environment(), capture_output=True, text=True, timeout=600, errors="replace"
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    assert f"_actor/global_step{STEP}, verified in" in log and f"trained {2 * STEP} steps" in log
    assert f"Global step {STEP + 1}: " in log and f"Global step {STEP}: " not in log
    assert (tmp_path / "final" / "model.safetensors").exists()
    newest = list((tmp_path / "ckpt" / "_actor" / f"global_step{2 * STEP}").glob("*.pt"))
    named = {name.partition(".")[0] for path in newest for name in get_unsafe_globals_in_checkpoint(path)}
    assert len(newest) == 3 and named == {"deepspeed"}
