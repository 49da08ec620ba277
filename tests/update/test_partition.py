"""Micro-batches and ranks get whole prompts, within a budget of tokens."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from transformers import Qwen2Config

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


def test_a_number_of_samples_gives_way_to_a_whole_prompt_in_stocks_memory():
    """A layer takes 8 x 24 + 20 x 8 + 4 x 4 = 368 bytes per token, and as many of gradients. The last norm takes 64,
    and states in the head take 48."""
    config = Qwen2Config(
        hidden_size=8, intermediate_size=24, num_hidden_layers=1, vocab_size=100, num_attention_heads=2
    )
    config.num_key_value_heads = 1
    train = SimpleNamespace(dynamic_batch_enable=False, max_tokens_per_gpu=5, micro_batch_size=2)
    args = SimpleNamespace(train=train, actor=SimpleNamespace(gradient_checkpointing_enable=False))

    def budget(costliest: int, keys: int = 1) -> int:
        return partition.token_budget(args, config, longest=5000, costliest=costliest, keys_per_token=keys)

    # One block holds all logits, as many as OpenRLHF's.
    stock = 10_000 * (368 + 64 + 10 * 100)
    assert budget(60) == budget(10**9) == stock // (368 + 64 + 48 + 10 * 100) < 10_000
    config.vocab_size = 10_000
    stock = 10_000 * (368 + 64 + 10 * 10_000)
    assert [budget(cost) for cost in (60, 30_000)] == [10_000, 30_000]
    # A block holds 2 ** 24 of the logits, but a layer's gradients take more than that.
    assert budget(10**9) == stock // (2 * 368 + 64)
    # A shared prompt of which each token has three keys: 16 bytes more, twice each.
    assert budget(10**9, keys=3) == stock // (2 * (368 + 2 * 16) + 64)
    config.model_type = "unheard_of"
    assert budget(10**9) == 10_000
    train.dynamic_batch_enable = True
    assert budget(1000) == 5


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
