"""Neither a grader nor a reward function gets the keys of the run."""

import pytest

from arlopti_openrlhf.grading.runner import WorkerPool
from arlopti_openrlhf.ops.rollouts.reward_process import RewardProcess

REWARD = """
import os
def reward_func(*lists):
    return dict(os.environ)
"""
SECRETS = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN", "WANDB_API_KEY", "ARLOPTI_REWARD_TOKEN"}
SECRETS |= {"HUGGINGFACE_HUB_TOKEN", "HUGGINGFACEHUB_API_TOKEN", "ARLOPTI_REWARD_SECRET_0_0"}


@pytest.mark.parametrize("kind", ["a grader's", "a reward's"])
def test_a_process_has_no_key_of_the_run(kind, tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text(REWARD)
    for name in SECRETS:
        monkeypatch.setenv(name, "s3cret")
    kept = {"OPENAI_API_KEY": "mine", "no_proxy": "a@b", "HF_TOKEN_PATH": "file", "PYTHONPATH": "."}
    proxies = {"HTTPS_PROXY": "http://{}proxy:1", "all_proxy": "{}proxy", "http_proxy": "http://{}proxy:1/"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    for name, value in proxies.items():
        monkeypatch.setenv(name, value.format("user:s3/cret@"))
    if kind == "a grader's":
        pool = WorkerPool(f"{tmp_path}/reward.py:reward_func", 1, 20)
        found, end = pool.call([], [], []), pool.close
    else:
        process = RewardProcess(f"{tmp_path}/reward.py", 20)
        found, end = process.call("", "", ""), process.kill
    end()
    assert not SECRETS & found.keys()
    assert {name: found[name] for name in kept | proxies} == kept | {n: v.format("") for n, v in proxies.items()}
    assert "s3" not in str(found)
