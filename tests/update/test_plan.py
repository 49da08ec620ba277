"""Mini-batches, micro-batches and ranks get whole prompts, within a budget of tokens."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch

from arlopti_openrlhf.forward.selective_actor import Shortcuts
from arlopti_openrlhf.update import optimizer_steps, plan
from arlopti_openrlhf.update.optimizer_steps import whole_mini_batches
from arlopti_openrlhf.update.plan import MiniBatch, Planner, divide, in_order
from arlopti_openrlhf.update.sample import Sample, by_prompt, numbered
from arlopti_openrlhf.update.settings import Settings
from arlopti_openrlhf.update.whole_prompts import balance_experiences


def experience(prompt: int, response: int, length: int = 4) -> Experience:
    """Return a single sample with a prompt of `length` tokens of that id, and so many response tokens."""
    tokens = torch.tensor([prompt] * length + [9] * response)
    mask = torch.tensor([0] * (length - 1) + [1] * response)
    return Experience(sequences=tokens, action_mask=mask, attention_mask=torch.ones_like(tokens))


def samples(*sizes: tuple[int, int]) -> list[Sample]:
    """Return samples of these (prompt, response tokens)."""
    return numbered(experience(*size) for size in sizes)


def lengths(batches) -> list[list[tuple[int, int]]]:
    """The (prompt, response length) of each sample."""
    return [[(int(s.sequences[0]), int(s.action_mask.sum())) for s in batch] for batch in batches]


def test_a_prompt_costs_once():
    assert plan.cost(samples((1, 3), (1, 5), (2, 2))) == (4 + 3 + 5) + (4 + 2)
    assert plan.cost([]) == 0


def test_short_responses_have_the_most_keys_for_a_token():
    """A shared prompt of 4 keeps its own keys, too: (4 + 7 + 7) / (4 + 3 + 3) of two responses. One shares nothing."""
    assert plan.keys_per_token(samples((1, 3))) == plan.keys_per_token([]) == 1
    assert plan.keys_per_token(samples((1, 3), (1, 3))) == 2
    # A micro-batch may hold the short ones alone: (4 + 15 · 5) / (4 + 15) is 4.2.
    assert plan.keys_per_token(samples((1, 1000), *[(1, 1)] * 15)) == 5


def test_prompts_stay_whole_where_they_fit():
    """Three prompts that cost 10, 9 and 6: the budget of 16 holds the first and the last."""
    items = samples((1, 3), (2, 5), (3, 1), (1, 3), (3, 1))
    assert lengths(divide(items, 16)) == [[(1, 3), (1, 3), (3, 1), (3, 1)], [(2, 5)]]


def test_a_prompt_is_divided_where_it_exceeds_the_budget_alone():
    """4 + 3 + 3 fits into 10, and a third response does not. One of 20 exceeds it by itself."""
    items = samples((1, 3), (1, 3), (1, 3), (2, 20))
    assert lengths(divide(items, 10)) == [[(2, 20)], [(1, 3), (1, 3)], [(1, 3)]]


def test_the_costliest_is_halved_for_more():
    items = samples(*[(1, 3)] * 4, (2, 1))
    # 4 + 6 + 5 costs more than 4 + 6.
    three = [[(1, 3), (1, 3)], [(1, 3)], [(1, 3), (2, 1)]]
    assert lengths(divide(items, 100, count=3)) == three
    assert [len(batch) for batch in divide(items, 100, count=5)] == [1] * 5


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_get_whole_prompts_and_as_many_samples(count):
    items = [experience(prompt, 1 + (prompt + i) % 4, length=3 + prompt % 2) for i in range(4) for prompt in range(6)]
    args = SimpleNamespace(actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=count))
    batches = [make_experience_batch(items[:10]), make_experience_batch(items[10:])]  # padded
    shares = balance_experiences(batches, args)
    assert [len(share.sequences) for share in shares] == [24 // count] * count
    prompts = [set(share.sequences[:, 0].tolist()) for share in shares]
    assert sum(map(len, prompts)) == 6  # each on one rank
    found = [s.sequences[i][s.attention_mask[i].bool()].tolist() for s in shares for i in range(len(s.sequences))]
    assert sorted(found) == sorted(item.sequences.tolist() for item in items)
    for share in shares:  # the cheap prompts and the costly ones as they came
        assert share.sequences[:, 0].tolist() == sorted(share.sequences[:, 0].tolist())
    tokens = [int(share.attention_mask.sum()) for share in shares]
    assert max(tokens) - min(tokens) <= 10


class OneRank:
    """Stands in for `Ranks` where the other rank has room for `other` mini-batches, and needs `more` micro-batches."""

    count = 1

    def __init__(self, other: int = 10**6, more: int = 0) -> None:
        self.other, self.more = other, more

    def min(self, value: int) -> int:
        return min(value, self.other)

    def max(self, value: int) -> int:
        return max(value, self.more)

    def sum(self, *values: float) -> list[float]:
        return list(values)


def planner(size: int, micro: int = 2, dynamic: bool = False, reason: str | None = "why", ranks=None) -> Planner:
    """Return one for mini-batches of so many samples, on a model that shares no prompts for that reason."""
    train = SimpleNamespace(
        batch_size=size, micro_batch_size=micro, dynamic_batch_enable=dynamic, max_tokens_per_gpu=10
    )
    actor = SimpleNamespace(gradient_checkpointing_enable=False, aux_loss_coef=0.0)
    ds, algo = (
        SimpleNamespace(packing_samples=True, use_liger_kernel=False, lora=SimpleNamespace(rank=0)),
        SimpleNamespace(advantage=SimpleNamespace(estimator="reinforce")),
    )
    args = SimpleNamespace(train=train, actor=actor, ds=ds, algo=algo)
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="unheard of"))
    engine = SimpleNamespace(module=model, global_steps=0, skipped_steps=0)
    policy = SimpleNamespace(model=engine, shortcuts=Shortcuts(reason, True))
    return Planner(policy, args, Settings(), ranks or OneRank())


def test_the_order_of_the_passes():
    a, b = MiniBatch([]), MiniBatch([[]])
    assert in_order([a, b], 2, "batch") == [(a, 0), (b, 0), (a, 1), (b, 1)]
    assert in_order([a, b], 2, "minibatch") == [(a, 0), (a, 1), (b, 0), (b, 1)]


def test_mini_batches_are_whole_on_every_rank(monkeypatch):
    """Seven samples in mini-batches of three: two here, but the other rank has room for one."""
    said = []
    monkeypatch.setattr(optimizer_steps.logger, "info", said.append)
    assert whole_mini_batches(range(7), 3, OneRank(5)) == [0, 1, 2, 3, 4, 5]
    assert "1 samples do not fill" in said.pop()
    assert whole_mini_batches(range(7), 3, OneRank(1)) == [0, 1, 2]
    assert "4 samples" in said.pop()
    assert whole_mini_batches([], 3, OneRank(5)) == [] and not said


def test_samples_of_a_prompt_stay_together_when_shuffled():
    items = samples(*[(prompt, 1 + response) for response in range(3) for prompt in range(4)])
    torch.manual_seed(0)
    (batch,) = planner(size=12).epoch(items)
    prompts = [sample.prompt for sample in batch.samples]
    assert prompts[::3] == prompts[1::3] == prompts[2::3] != sorted(prompts[::3])
    assert {id(s) for s in batch.samples} == {id(s) for s in items}
    assert [len(micro_batch) for micro_batch in batch.micro_batches] == [2] * 6


def test_dynamic_batches_of_a_model_that_shares_no_prompts_hold_so_many_tokens():
    """In their order, since upstream does not shuffle them: lengths 7, 5 | 6, 6 within 10 tokens."""
    first, second = planner(size=2, dynamic=True).epoch(samples((1, 3), (1, 1), (2, 2), (2, 2), (3, 1)))
    assert lengths(first.micro_batches) == [[(1, 3)], [(1, 1)]]
    assert lengths(second.micro_batches) == [[(2, 2)], [(2, 2)]]


@pytest.mark.parametrize("reason", [None, "why"])
def test_every_rank_makes_as_many_micro_batches(reason):
    """This rank's samples fit into one; another needs three."""
    items = samples(*[(1, 3)] * 4)
    (batch,) = planner(size=4, micro=4, reason=reason, ranks=OneRank(more=1)).epoch(items)
    assert len(batch.micro_batches) == 1
    (batch,) = planner(size=4, micro=4, reason=reason, ranks=OneRank(more=3)).epoch(items)
    assert len(batch.micro_batches) == 3 and {id(s) for s in batch.samples} == set(map(id, items))


def test_what_is_saved_is_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(plan.logger, "info", said.append)
    first = "selective update, first mini-batch of this rank: "
    sharing = planner(size=4, micro=4, reason=None)
    sharing._fit = lambda own: 10
    for _ in range(2):
        sharing.epoch(samples((1, 3), (1, 3), (1, 3), (2, 2)))
    assert said == [
        f"{first}23 of 27 tokens are computed, in 3 micro-batches of at most 10. 2 prompts are computed 3 times, "
        "because some have more responses"
    ]
    said.clear()
    planner(size=2, reason="attention is eager").epoch(samples((1, 3), (2, 2)))
    assert said == [f"{first}all 13 tokens are computed in 1 micro-batch, because attention is eager"]


def test_prompts_are_numbered_by_their_tokens():
    """Two prompts, of which one is the beginning of the other, and a response that begins like a prompt."""
    items = numbered([experience(1, 2, length=3), experience(1, 1, length=4), experience(1, 3, length=3)])
    assert [(item.prompt, item.prompt_length) for item in items] == [(0, 3), (1, 4), (0, 3)]
    assert by_prompt(items[::-1]) == [[items[2], items[0]], [items[1]]]
