"""Token methods through real Ray workers, each beside plain PyTorch: two ranks, ZeRO-3, packed, shared prompts."""

import math
from pathlib import Path

import pytest
import torch
from arlopti_testing.update_workers import (
    OFF,
    RANKS,
    SAMPLES,
    Group,
    assert_no_nan,
    experiences,
    flags,
    relative_distance,
)
from transformers import AutoModelForCausalLM

from arlopti_openrlhf.methods import built_in
from arlopti_openrlhf.token_method import load

pytestmark = [pytest.mark.whole_stack, pytest.mark.usefixtures("ray_cluster")]
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "token_method.py")
PLAIN = OFF | {"algo.ar.alpha": None, "ds.packing_samples": True, "algo.kl.use_loss": False, "algo.kl.init_coef": 0.0}


@pytest.fixture(scope="module")
def group(tiny_model):
    more = "--ds.zero_stage 3 --actor.max_norm 0 --ds.packing_samples --train.micro_batch_size 2".split()
    return Group(flags(tiny_model, *more), selective=True)


def lowest(values: torch.Tensor, among: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` lowest of some values, one by one."""
    chosen = sorted(among.nonzero()[:, 0].tolist(), key=lambda i: values[i].item())[:count]
    return torch.zeros_like(among).index_fill(0, torch.tensor(chosen, dtype=torch.long), True)


def ceil(x: float) -> int:
    return math.ceil(round(x, 6))


def a3po(p, h, a, response):
    w = torch.ones_like(p)
    for i in response.unique():
        own = response == i
        count = max(1, int(own.sum().item() * 0.2))
        w[lowest(p, own, count) & (a > 0)] = 2.0
        w[lowest(-p, own, count) & (a < 0)] = 2.0
    return w


def stapo(p, h, a, response):
    rare = (a > 0) & (p < 0.003)
    threshold = sorted(h[rare].tolist())[ceil(0.75 * rare.sum().item()) - 1]
    return 1.0 - (rare & (h < threshold)).float()


def stare(p, h, a, response):
    w = torch.ones_like(p)
    w[lowest(p, a > 0, ceil(0.1 * (a > 0).sum().item()))] = 1.1
    w[lowest(p, a < 0, ceil(0.1 * (a < 0).sum().item()))] = 0.9
    return w


def steer(p, h, a, response):
    change = a.abs() * (1 - p) * (p.log() + h).abs()
    return torch.exp(change / change.max() * math.log(0.8)).clamp(0.8, 1)


def cov(p, a):
    return (a - a.mean()) * (p.log() - p.log().mean())


def cw_grpo(p, h, a, response):
    w = torch.exp(-(cov(p, a) ** 2) / (2 * cov(p, a).var(correction=0)))
    return w / w.mean()


# Of p, H and A of all tokens, of which response each is, and of μ. The constants suit the tiny model,
# whose tokens all have a probability of about 1/320.
METHODS = {
    "ar": (["alpha=-0.2"], lambda p, h, a, r: 1 + 0.2 * (1 - p)),
    "lopti": (["eta=0.003"], lambda p, h, a, r: [(p < 0.003).float(), (p >= 0.003).float()]),
    "eighty_twenty": ([], lambda p, h, a, r: lowest(-h, h > 0, ceil(0.2 * len(h))).float()),
    "stapo": (["tau=0.003"], stapo),
    "a3po": ([], a3po),
    "stare": (["entropy=9", "negative=0.9"], stare),
    "entropy_advantage": (
        [],
        lambda p, h, a, r: torch.where(a == 0, 1.0, 1 + torch.minimum(0.4 * h, a.abs() / 2) / a),
    ),
    "steer": ([], steer),
    "surprisal_band": (["lo=0.9", "hi=1.2"], lambda p, h, a, r: ((-p.log() / h - 1.05).abs() <= 0.15).float()),
    "positive_weight": ([], lambda p, h, a, r: torch.where(a > 0, 0.1, 1.0)),
    "clip_cov": (["share=1", "low=0.3"], lambda p, h, a, r: 1.0 - ((cov(p, a) > 0.3) & (cov(p, a) < 5)).float()),
    "cw_grpo": ([], cw_grpo),
    "gmts": ([], lambda p, h, a, r: lowest(-h * a.abs(), h > 0, ceil(0.2 * len(h))).float()),
    "dppo": ([], lambda p, h, a, r, mu: 1.0 - ((a > 0) & (p - mu > 0.2) | (a < 0) & (p - mu < -0.2)).float()),
    EXAMPLE: ([], lambda p, h, a, r: 1.0 - ((p <= p.kthvalue(ceil(0.2 * len(p))).values) & (a < 0)).float()),
}
DIVIDE_BY_KEPT = ("eighty_twenty", "stapo", "gmts")
READ_ROLLOUT = ("dppo",)
# Without it a run has no log-probs of the rollout. Clipped to 1, it corrects nothing.
CORRECTION = {"level": "token", "mode": "clip", "threshold": [1.0, 1.0]}


def given(source: str, *more: str) -> dict:
    name = Path(source).stem
    arguments = [f"{name}.{argument}" for argument in METHODS[source][0]]
    asked = {"algo.token_method": [source, *more], "algo.token_method_args": arguments}
    correction = {f"algo.advantage.is_correction_{key}": value for key, value in CORRECTION.items()}
    return asked | (correction if source in READ_ROLLOUT else {})


def references(model: str, batch: list, source: str) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return the gradient of each pass and its weights, from the whole logits of each response, in float32."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    columns = []
    for i, sample in enumerate(batch):
        log_p = policy(sample.sequences).logits[0, :-1].log_softmax(-1)
        log_prob = log_p.gather(-1, sample.sequences[0, 1:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1).detach()
        mask = sample.action_mask[0].bool()
        rows = entropy, sample.advantages[0], torch.full_like(entropy, i), sample.rollout_log_probs[0].exp()
        columns.append([x[mask] for x in (log_prob, *rows)])
    log_prob, h, a, response, mu = map(torch.cat, zip(*columns, strict=True))
    of_rollout = [mu] if source in READ_ROLLOUT else []
    weights = METHODS[source][1](log_prob.detach().exp(), h, a, response, *of_rollout)
    gradients = []
    for w in weights if isinstance(weights, list) else [weights]:
        count = (w != 0).sum() if source in DIVIDE_BY_KEPT else len(w)
        loss = -(w * a * log_prob).sum() / count  # at one θ, the gradient of PPO's
        gradients.append(list(torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)))
    return gradients, weights if isinstance(weights, list) else [weights]


@pytest.mark.parametrize("source", METHODS, ids=lambda source: Path(source).stem)
def test_gradients_and_metrics_are_the_references(group, tiny_model, source):
    batch = experiences(seed=1, empty=(3,), samples_per_prompt=4)
    batch[5].advantages.zero_()  # an idle response, which no forward pass of the update computes
    expected, weights = references(tiny_model, batch, source)
    result = group.run(batch, PLAIN | given(source), on_policy=True)
    assert_no_nan(result.status)
    assert len(result.gradients) == len(expected)
    for ours, theirs in zip(result.gradients, expected, strict=True):
        assert relative_distance(ours, theirs) < 1e-5
    if source == "ar":
        assert result.status["ar/mean_weight"] == pytest.approx(weights[0].mean().item(), rel=1e-5)
    if source == "lopti":
        assert result.status["lopti/low_share"] == pytest.approx(weights[0].mean().item(), rel=1e-5)
        assert result.status["lopti/eta"] == 0.003
    name = f"token_method/{Path(source).stem}"
    assert (source in ("ar", "lopti")) != any(logged.startswith(name) for logged in result.status)
    for w in weights:
        figures = w.mean(), (w == 0).float().mean(), w.sum() ** 2 / (len(w) * (w**2).sum())
        for figure, value in zip(("mean_weight", "zero_share", "effective_share"), figures, strict=True):
            if source not in ("ar", "lopti"):
                assert result.status[f"{name}/{figure}"] == pytest.approx(value.item(), rel=1e-5)
        assert 0 < w.mean() and not torch.equal(w, torch.ones_like(w)), "the reference changes nothing"


def run(group, source: str, *more: str, **overrides):
    batch = experiences(seed=1, samples_per_prompt=4)
    return group.run(batch, PLAIN | given(source, *more) | overrides, on_policy=True)


def test_lopti_as_a_method_is_the_flags_to_the_last_bit(group):
    ours = run(group, "lopti")
    flags = group.run(experiences(seed=1, samples_per_prompt=4), PLAIN | {"algo.lopti.eta": 0.003}, on_policy=True)
    assert len(ours.gradients) == 2
    for a, b in zip(ours.gradients, flags.gradients, strict=True):
        assert all(map(torch.equal, a, b))
    assert "lopti/low/policy_loss" in ours.status and ours.status == flags.status


def test_methods_multiply_and_lopti_divides_them_into_its_passes(group):
    """80/20's tokens by AR's weights, in one pass, or in Lopti's two, whose gradients add up to it."""
    args = {"algo.token_method_args": ["ar.alpha=1"]}
    (whole,) = run(group, "eighty_twenty", "ar", **args).gradients
    result = run(group, "eighty_twenty", "ar", **args, **{"algo.lopti.eta": 0.003})
    low, high = result.gradients
    assert relative_distance([a + b for a, b in zip(low, high, strict=True)], whole) < 1e-5
    assert min(relative_distance(part, whole) for part in (low, high)) > 0.1
    assert result.status["ar/mean_weight"] < 0.1
    (alone,) = run(group, "eighty_twenty").gradients
    assert relative_distance(whole, alone) > 0.9


READING_ENTROPIES = ("eighty_twenty", "stapo", "stare", "entropy_advantage", "steer", "surprisal_band", "gmts")


def test_the_methods_that_read_entropies_are_all_in_the_table():
    methods = load(built_in(), ["surprisal_band.lo=0.9", "surprisal_band.hi=1.2"])
    assert {method.name for method in methods if method.needs_entropies} == set(READING_ENTROPIES)


@pytest.mark.parametrize("source", READING_ENTROPIES)
def test_a_quantile_divides_the_tokens_of_a_method_that_reads_entropies(group, source):
    """The forward pass that gives the entropies gives log π_old too, and so the threshold."""
    share = 0.6 if source == "gmts" else 0.9  # GMTS keeps none of the tenth of the highest probabilities here
    (whole,) = run(group, source).gradients
    result = run(group, source, **{"algo.lopti.quantile": share})
    low, high = result.gradients
    assert relative_distance([a + b for a, b in zip(low, high, strict=True)], whole) < 1e-5
    assert result.status["lopti/low_share"] == pytest.approx(share, abs=0.02)
    assert_no_nan(result.status)


@pytest.mark.parametrize("loss", ["token-mean", "seq-mean-token-mean"])
def test_normalized_weights_have_a_mean_of_one(group, loss):
    """The gradient is the one without, divided by the mean weight. π_old is known before the first pass."""
    overrides = {"actor.loss_agg_mode": loss, "algo.token_method_args": ["ar.alpha=0.9", "positive_weight.positive=3"]}
    raw = run(group, "positive_weight", "ar", **overrides)
    result = run(group, "positive_weight", "ar", **overrides, **{"algo.token_method_normalize": True})
    mean = result.status["token_method/mean_weight"]
    assert 0 < mean < 0.5 and "token_method/mean_weight" not in raw.status
    divided = [gradient / mean for gradient in raw.gradients[0]]
    assert (
        relative_distance(result.gradients[0], divided)
        < 1e-5
        < relative_distance(result.gradients[0], raw.gradients[0])
    )
    if loss == "token-mean":  # the mean of the product, over all ranks
        by_method = [result.status[f"{name}/mean_weight"] for name in ("token_method/positive_weight", "ar")]
        assert mean == pytest.approx(math.prod(by_method), rel=1e-2)  # all probabilities are about 1/320
    assert all(raw.unknown) and not any(result.unknown)


def test_normalized_masks_train_as_they_are_to_the_last_bit(group):
    """Lopti's masks add up to one, and 80/20 divides by what it keeps. With 80/20, both runs know π_old before."""
    args = {"algo.token_method_args": ["lopti.eta=0.003"]}
    raw, normalized = (
        run(group, "eighty_twenty", "lopti", **args, **{"algo.token_method_normalize": on}) for on in (False, True)
    )
    assert normalized.status["token_method/mean_weight"] == 1 and len(raw.gradients) == 2
    for a, b in zip(raw.gradients, normalized.gradients, strict=True):
        assert all(map(torch.equal, a, b))


def test_only_tokens_with_a_weight_are_computed(group):
    """π_old and the entropies come from one forward pass. Without a statistic the first pass is that one."""
    run(group, "positive_weight")  # a model checks itself before its first pass
    whole = run(group, "positive_weight")
    assert all(whole.unknown) and all(with_gradient for with_gradient, _ in whole.forwards)
    masked = run(group, "eighty_twenty")
    updated, tokens = (sum(seen[i] for seen in masked.seen) for i in (3, 2))
    assert updated / tokens == pytest.approx(masked.status["token_method/eighty_twenty/mean_weight"], abs=0.1)
    assert all(masked.unknown)
    before, within = ([n for with_gradient, n in masked.forwards if with_gradient == kind] for kind in (False, True))
    assert 0 < len(before) < SAMPLES // RANKS  # as many samples at a time as fit, and once
    assert sum(within) < sum(n for _, n in whole.forwards)


@pytest.mark.parametrize(
    ("source", "is_whole", "is_known"),
    [
        ("eighty_twenty", False, False),  # what the tokens that it leaves out would have, nobody computes
        ("positive_weight", True, True),
        ("lopti", True, False),  # its groups have the gradient that there is without it
    ],
)
def test_an_entropy_and_a_share_without_weights_are_those_of_all_tokens_or_left_out(group, source, is_whole, is_known):
    status = run(group, source).status
    assert ("tokens/entropy" in status) == is_whole
    assert "tokens/p0.00-0.25/grad_share" in status
    assert ("tokens/p0.00-0.25/grad_share_unweighted" in status) == is_known


@pytest.mark.parametrize("more", [{}, {"algo.kl.init_coef": 0.1}], ids=["", "KL in the reward"])
def test_what_is_computed_in_advance_changes_nothing(tiny_model, more):
    """Two mini-batches, two epochs, weights that move: entropies from the first pass, or all before it, for STEER's
    maximum. With a KL in the reward, π_old is known before the update, and a forward pass more gives entropies.
    """
    flat = "--ds.packing_samples --actor.adam.lr 1e-3 --train.batch_size 8".split()
    parameters = []
    for others in ([], ["steer"]):
        group = Group(flags(tiny_model, *flat), selective=True)
        start = group.parameters()
        overrides = PLAIN | {"train.max_epochs": 2, "algo.token_method": ["entropy_advantage", *others]} | more
        overrides["algo.token_method_args"] = [f"{name}.w_min=1" for name in others]
        batch = experiences(seed=2, samples_per_prompt=4)
        batch[1].advantages.zero_()
        result = group.run(batch, overrides, on_policy=True)
        assert result.steps == 4 and all(result.unknown) != bool(more)
        parameters.append(group.parameters())
    assert relative_distance(*parameters) < 1e-5 < 1e-3 < relative_distance(start, parameters[0])


def test_kept_tokens_divide_a_mean_over_responses(group, tiny_model):
    """Each response by its own kept tokens, and the sum by the responses that have any."""
    batch = experiences(seed=1, samples_per_prompt=4)
    result = group.run(
        batch, PLAIN | given("eighty_twenty") | {"actor.loss_agg_mode": "seq-mean-token-mean"}, on_policy=True
    )
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    log_ps = [policy(sample.sequences).logits[0, :-1].log_softmax(-1) for sample in batch]
    entropies = [
        -(log_p.exp() * log_p).sum(-1)[s.action_mask[0].bool()] for log_p, s in zip(log_ps, batch, strict=True)
    ]
    threshold = torch.cat(entropies).sort(descending=True).values[ceil(0.2 * sum(map(len, entropies))) - 1]
    losses = []
    for log_p, entropy, s in zip(log_ps, entropies, batch, strict=True):
        kept, mask = entropy >= threshold, s.action_mask[0].bool()
        log_prob = log_p.gather(-1, s.sequences[0, 1:, None])[mask, 0]
        if kept.any():
            losses.append(-(s.advantages[0][mask] * log_prob)[kept].mean())
    assert 1 < len(losses) < len(batch)
    expected = torch.autograd.grad(torch.stack(losses).mean(), list(policy.parameters()))
    assert relative_distance(result.gradients[0], list(expected)) < 1e-5


def test_a_weight_that_turns_out_to_be_no_number_ends_the_run_with_one_line(group, tmp_path):
    """The tokens that are asked for before the run have other probabilities."""
    body = "torch.where((tokens.probabilities > 0.0011) & (tokens.probabilities < 0.01), torch.nan, 1.0)"
    (tmp_path / "mine.py").write_text(f"import torch\n\n\ndef weigh(tokens):\n    return {body}\n", encoding="utf-8")
    said = "ValueError: token method mine: weigh returned nan for a token of π_old 0.00[^\n]*: not finite"
    with pytest.raises(ValueError, match=said):
        overrides = {"algo.token_method": [str(tmp_path / "mine.py")]}
        group.run(experiences(seed=1, samples_per_prompt=4), PLAIN | overrides, on_policy=True)
