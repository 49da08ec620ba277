"""`--ops off` checks the method only, and gives OpenRLHF its own arguments."""

import sys
from pathlib import Path

import pytest

from arlopti_openrlhf.cli import command_line, train_ppo_ray, without_care
from arlopti_openrlhf.ops.checkpoints.files import MANIFEST

FLAGS = "--ops off --actor.model_name_or_path m --vllm.num_engines 1 --reward.remote_url kk"


@pytest.fixture
def start(monkeypatch):
    """Return start(flags), which returns what upstream's `train` would be called with, and the rest."""

    def run(more: str = "") -> list:
        seen: list = []
        monkeypatch.setattr(sys, "argv", ["train", *FLAGS.split(), *more.split()])
        monkeypatch.setattr(without_care.interrupts, "leave", lambda: None)
        monkeypatch.setattr(without_care, "train", lambda *given: seen.extend(given))
        train_ppo_ray.main()
        return seen

    return run


def test_upstream_gets_the_arguments_of_its_own_parser(start):
    args, _, has, _ = start()
    names = set(vars(args.algo)) | set(vars(args.logger)) | set(vars(args))
    assert not has and not names & {"ar", "lopti", "token_method", "console", "ops", "dry_run"}
    assert args.reward.remote_url == [str(Path(without_care.__file__).parents[1] / "grading/kk_reward.py")]


def test_the_method_reaches_the_trainer_apart(start):
    _, _, has, settings = start("--algo.ar.alpha 0.3 --algo.lopti.eta 0.5 --algo.lopti.scope minibatch")
    assert has == {"selective"} and settings.scope == "minibatch" and settings.statistics == "off"
    assert set(settings.methods) == {"ar", "lopti"} and {"ar.alpha=0.3", "lopti.eta=0.5"} <= set(settings.arguments)


def test_secrets_are_those_of_the_variables(start, monkeypatch):
    monkeypatch.setenv("TOKEN", "abc")
    monkeypatch.setenv("WANDB_API_KEY", "key")
    args, *_ = start("--reward.remote_url http://host/${TOKEN} --logger.wandb.key WANDB_API_KEY")
    assert (args.reward.remote_url, args.logger.wandb.key) == (["http://host/abc"], "key")


@pytest.mark.parametrize(("more", "gpus"), [("", 3), ("--train.colocate_all", 1)])
def test_a_lora_run_has_a_reference_of_its_own(start, more, gpus):
    """Stock loads one, and here nothing repairs that."""
    flags = "--algo.advantage.estimator reinforce --algo.kl.init_coef 0.1 --ds.lora.rank 4"
    flags += " --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1"
    _, placed, *_ = start(f"{flags} --rollout.batch_size 8 --train.batch_size 8 {more}")
    assert placed == gpus  # with one for the engine


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--train.deterministic", "--train.deterministic True: is for what --ops off leaves out"),
        ("--reward.remote_url http://host/${NOT_THERE}", "NOT_THERE is not set"),
        ("--algo.lopti.scope minibatch", "--algo.lopti.scope minibatch: Lopti is off"),
        ("--algo.token_method nonesuch", "there is no token method nonesuch"),
    ],
)
def test_what_cannot_be_is_refused(start, capsys, flags, line):
    with pytest.raises(SystemExit) as ended:
        start(flags)
    assert ended.value.code == 2 and line in capsys.readouterr().err


def test_a_checkpoint_of_a_run_with_care_is_not_resumed(start, capsys, tmp_path):
    manifest = tmp_path / "_actor" / "global_step1" / MANIFEST
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    with pytest.raises(SystemExit):
        start(f"--ckpt.path {tmp_path} --ckpt.load_enable")
    assert "its checkpoints are of a run with care" in capsys.readouterr().err


def test_a_dry_run_checks_the_method_and_starts_nothing(start, capsys):
    with pytest.raises(SystemExit) as ended:
        start("--dry-run --algo.ar.alpha 0.3")
    assert ended.value.code == 0 and "the method can run" in capsys.readouterr().out


def test_the_parser_knows_what_is_ours():
    assert {row.dest for row in without_care.flags.ours()} < set(vars(command_line.parse([])))
