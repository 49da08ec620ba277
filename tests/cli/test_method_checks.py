"""What is wrong with token methods is found before anything starts, in one line."""

import pytest
from arlopti_testing.preflight_command import FITTING, arguments, findings

from arlopti_openrlhf.cli import method_checks

WEIGH = "import torch\ndef weigh(tokens, *, x=1):\n    "


def check(flags: str) -> list[str]:
    return [str(finding) for finding in method_checks.check_methods(arguments(flags))]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--algo.token_method ar stapo --algo.token_method_args ar.alpha=-0.2 stapo.tau=0.01",
        "--algo.token_method examples/token_method.py",
        "--algo.token_method lopti --actor.lr_scheduler constant",
        "--algo.token_method ar lopti --algo.token_method_normalize",
        "--algo.token_method ar --actor.update stock",
        "--algo.token_method ar --algo.ar.alpha 0.3",
        "--algo.token_method lopti --algo.lopti.quantile 0.5 --algo.lopti.order high_first",
        "--algo.token_method lopti --algo.lopti.scope minibatch",
        "--algo.token_method ar lopti --actor.policy_loss_type gspo",
        "--algo.token_method stapo --algo.token_method_normalize --algo.ar.alpha 0.3 --algo.lopti.eta 0.5",
        "--algo.lopti.eta 0.5 --algo.token_method_args lopti.groups=low",
        "--algo.token_method dppo --algo.advantage.is_correction_level token "
        "--algo.advantage.is_correction_threshold 0 inf",
    ],
)
def test_nothing_is_wrong(flags):
    assert check(flags) == [] and findings([*FITTING, *flags.split()]) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--algo.ar.alpha 0.3 --algo.token_method_args ar.alpha=0.2",
            "--algo.token_method ar: ar.alpha=0.2: ar.alpha is given as 0.3 already",
        ),
        ("--algo.token_method ar stapo --actor.update stock", "stapo needs the selective update"),
        ("--algo.token_method steer --ds.tensor_parallel_size 2", "steer needs the selective update"),
        (
            "--algo.token_method ar dppo",
            "dppo needs vLLM's log-probs of all samples, which OpenRLHF asks for with "
            "--algo.advantage.is_correction_level alone; give --algo.advantage.is_correction_level token",
        ),
    ],
)
def test_a_mistake_is_one_finding(flags, said):
    (found,) = check(flags)
    assert said in found and "\n" not in found


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1e7 / tokens.probabilities\n", "mine: weigh returned 1e+10 for a made-up token, and at most 1e+06"),
        ("return None\n", "mine: weigh returned NoneType, where a tensor is due"),
        ("raise SystemExit(1)\n", "mine: SystemExit: 1 (mine.py, line 3)"),
    ],
)
def test_a_users_file_is_tried(tmp_path, body, said):
    (tmp_path / "mine.py").write_text(WEIGH + body, encoding="utf-8")
    (found,) = check(f"--algo.token_method {tmp_path}/mine.py")
    assert said in found and "\n" not in found


@pytest.mark.parametrize(
    ("flags", "flag", "said"),
    [
        ("--algo.token_method stapo --actor.policy_loss_type gspo", "--algo.token_method", "gspo"),
        ("--algo.token_method_args ar.alpha=1", "--algo.token_method_args", "there is no token method"),
        ("--algo.token_method ar --train.batch_size 24", "--train.batch_size", "= 32"),
        (
            "--algo.token_method ar --actor.gradient_checkpointing_level whole",
            "--actor.gradient_checkpointing_level",
            "with --actor.gradient_checkpointing_enable",
        ),
        ("--algo.token_method ar --train.batch_size 24 --actor.update stock", "--train.batch_size", "= 32"),
    ],
)
def test_flags_that_do_not_go_together(flags, flag, said):
    found = {finding.flag: str(finding) for finding in findings([*FITTING, *flags.split()]) if finding.is_fatal}
    assert found.keys() == {flag} and said in found[flag]


def test_a_token_method_makes_the_update_selective_and_a_files_path_absolute(tmp_path, monkeypatch):
    assert method_checks.is_selective(arguments("--algo.token_method ar"))
    assert not method_checks.is_selective(arguments(""))
    monkeypatch.chdir(tmp_path)
    args = arguments("--algo.token_method ar mine.py")
    assert args.algo.token_method == ["ar", str(tmp_path / "mine.py")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "no token method"),
        ("--algo.ar.alpha 0.3", "token method ar (ar.alpha=0.3)"),
        ("--algo.token_method ar --algo.ar.alpha 0", "token method ar (ar.alpha=0.0)"),
        (
            "--algo.ar.alpha 0.3 --algo.lopti.eta 0.5 --algo.lopti.order high_first --algo.token_method_normalize",
            "token methods lopti x ar (ar.alpha=0.3, lopti.eta=0.5, lopti.order=high_first, lopti.scope=batch, "
            "weights divided by their mean)",
        ),
        ("--algo.token_method stapo", "token method stapo"),
    ],
)
def test_a_run_says_its_token_methods(flags, said):
    assert method_checks.describe_methods(arguments(flags)) == said


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return tokens.mask * 0", "gives all made-up tokens the weight 0"),
        ("return torch.rand_like(tokens.log_probs)", "gives the same tokens other weights at each call"),
        ("global calls; calls += 1; return tokens.mask * calls", "gives the same tokens other weights at each call"),
        (
            "return tokens.probabilities\n\n\ndef statistic(tokens):\n    return torch.rand(())\n\n\n"
            "def weigh(tokens, statistic):\n    return tokens.mask * statistic",
            "gives the same tokens other weights at each call",  # and the ranks would have other ones
        ),
    ],
)
def test_weights_that_look_wrong_are_a_warning(body, said, tmp_path):
    (tmp_path / "own.py").write_text(f"calls = 0\n{WEIGH}{body}\n")
    (found,) = method_checks.check_methods(arguments(f"--algo.token_method {tmp_path / 'own.py'}"))
    assert not found.is_fatal and said in found.problem


def test_the_update_of_a_vision_language_model_gives_no_entropies(tmp_path):
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    policy = f"--actor.model_name_or_path {tmp_path} --algo.token_method"
    [found] = method_checks.check_methods(arguments(f"{policy} stapo"))
    assert "stapo needs the selective update, for entropies" in str(found)
    assert list(method_checks.check_methods(arguments(f"{policy} ar"))) == []
