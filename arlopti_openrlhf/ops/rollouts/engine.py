"""OpenRLHF's Ray actor around a vLLM engine, which here can also take a list of requests in a fixed order."""

import asyncio
from collections.abc import Sequence
from copy import copy

from vllm.sampling_params import RequestOutputKind

from arlopti_openrlhf.patching import Upstream, replaced_attribute


class RolloutRayActor(Upstream):
    """`RolloutRayActor` with two changes.

    1. vLLM makes the result of a request once, when it is complete. Upstream lets it make one after each token, and
       takes the last. The tokens are the same.
    2. `generate_in_order`, for `--train.deterministic`.
    """

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        """Return upstream's result."""
        once = copy(sampling_params)
        once.output_kind = RequestOutputKind.FINAL_ONLY
        return await super().generate(prompt_token_ids, once, multi_modal_data)

    async def generate_in_order(self, requests: Sequence[dict]) -> list[list[dict]]:
        """Return the responses to each request, which do not depend on when anything arrives.

        vLLM's scheduler stands still until it has all requests, and has them in their order. From there on, what it
        computes together follows from its own state alone. That state is the same each time, because no other request
        is under way and the pause empties the prefix cache.

        Args:
            requests: what upstream's `generate_responses` gets, with `seeds` for the samples in place of their number.
        """
        tasks = []
        await self.pause_generation()
        for request in requests:
            for seed in request["seeds"]:
                sampled = {name: value for name, value in request.items() if name != "seeds"}
                sampled["sampling_params"] = copy(request["sampling_params"])
                sampled["sampling_params"].seed = seed
                tasks.append(await self._admit(self.executor.execute(**sampled, llm_engine=self)))
        await self.resume_generation()
        responses = iter(await asyncio.gather(*tasks))
        return [[next(responses) for _ in request["seeds"]] for request in requests]

    async def _admit(self, sample) -> asyncio.Task:
        """Start to work on a sample, and return the task when vLLM has its request, or when it has failed."""
        admitted = asyncio.get_running_loop().create_future()
        add_request = self.llm.add_request

        async def add(*args, **kwargs):
            queue = await add_request(*args, **kwargs)
            admitted.set_result(None)
            return queue

        with replaced_attribute(self.llm, "add_request", add):
            task = asyncio.ensure_future(sample)
            await asyncio.wait([task, admitted], return_when=asyncio.FIRST_COMPLETED)
        return task
