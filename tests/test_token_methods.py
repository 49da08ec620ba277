"""Each token method by hand, at constants that change nothing, and what is refused."""

import math
from pathlib import Path

import pytest
import torch

from arlopti_openrlhf import methods, token_method
from arlopti_openrlhf.token_method import Tokens


def load(source: str, *arguments: str) -> token_method.Method:
    name = methods.name_of(source)
    (method,) = token_method.load([source], [f"{name}.{argument}" for argument in arguments])
    return method


def tokens(probabilities, advantages, entropies=None, mask=None, rollout=None) -> Tokens:
    """Tokens of one response, (1, A). The probabilities that vLLM drew them by are π_old's if not given."""
    p = torch.tensor([probabilities], dtype=torch.float64)
    entropies = [0.0] * len(probabilities) if entropies is None else entropies
    mask = torch.ones_like(p) if mask is None else torch.tensor([mask])
    mu = p if rollout is None else torch.tensor([rollout]).double()
    return Tokens(p.log(), torch.tensor([advantages]).double(), mask, torch.tensor([entropies]).double(), mu.log())


def weights(method: token_method.Method, seen: Tokens) -> list:
    found = method.weigh(seen, method.statistic(seen))
    return [w[0].tolist() for w in found] if len(found) > 1 else found[0][0].tolist()


def test_ar_and_direction():
    # 0.3 · p + 0.7, and 1 + 0.2 · (1 − p).
    seen = tokens([1.0, 0.5, 0.1], [1.0, -1.0, 1.0])
    assert weights(load("ar"), seen) == pytest.approx([1.0, 0.85, 0.73])
    assert weights(load("ar", "alpha=-0.2"), seen) == pytest.approx([1.0, 1.1, 1.18])


def test_lopti():
    """Two passes that share the tokens; η = 0.5 belongs to the second."""
    assert weights(load("lopti"), tokens([0.4, 0.5, 0.9], [1.0] * 3)) == [[1, 0, 0], [0, 1, 1]]


def test_loptis_order_groups_and_quantile():
    """The quantile 0.5 of probabilities 0.1, 0.2, 0.6 and 0.8 is 0.4. Without it there is no statistic to compute."""
    seen = tokens([0.1, 0.8, 0.2, 0.6], [1.0] * 4)
    assert weights(load("lopti", "quantile=0.5"), seen) == [[1, 0, 1, 0], [0, 1, 0, 1]]
    assert weights(load("lopti", "eta=0.7", "order=high_first"), seen) == [[0, 1, 0, 0], [1, 0, 1, 1]]
    assert weights(load("lopti", "eta=0.7", "groups=high"), seen) == [0, 1, 0, 0]
    assert load("lopti", "quantile=0.5").statistic(seen) == pytest.approx(0.4)
    assert load("lopti", "quantile=0.5").needs_rollout_batch and not load("lopti").needs_rollout_batch
    assert load("lopti").statistic(seen) is None


def test_the_names_of_passes():
    both, high = load("lopti", "order=high_first"), load("lopti", "groups=high")
    assert (both.passes, high.passes, load("ar").passes) == (("high", "low"), ("high",), ("",))
    assert token_method.pass_labels([]) == token_method.pass_labels([load("ar")]) == [""]
    assert token_method.pass_labels([load("ar"), both]) == ["lopti/high", "lopti/low"]
    two = load("ar")._replace(passes=("pass1", "pass2"))
    assert token_method.pass_labels([two]) == ["token_method/pass1", "token_method/pass2"]
    assert token_method.pass_labels([high, two]) == ["lopti/high/pass1", "lopti/high/pass2"]


def test_what_is_logged_of_the_weights():
    """Four tokens with weights 0, 0, 1 and 2: mean 3/4, half of them 0, effective share 9 / (4 · 5)."""
    sums = token_method.WeightSums(4, 3, 5, 2)
    assert load("ar").metrics({"": sums}, None) == {"ar/mean_weight": 0.75}
    logged = load("steer").metrics({"": sums}, 0.1)
    names = "mean_weight", "zero_share", "effective_share"
    assert logged == dict(zip([f"token_method/steer/{name}" for name in names], (0.75, 0.5, 9 / 20), strict=True))
    # 40 tokens, of which 10 are in the low group.
    low, high = token_method.WeightSums(40, 10, 10, 30), token_method.WeightSums(40, 30, 30, 10)
    expected = {"lopti/low_share": 0.25, "lopti/eta": 0.5}
    assert load("lopti").metrics({"low": low, "high": high}, None) == expected
    assert load("lopti", "groups=high").metrics({"high": high}, None) == expected
    assert load("lopti", "quantile=0.25").metrics({"low": low}, 0.1) == expected | {"lopti/eta": 0.1}


