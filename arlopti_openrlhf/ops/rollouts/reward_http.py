"""Asks a reward server for the reward of one sample, and trusts it with neither memory nor where the sample goes."""

import json
from typing import Any

import aiohttp
from yarl import URL

from arlopti_openrlhf import terminal
from arlopti_openrlhf.grading.reward_answers import request_body
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.rollouts.reward_process import RewardError, about

SECONDS = 180  # for an answer
_ANSWER_BYTES = 2**20  # the answer has the numbers of one sample
_SHOWN = 500  # characters of an error
# A compressed answer could be a thousand times as long as what is read, so none is asked for, and none is unpacked.
_HEADERS = {"Accept-Encoding": "identity", "Content-Type": "application/json"}


async def post(url: str, query: str, prompt: str, label: Any) -> Any:
    """Return a server's answer for one sample, as JSON has it.

    Args:
        url: may have `${NAME}` for secrets.

    Raises:
        RewardError: the server refuses the request (4xx), or leads elsewhere.
        aiohttp.ClientError, OSError, ValueError, RecursionError: a further attempt may succeed.
    """
    try:
        body = request_body(query, prompt, label)
    except ValueError as error:
        raise RewardError(f"{error}{about(query, label)}") from None
    target = URL(credentials.expand(url))
    # Each request opens its own connection, as upstream's do. A kept one could have died with its server since.
    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=SECONDS), auto_decompress=False, headers=_HEADERS | credentials.headers()
    )
    try:
        async with session:
            # A prompt and its label go nowhere else.
            async with session.post(target, data=body, allow_redirects=False) as response:
                return await _read(response, url, about(query, label))
    except TimeoutError:  # which has no text
        raise OSError(f"no whole answer in {SECONDS} s") from None


async def _read(response: aiohttp.ClientResponse, url: str, of_sample: str) -> Any:
    is_answer, coding, body = response.status < 300, response.headers.get("Content-Encoding"), bytearray()
    if is_answer and coding:
        raise ValueError(f"the answer is compressed ({coding}), which was not asked for")
    async for part in response.content.iter_chunked(2**16):
        body += part
        if len(body) > _ANSWER_BYTES:
            break
    if is_answer:
        if len(body) > _ANSWER_BYTES:
            raise ValueError(f"the answer is longer than {_ANSWER_BYTES} bytes")
        return json.loads(body)
    text = terminal.one_line(credentials.mask(body.decode("utf-8", "replace"), url)[:_SHOWN])
    if response.status >= 500 or response.status in (408, 429):
        raise OSError(f"status {response.status}: {text}")
    refusal = f"{url} refuses the request with status {response.status}: {text}"
    raise RewardError(f"{refusal}{of_sample}")
