"""Reads what a user's agent returns (`--train.agent_func_path`). OpenRLHF takes tensors alone, and names no file."""

from collections.abc import Mapping
from typing import Any

import torch
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import AgentExecutorBase, MultiTurnAgentExecutor

from arlopti_openrlhf import user_files
from arlopti_openrlhf.grading.reward_answers import normalise
from arlopti_openrlhf.ops.rollouts.reward_process import RewardError

# What upstream reads of a step, and of a whole sample, apart from numbers.
_STEP = ("rewards", "environment_feedback", "done")
_SAMPLE = ("prompt", "label", "observation_tokens", "action_ranges", "rollout_log_probs")

_upstream_load = vllm_engine._load_agent_executor


def load(path: str) -> AgentExecutorBase:
    """Return upstream's executor of an agent's file, which may import modules next to it.

    The agent's numbers may be plain ones, tensors, or lists of one. If it returns anything else, the error names the
    file and the field.
    """
    user_files.find_modules_beside(path)
    executor: Any = _upstream_load(path)
    execute = executor.execute

    async def read_sample(*args, **kwargs) -> dict:
        return _sample(await execute(*args, **kwargs), path)

    executor.execute = read_sample
    if isinstance(executor, MultiTurnAgentExecutor):
        instance = executor.agent_instance_cls
        executor.agent_instance_cls = lambda: _Instance(instance(), path)
    return executor


class _Instance:
    """An agent's instance, whose steps are read."""

    def __init__(self, agent: Any, path: str) -> None:
        self.agent, self.path = agent, path

    async def reset(self, states: dict, **kwargs) -> dict:
        return await self.agent.reset(states, **kwargs)

    async def step(self, states: dict, **kwargs) -> dict:
        result = _fields(await self.agent.step(states, **kwargs), _STEP, f"{self.path}: step")
        if result["rewards"] is None:
            raise RewardError(f"{self.path}: step returned `rewards` that are None")
        feedback = result["environment_feedback"]
        if not isinstance(feedback, str):
            raise RewardError(f"{self.path}: step returned `environment_feedback` that is no text: {feedback!r:.200}")
        numbers = _numbers(result, f"{self.path}: step")
        numbers["rewards"] = torch.tensor(numbers["rewards"])  # upstream calls its `item`
        return {name: value for name, value in result.items() if value is not None} | numbers


def _sample(output: Any, path: str) -> dict:
    result = _fields(output, _SAMPLE, f"{path}: execute")
    if result.get("reward") is None:  # a reward model gives it
        return result
    numbers = _numbers(result | {"rewards": result["reward"]}, f"{path}: execute")
    return result | numbers | {"reward": numbers["rewards"]}


def _fields(result: Any, names: tuple[str, ...], who: str) -> dict:
    """Return the fields of a step or a sample.

    Raises:
        RewardError: one of the names is not there.
    """
    if not isinstance(result, Mapping):
        raise RewardError(f"{who} returned no dict, but {result!r:.200}")
    if missing := [name for name in names if name not in result]:
        raise RewardError(f"{who} returned no `{missing[0]}`, but {', '.join(map(str, result))}")
    return dict(result)


def _numbers(result: Mapping[str, Any], who: str) -> dict[str, Any]:
    """Return the rewards, scores and extra logs of one sample that are there, as numbers.

    Raises:
        RewardError: they are none.
    """
    given = {name: result[name] for name in ("rewards", "scores", "extra_logs") if result.get(name) is not None}
    try:
        answer = normalise(given, 1)
    except ValueError as error:
        raise RewardError(f"{who} returned {error}") from None
    read = {
        "rewards": answer["rewards"][0],
        "extra_logs": {name: value for name, [value] in answer["extra_logs"].items()},
    }
    return read | ({} if answer["scores"] is None else {"scores": answer["scores"][0]})