def test_eighty_twenty():
    # ⌈0.4 · 5⌉ = 2 tokens: entropies 0.9 and 0.7. The one without a mask has more, and does not count.
    seen = tokens([0.5] * 6, [1.0] * 6, [0.1, 0.9, 0.3, 0.7, 0.2, 5.0], mask=[1, 1, 1, 1, 1, 0])
    assert weights(load("eighty_twenty", "share=0.4"), seen) == [0, 1, 0, 1, 0, 0]
    # A tie with the second is selected too.
    assert weights(load("eighty_twenty", "share=0.4"), tokens([0.5] * 5, [1.0] * 5, [0, 9, 3, 3, 1])) == [
        0,
        1,
        1,
        1,
        0,
    ]


def test_stapo():
    # Rare with A > 0: the first four, whose entropies' ⌈0.75 · 4⌉ = 3rd is 0.3. Below it lie 0.1 and 0.2.
    seen = tokens([0.001] * 5 + [0.5], [1.0] * 4 + [-1.0, 1.0], [0.1, 0.2, 0.3, 0.4, 0.0, 0.0])
    assert weights(load("stapo"), seen) == [0, 0, 1, 1, 1, 1]


def test_a3po():
    # ⌊0.4 · 5⌋ = 2 of each response: the rarest of the right one, the most probable of the wrong one.
    p = torch.tensor([[0.9, 0.1, 0.5, 0.2, 0.8], [0.9, 0.1, 0.5, 0.2, 0.8], [0.7, 0.6, 0.3, 0.1, 0.1]])
    a = torch.tensor([[1.0], [-1.0], [1.0]]).expand(3, 5)
    mask = torch.tensor([[1.0] * 5, [1.0] * 5, [1.0, 1.0, 1.0, 0.0, 0.0]])
    method = load("a3po", "share=0.4", "positive=3", "negative=2")
    (found,) = method.weigh(Tokens(p.log(), a, mask), None)
    # Of three tokens ⌊1.2⌋ = 1: the padding, though rarer, is none.
    assert found.tolist() == [[1, 3, 1, 3, 1], [2, 1, 1, 1, 2], [1, 1, 3, 0, 0]]


def test_stare():
    # ⌈0.5 · 3⌉ = 2 of the three tokens with A > 0, and ⌈0.5 · 1⌉ = 1 of the other. The mean entropy is 0.2.
    seen = tokens([0.9, 0.1, 0.5, 0.2], [1.0, 1.0, 1.0, -1.0], [0.2] * 4)
    assert weights(load("stare", "share=0.5"), seen) == pytest.approx([1, 1.1, 1.1, 1])
    assert weights(load("stare", "share=0.5", "negative=0.9"), seen) == pytest.approx([1, 1.1, 1.1, 0.9])
    assert weights(load("stare", "share=0.5", "entropy=0.2"), seen) == [1, 1, 1, 1]  # the gate is closed


def test_entropy_advantage():
    # A + min(0.4 · H, |A| / 2): 2 + 0.4, 2 + 1, -2 + 0.4, -0.5 + 0.25, and 0.
    seen = tokens([0.5] * 5, [2.0, 2.0, -2.0, -0.5, 0.0], [1.0, 9.0, 1.0, 1.0, 1.0])
    found = torch.tensor(weights(load("entropy_advantage"), seen)) * seen.advantages[0]
    assert found.tolist() == pytest.approx([2.4, 3.0, -1.6, -0.25, 0.0])


def test_steer():
    # Ω = |A| (1 − p) |ln p + H|: 2 · 0.5 · (1 + ln 0.5) = 0.3069, the greatest; 1 · 0.5 · 0.3069 = 0.1534.
    seen = tokens([0.5, 0.5, 1.0], [2.0, -1.0, 5.0], [1.0, 1.0, 1.0])
    assert weights(load("steer"), seen) == pytest.approx([0.8, math.exp(math.log(0.8) / 4 * 2), 1.0])
    # Where nothing changes much, 0.02 stands for the greatest: 0.8^(0.01 / 0.02).
    small = tokens([0.5], [0.02 / (1 + math.log(0.5))], [1.0])
    assert weights(load("steer"), small) == pytest.approx([math.sqrt(0.8)])


