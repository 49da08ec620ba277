"""A run that an earlier commit has begun is resumed on the whole stack, and its checkpoints hold no class of ours."""

import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from arlopti_testing.stored_run import STEP, command, environment, unpack
from torch.serialization import get_unsafe_globals_in_checkpoint

from arlopti_openrlhf.ops.checkpoints import files, state, unpickling

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
    assert f"_actor/global_step{STEP}" in log and f"trained {2 * STEP} steps" in log
    assert f"Global step {STEP + 1}: " in log and f"Global step {STEP}: " not in log
    assert (tmp_path / "final" / "model.safetensors").exists()
    checkpoint = tmp_path / "ckpt" / "_actor" / f"global_step{2 * STEP}"
    require_listed(checkpoint)
    newest = list(checkpoint.glob("*.pt"))
    named = {name.partition(".")[0] for path in newest for name in get_unsafe_globals_in_checkpoint(path)}
    assert len(newest) == 3 and named == {"deepspeed"}


def require_listed(checkpoint: Path) -> None:
    """A checkpoint holds nothing that nobody restores."""
    patterns = [state.RANK_FILE.format("*"), "*_model_states.pt", "*_optim_states.pt", "metric.json", files.MANIFEST]
    assert not [path.name for path in checkpoint.iterdir() if not any(fnmatch(path.name, each) for each in patterns)]
    of_rank = torch.load(checkpoint / state.RANK_FILE.format(0), weights_only=True)
    assert list(of_rank) == [part.key for part in state.OF_RANK]
    with unpickling.restricted():
        keys = list(torch.load(checkpoint / "mp_rank_00_model_states.pt", weights_only=False))
    of_client = {"episode", "global_step", "total_consumed_prompts", "data_loader_state_dict"}
    of_client |= {
        "best_eval_metric_key",
        "best_eval_metric_value",
        "latest_eval_metric_value",
        "checkpoint_metric_key",
    }
    of_client |= {part.key for part in state.OF_CONTROLLER}
    # DeepSpeed adds the client state to its own. The best checkpoint alone has the metric's name.
    assert {*keys[keys.index("ds_version") + 1 :], "checkpoint_metric_key"} == of_client
