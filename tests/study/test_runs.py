"""The study's runs are what they say, and the real command parses their flags."""

from pathlib import Path

from arlopti_testing.study_fakes import of_name

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
    assert set(TITLES) == set(seeds) | {r.variant for r in (*runs.FAMILY, *runs.NEXT)}
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


def test_the_family_is_balanced_wherever_it_is_cut_short():
    names = [r.name for r in runs.FAMILY]
    assert len(names) == len(set(names)) == 2 * 15 * 5 and not {r.name for r in runs.STUDY} & set(names)
    assert names[:4] == ["decisions-grpo-0", "noise-grpo-0", "decisions-lopti-0", "noise-lopti-0"]
    assert [r.seed for r in runs.FAMILY] == sorted(r.seed for r in runs.FAMILY)
    for even, odd in zip(runs.FAMILY[::2], runs.FAMILY[1::2], strict=True):
        assert (even.condition, odd.condition) == (runs.DECISIONS, runs.NOISE)
        assert even.flags == odd.flags and even.mini_batches == odd.mini_batches
    assert {r.condition for r in (*runs.STUDY, *runs.TUNING)} == {runs.DECISIONS}


def test_the_controls_are_three_of_each_seed_and_condition_in_order():
    names = [f"{condition}-{name}-0" for name in ("grpo", "lopti", runs.CONTROL) for condition in runs.CONDITIONS]
    assert [r.name for r in runs.FAMILY_CONTROLS[:6]] == names
    assert len(runs.FAMILY_CONTROLS) == 30 and [r.seed for r in runs.FAMILY_CONTROLS[::6]] == list(range(5))


def test_every_method_of_the_family_parses_as_what_it_is():
    family = {r.variant.removeprefix("noise-"): parsed(r) for r in runs.FAMILY[:30] if r.condition == runs.NOISE}
    grpo = family.pop("grpo")
    different = {
        name: {key: value for key, value in values.items() if value != grpo[key]} for name, values in family.items()
    }
    assert different.pop(runs.CONTROL) == {"train.batch_size": 64} and grpo["train.batch_size"] == 128
    assert different.pop("lopti") == {"algo.lopti.eta": 0.5}
    sources = {name.removesuffix("-mean-one"): values["algo.token_method"] for name, values in different.items()}
    assert sources == {
        "ar": ["ar"],
        "direction": ["ar"],
        "eighty-twenty": ["eighty_twenty"],
        **{name: [name] for name in ("stapo", "a3po", "stare", "steer")},
    }
    alpha = {name: values.get("algo.token_method_args") for name, values in different.items()}
    assert {name: given for name, given in alpha.items() if given} == {
        name + suffix: [f"ar.alpha={value}"]
        for name, value in (("ar", 0.3), ("direction", -0.2))
        for suffix in ("", "-mean-one")
    }
    for name, values in different.items():
        assert ("algo.token_method_normalize" in values) == name.endswith("-mean-one")
    allowed = {"algo.token_method", "algo.token_method_args", "algo.token_method_normalize"}
    assert set().union(*different.values()) == allowed


def test_later_methods_differ_from_grpo_in_the_method_alone():
    assert len(runs.NEXT) == 3 * 5 * 2
    assert set(runs.NEXT) & set(runs.FAMILY) == {r for r in runs.FAMILY if r.variant.endswith("-grpo")}
    grpo, *others = (parsed(r) for r in runs.NEXT if (r.condition, r.seed) == ("noise", 3))
    different = [{key: value for key, value in values.items() if value != grpo[key]} for values in others]
    assert different == [{"algo.token_method": ["cw_grpo"]}, {"algo.token_method": ["gmts"]}]


def test_conditions_differ_in_the_warm_start_and_in_room_for_it():
    decisions, noise = (runs.configuration(of_name(f"{condition}-ar-1")) for condition in runs.CONDITIONS)
    assert noise["inputs"]["warm_start"].pop("varied_wording") is True and noise["inputs"] == decisions["inputs"]
    limits = [f"--rollout.max_new_tokens {c.max_new_tokens} " for c in runs.CONDITIONS.values()]
    assert limits[0] != limits[1] and noise["flags"] == decisions["flags"].replace(*limits)


def test_a_run_in_one_process_has_the_flags_of_one_of_the_whole_stack_but_for_placement_and_vllm():
    stack, own = of_name("grpo-1"), of_name("decisions-grpo-1")
    assert own.is_in_process and not stack.is_in_process
    assert runs.configuration(own)["inputs"] == runs.configuration(stack)["inputs"]
    assert runs.configuration(own)["trained"] == "in one process" and "trained" not in runs.configuration(stack)
    values = parsed(stack), parsed(own)
    different = {name for name in values[0] if values[0][name] != values[1][name]}
    assert different == {
        "train.colocate_all",
        "vllm.num_engines",
        "vllm.enforce_eager",
        "vllm.sync_backend",
        "vllm.gpu_memory_utilization",
    }


def test_a_learning_rate_is_the_only_difference_in_the_tuning():
    rates = [parsed(r) for r in runs.TUNING if r.seed == runs.TUNING[0].seed]
    assert [value["actor.adam.lr"] for value in rates] == list(runs.LEARNING_RATES)
    assert {name for value in rates for name in value if value[name] != rates[0][name]} == {"actor.adam.lr"}