def test_surprisal_band():
    # −ln 0.5 = 0.693 over 1 and over 0.1; a certain token has the ratio 0.
    seen = tokens([0.5, 0.5, 1.0], [1.0] * 3, [1.0, 0.1, 0.0])
    assert weights(load("surprisal_band", "lo=0.5", "hi=2"), seen) == [1, 0, 0]
    assert weights(load("surprisal_band", "lo=0", "hi=2"), seen) == [1, 0, 1]


def test_positive_weight():
    assert weights(load("positive_weight"), tokens([0.5] * 3, [2.0, -2.0, 0.0])) == pytest.approx([0.1, 1, 1])


def test_clip_cov():
    # Means 0 and ln p's −1: cov = A · (ln p + 1) = 1.5, 0.5, 1.5, −0.5, and of the last four 0 · x.
    p = [math.exp(x) for x in (0.5, -0.5, -2.5, -1.5, -1.0, -1.0, -1.0, -1.0)]
    seen = tokens(p, [1.0, 1.0, -1.0, 1.0, 0.0, 0.0, 0.0, -2.0])
    assert weights(load("clip_cov", "share=1"), seen) == [0, 1, 0, 1, 1, 1, 1, 1]


def test_clip_cov_draws_one_token_at_least_and_the_same_in_any_order():
    generator = torch.Generator().manual_seed(0)
    p, a = torch.rand(2, 1, 5000, generator=generator)
    seen = Tokens(p.log(), 4 * a - 2, torch.ones_like(p))
    method, order = load("clip_cov", "share=0.002"), torch.randperm(5000, generator=generator)
    (found,) = method.weigh(seen, method.statistic(seen))
    shuffled = Tokens(*(x[:, order] for x in seen[:3]))
    (again,) = method.weigh(shuffled, method.statistic(shuffled))
    assert (found == 0).sum() == 10 and torch.equal(again, found[:, order])
    few = load("clip_cov", "share=0")
    assert (few.weigh(seen, few.statistic(seen))[0] == 0).sum() == 1


def test_clip_cov_draws_no_token_beside_those_drawn_that_has_another_probability():
    """1,000 tokens of ln p = −1e-9, −2e-9, ... and A = 1.5, 3,000 of ln p = −4 and A = 0: cov = 3.375 and 0.375.

    In float32 hundreds of the first share a covariance.
    """
    log_probs = torch.cat([torch.arange(1, 1001) * -1e-9, torch.full((3000,), -4.0)])[None]
    advantages = torch.where(log_probs > -1, 1.5, 0.0)
    seen = Tokens(log_probs, advantages, torch.ones_like(log_probs))
    method = load("clip_cov", "share=0.005")
    assert len(log_probs.unique()) == 1001
    assert (method.weigh(seen, method.statistic(seen))[0] == 0).sum() == 20


def test_cw_grpo():
    """ln p = −1, −1, −3, −3 around −2, and A = 1, −1, 1, −3 around −0.5: c = 1.5, −0.5, −1.5, 2.5.

    Their mean is 0.5, and σ² = (1 + 1 + 4 + 4) / 4 = 2.5. So the weights are exp(−c² / 5) over their mean.
    """
    seen = tokens([math.exp(x) for x in (-1, -1, -3, -3)], [1.0, -1.0, 1.0, -3.0])
    kernel = [math.exp(-c * c / 5) for c in (1.5, -0.5, -1.5, 2.5)]
    assert weights(load("cw_grpo"), seen) == pytest.approx([4 * k / sum(kernel) for k in kernel])


def test_cw_grpo_has_a_mean_weight_of_one_over_the_rollout_batch_whatever_the_padding():
    method, seen = load("cw_grpo"), random_tokens((40, 300))
    (found,) = method.weigh(seen, method.statistic(seen))
    assert found.double().sum() / seen.mask.sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("p", "advantages"),
    [
        *[([0.9, 0.5, 0.1], [1.0] * 3), ([0.5] * 3, [1.0, -1.0, 2.0]), ([0.5], [2.0])],
        ([0.9, 0.1] * 3, [0.7, -0.1] * 3),
    ],
)
def test_cw_grpo_is_the_plain_update_where_nothing_covaries(p, advantages):
    """All tokens have one advantage, as in a batch without any, or one probability: every c is 0. Of two kinds of
    tokens, as many of each, every c is the same but for rounding."""
    assert weights(load("cw_grpo"), tokens(p, advantages)) == [1] * len(p)


