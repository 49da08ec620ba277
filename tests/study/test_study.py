"""The study: its runs parse, a study resumes, the statistics are right, the report copes with what is not there."""

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from arlopti_openrlhf.cli import train_ppo_ray  # noqa: E402
from study import report, run, runs  # noqa: E402

NAN = pytest.approx(math.nan, nan_ok=True)


def of_name(name: str) -> runs.Run:
    return next(r for r in runs.STUDY if r.name == name)


def scalars(reward=(1.0, 1.0, 2.0, 2.0), **more) -> run.Scalars:
    """What a run logs, with accuracies 0.25 before and 0.5 after; `more` adds to it."""
    found = {"train/rollout/reward_mean": reward, "train/rollout/response_length_mean": [30.0] * len(reward)}
    found |= {f"train/timing/{name}": [9.0, 1.0, 2.0, 3.0] for name in ("step_total", "generation", "ppo_train")}
    found |= more or {"train/actor_grad_norm": [0.5, 1.5, 0.5, 0.5]}
    for people in runs.PEOPLE:
        names = [f"kk_{people}ppl/{measure}" for measure in run.MEASURES] + [f"kk_{people}ppl_greedy/accuracy"]
        for name in names:
            found |= {f"eval/{name}": [0.25, 0.5], f"eval/{name}/low": [0.2, 0.4], f"eval/{name}/high": [0.3, 0.6]}
    return {name: list(enumerate(values)) for name, values in found.items()}


def result(of: runs.Run, accuracy: float = 0.5) -> dict:
    made = run.summarize(of, scalars())
    for source in made["after"].values():
        source["accuracy"] = [accuracy, accuracy - 0.03, accuracy + 0.03]
    return made | {
        "seconds": {"run": 120.0, "warm_start": 60.0, "step": 2.0, "generation": 1.0, "update": 0.5},
        "machine": {"cpu": "some CPU", "cores": 2, "parallel": 1},
        "warm_start_sha256": "a",
        "commit": "c",
    }


# --- the runs ------------------------------------------------------------------------------------------------


def test_the_study_is_what_it_says():
    seeds = {
        variant: {r.seed for r in runs.STUDY if r.variant == variant} for variant in {r.variant for r in runs.STUDY}
    }
    assert len(runs.STUDY) == len({r.name for r in runs.STUDY}) == 56
    assert all(seeds[variant] == set(range(5)) for variant in runs.GRPO)
    assert all(seeds[variant] == set(range(3)) for variant in (*runs.ABLATIONS, *runs.REINFORCE, runs.CONTROL))
    assert [r.variant for r in runs.STUDY[:5]] == ["grpo", "ar", "lopti", "both", "grpo"]  # seed by seed
    assert set(report.TITLES) == set(seeds)
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


# --- resuming ------------------------------------------------------------------------------------------------


def test_a_run_is_done_with_its_own_configuration_only(tmp_path):
    wanted = of_name("both-1")
    assert not run.is_done(wanted, tmp_path)
    run.write(result(wanted), tmp_path)
    assert run.is_done(wanted, tmp_path)
    assert not run.is_done(wanted._replace(learning_rate=1.0), tmp_path)
    assert not run.is_done(of_name("both-2"), tmp_path)
    assert run.load(runs.STUDY, tmp_path) == {"both-1": result(wanted)}
    assert len((tmp_path / "both-1.json").read_text()) < 6000


def test_the_configuration_is_that_of_any_machine():
    text = json.dumps(runs.configuration(of_name("ar-0")))
    assert str(ROOT) not in text and "rewards/kk_reward.py" in text and "INPUTS/model" in text


def test_dry_run_lists_and_starts_nothing():
    command = [sys.executable, "-m", "study.run", *shlex.split("--dry-run --only 'only-*'")]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert output.returncode == 0, output.stderr
    listed = [line.split()[1] for line in output.stdout.splitlines()[1:]]
    assert listed == [f"only-{group}-{seed}" for seed in range(3) for group in ("low", "high")]


# --- what a result says --------------------------------------------------------------------------------------


