"""Sample responses with vLLM, grade them, and make one batch of tensors with GRPO's advantages."""

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor

from arlopti_openrlhf.grading import kk_reward, sources
from arlopti_openrlhf.lab.scoring.inputs import Row, check_labels
from arlopti_openrlhf.lab.scoring.inputs import read_rows as read_problems
from arlopti_openrlhf.lab.scoring.offline import generate, load_engine


class Sampled(NamedTuple):
    """Holds what vLLM returns for one prompt."""

    prompt: str
    prompt_ids: list[int]
    responses: list[tuple[str, list[int]]]  # text and token ids of each


class Graded(NamedTuple):
    """Holds one graded response."""

    prompt: int  # number of its prompt
    text: str
    prompt_ids: list[int]
    response_ids: list[int]
    reward: float  # what advantages come from: K&K's 3, -0.5, -1, -3; 1 or 0 for math
    score: float  # 1 right, 0 wrong


@dataclass
class Batch:
    """Holds B graded responses, right-padded to T tokens. Column j of (B, A) stands for token j + 1; A = T - 1."""

    sequences: Tensor  # (B, T)
    attention_mask: Tensor  # (B, T)
    action_mask: Tensor  # (B, A) bool, true on response tokens
    advantages: Tensor  # (B, A), 0 outside the response
    prompts: Tensor  # (B,) number of the prompt; its responses are neighbours


def read_rows(files: Sequence[str], count: int, seed: int) -> list[Row]:
    """Draw `count` rows of `prepare_data`'s JSONL by `seed`, in the order of the files; all where there are fewer.

    Raises:
        OSError, ValueError: a file cannot be read, a row lacks prompt, label or datasource, or has a label that its
            grader cannot read.
    """
    rows = read_problems(files)
    # All rows are checked, not only those that are drawn, so that another seed brings no surprise.
    check_labels(rows)
    drawn = sorted(random.Random(seed).sample(range(len(rows)), min(count, len(rows))))
    return [rows[i][1] for i in drawn]


def sample(
    model: str, rows: Sequence[Row], n: int, temperature: float, max_new_tokens: int, seed: int
) -> list[Sampled]:
    """Sample n responses to each row's prompt.

    vLLM runs in a process of its own, because an engine does not give back all the memory that it holds.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        prompts = [row["prompt"] for row in rows]
        return pool.submit(_sample, model, prompts, n, temperature, max_new_tokens, seed).result()


def _sample(model: str, prompts: list, n: int, temperature: float, max_new_tokens: int, seed: int) -> list[Sampled]:
    engine = load_engine(model, seed)
    from vllm import SamplingParams

    parameters = SamplingParams(n=n, temperature=temperature, max_tokens=max_new_tokens, skip_special_tokens=False)
    return [
        Sampled(text, list(output.prompt_token_ids), [(o.text, list(o.token_ids)) for o in output.outputs])
        for text, output in generate(engine, prompts, parameters)
    ]


def grade(rows: Sequence[Row], sampled: Sequence[Sampled]) -> list[Graded]:
    """Grade every response by its source's rule. Empty responses are left out."""
    graded = []
    for number, (row, one) in enumerate(zip(rows, sampled, strict=True)):
        for text, response_ids in one.responses:
            turn = kk_reward.assistant_turn(one.prompt + text, one.prompt)
            result = sources.grade(row["datasource"], turn, row["label"])
            if response_ids:
                graded.append(Graded(number, text, one.prompt_ids, response_ids, result.reward, result.score))
    return graded


def group_normalized(rewards: Tensor, prompts: Tensor) -> Tensor:
    """Return GRPO's advantages: (r - mean) / (std + 1e-9) over the responses to each prompt.

    They are those of OpenRLHF's `group_norm`, but for equal rewards, where upstream divides the mean's rounding error
    by 1e-9.

    Args:
        rewards: (B,).
        prompts: (B,) number of each response's prompt.

    Returns:
        (B,); 0 where a prompt's rewards are all equal.
    """
    advantages = torch.zeros_like(rewards)
    for prompt in prompts.unique():
        group = rewards[prompts == prompt]
        if (group != group[0]).any():
            advantages[prompts == prompt] = (group - group.mean()) / (group.std() + 1e-9)
    return advantages


def make_batch(graded: Sequence[Graded]) -> Batch:
    """Return the responses as tensors.

    Raises:
        ValueError: there is none.
    """
    if not graded:
        raise ValueError("the model gave no response")
    lengths = [len(g.prompt_ids) + len(g.response_ids) for g in graded]
    sequences = torch.zeros(len(graded), max(lengths), dtype=torch.long)
    attention_mask = torch.zeros_like(sequences)
    action_mask = torch.zeros(len(graded), max(lengths) - 1, dtype=torch.bool)
    for i, (one, length) in enumerate(zip(graded, lengths, strict=True)):
        # Column j predicts token j + 1, so the first response token belongs to the prompt's last column.
        sequences[i, :length] = torch.tensor(one.prompt_ids + one.response_ids)
        attention_mask[i, :length] = 1
        action_mask[i, len(one.prompt_ids) - 1 : length - 1] = True
    prompts = torch.tensor([g.prompt for g in graded])
    advantages = group_normalized(torch.tensor([g.reward for g in graded]), prompts)
    return Batch(sequences, attention_mask, action_mask, advantages[:, None] * action_mask, prompts)
