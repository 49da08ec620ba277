"""One reading of a reward function's answer: in process, over HTTP, by the server, and in the pre-flight."""

import asyncio
import math

import pytest
from arlopti_testing.engine_fakes import Engine, Tokenizer
from arlopti_testing.reward_server import post, server
from vllm import SamplingParams

from arlopti_openrlhf.grading.reward_answers import normalise
from arlopti_openrlhf.ops.preflight import reward, right_answers
from arlopti_openrlhf.ops.rollouts.reward_client import SCORES_ARE_REWARDS, RewardError, RewardExecutor

# What a function returns for n queries, by name. The label is the name.
ANSWERS = """
import collections, decimal
import numpy as np, torch

Pair = collections.namedtuple("Pair", "first second")
ANSWERS = {
    "bare": lambda n: [0.5] * n,
    "bare tuple": lambda n: (0.5,) * n,
    "bare, nested": lambda n: [[0.5]] * n,
    "bare tensor": lambda n: torch.full((n,), 0.5),
    "bare column": lambda n: torch.full((n, 1), 0.5, dtype=torch.bfloat16),
    "bare array": lambda n: np.full(n, 0.5, dtype=np.float32),
    "tensors in a list": lambda n: [torch.tensor(0.5)] * n,
    "array of booleans": lambda n: np.ones(n, dtype=bool),
    "dict": lambda n: {"rewards": [0.5] * n},
    "no scores": lambda n: {"rewards": [0.5] * n, "scores": None, "extra_logs": None},
    "all": lambda n: {"rewards": np.full(n, 3), "scores": torch.ones(n), "extra_logs": {"x": [[True]] * n}},
    "undefined extra log": lambda n: {"rewards": [0.5] * n, "extra_logs": {"x": [float("nan")] * n}},
    "named by a number": lambda n: {"rewards": [0.5] * n, "extra_logs": {7: [0.5] * n}},
    "too many": lambda n: [0.5] * (n + 1),
    "a pair for each": lambda n: [[0.5, 1.0]] * n,
    "none": lambda n: None,
    "text": lambda n: ["0.5"] * n,
    "set": lambda n: {0.5},
    "decimal": lambda n: [decimal.Decimal("0.5")] * n,
    "no rewards": lambda n: {"scores": [0.5] * n},
    "not finite": lambda n: {"rewards": [float("nan")] * n},
    "huge": lambda n: [10**400] * n,
    "scores not finite": lambda n: {"rewards": [0.5] * n, "scores": [float("inf")] * n},
    "scores of some": lambda n: {"rewards": [0.5] * n, "scores": [None] * n},
    "extra logs in a list": lambda n: {"rewards": [0.5] * n, "extra_logs": [0.5] * n},
    "named by a pair": lambda n: {"rewards": [0.5] * n, "extra_logs": {Pair(1, 2): [0.5] * n}},
}


def reward_func(queries, prompts, labels):
    return ANSWERS[labels[0]](len(queries))
"""
READ = {  # for one sample; the others are refused
    **dict.fromkeys(
        ["bare", "bare tuple", "bare, nested", "bare tensor", "bare column", "bare array", "tensors in a list"],
        {"rewards": 0.5},
    ),
    "array of booleans": {"rewards": 1.0},
    "dict": {"rewards": 0.5},
    "no scores": {"rewards": 0.5},
    "all": {"rewards": 3.0, "scores": 1.0, "extra_logs": {"x": 1.0}},
    "undefined extra log": {"rewards": 0.5, "extra_logs": {"x": math.nan}},
    "named by a number": {"rewards": 0.5, "extra_logs": {"7": 0.5}},
}
NAMES = [line.split('"')[1] for line in ANSWERS.splitlines() if "lambda n" in line]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """What asks the file, what asks a server that has it, and the server's URL."""
    path = tmp_path_factory.mktemp("rewards") / "answers.py"
    path.write_text(ANSWERS, encoding="utf-8")
    with server("--grader", path, "--workers", "1") as process:
        url = f"{process.url}/get_reward"
        yield RewardExecutor([str(path)]), RewardExecutor([url]), url


def outcome(executor: RewardExecutor, label: str) -> dict | None:
    """What the run reads from a source, or None where it refuses it."""

    async def run() -> dict:
        return await executor.execute("prompt", label, SamplingParams(max_tokens=8), 100, Tokenizer(), Engine())

    try:
        output = asyncio.run(run())
    except RewardError:
        return None
    read = {"rewards": output["reward"], "scores": output["scores"], "extra_logs": output["extra_logs"]}
    if output[SCORES_ARE_REWARDS]:
        assert read.pop("scores") == read["rewards"]
    return {name: value for name, value in read.items() if value != {}}


def same(a, b) -> bool:
    return repr(a) == repr(b)  # NaN equals itself


@pytest.mark.parametrize("name", NAMES)
def test_one_sample_is_read_alike_in_process_over_http_and_before_the_run(sources, name):
    function, service, _ = sources
    in_process, over_http = outcome(function, name), outcome(service, name)
    assert same(in_process, over_http), "a server changes the answer"
    assert same(in_process, READ.get(name))
    try:
        right_answers.try_out(reward._asking(function._process), [("prompt", name)])
    except right_answers.Refused:
        assert in_process is None
    else:
        assert in_process is not None


@pytest.mark.parametrize("name", NAMES)
def test_several_samples_are_read_as_one_is(sources, name):
    url = sources[-1]
    status, answer = post(url, {"query": ["a", "b"], "prompts": ["", ""], "labels": [name, name]})
    if name not in READ:
        assert status == 422 and answer["error"]
        return
    expected = {part: [value] * 2 for part, value in READ[name].items() if part != "extra_logs"}
    expected["extra_logs"] = {key: [value] * 2 for key, value in READ[name].get("extra_logs", {}).items()}
    assert status == 200 and same(answer, expected)
    assert normalise(answer, 2)["scores"] == expected.get("scores")
