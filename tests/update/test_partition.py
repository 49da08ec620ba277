"""Micro-batches and ranks get whole prompts, within a budget of tokens."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch

from arlopti_openrlhf.update import partition


def sample(prompt: int, response: int, length: int = 4) -> Experience:
    """Return a single sample with a prompt of `length` tokens of that id, and so many response tokens."""
    tokens = torch.tensor([prompt] * length + [9] * response)
    mask = torch.tensor([0] * (length - 1) + [1] * response)
    return Experience(sequences=tokens, action_mask=mask, attention_mask=torch.ones_like(tokens))


def lengths(batches) -> list[list[tuple[int, int]]]:
    """The (prompt, response length) of each sample."""
    return [[(int(s.sequences[0]), int(s.action_mask.sum())) for s in batch] for batch in batches]


def test_a_prompt_costs_once():
    assert partition.cost([sample(1, 3), sample(1, 5), sample(2, 2)]) == (4 + 3 + 5) + (4 + 2)
    assert partition.cost([]) == 0


def test_short_responses_have_the_most_keys_for_a_token():
    """A shared prompt of 4 keeps its own keys, too: (4 + 7 + 7) / (4 + 3 + 3) of two responses. One shares nothing."""
    assert partition.keys_per_token([sample(1, 3)]) == partition.keys_per_token([]) == 1
    assert partition.keys_per_token([sample(1, 3), sample(1, 3)]) == 2
    # A micro-batch may hold the short ones alone: (4 + 15 · 5) / (4 + 15) is 4.2.
    assert partition.keys_per_token([sample(1, 1000), *[sample(1, 1)] * 15]) == 5


def test_prompts_stay_whole_where_they_fit():
    """Three prompts that cost 10, 9 and 6: the budget of 16 holds the first and the last."""
    items = [sample(p, n) for p, n in [(1, 3), (2, 5), (3, 1), (1, 3), (3, 1)]]
    assert lengths(partition.micro_batches(items, 16)) == [[(1, 3), (1, 3), (3, 1), (3, 1)], [(2, 5)]]


def test_a_prompt_is_divided_where_it_exceeds_the_budget_alone():
    """4 + 3 + 3 fits into 10, and a third response does not. One of 20 exceeds it by itself."""
    items = [sample(1, 3), sample(1, 3), sample(1, 3), sample(2, 20)]
    assert lengths(partition.micro_batches(items, 10)) == [[(2, 20)], [(1, 3), (1, 3)], [(1, 3)]]


def test_the_costliest_is_halved_for_more():
    items = [sample(1, 3) for _ in range(4)] + [sample(2, 1)]
    # 4 + 6 + 5 costs more than 4 + 6.
    three = [[(1, 3), (1, 3)], [(1, 3)], [(1, 3), (2, 1)]]
    assert lengths(partition.micro_batches(items, 100, count=3)) == three
    assert [len(batch) for batch in partition.micro_batches(items, 100, count=5)] == [1] * 5


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_get_whole_prompts_and_as_many_samples(count):
    items = [sample(prompt, 1 + (prompt + i) % 4, length=3 + prompt % 2) for i in range(4) for prompt in range(6)]
    args = SimpleNamespace(actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=count))
    batches = [make_experience_batch(items[:10]), make_experience_batch(items[10:])]  # padded
    shares = partition.balance_experiences(batches, args)
    assert [len(share.sequences) for share in shares] == [24 // count] * count
    prompts = [set(share.sequences[:, 0].tolist()) for share in shares]
    assert sum(map(len, prompts)) == 6  # each on one rank
    found = [s.sequences[i][s.attention_mask[i].bool()].tolist() for s in shares for i in range(len(s.sequences))]
    assert sorted(found) == sorted(item.sequences.tolist() for item in items)
    for share in shares:  # the cheap prompts and the costly ones as they came
        assert share.sequences[:, 0].tolist() == sorted(share.sequences[:, 0].tolist())
    tokens = [int(share.attention_mask.sum()) for share in shares]
    assert max(tokens) - min(tokens) <= 10


def test_what_is_saved_is_said():
    items = [sample(1, 3), sample(1, 3), sample(1, 3), sample(2, 2)]
    said = partition.describe(partition.micro_batches(items, 10), 10)
    assert said == (
        "23 of 27 tokens are computed, in 3 micro-batches of at most 10. 2 prompts are computed 3 times, because some "
        "have more responses than that"
    )
    assert partition.describe([items], 100) == "19 of 27 tokens are computed, in 1 micro-batch of at most 100"
    said = partition.describe([items], "attention is eager")
    assert said == "all 27 tokens are computed in 1 micro-batch, because attention is eager"
