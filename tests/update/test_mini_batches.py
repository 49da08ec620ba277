"""The passes of an update: their order, their samples, their tokens."""

from types import SimpleNamespace

import torch

from arlopti_openrlhf.update import mini_batches
from arlopti_openrlhf.update.mini_batches import MiniBatch
from arlopti_openrlhf.update.sample import Sample


def sample(prompt: list[int], response: list[int], probabilities: list[float] | None = None) -> Sample:
    """Return a single sample as the replay buffer holds it: rows without a batch dimension, without padding."""
    tokens = torch.tensor(prompt + response)
    mask = torch.tensor([0] * (len(prompt) - 1) + [1] * len(response))
    log_probs = torch.zeros(len(mask))
    if probabilities:
        log_probs[mask.bool()] = torch.tensor(probabilities).log()
    return Sample(sequences=tokens, action_mask=mask, action_log_probs=log_probs)


class OneRank:
    """Stands in for `Ranks` where the other rank has room for `other` mini-batches."""

    def __init__(self, other: int) -> None:
        self.other = other

    def min(self, value: int) -> int:
        return min(value, self.other)


def test_the_order_of_the_passes():
    a, b = MiniBatch([]), MiniBatch([[]])
    assert mini_batches.in_order([a, b], 2, "batch") == [(a, 0), (b, 0), (a, 1), (b, 1)]
    assert mini_batches.in_order([a, b], 2, "minibatch") == [(a, 0), (a, 1), (b, 0), (b, 1)]


def test_mini_batches_are_whole_on_every_rank(monkeypatch):
    """Seven samples in mini-batches of three: two here, but the other rank has room for one."""
    said = []
    monkeypatch.setattr(mini_batches.logger, "info", said.append)
    items = [sample([i], [9]) for i in range(7)]
    assert mini_batches.mini_batches(items, 3, shuffle=False, ranks=OneRank(5)) == [items[:3], items[3:6]]
    assert "1 samples do not fill" in said.pop()
    assert mini_batches.mini_batches(items, 3, shuffle=False, ranks=OneRank(1)) == [items[:3]]
    assert "4 samples" in said.pop()
    assert mini_batches.mini_batches([], 3, shuffle=True, ranks=OneRank(5)) == [] and not said


def test_micro_batches_by_count():
    items = [sample([i], [9]) for i in range(3)]
    assert mini_batches.by_count(items, 2).micro_batches == [items[:2], items[2:]]


def test_every_rank_makes_as_many_micro_batches():
    """This rank's samples fit into one; another needs three."""
    items = [sample([1, 2], [9, 8]) for _ in range(4)]
    (own,) = mini_batches.by_cost(items, 100, SimpleNamespace(max=lambda count: count)).micro_batches
    assert own == items
    three = mini_batches.by_cost(items, 100, SimpleNamespace(max=lambda count: max(count, 3)))
    assert len(three.micro_batches) == 3 and {id(s) for s in three.samples} == set(map(id, items))


def test_samples_of_a_prompt_stay_together_when_shuffled():
    items = [sample([prompt, prompt], [9, response]) for response in range(3) for prompt in range(4)]
    torch.manual_seed(0)
    (batch,) = mini_batches.mini_batches(items, 12, shuffle=True, ranks=OneRank(1))
    prompts = [int(s.sequences[0]) for s in batch]
    assert prompts[::3] == prompts[1::3] == prompts[2::3] != sorted(prompts[::3])
    assert {id(s) for s in batch} == {id(s) for s in items}


def test_dynamic_mini_batches_end_where_upstream_says():
    items = [sample([i], [9]) for i in range(5)]
    buffer = SimpleNamespace(dynamic_indices=[[0], [2, 1], [3]], dynamic_optimizer_step=[0, 1, 1])
    first, second = mini_batches.dynamic_mini_batches(buffer, items, 2)
    assert first == MiniBatch([[items[0]], [items[2], items[1]]])
    assert second == MiniBatch([[items[3]]])