def test_summary_of_a_run():
    summary = run.summarize(of_name("grpo-0"), scalars())
    source = f"kk_{runs.PEOPLE[0]}ppl"
    assert summary["before"][source]["accuracy"] == [0.25, 0.2, 0.3]
    assert summary["after"][source]["greedy"] == [0.5, 0.4, 0.6]
    assert summary["curves"]["reward"] == [1, 1, 2, 2] and summary["grad_norm"] == {"median": 0.5, "max": 1.5}
    assert run.step_seconds(scalars()) == {
        "step": 2.0,
        "generation": 2.0,
        "update": 2.0,
    }  # without the 9 s of the first


def test_lopti_has_a_gradient_norm_for_each_stage():
    found = scalars(**{f"train/lopti/{group}/actor_grad_norm": [1.0, 2.0, 3.0, 9.0] for group in ("low", "high")})
    del found["train/lopti/low/actor_grad_norm"][2]  # a step without low tokens
    summary = run.summarize(of_name("lopti-0"), found)
    assert summary["grad_norm_low"] == {"median": 2.0, "max": 9.0} and "grad_norm" not in summary
    assert summary["curves"]["grad_norm_low"] == [1.0, 2.0, None, 9.0]
    assert summary["curves"]["grad_norm_high"] == [1.0, 2.0, 3.0, 9.0] and not summary["collapsed"]


def test_a_norm_that_is_not_finite_is_no_number_of_the_result():
    summary = run.summarize(of_name("grpo-0"), scalars(**{"train/actor_grad_norm": [0.5, -1.0, math.nan, 1.5]}))
    assert summary["collapsed"] and summary["grad_norm"] == {"median": 1.0, "max": 1.5}
    assert summary["curves"]["grad_norm"] == [0.5, None, None, 1.5]
    assert run.median_and_max([-1.0]) == {"median": None, "max": None}


def test_one_group_alone_has_no_statistics_of_all_tokens():
    summary = run.summarize(of_name("only-low-0"), scalars(**{"train/lopti/low_share": [0.1, 0.2, 0.3, 0.4]}))
    assert summary["curves"]["low_share"] == [0.1, 0.2, 0.3, 0.4]
    assert not {"entropy", "low_grad_share"} & summary["curves"].keys()


def test_shares_and_means_over_the_bins():
    # Step 0: 20% of the tokens below 0.25 with entropy 2, 80% above 0.75 with 0.5: 0.4 + 0.4. Step 1: all above.
    found = {
        "train/rollout/reward_mean": [(0, 0.0), (1, 0.0)],
        "train/tokens/p0.00-0.25/share": [(0, 0.2), (1, 0.0)],
        "train/tokens/p0.00-0.25/entropy": [(0, 2.0)],
        "train/tokens/p0.75-1.00/share": [(0, 0.8), (1, 1.0)],
        "train/tokens/p0.75-1.00/entropy": [(0, 0.5), (1, 0.25)],
    }
    assert run.over_bins(found, run.LOW_BINS, "share") == [0.2, 0.0]
    assert run.over_bins(found, run.LOW_BINS + run.HIGH_BINS, "entropy") == pytest.approx([0.8, 0.25])


def test_collapse():
    assert not run.collapsed([1.0, 1.0, 1.0, 1.0, 1.0], [0.1])
    assert run.collapsed([1.0, 2.0, 2.0, 2.0, 0.9], [0.1])
    assert run.collapsed([1.0, 2.0], [math.nan]) and run.collapsed([1.0, 2.0], [math.inf])
    assert run.collapsed([1.0, 2.0], [0.1, -1.0])  # what DeepSpeed says of a norm that is not finite
    # A fifth of 10 steps are 2: -1 + 3 at the end against 0 + 1.
    assert not run.collapsed([0, 1, 2, 2, 2, 2, 2, 2, -1, 3], [0.1])


def test_curves_are_means_of_stretches():
    assert run.thinned([1.0, 2.0]) == [1.0, 2.0]
    assert run.thinned([1.0] * 20 + [2.0] * 20) == [1.0] * 10 + [2.0] * 10
    assert run.thinned([1 / 3] * 41)[-1] == 0.3333
    assert run.thinned([1.0, math.nan, math.inf]) == [1.0, None, None]


# --- statistics ----------------------------------------------------------------------------------------------


