"""What holds of the passes of an update for every rollout batch."""

from collections import Counter
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from openrlhf.trainer.ppo_utils.experience import Experience

from arlopti_openrlhf.update import plan
from arlopti_openrlhf.update.optimizer_steps import whole_mini_batches
from arlopti_openrlhf.update.sample import by_prompt, numbered

LOG_PROBS = st.one_of(st.floats(-30, 0), st.just(float("-inf")))


@st.composite
def samples(draw):
    """Return a single sample: its mask begins with the prompt, and its response may be one token or none."""
    prompt, response = draw(st.integers(2, 4)), draw(st.integers(0, 4))
    mask = torch.tensor([0] * (prompt - 1) + [1] * response)
    log_probs = torch.tensor(draw(st.lists(LOG_PROBS, min_size=len(mask), max_size=len(mask))))
    first = draw(st.integers(0, 2))  # few prompts, so that several samples share one
    sequence = torch.tensor([first] * prompt + [7] * response)
    return Experience(sequences=sequence, action_mask=mask, action_log_probs=log_probs)


class Ranks(SimpleNamespace):
    """Stands in for the ranks: another one has room for `other` mini-batches."""

    def min(self, value: int) -> int:
        return min(value, self.other)


@given(st.lists(samples(), max_size=12), st.integers(1, 5), st.integers(0, 12))
def test_mini_batches_are_whole_and_hold_no_sample_twice(items, size, other):
    made = whole_mini_batches(items, size, Ranks(other=other))
    assert len(made) == min(len(items) // size, other) * size and made == items[: len(made)]


@given(
    st.lists(samples(), min_size=1, max_size=12),
    st.integers(1, 30),
    st.sampled_from([plan.cost, plan.tokens, len]),
    st.data(),
)
def test_micro_batches_keep_to_the_budget_and_hold_each_sample_once(items, budget, price, data):
    items, count = numbered(items), data.draw(st.integers(1, len(items)))
    made = plan.divide(items, budget, price, count)
    assert len(made) >= count and all(made)
    assert Counter(id(sample) for batch in made for sample in batch) == Counter(map(id, items))
    assert all(len(batch) == 1 or price(batch) <= budget for batch in made)


@given(st.lists(samples(), max_size=12))
def test_samples_are_grouped_by_prompt_and_none_is_lost(items):
    items = numbered(items)
    groups = by_prompt(items)
    assert Counter(id(sample) for group in groups for sample in group) == Counter(map(id, items))
    for group in groups:
        assert len({sample.sequences[0].item() for sample in group if sample.action_mask.any()}) <= 1


@given(st.sampled_from(["batch", "minibatch"]), st.integers(0, 5), st.integers(1, 3))
def test_every_mini_batch_takes_every_pass_once(scope, count, number):
    made = plan.in_order(range(count), number, scope)
    assert Counter(made) == Counter((batch, i) for batch in range(count) for i in range(number))