@pytest.mark.parametrize("source", [("cw_grpo",), ("ar", "alpha=1")])
def test_a_weight_above_zero_stays_above_zero(source):
    """Of 2,500 tokens one is 50 σ from the mean, and its exp(−50² / 2) is no number of float32 nor of float64. The
    same token has the probability exp(−200). A weight of 0 would leave it out of the KL and entropy terms."""
    seen = tokens([0.5] * 2500, [1.0, -1.0] * 1250)
    seen = Tokens(*(field.float() for field in seen))
    seen.log_probs[0, 0], seen.advantages[0, 0] = -200.0, 1e6
    assert min(weights(load(*source), seen)) > 0


def test_gmts():
    # H · |A| = 0.2, 1.5, 0.6, 0.9, 0; ⌈0.4 · 5⌉ = 2 of them. By entropy alone it would be the first and the last.
    seen = tokens([0.5] * 5, [0.1, -1.0, 2.0, 3.0, 0.0], [2.0, 1.5, 0.3, 0.3, 9.0])
    assert weights(load("gmts", "share=0.4"), seen) == [0, 1, 0, 1, 0]
    # One token of five has an advantage, and two are to be selected: the second ties with all others.
    assert weights(load("gmts", "share=0.4"), tokens([0.5] * 5, [0, 0, 1.0, 0, 0], [1.0] * 5)) == [1] * 5


def test_gmts_divides_by_what_it_keeps():
    assert load("gmts").divides_by_kept and load("gmts").needs_entropies


def test_dppo():
    # π_old − μ = 0.3, 0.3, −0.3, −0.3, 0.3 and twice 0.1: 0 where it has the advantage's sign and more than 0.2.
    p, mu = [0.8, 0.8, 0.2, 0.2, 0.8, 0.5, 0.3], [0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.2]
    seen = tokens(p, [1.0, -1.0, 1.0, -1.0, 0.0, 2.0, 2.0], rollout=mu)
    assert weights(load("dppo"), seen) == [0, 1, 1, 0, 1, 1, 1]
    assert weights(load("dppo", "delta=0.05"), seen) == [0, 1, 1, 0, 1, 0, 0]


def test_dppo_changes_nothing_where_the_rollout_policy_is_the_old_one():
    seen = tokens([0.9, 0.1, 0.5], [1.0, -1.0, 0.0])
    assert weights(load("dppo", "delta=0"), seen) == [1, 1, 1]


NEUTRAL = {
    "ar": ["alpha=0"],
    "lopti": ["eta=1e-9"],
    "eighty_twenty": ["share=1"],
    "stapo": ["tau=0"],
    "a3po": ["positive=1", "negative=1"],
    "stare": ["positive=1", "negative=1"],
    "entropy_advantage": ["alpha=0"],
    "steer": ["w_min=1"],
    "surprisal_band": ["lo=0", "hi=inf"],
    "positive_weight": ["positive=1"],
    "clip_cov": ["low=5"],
    "cw_grpo": [],
    "gmts": ["share=1"],
    "dppo": ["delta=1"],
}


def random_tokens(shape=(4, 9)) -> Tokens:
    generator = torch.Generator().manual_seed(3)
    p, a, h = torch.rand(3, *shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) < 0.8).float()
    return Tokens(p.log() * 3, 4 * a - 2, mask, 3 * h, torch.rand(shape, generator=generator).log())


@pytest.mark.parametrize("name", methods.built_in())
def test_neutral_constants_are_the_identity_to_the_last_bit(name):
    method, seen = load(name, *NEUTRAL[name]), random_tokens()
    if name == "cw_grpo":  # it has no constants, and is neutral where no token differs from the others
        seen = seen._replace(advantages=torch.full_like(seen.advantages, 0.5))
    assert torch.equal(method.weigh(seen, method.statistic(seen))[-1], seen.mask)


