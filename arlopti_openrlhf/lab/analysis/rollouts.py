"""Sample responses with vLLM, grade them, and make one batch of tensors with GRPO's advantages."""

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from arlopti_openrlhf.lab.scoring import offline
from arlopti_openrlhf.lab.scoring.inputs import Row
from arlopti_openrlhf.lab.scoring.own_reward import OwnReward
from arlopti_openrlhf.lab.scoring.waiting import quiet


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
    """Draw `count` rows by `seed`, in their order; all where there are fewer."""
    return [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), min(count, len(rows))))]


def sample(
    model: str,
    rows: Sequence[Row],
    n: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    with_end: bool = False,
) -> list[Sampled]:
    """Sample n responses to each row's prompt, with the text of the token that ends them if asked for.

    vLLM runs in a process of its own, because an engine does not give back all the memory that it holds.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        prompts = [row["prompt"] for row in rows]
        return pool.submit(_sample, model, prompts, n, temperature, max_new_tokens, seed, with_end).result()


def _sample(
    model: str, prompts: list, n: int, temperature: float, max_new_tokens: int, seed: int, with_end: bool
) -> list[Sampled]:
    with quiet():
        engine = offline.load_engine(model, seed)
        answered = offline.generate(engine, prompts, [(n, temperature)] * len(prompts), max_new_tokens, with_end)
        del engine  # whose end is logged too
    return [
        Sampled(text, list(output.prompt_token_ids), [(o.text, list(o.token_ids)) for o in output.outputs])
        for text, output in answered
    ]


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
