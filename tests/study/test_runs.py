"""The study's runs are what they say, and the real command parses their flags."""

from pathlib import Path

from study_fakes import of_name

from arlopti_openrlhf.cli import train_ppo_ray
from study import runs
from study.comparison import TITLES


def test_the_study_is_what_it_says():
    seeds = {
        variant: {r.seed for r in runs.STUDY if r.variant == variant} for variant in {r.variant for r in runs.STUDY}
    }
    assert len(runs.STUDY) == len({r.name for r in runs.STUDY}) == 56
    assert all(seeds[variant] == set(range(5)) for variant in runs.GRPO)
    assert all(seeds[variant] == set(range(3)) for variant in (*runs.ABLATIONS, *runs.REINFORCE, runs.CONTROL))
    assert [r.variant for r in runs.STUDY[:5]] == ["grpo", "ar", "lopti", "both", "grpo"]  # seed by seed
    assert set(TITLES) == set(seeds)
    assert runs.LEARNING_RATE in runs.LEARNING_RATES
    assert {r.seed for r in runs.TUNING}.isdisjoint(r.seed for r in runs.STUDY)
    assert runs.HELD_OUT * len(runs.PEOPLE) >= 256 and runs.EVAL_SAMPLES == 8


def parsed(of: runs.Run):
    return vars(train_ppo_ray.parse(runs.flags(of, Path("/in"), Path("/out"))))


def test_every_variant_parses_as_what_it_is():
    variants = {r.variant: parsed(r) for r in runs.STUDY if r.seed == 0}
    alpha = {name: value["algo.ar.alpha"] for name, value in variants.items() if value["algo.ar.alpha"]}
    assert alpha == {"ar": 0.3, "both": 0.3, "alpha-0.1": 0.1, "alpha-1": 1.0, "rpp-ar": 0.1, "rpp-both": 0.1}
    eta = {name: value["algo.lopti.eta"] for name, value in variants.items() if value["algo.lopti.eta"]}
    assert eta == {"eta-0.3": 0.3, "eta-0.7": 0.7} | dict.fromkeys(
        ("lopti", "both", "high-first", "only-low", "only-high", "rpp-lopti", "rpp-both"), 0.5
    )
    assert variants["high-first"]["algo.lopti.order"] == "high_first"
    assert [variants[f"only-{group}"]["algo.lopti.groups"] for group in ("low", "high")] == ["low", "high"]
    assert variants["rpp"]["algo.advantage.estimator"] == "reinforce"
    assert not variants["rpp"]["algo.kl.use_loss"] and variants["grpo"]["algo.kl.use_loss"]


def test_variants_of_a_seed_differ_in_their_method_alone():
    baseline = parsed(of_name("grpo-1"))
    different = {name for name, value in parsed(of_name("both-1")).items() if value != baseline[name]}
    assert different == {"algo.ar.alpha", "algo.lopti.eta"}
    assert baseline["train.seed"] == 2 and baseline["eval.steps"] == runs.STEPS
    assert [tuple(s) for s in baseline["eval.sampling"]][1:] == [
        ("kk_*", 8, runs.TEMPERATURE),
        ("*_greedy", 1, 0.0),
    ]


def test_a_learning_rate_is_the_only_difference_in_the_tuning():
    rates = [parsed(r) for r in runs.TUNING if r.seed == runs.TUNING[0].seed]
    assert [value["actor.adam.lr"] for value in rates] == list(runs.LEARNING_RATES)
    assert {name for value in rates for name in value if value[name] != rates[0][name]} == {"actor.adam.lr"}