@pytest.mark.parametrize("name", methods.built_in())
def test_published_constants_change_something(name):
    method, seen = load(name, *(["lo=0.5", "hi=2"] if name == "surprisal_band" else [])), random_tokens((40, 300))
    seen = seen._replace(entropies=seen.entropies / 6, log_probs=seen.log_probs * 3)
    assert not torch.equal(method.weigh(seen, method.statistic(seen))[-1], seen.mask)


@pytest.mark.parametrize("name", methods.built_in())
def test_a_docstring_has_the_paper_the_formula_and_the_constants(name):
    text = (methods.FOLDER / f"{name}.py").read_text("utf-8").split('"""')[1]
    parts = {line.removeprefix("- ").partition(":")[0] for line in text.splitlines() if line.startswith("- ")}
    assert {"Formula", "Code read", "Constants", "Deviations"} < parts and {"Paper", "Papers"} & parts


def test_the_page_begins_with_a_method_that_works(tmp_path):
    """And its second one asks for entropies, whose mean over the rollout batch is 2: above it lies 3 alone."""
    page = (methods.FOLDER.parents[1] / "docs" / "token_methods.md").read_text("utf-8")
    first, second = (block.partition("```")[0] for block in page.split("```python\n")[1:])
    assert page.index("```python") < 200 and len(first.splitlines()) < 10
    seen = tokens([0.001, 0.001, 0.5], [-1.0, 1.0, -1.0], [1.0, 2.0, 3.0])
    assert weights(load(write(tmp_path, first, "first.py")), seen) == [0, 1, 1]
    assert weights(load(write(tmp_path, first, "first.py"), "below=0.6"), seen) == [0, 1, 0]
    assert weights(load(write(tmp_path, second, "second.py")), seen) == [0, 0, 1]


def test_weights_multiply_over_all_combinations_of_passes():
    a, b, c = (torch.tensor([[x]]) for x in (2.0, 3.0, 5.0))
    assert [w.item() for w in token_method.combine([[a, b], [c, a]])] == [10, 4, 15, 6]


def write(folder: Path, body: str, name: str = "mine.py") -> str:
    (folder / name).write_text("import torch\n" + body, encoding="utf-8")
    return str(folder / name)


