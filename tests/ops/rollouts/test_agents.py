"""What a user's agent returns is read, or the error names its file and the field."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from arlopti_testing.engine_fakes import Tokenizer
from openrlhf.utils.agent import AgentExecutorBase
from vllm import SamplingParams

from arlopti_openrlhf.ops.rollouts import agents
from arlopti_openrlhf.ops.rollouts.reward_process import RewardError

TURNS = """
import numpy, torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Instance(AgentInstanceBase):
    def __init__(self):
        pass

    async def step(self, state_dict, **kwargs):
        return {STEP}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Instance)
"""
WHOLE = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        return {OUTPUT}
"""
SAMPLE = (
    '"prompt": prompt, "label": label, "observation_tokens": [1, 2], "action_ranges": [(1, 2)], '
    '"rollout_log_probs": None'
)


class Engine:
    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        answer = SimpleNamespace(token_ids=list(b" answer"), text=" answer", finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[answer])


@pytest.fixture
def run(tmp_path):
    """run(what a step returns) gives the sample of an agent of one turn."""

    def execute(body: str, file: str = TURNS) -> dict:
        path = tmp_path / "agent.py"
        path.write_text(file.replace("{STEP}", body).replace("{OUTPUT}", body))
        executor = agents.load(str(path))
        assert isinstance(executor, AgentExecutorBase)
        parameters = SamplingParams(max_tokens=8)
        return asyncio.run(executor.execute("prompt", "label", parameters, 100, Tokenizer(), Engine()))

    return execute


DONE = '"environment_feedback": "", "done": True'


@pytest.mark.parametrize("number", ["1.5", "torch.tensor(1.5)", "torch.tensor([1.5])", "[1.5]", "numpy.float32(1.5)"])
def test_numbers_in_each_form(run, number):
    step = f'{{"rewards": {number}, "scores": {number}, "extra_logs": {{"turns": {number}}}, {DONE}}}'
    sample = run(step)
    assert (sample["reward"], sample["scores"], sample["extra_logs"]) == (1.5, 1.5, {"turns": 1.5})
    for name in ("reward", "scores"):
        assert torch.tensor([sample[name]]).shape == (1,)


@pytest.mark.parametrize("scores", ["", '"scores": None, "extra_logs": None, "sampling_params": None,'])
def test_what_may_be_left_out(run, scores):
    sample = run(f'{{"rewards": 2, {scores} {DONE}}}')
    assert (sample["reward"], sample["scores"], sample["extra_logs"]) == (2.0, 2.0, {})  # upstream's scores


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ("None", "step returned no dict, but None"),
        ('{"rewards": 1.0, "done": True}', "step returned no `environment_feedback`, but rewards, done"),
        ('{"rewards": 1.0, "environment_feedback": ""}', "step returned no `done`"),
        (f'{{"reward": 1.0, {DONE}}}', "step returned no `rewards`, but reward, environment_feedback, done"),
        (f'{{"rewards": None, {DONE}}}', "step returned `rewards` that are None"),
        (f'{{"rewards": "1", {DONE}}}', "step returned rewards for one sample that are not one number: 1"),
        (f'{{"rewards": float("nan"), {DONE}}}', "step returned rewards that are not finite: nan"),
        (f'{{"rewards": torch.ones(2), {DONE}}}', "step returned rewards for one sample that are not one number"),
        (f'{{"rewards": 1, "scores": [], {DONE}}}', "step returned scores for one sample that are not one number"),
        (f'{{"rewards": 1, "extra_logs": [1], {DONE}}}', "step returned extra_logs that are no dict"),
        (f'{{"rewards": 1, "extra_logs": {{"x": "y"}}, {DONE}}}', "step returned x for one sample"),
        ('{"rewards": 1, "environment_feedback": None, "done": True}', "`environment_feedback` that is no text: None"),
    ],
)
def test_an_error_names_the_file_and_the_field(run, step, problem):
    with pytest.raises(RewardError) as error:
        run(step)
    assert "agent.py: " in str(error.value) and problem in str(error.value)


def test_an_executor_of_whole_samples(run):
    sample = run(f'{{{SAMPLE}, "reward": [1], "scores": 0.5, "extra_logs": {{"x": 2}}}}', WHOLE)
    assert (sample["reward"], sample["scores"], sample["extra_logs"]) == (1.0, 0.5, {"x": 2.0})
    assert run(f'{{{SAMPLE}, "reward": None}}', WHOLE)["reward"] is None  # a reward model gives it
    with pytest.raises(RewardError, match="agent.py: execute returned no `action_ranges`, but prompt"):
        run('{"prompt": prompt, "label": label, "observation_tokens": []}', WHOLE)
    with pytest.raises(RewardError, match="agent.py: execute returned rewards for one sample that are not one number"):
        run(f'{{{SAMPLE}, "reward": "good"}}', WHOLE)


def test_an_agent_imports_a_module_next_to_it(run, tmp_path):
    (tmp_path / "next_to_the_agent.py").write_text("REWARD = 3.0")
    assert run(f'{{"rewards": next_to_the_agent.REWARD, {DONE}}}', "import next_to_the_agent\n" + TURNS)["reward"] == 3
