"""Sample responses with vLLM, grade them, and make one batch of tensors with GRPO's advantages."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from arlopti_openrlhf.lab.scoring import offline
from arlopti_openrlhf.lab.scoring.inputs import Row
from arlopti_openrlhf.lab.scoring.own_reward import OwnReward
from arlopti_openrlhf.lab.scoring.waiting import quiet

_CHUNK = 1024  # responses that are sampled before they are written
_LEAST_CHUNK = 32  # with fewer at a time vLLM gets slow


class Sampled(NamedTuple):
    """What vLLM returns for one prompt."""

    prompt: str
    prompt_ids: list[int]
    responses: list[tuple[str, list[int]]]  # text and token ids of each


class Graded(NamedTuple):
    """One graded response."""

    prompt: int  # number of its prompt
    text: str
    prompt_ids: list[int]
    response_ids: list[int]
    reward: float  # what advantages come from: K&K's 3, -0.5, -1, -3; 1 or 0 for math
    score: float | None  # 1 right, 0 wrong. None where the reward returns no scores


@dataclass
class Batch:
    """B graded responses, right-padded to T tokens. Column j of (B, A) stands for token j + 1; A = T - 1."""

    sequences: Tensor  # (B, T)
    attention_mask: Tensor  # (B, T)
    action_mask: Tensor  # (B, A) bool, true on response tokens
    advantages: Tensor  # (B, A), 0 outside the response
    prompts: Tensor  # (B,) number of the prompt; its responses are neighbours


def draw(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """Draw `count` rows by `seed`; all where there are fewer. The first of them are a draw of all rows, too."""
    return random.Random(seed).sample(rows, min(count, len(rows)))


class Asked(NamedTuple):
    """How each prompt is answered."""

    n: int  # responses
    temperature: float
    max_new_tokens: int
    seed: int
    with_end: bool  # whether the texts have the token that ends them
    template: Mapping[str, Any] = {}  # arguments of the chat template


def answer(path: Path, model: str, rows: Sequence[Row], asked: Asked, most_tokens: int | None = None) -> list[Sampled]:
    """Return the responses to the first rows, up to `most_tokens` tokens of prompts and responses, or to all rows.

    The file gets every response as it comes. What it already has of the same model and settings is kept.
    """
    version = offline.version_of(model)
    keys = [
        hashlib.sha256(json.dumps([row["prompt"], *asked, version]).encode()).hexdigest()[:16]  # of all it depends on
        for row in rows
    ]
    done = {record.pop("key"): Sampled(**record) for record in offline.kept_records(path)}
    open_rows = [(key, row) for key, row in zip(keys, rows, strict=True) if key not in done]
    room = most_tokens and most_tokens - sum(_tokens(done[key]) for key in takewhile(done.__contains__, keys))
    if len(open_rows) < len(rows):
        print(f"{path}: has the responses to {len(rows) - len(open_rows)} of {len(rows)} prompts", flush=True)
    if open_rows and (room is None or room > 0):
        done |= sample(path, model, open_rows, asked, room)
    # In the order of the rows, and no more than there is room for.
    answered: list[Sampled] = []
    total = 0
    for key in takewhile(done.__contains__, keys):
        total += _tokens(done[key])
        if answered and most_tokens and total > most_tokens:
            break
        answered.append(done[key])
    return answered


def _tokens(sampled: Sampled) -> int:
    return len(sampled.prompt_ids) + sum(len(ids) for _, ids in sampled.responses)


def sample(
    path: Path, model: str, rows: Sequence[tuple[str, Row]], asked: Asked, room: int | None
) -> dict[str, Sampled]:
    """Sample responses to each row's prompt, until they fill the room (tokens). Return and append them by their keys.

    vLLM runs in a process of its own, because an engine does not give back all the memory that it holds.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        prompts = [(key, row["prompt"]) for key, row in rows]
        return pool.submit(_sample, path, model, prompts, asked, room).result()


def _sample(path: Path, model: str, prompts: list, asked: Asked, room: int | None) -> dict[str, Sampled]:
    done: dict[str, Sampled] = {}
    with quiet():
        engine = offline.load_engine(model, asked.seed)
        while prompts and (room is None or room > 0):
            # At most as many responses as may fill the room.
            most = _CHUNK if room is None else min(_CHUNK, max(_LEAST_CHUNK, room // asked.max_new_tokens))
            size = max(1, most // asked.n)
            keys, texts = zip(*prompts[:size], strict=True)
            prompts = prompts[size:]
            ways = [(asked.n, asked.temperature)] * len(texts)
            longest, with_end, template = asked.max_new_tokens, asked.with_end, asked.template
            answered = offline.generate(engine, texts, ways, longest, with_end, template)
            chunk = {}
            for key, (text, output) in zip(keys, answered, strict=True):
                responses = [(one.text, list(one.token_ids)) for one in output.outputs]
                chunk[key] = Sampled(text, list(output.prompt_token_ids), responses)
            append(path, chunk)
            done |= chunk
            room = room and room - sum(map(_tokens, chunk.values()))
        del engine  # whose end is logged too
    return done


def append(path: Path, sampled: Mapping[str, Sampled]) -> None:
    """Write responses as JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        for key, one in sampled.items():
            file.write(json.dumps({"key": key} | one._asdict(), ensure_ascii=False) + "\n")


def grade(rows: Sequence[Row], sampled: Sequence[Sampled], reward: OwnReward | None = None) -> list[Graded]:
    """Grade every response by the reward, or by its source's rule. Empty responses are left out."""
    texts = [(one.prompt, [text for text, _ in one.responses]) for one in sampled]
    graded = []
    for number, (one, grades) in enumerate(zip(sampled, offline.grade_all(rows, texts, reward), strict=True)):
        for (text, response_ids), result in zip(one.responses, grades, strict=True):
            if response_ids:
                graded.append(Graded(number, text, one.prompt_ids, response_ids, result.reward, result.score))
    return graded


def group_normalized(rewards: Tensor, prompts: Tensor) -> Tensor:
    """Return GRPO's advantages (B,): (r - mean) / (std + 1e-9) over the responses to each prompt.

    They are those of OpenRLHF's `group_norm`, except for equal rewards. There they are 0, and upstream divides the
    mean's rounding error by 1e-9. `prompts` (B,) has the number of each response's prompt.
    """
    advantages = torch.zeros_like(rewards)
    for prompt in prompts.unique():
        group = rewards[prompts == prompt]
        if (group != group[0]).any():
            advantages[prompts == prompt] = (group - group.mean()) / (group.std() + 1e-9)
    return advantages


def make_batch(graded: Sequence[Graded]) -> Batch:
    """Return the responses as tensors. ValueError where there is none."""
    if not graded:
        raise ValueError("the model gave no response")
    rows = [torch.tensor(g.prompt_ids + g.response_ids) for g in graded]
    sequences = pad_sequence(rows, batch_first=True)
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    # Column j predicts token j + 1, so the first response token belongs to the prompt's last column.
    masks = [torch.arange(1, len(row)) >= len(g.prompt_ids) for g, row in zip(graded, rows, strict=True)]
    action_mask = pad_sequence(masks, batch_first=True)
    prompts = torch.tensor([g.prompt for g in graded])
    advantages = group_normalized(torch.tensor([g.reward for g in graded]), prompts)
    return Batch(sequences, attention_mask, action_mask, advantages[:, None] * action_mask, prompts)