WEIGH = "def weigh(tokens, *, x=1):\n    return "


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def weight(tokens): pass\n", "mine: it has no function `weigh`"),
        ("def weigh(:\n", "mine: SyntaxError: invalid syntax"),
        ("import nowhere_to_be_found\n", "mine: ModuleNotFoundError: No module named"),
        ("raise SystemExit('usage')\n", "mine: SystemExit: usage"),
        ("def weigh(): pass\n", "mine: weigh is called as weigh(tokens, *, ...)"),
        ("def weigh(tokens, other): pass\n", "mine: weigh is called as weigh(tokens, *, ...)"),
        (
            "def statistic(tokens): pass\ndef weigh(tokens): pass\n",
            "weigh is called as weigh(tokens, statistic, *, ...)",
        ),
        ("def weigh(tokens, *, need): pass\n", "mine: needs need: give --algo.token_method_args"),
        (WEIGH + "None\n", "mine: weigh returned NoneType"),
        (WEIGH + "[]\n", "mine: weigh returned no tensor at all"),
        (WEIGH + "tokens.log_probs[0]\n", "mine: weigh returned the shape (5,) for tokens of the shape (1, 5)"),
        (WEIGH + "torch.ones(3, 5)\n", "mine: weigh returned the shape (3, 5) for tokens of the shape (1, 5)"),
        (
            WEIGH + "tokens.log_probs * torch.nan\n",
            "mine: weigh returned nan for a token of π_old 0.9 and advantage 1",
        ),
        (WEIGH + "1 / (tokens.log_probs * 0)\n", "mine: weigh returned -inf"),
        (WEIGH + "tokens.advantages\n", "returned -1 for a token of π_old 0.9 and advantage -1: negative"),
        (
            WEIGH + "(\n        tokens.entropies > 1)\n",
            "mine: tokens.entropies is there if the file says NEEDS_ENTROPIES = True (mine.py, line 4)",
        ),
        (WEIGH + "tokens.rollout_log_probs\n", "says NEEDS_ROLLOUT_LOG_PROBS = True (mine.py, line 3)"),
        (WEIGH + "tokens.masks\n", "mine: AttributeError: 'Tokens' object has no attribute 'masks' (mine.py, line 3)"),
        ("\n1 / 0\n", "mine: ZeroDivisionError: division by zero (mine.py, line 3)"),
        (
            "def half(x): return x.halve()\n" + WEIGH + "half(tokens.mask)\n",
            "object has no attribute 'halve' (mine.py, line 2)",
        ),
        (
            WEIGH + "[tokens.mask] * (2 if tokens.mask.numel() < 9 else 1)\n",
            "mine: weigh returned 2 tensors, and 1 before",
        ),
        (
            WEIGH + "dict.fromkeys(['a', 'b'] if tokens.mask.numel() > 9 else ['b', 'a'], tokens.mask)\n",
            "mine: weigh returned the passes b, a, and a, b before",
        ),
        (
            WEIGH + "tokens.mask\ndef metrics(sums, statistic): return {'mean': sums['only'].mean}\n",
            "mine: KeyError: 'only' (mine.py, line 4)",
        ),
    ],
)
def test_a_file_that_cannot_work_is_refused_in_one_line(tmp_path, body, said):
    with pytest.raises(ValueError) as refused:
        token_method.load([write(tmp_path, body)], [])
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("sources", "arguments", "said"),
    [
        (["aar"], [], "aar: there is no such token method. Give a .py file, or one of a3po, ar,"),
        (["missing.py"], [], "missing.py: there is no such file"),
        (["ar", "ar"], [], "ar: given twice"),
        (["ar"], ["lopti.eta=1"], "lopti.eta=1: there is no token method lopti among those given (ar)"),
        (["ar"], ["ar.beta=1"], "ar: weigh has no keyword argument beta; it takes alpha"),
        (["ar"], ["alpha=1"], "alpha=1 is not of the form NAME.KEY=VALUE"),
        (["ar"], ["ar.alpha="], "ar.alpha= is not of the form"),
        (["ar"], ["ar.alpha=1", "ar.alpha=1"], "ar.alpha=1: ar.alpha is given as 1 already"),
        (["lopti"], ["lopti.order=low"], "lopti: order must be low_first or high_first"),
        (
            ["lopti"],
            ["lopti.groups=none"],
            "and groups both, low or high: low_first, none",
        ),
        (["surprisal_band"], ["surprisal_band.lo=1"], "surprisal_band: needs hi"),
        *(
            ([argument.partition(".")[0]], [argument], "must lie in")
            for argument in (
                "ar.alpha=1.1",
                "ar.alpha=nan",
                "ar.alpha=text",
                "lopti.eta=0",
                "lopti.quantile=0",
                "eighty_twenty.share=0",
                "stapo.tau=2",
                "stapo.kappa=-1",
                "a3po.share=2",
                "a3po.positive=-1",
                "stare.negative=-1",
                "stare.share=2",
                "entropy_advantage.alpha=-1",
                "entropy_advantage.kappa=0.5",
                "steer.w_min=0",
                "positive_weight.positive=-1",
                "clip_cov.high=0",
                "clip_cov.share=-1",
                "gmts.share=0",
                "dppo.delta=1.5",
            )
        ),
    ],
)
def test_a_bad_argument_is_named(sources, arguments, said):
    with pytest.raises(ValueError) as refused:
        token_method.load(sources, arguments)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "value"), [("False", False), ("true", True), ("1e-3", 0.001), ("2", 2), ("high", "high")]
)
def test_a_constant_is_read_from_the_command_line(text, value):
    assert methods.parse_argument(f"mine.key={text}") == ("mine", "key", value)


def test_a_method_that_writes_into_its_tokens_changes_no_other(tmp_path):
    body = "def weigh(tokens):\n    tokens.mask[tokens.probabilities < 0.3] = 0\n    return tokens.mask\n"
    (own,) = token_method.load([write(tmp_path, body)], [])
    seen = tokens([0.1, 0.5], [1.0, 1.0])
    assert weights(own, seen) == [0, 1] and seen.mask.tolist() == [[1, 1]]


def test_weights_that_a_later_batch_spoils_are_refused(tmp_path):
    method = load(write(tmp_path, WEIGH + "torch.where(tokens.log_probs < -20, torch.nan, 1.0)\n"))
    with pytest.raises(ValueError, match="token method mine: weigh returned nan for a token of π_old 1e-12"):
        method.weigh(tokens([0.5, 1e-12], [1.0, 1.0]), None)
    # Outside the mask anything goes.
    assert weights(method, tokens([0.5, 1e-12], [1.0, 1.0], mask=[1, 0])) == [1, 0]
