"""The command line: what it refuses, in one line and before Ray starts, and what it adds to OpenRLHF's flags."""

import importlib.metadata
import subprocess
import sys

import pytest
import ray

from arlopti_openrlhf.cli import train_ppo_ray

FITTING = ["--rollout.batch_size", "16", "--rollout.n_samples_per_prompt", "8", "--train.batch_size", "64"]


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--algo.ar.alpha 1.01", ["--algo.ar.alpha", "1.01", "[0, 1]"]),
        ("--algo.ar.alpha -0.1", ["--algo.ar.alpha", "-0.1", "[0, 1]"]),
        ("--algo.ar.alpha nan", ["--algo.ar.alpha", "nan", "[0, 1]"]),
        ("--actor.update selective --ds.tensor_parallel_size 2", ["--actor.update", "selective", "2"]),
        ("--algo.ar.alpha x", ["--algo.ar.alpha", "x", "[0, 1]"]),
        ("--algo.lopti.eta 0", ["--algo.lopti.eta", "0", "(0, 1)"]),
        ("--algo.lopti.eta 1", ["--algo.lopti.eta", "1", "(0, 1)"]),
        ("--algo.lopti.eta inf", ["--algo.lopti.eta", "inf", "(0, 1)"]),
        ("--algo.lopti.quantile 1", ["--algo.lopti.quantile", "1", "(0, 1)"]),
        (
            "--algo.lopti.eta 0.5 --algo.lopti.quantile 0.3",
            ["--algo.lopti.eta", "0.5", "--algo.lopti.quantile", "0.3"],
        ),
        ("--algo.lopti.scope epoch --algo.lopti.eta 0.5", ["--algo.lopti.scope", "epoch", "batch", "minibatch"]),
        ("--algo.lopti.scope minibatch", ["--algo.lopti.scope", "minibatch", "--algo.lopti.eta"]),
        ("--algo.lopti.order high_first", ["--algo.lopti.order", "high_first", "--algo.lopti.eta"]),
        ("--algo.lopti.groups low", ["--algo.lopti.groups", "low", "--algo.lopti.eta"]),
        (
            "--algo.lopti.eta 0.5 --algo.lopti.groups low --algo.lopti.order high_first",
            ["--algo.lopti.order", "high_first", "--algo.lopti.groups"],
        ),
        ("--algo.lopti.eta 0.5 --train.batch_size 256", ["--train.batch_size", "256", "128"]),
        ("--algo.lopti.eta 0.5 --train.batch_size 96", ["--train.batch_size", "96", "128"]),
        ("--algo.lopti.etaa 0.5", ["--algo.lopti.etaa"]),
        (
            "--algo.lopti.eta 0.5 --actor.lr_scheduler reduce_lr_on_plateau",
            ["--actor.lr_scheduler", "reduce_lr_on_plateau"],
        ),
        ("--reward.remote_url KK", ["--reward.remote_url", "KK", "kk, math"]),
        ("--reward.remote_url kk,math", ["--reward.remote_url", "kk,math", "one Python file"]),
        ("--reward.remote_url r.py,http://a/b", ["--reward.remote_url", "r.py,http://a/b", "one Python file"]),
        ("--reward.remote_url http://a/b,kk", ["--reward.remote_url", "http://a/b,kk", "URLs"]),
        ("--reward.retry_minutes -1", ["--reward.retry_minutes", "-1", "[0, inf]"]),
    ],
)
def test_refused_in_one_line(flags, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_ppo_ray.parse(FITTING + flags.split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.count("\n") == 1 and all(part in error for part in named), error
    assert not ray.is_initialized()


def test_defaults_are_off_and_values_arrive():
    off = vars(train_ppo_ray.parse([]))
    assert off["algo.ar.alpha"] == 0 and off["algo.lopti.eta"] is None and off["algo.lopti.quantile"] is None
    on = vars(train_ppo_ray.parse([*FITTING, "--algo.ar.alpha=0.3", "--algo.lopti.quantile", "0.2"]))
    assert on["algo.ar.alpha"] == 0.3 and on["algo.lopti.quantile"] == 0.2
    assert (on["algo.lopti.scope"], on["algo.lopti.order"], on["algo.lopti.groups"]) == ("batch", "low_first", "both")


@pytest.mark.parametrize(
    "source", ["kk", "math", "rewards/kk_reward.py", "http://a:5000/get_reward", "http://a/b,https://c/d"]
)
def test_reward_sources_arrive_as_they_are(source):
    """The engines look names up, on their own nodes."""
    assert vars(train_ppo_ray.parse(["--reward.remote_url", source]))["reward.remote_url"] == source


def test_an_agent_has_no_reward_source():
    args = train_ppo_ray.parse(["--train.agent_func_path", "agent.py", "--reward.remote_url", "anything"])
    assert vars(args)["train.agent_func_path"] == "agent.py"


def test_help_lists_upstreams_flags_and_ours(capsys):
    with pytest.raises(SystemExit) as stopped:
        train_ppo_ray.parse(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for flag in ("--algo.advantage.estimator", "--vllm.num_engines", "--algo.ar.alpha", "--algo.lopti.eta"):
        assert flag in text
    assert "--reward.remote_url kk|math|PATH.py|URL,..." in text


@pytest.mark.parametrize("installed", ["0.11.1", "0.12.0", None])
def test_another_openrlhf_is_refused_in_one_line(monkeypatch, installed):
    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(train_ppo_ray.importlib.metadata, "version", version)
    with pytest.raises(SystemExit, match=r"needs openrlhf 0\.11\.2, found") as stopped:
        train_ppo_ray.main()
    assert "\n" not in stopped.value.code


@pytest.mark.parametrize(
    "flags, gpus",
    [
        ("--train.colocate_all --actor.num_gpus_per_node 2 --vllm.num_engines 2 --reward.remote_url r.py", 2),
        ("--train.colocate_all --train.async_enable --actor.num_gpus_per_node 2 --vllm.num_engines 3", 5),
        (
            "--actor.num_gpus_per_node 2 --ref.num_gpus_per_node 1 --critic.num_gpus_per_node 1 "
            "--vllm.num_engines 1 --reward.remote_url r.py",
            5,
        ),
    ],
)
def test_logical_gpus_are_what_the_placement_asks_for(flags, gpus):
    more = ["--algo.advantage.estimator", "gae" if "critic" in flags else "group_norm"]
    assert train_ppo_ray._gpus_placed(train_ppo_ray.parse(flags.split() + more)) == gpus


@pytest.mark.parametrize(
    "flags, selective",
    [
        ("", False),  # OpenRLHF, to the last bit
        ("--actor.update selective", True),
        ("--algo.ar.alpha 0.3", True),
        ("--algo.lopti.quantile 0.3", True),
        ("--algo.lopti.eta 0.5 --actor.update stock", False),
        ("--algo.lopti.eta 0.5 --ds.tensor_parallel_size 2", False),
        ("--algo.lopti.eta 0.5 --ds.deepcompile", False),
    ],
)
def test_where_the_update_is_selective(flags, selective):
    args = train_ppo_ray.parse(["--actor.model_name_or_path", "m", *FITTING, *flags.split()])
    assert train_ppo_ray._is_selective(args) is selective


BUILT = """
import sys
import ray
from arlopti_openrlhf.cli import train_ppo_ray

def init(*args, **kwargs):
    cli = next(f.f_globals for f in iter_frames() if "PolicyModelActor" in f.f_globals)
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import launcher, ppo_actor
    plain = cli["PolicyModelActor"].__ray_metadata__.modified_class.__ray_actor_class__
    print([c.__name__ for c in (plain, ppo_actor.ActorPPOTrainer, ppo_actor.Actor, launcher.Actor)])
    sys.exit()

def iter_frames():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back

ray.init = init
train_ppo_ray.main()
"""


@pytest.mark.parametrize(
    ("flags", "actor"), [("", "Actor"), ("--algo.lopti.eta 0.5", "SelectiveActor")], ids=["off", "Lopti"]
)
def test_upstreams_train_builds_our_classes(flags, actor):
    """Upstream binds the policy's Ray actor when its module is imported: ours has to be in place by then."""
    command = [sys.executable, "-c", BUILT, *FITTING, *flags.split()]
    command += ["--actor.model_name_or_path", "model", "--reward.remote_url", "kk"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    expected = str(["PolicyActor", "TokenUpdateTrainer", actor, actor])
    assert expected in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
