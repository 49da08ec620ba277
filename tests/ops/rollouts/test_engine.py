"""vLLM gets its requests in their order, all of them before it begins."""

import asyncio
import random

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from arlopti_openrlhf.ops.rollouts import engine

Engine = engine.RolloutRayActor.__ray_metadata__.modified_class.__ray_actor_class__


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
    actor = object.__new__(Engine)
    actor.executor, actor._mm_pad_token_ids = Executor(), None

    async def run() -> list:
        actor.llm = Llm()
        requests = [
            {"prompt": "p" * i, "label": label, "images": None, "seeds": [10 * i, 10 * i + 1]}
            for i, label in enumerate(labels.split(), start=1)
        ]
        return await asyncio.wait_for(actor.generate_in_order(requests, SamplingParams(), 8, None), 20)

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
    actor = object.__new__(Engine)
    actor._mm_pad_token_ids, parameters = None, SamplingParams()

    async def run():
        actor.llm = Llm()
        actor.llm.running.set()
        await actor.generate([1], parameters)

    asyncio.run(run())
    assert actor.llm.kind == RequestOutputKind.FINAL_ONLY != parameters.output_kind
