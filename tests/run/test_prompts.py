"""The prompts come in the order of the seed, and their place survives a checkpoint."""

import logging
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from arlopti_openrlhf.run.prompts import Prompts, seed_of


def prompts(seed: int = 1, count: int = 40) -> Prompts:
    return Prompts(DataLoader(list(range(count)), batch_size=1, collate_fn=list), seed)


def test_the_order_follows_from_the_seed_and_the_episode():
    first = [item for batch in prompts().rest for item in batch]
    torch.rand(1)  # what else the process draws does not matter
    state = torch.get_rng_state()
    assert [item for batch in prompts().rest for item in batch] == first
    assert sorted(first) == list(range(40)) != first
    assert [item for batch in prompts(seed=2).rest for item in batch] != first
    assert torch.equal(torch.get_rng_state(), state)
    later = prompts()
    later.begin_next_episode()
    assert later.rest.name == ("train", 1) and sorted(second := [i for b in later.rest for i in b]) == sorted(first)
    assert second != first


def test_a_place_is_that_of_a_moment_and_can_be_gone_to():
    whole, resumed = prompts(), prompts()
    whole.begin_next_episode()
    for _ in range(17):
        next(whole.rest)
    whole.leftover.append("a sample")
    state = pickle.loads(pickle.dumps(whole.state_dict()))
    assert "1 samples" in str(state) and "a sample" not in str(state)  # upstream logs it
    following = list(whole.rest)
    whole.leftover.clear()
    resumed.load_state_dict(state)
    assert resumed.leftover == ["a sample"] and resumed.rest.drawn == 17 and not resumed.is_drawn
    assert list(resumed.rest) == following and resumed.is_drawn


def test_a_place_among_other_prompts_is_not_gone_to_in_silence(caplog):
    logging.getLogger("arlopti_openrlhf.run.prompts").addHandler(caplog.handler)
    prompts(count=48).load_state_dict(prompts(count=40).state_dict())
    assert "run on 40 prompts, and now there are 48" in caplog.text
    with pytest.raises(ValueError, match="earlier version"):
        prompts().load_state_dict({"_sampler_iter_yielded": 3})


def test_seeds_differ_and_stay():
    seeds = {seed_of(42, "train", 0, prompt, sample) for prompt in range(100) for sample in range(100)}
    assert len(seeds) == 10_000 and all(0 <= seed < 2**56 for seed in seeds)
    assert seed_of(42, "train", 0, 0, 0) == 43614687250317358
