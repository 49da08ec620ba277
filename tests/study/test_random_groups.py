"""Random groups have the sizes of Lopti's, and nothing of its choice."""

from pathlib import Path

import torch

from arlopti_openrlhf import token_method
from arlopti_openrlhf.token_method import Tokens

FILE = str(Path(__file__).parents[2] / "study" / "random_groups.py")


def groups(tokens: Tokens, *args: str) -> tuple[torch.Tensor, torch.Tensor]:
    (method,) = token_method.load([FILE], list(args))
    assert method.passes == ("low", "high") and method.groups
    low, high = method.weigh(tokens, None)
    return low, high


def response(length: int, seed: int) -> Tokens:
    log_probs = torch.rand(1, length, generator=torch.Generator().manual_seed(seed)).log()
    return Tokens(log_probs, torch.ones(1, length), torch.ones(1, length))


def test_the_groups_divide_the_response_in_lopti_s_sizes():
    tokens = response(40, 0)
    low, high = groups(tokens)
    assert torch.equal(low + high, tokens.mask) and set(low.unique().tolist()) == {0, 1}
    assert low.sum() == (tokens.probabilities < 0.5).sum()
    one_token = response(1, 0)
    assert torch.cat(groups(one_token)).sum() == 1


def test_the_draw_follows_from_the_seed_and_the_response():
    a, b = response(40, 0), response(40, 1)
    assert torch.equal(groups(a)[0], groups(a)[0])
    assert not torch.equal(groups(a)[0], groups(a, "random_groups.seed=1")[0])
    # Whatever else is weighed, and whatever PyTorch has drawn meanwhile
    both = Tokens(*(None if x is None else torch.cat([x, y]) for x, y in zip(b, a, strict=True)))
    torch.rand(3)
    assert torch.equal(groups(both)[0], torch.cat([groups(b)[0], groups(a)[0]]))


def test_probability_does_not_matter():
    """Of the tokens that are drawn as low, as many are likely ones as among all: 0.5 ± 4 standard errors."""
    drawn, likely = 0, 0
    for seed in range(200):
        tokens = response(40, seed)
        low = groups(tokens)[0].bool()
        drawn += int(low.sum())
        likely += int((low & (tokens.probabilities >= 0.5)).sum())
    assert abs(likely / drawn - 0.5) < 4 * 0.5 / drawn**0.5