def test_students_t_is_that_of_the_tables():
    # Two-sided 5% points: 12.706 (ν = 1), 4.303, 2.776 (ν = 4).
    assert [round(report.t_quantile(n), 3) for n in (1, 2, 4)] == [12.706, 4.303, 2.776]
    # ν = 1 is Cauchy's distribution: P(|T| > 1) = 1/2. ν = 2: P(|T| > t) = 1 - t / sqrt(2 + t²).
    assert report.t_tail(1.0, 1) == pytest.approx(0.5)
    assert report.t_tail(2.0, 2) == pytest.approx(1 - 2 / math.sqrt(6))


def test_paired_test_by_hand():
    # Seeds 0, 1, 2 have both: differences 0.1, 0.2, 0.3; mean 0.2, s = 0.1, standard error 0.1 / √3, t = 2 √3.
    test = report.paired_test({0: 0.4, 1: 0.6, 2: 0.8, 3: 9.0}, {0: 0.3, 1: 0.4, 2: 0.5, 7: 0.0})
    assert test.difference == pytest.approx((0.2, 4.30265 * 0.1 / math.sqrt(3), 3), rel=1e-5)
    assert test.p == pytest.approx(1 - 2 * math.sqrt(3) / math.sqrt(2 + 12))
    assert report.paired_test({0: 1.0}, {1: 1.0}) is None
    assert report.paired_test({0: 1.0}, {0: 0.5}) == ((0.5, NAN, 1), NAN)


def test_holm():
    # Sorted 0.01, 0.03, 0.04 by 3, 2, 1: 0.03, 0.06, and 0.04 raised to what comes before it.
    assert report.holm([0.04, 0.01, math.nan, 0.03]) == [
        pytest.approx(0.06),
        pytest.approx(0.03),
        NAN,
        pytest.approx(0.06),
    ]


# --- the report ----------------------------------------------------------------------------------------------


def test_report_of_an_unfinished_study(tmp_path):
    accuracies = {"grpo": (0.50, 0.52, 0.54), "both": (0.55, 0.59)}
    for variant, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            run.write(result(of_name(f"{variant}-{seed}"), accuracy), tmp_path)
    (tmp_path / "study.md").write_text(f"Before.\n{report.START}\nold\n{report.END}\nAfter.\n")
    command = [sys.executable, "-m", "study.report", "--results", tmp_path, "--docs", tmp_path]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert output.returncode == 0, output.stderr
    page = (tmp_path / "study.md").read_text()
    assert page.startswith("Before.\n") and page.endswith("\nAfter.\n") and "old" not in page
    # GRPO: mean 0.52, s = 0.02, 4.303 · 0.02 / √3 = 0.050. By puzzle: 0.03 in each of 3 x 2, 0.03 / √6 = 0.012.
    row = "| GRPO | 3 of 5 | 0.520 ± 0.050 | 0.520 ± 0.050 | 0.520 ± 0.050 | 0.012 | 0.500 ± 0.000 | 0.500 ± 0.000 |"
    assert f"{row} 1.500 ± 0.000 |" in page
    # Both: differences 0.05 and 0.07: mean 0.06, s = 0.0141, t(1) = 12.706, so ± 0.127; t = 6: p = 1 - 2/π · atan 6.
    assert "| + AR + Lopti | 2 of 5 | +0.060 ± 0.127 | 0.105 | 0.105 | +0.060 ± 0.127 |" in page
    assert "| + Lopti (η = 0.5) | 0 of 5 | missing |" in page
    assert "Runs that are missing: ar-0, lopti-0, ar-1," in page
    assert "Run on: some CPU, 2 cores, runs at a time: 1." in page
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_runs_from_different_warm_starts_are_no_pair():
    results = {f"{v}-{seed}": result(of_name(f"{v}-{seed}")) for v in ("grpo", "ar") for seed in (0, 1)}
    grpo, ar = report.rows_of(["grpo", "ar"], results)
    assert report.differences(ar, grpo, report.accuracy).difference.n == 2
    results["ar-1"]["warm_start_sha256"] = "b"
    grpo, ar = report.rows_of(["grpo", "ar"], results)
    assert report.differences(ar, grpo, report.accuracy).difference.n == 1


def test_report_of_nothing_says_so():
    page = report.tables({})
    assert page.count("0 of 5") >= 5 and "Run on: nothing yet." in page


def test_the_page_has_its_marks():
    page = (ROOT / "docs" / "study.md").read_text("utf-8")
    assert page.count(report.START) == page.count(report.END) == 1
