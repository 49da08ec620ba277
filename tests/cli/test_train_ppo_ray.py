"""The command line: what it refuses, in one line and before Ray starts, and what it adds to OpenRLHF's flags."""

import re
import subprocess
import sys

import pytest
import ray
from arlopti_testing.processes import cpu_seconds_of_children

from arlopti_openrlhf.cli import command_line, help, train_ppo_ray
from arlopti_openrlhf.cli.method_checks import is_selective
from arlopti_openrlhf.ops.preflight import values
from arlopti_openrlhf.ops.preflight.placement import gpus_placed, least_shared, models_by_ranks

FITTING = ["--rollout.batch_size", "16", "--rollout.n_samples_per_prompt", "8", "--train.batch_size", "64"]


def nested(argv: list[str]):
    return command_line.hierarchize(train_ppo_ray.parse(argv))


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--actor.update selective --ds.tensor_parallel_size 2", ["--actor.update", "selective", "2"]),
        ("--actor.update selective --ds.ring_attn_size 2", ["--actor.update", "selective", "2"]),
        ("--algo.lopti.eta 1", ["--algo.lopti.eta", "1", "(0, 1)"]),
        ("--algo.lopti.quantile 1", ["--algo.lopti.quantile", "1", "(0, 1)"]),
        (
            "--algo.lopti.eta 0.5 --algo.lopti.quantile 0.3",
            ["--algo.lopti.eta", "0.5", "--algo.lopti.quantile", "0.3"],
        ),
        ("--algo.lopti.scope epoch --algo.lopti.eta 0.5", ["--algo.lopti.scope", "epoch", "batch", "minibatch"]),
        ("--algo.lopti.scope minibatch", ["--algo.lopti.scope", "minibatch", "--algo.lopti.eta"]),
        ("--algo.lopti.groups low", ["--algo.lopti.groups", "low", "--algo.lopti.eta"]),
        (
            "--algo.lopti.eta 0.5 --algo.lopti.groups low --algo.lopti.order high_first",
            ["--algo.lopti.order", "high_first", "--algo.lopti.groups"],
        ),
        ("--algo.lopti.eta 0.5 --train.batch_size 256", ["--train.batch_size", "256", "128"]),
        ("--algo.lopti.eta 0.5 --train.batch_size 96", ["--train.batch_size", "96", "128"]),
        ("--algo.lopti.etaa 0.5", ["--algo.lopti.etaa: did you mean --algo.lopti.eta?"]),
        (
            "--algo.ar.alpah=1 --train.sead 3",
            ["alpah: did you mean --algo.ar.alpha?; --train.sead: did you mean --train.seed?"],
        ),
        ("-algo.ar.alpha 0.3", ["arguments: -algo.ar.alpha: did you mean --algo.ar.alpha?"]),
        ("--actor.adam.lr 1,2,3", ["invalid float value: '1,2,3'\n"]),
        ("--eta 0.5", ["unrecognized arguments: --eta: did you mean --algo.lopti.eta?"]),
        ("--train_batch_size 8", ["--train_batch_size: did you mean --train.batch_size?"]),
        ("--lr 1e-6", ["did you mean --actor.muon.lr or --actor.adam.lr or "]),
        ("--model x", ["unrecognized arguments: --model\n"]),
        ("--train.colocate_all true", ["unrecognized arguments: true: --train.colocate_all takes no value\n"]),
        ("--algo.token_method_args alpha=1", ["--algo.token_method_args", "alpha=1", "NAME.KEY=VALUE"]),
        ("--algo.token_method ar --algo.token_method_args ar.alpha=", ["ar.alpha=", "NAME.KEY=VALUE"]),
        ("--algo.token_method lopt", ["there is no token method lopt; did you mean lopti?"]),
        ("--data.chat_template_args enable_thinking", ["enable_thinking is not of the form NAME=VALUE"]),
        ("--algo.token_method_normalize", ["--algo.token_method_normalize", "give --algo.token_method"]),
        ("--reward.remote_url KK", ["--reward.remote_url", "KK", "kk, math, math_boxed"]),
        ("--reward.remote_url kk,math", ["--reward.remote_url", "kk,math", "one Python file"]),
        ("--reward.remote_url r.py,http://a/b", ["--reward.remote_url", "r.py,http://a/b", "one Python file"]),
        ("--reward.remote_url http://a/b,kk", ["--reward.remote_url", "http://a/b,kk", "URLs"]),
        ("--reward.retry_minutes -1", ["--reward.retry_minutes", "-1", "[0, inf]"]),
        ("--train.deterministic --train.async_enable", ["--train.deterministic", "--train.async_enable"]),
        ("--train.deterministic --train.agent_func_path a.py", ["--train.deterministic", "--train.agent_func_path"]),
    ],
)
def test_refused_in_one_line(flags, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        train_ppo_ray.parse(FITTING + flags.split())
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.count("\n") == 1 and all(part in error for part in named), error
    assert not ray.is_initialized()


def test_the_flags_of_an_earlier_script_are_named_and_no_key_is_shown(capsys):
    """Of OpenRLHF 0.9's train_grpo_ray_hybrid_engine.sh, and of some forks'."""
    flags = "--pretrain m --init_kl_coef 1e-3 --lora_rank=8 --micro_train_batch_size 4 --max_ckpt_num 3 --perf --foo 1"
    with pytest.raises(SystemExit):
        train_ppo_ray.parse([*flags.split(), "--use_wandb", "f3b175fa", "--wandb_org=secret"])
    assert capsys.readouterr().err.partition("unrecognized arguments: ")[2].rstrip().split("; ") == [
        "--pretrain",
        "--init_kl_coef: did you mean --algo.kl.init_coef?",
        "--lora_rank: did you mean --ds.lora.rank?",
        "--micro_train_batch_size: did you mean --train.micro_batch_size?",
        "--max_ckpt_num: did you mean --ckpt.max_num?",
        "--perf",
        "--foo",
        "--use_wandb",
        "--wandb_org: did you mean --logger.wandb.org?",
    ]


def test_defaults_are_off_and_values_arrive():
    off = vars(train_ppo_ray.parse([]))
    assert off["algo.ar.alpha"] is None and off["algo.lopti.eta"] is None and off["algo.lopti.quantile"] is None
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


REFUSED = """
import sys
from arlopti_openrlhf.cli import train_ppo_ray
try:
    train_ppo_ray.main()
finally:
    heavy = {"openrlhf", "torch", "ray", "vllm", "transformers", "deepspeed"}
    print(sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        ("--help", 0, "--algo.ar.alpha"),
        ("--algo.ar.alpha 2", 2, "arlopti train: error: argument --algo.ar.alpha: 2 is not a number in [0, 1]\n"),
        ("--algo.lopti.order high_first", 2, "error: --algo.lopti.order high_first: Lopti is off"),
        ("--algo.advantage.estimator rloo", 2, "error: --rollout.n_samples_per_prompt 1: rloo requires"),
        ("", 2, "error: --vllm.num_engines None"),
    ],
)
def test_a_refusal_takes_seconds_and_imports_nothing_heavy(flags, status, said):
    before = cpu_seconds_of_children()
    command = [sys.executable, "-c", REFUSED, *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status and said in done.stdout + done.stderr
    assert done.stderr.endswith("[]\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert cpu_seconds_of_children() - before < 10  # under 2 s on an idle core


def test_the_checks_are_announced_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "argv", ["train", "--dry-run", "--algo.lopti.order", "high_first"])
    with pytest.raises(SystemExit):
        train_ppo_ray.main()
    assert capsys.readouterr().err.startswith("arlopti_openrlhf: checking flags, models, data, reward and machine\n")


@pytest.mark.parametrize(
    "flags, is_loaded, said",
    [
        ("", True, ""),
        ("--ds.lora.rank 8", False, "--ds.lora.rank 8: the policy without its adapter is the reference"),
        ("--ds.lora.rank 8 --ds.load_in_4bit", True, "--ds.load_in_4bit loads the reference apart"),
        ("--ds.lora.rank 8 --algo.kl.init_coef 0", False, ""),
    ],
)
def test_with_lora_the_policy_is_its_own_reference(flags, is_loaded, said, capsys):
    args = nested(flags.split())
    assert values.loads_reference(args) == is_loaded
    assert models_by_ranks(args) == {8: ["actor", *(["ref"] if is_loaded else []), "reward"]}
    out = capsys.readouterr().out
    assert said in out if said else "reference" not in out


@pytest.mark.parametrize(
    "flags, gpus",
    [
        ("--train.colocate_all --actor.num_gpus_per_node 2 --vllm.num_engines 2 --reward.remote_url r.py", 2),
        ("--actor.num_gpus_per_node 2 --ref.num_gpus_per_node 1 --vllm.num_engines 1 --reward.remote_url r.py", 4),
        (
            "--actor.num_gpus_per_node 2 --ref.num_gpus_per_node 1 --vllm.num_engines 1 --reward.remote_url r.py "
            "--ds.lora.rank 8",
            3,
        ),
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
    assert gpus_placed(nested(flags.split() + more)) == gpus


@pytest.mark.parametrize(
    "flags, least",
    [
        ("--reward.remote_url r.py", 8),
        ("--reward.remote_url r.py --rollout.n_samples_per_prompt 6", 24),
        ("--reward.remote_url r.py --actor.num_nodes 2 --ref.num_nodes 2 --ds.ring_attn_size 4", 4),
        ("--reward.remote_url r.py --actor.num_gpus_per_node 4 --ref.num_gpus_per_node 6", 12),
        ("--reward.remote_url r.py --actor.num_gpus_per_node 4 --ref.num_gpus_per_node 6 --algo.kl.init_coef 0", 4),
        ("--actor.num_gpus_per_node 4 --ref.num_gpus_per_node 4 --reward.num_gpus_per_node 3", 12),
    ],
)
def test_a_short_rollout_batch_is_shared_by_the_ranks_of_each_model(flags, least):
    defaults = ["--rollout.n_samples_per_prompt", "2"]
    assert least_shared(nested([*defaults, *flags.split()])) == least


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
    assert is_selective(nested([*FITTING, *flags.split()])) is selective


def test_the_help_has_our_flags_first_with_defaults_and_an_example_that_parses(capsys):
    with pytest.raises(SystemExit) as exit:
        train_ppo_ray.parse(["--help"])
    text = capsys.readouterr().out
    topics = ["token-level update", "care for the run:", "faults:", "OpenRLHF's own:"]
    places = [text.index(f"\n{topic}") for topic in topics]
    assert exit.value.code == 0 and places == sorted(places)
    assert all(flag in text for flag in ("--algo.advantage.estimator", "--vllm.num_engines", "--algo.lopti.eta"))
    assert "--reward.remote_url kk|math|math_boxed|PATH.py|URL,..." in text
    assert re.search(r"--rollout\.n_samples_per_prompt \S+\s.+?\(default: 1\)", text, re.S)
    command = help.EXAMPLE.replace("\\\n", " ").split("arlopti train ")[1].split("\n\n")[0]
    args = vars(train_ppo_ray.parse(command.split()))
    assert (args["algo.ar.alpha"], args["algo.lopti.eta"], args["reward.remote_url"]) == (0.3, 0.5, "kk")


def test_an_empty_source_of_rewards_is_none():
    assert nested([*FITTING, "--reward.remote_url", "", "--reward.model_name_or_path", "x"]).reward.remote_url is None
