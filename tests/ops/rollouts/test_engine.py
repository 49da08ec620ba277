"""vLLM gets its requests in their order, all of them before it begins, and a few samples come with their log-probs."""

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch
from arlopti_testing.engine_fakes import Engine, Tokenizer
from openrlhf.trainer.ray import vllm_engine
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from arlopti_openrlhf.ops.rollouts import engine
from arlopti_openrlhf.ops.rollouts.reward_client import EVERY, RewardExecutor
from arlopti_openrlhf.patching import plain_class


class Actor(engine.RolloutRayActor, plain_class(vllm_engine.RolloutRayActor)):
    """Upstream's engine with our changes."""


class Llm:
    """Takes requests after any time, and answers them in any order. It notes what happens."""

    def __init__(self) -> None:
        self.seen: list = []
        self.running = asyncio.Event()

    async def pause_generation(self, mode: str) -> None:
        self.seen.append(f"pause, {mode}")

    async def resume_generation(self) -> None:
        self.seen.append("resume")
        self.running.set()

    async def add_request(self, request_id, prompt, params) -> None:
        await asyncio.sleep(random.random() / 100)
        self.seen.append((prompt["prompt_token_ids"], params.seed))
        self.kind = params.output_kind

    async def generate(self, prompt, sampling_params, request_id):
        await self.add_request(request_id, prompt, sampling_params)
        await self.running.wait()
        await asyncio.sleep(random.random() / 100)
        yield sampling_params.seed


class Executor:
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        await asyncio.sleep(random.random() / 100)
        if label == "bad":
            raise ValueError("too long")
        return prompt, label, max_length, await llm_engine.generate([len(prompt)], sampling_params)


def ask(labels: str) -> tuple[list, Llm]:
    actor = object.__new__(Actor)
    actor.executor, actor._mm_pad_token_ids = Executor(), None

    async def run() -> list:
        actor.llm = Llm()
        common = {"sampling_params": SamplingParams(), "max_length": 8, "hf_tokenizer": None, "images": None}
        requests = [
            common | {"prompt": "p" * i, "label": label, "seeds": [10 * i, 10 * i + 1]}
            for i, label in enumerate(labels.split(), start=1)
        ]
        return await asyncio.wait_for(actor.generate_in_order(requests), 20)

    return asyncio.run(run()), actor.llm


def test_requests_enter_in_order_while_the_engine_stands_still():
    responses, llm = ask("a b c")
    seeds = [(i, 10 * i + sample) for i in (1, 2, 3) for sample in (0, 1)]
    assert llm.seen == ["pause, keep", *(([i], seed) for i, seed in seeds), "resume"]
    assert responses == [
        [("p" * i, label, 8, 10 * i), ("p" * i, label, 8, 10 * i + 1)] for i, label in enumerate("abc", start=1)
    ]
    assert "add_request" not in vars(llm)


def test_a_request_that_fails_before_it_is_asked_does_not_hang_the_others():
    with pytest.raises(ValueError, match="too long"):
        ask("a bad c")


def test_vllm_makes_the_result_of_a_request_once():
    _, llm = ask("a")
    assert llm.kind == RequestOutputKind.FINAL_ONLY


def test_the_callers_parameters_stay_as_they_are():
    """An agent uses its parameters for every turn."""
    actor = object.__new__(Actor)
    actor._mm_pad_token_ids, parameters = None, SamplingParams()

    async def run():
        actor.llm = Llm()
        actor.llm.running.set()
        await actor.generate([1], parameters)

    asyncio.run(run())
    assert actor.llm.kind == RequestOutputKind.FINAL_ONLY != parameters.output_kind


class AskedEngine(Engine):
    """Notes which log-probs it is asked for. Those of each token are -0.5."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        self.asked.append(sampling_params.logprobs)
        output = await super().generate(prompt_token_ids, sampling_params)
        if sampling_params.logprobs is not None:
            [answer] = output.outputs
            answer.logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in answer.token_ids]
        return output


def outputs(*samples: SamplingParams) -> tuple[list[dict], list[int | None]]:
    executor, engine = RewardExecutor(), AskedEngine()

    async def run() -> list[dict]:
        return [await executor.execute("prompt", "label", each, 100, Tokenizer(), engine) for each in samples]

    return asyncio.run(run()), engine.asked


def test_one_sample_in_so_many_is_asked_for():
    params = SamplingParams(max_tokens=8)
    assert outputs(*[params] * 2 * EVERY)[1] == [0, *[None] * (EVERY - 1)] * 2
    assert params.logprobs is None  # it is shared with the other samples


def test_a_seed_says_whether_its_sample_is_asked_for():
    """Whatever an engine has sampled before."""
    chosen, other = (SamplingParams(max_tokens=8, seed=3 * EVERY + i) for i in (0, 1))
    assert outputs(other, chosen, chosen, other)[1] == [None, 0, 0, None]


@pytest.mark.parametrize("changed, asked", [({"temperature": 0.7}, None), ({"logprobs": 1}, 1)])
def test_what_is_not_comparable_is_left_alone(changed, asked):
    [output], seen = outputs(SamplingParams(max_tokens=8, **changed))
    assert seen == [asked] and (output["rollout_log_probs"] is None) == (asked is None)


def test_the_others_have_nan():
    params = SamplingParams(max_tokens=8)
    chosen, other = (torch.tensor(output["rollout_log_probs"][1:2048]) for output in outputs(params, params)[0])
    assert chosen.tolist() == [0] * 5 + [-0.5] * 7  # "prompt" has 6 tokens, and " answer" 7
    assert other.dtype == torch.float32 and other.isnan().all() and other.shape == chosen.shape
