"""Every flag of every launch script and YAML file, and of the commands in comments, goes through the real parsers."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from arlopti_openrlhf.cli import prepare_data, quickstart, train_ppo_ray
from arlopti_openrlhf.cli.quickstart_tasks import TASKS, Plan
from arlopti_openrlhf.evaluation.sampling import sampling_of
from arlopti_openrlhf.grading import REWARDS

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples/scripts").glob("train_*.sh"))
TRAIN = "arlopti_openrlhf.cli.train_ppo_ray"


def launch(script: Path, folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs the script with commands that write their arguments to folder/argv: bash expands what it would expand."""
    for name in ("python", "arlopti"):
        command = folder / name
        command.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {shlex.quote(str(folder / 'argv'))}\n")
        command.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    return subprocess.run(["bash", str(script), *flags], env=env, cwd=ROOT, capture_output=True, text=True, timeout=30)


def parse(script: Path, folder: Path, *flags: str, **variables: str) -> dict:
    done = launch(script, folder, *flags, **variables)
    assert done.returncode == 0, done.stderr
    argv = (folder / "argv").read_text().split("\0")[:-1]
    start = ["-m", TRAIN] if argv[0] == "-m" else ["train"]  # train_kk.sh also starts the study's module
    assert argv[: len(start)] == start
    argv = argv[len(start) :]
    return vars(train_ppo_ray.parse(argv))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_flag_is_known_and_trailing_flags_win(script, tmp_path):
    args = parse(script, tmp_path, "--train.seed", "7")
    assert args["train.seed"] == 7
    source = args["train.agent_func_path"] or args["reward.remote_url"]
    assert source in REWARDS or source.endswith("/get_reward") or (ROOT / source).is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_same_command_again_resumes_the_run(script, tmp_path):
    """OpenRLHF's name of a run holds the time, so that its curves would begin anew."""
    args = parse(script, tmp_path, OUT="outputs/mine")
    assert args["ckpt.load_enable"] is True
    assert (args["logger.wandb.run_name"], args["ckpt.path"]) == ("mine", "outputs/mine/checkpoints")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_commands_in_comments_parse(script):
    commands = re.findall(r"^# +arlopti data (.*)$", script.read_text(), re.M)
    for command in commands:
        prepare_data.make_parser().parse_args(shlex.split(command))
    assert commands, f"{script.name} does not say how its data is made"


# What a reader changes, and how the prompts of the scripts and of the quickstart differ from a reader's.
YOURS = {
    *("actor.model_name_or_path", "data.prompt_dataset", "eval.dataset", "reward.remote_url", "logger.wandb.run_name"),
    *("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir", "data.apply_chat_template", "config"),
}
SIZES = {f"{part}.micro_batch_size" for part in ("rollout", "train")} | {
    *("actor.adam.lr", "data.max_len", "rollout.max_new_tokens"),
}
KEPT = {"ckpt.save_steps", "ckpt.max_num", "ckpt.best_metric_key"}  # the quickstart keeps one checkpoint, to go on
NO_GPU = {"vllm.gpu_memory_utilization"}  # vLLM's cache has a size of its own on a CPU


def parse_example(name: str, *flags: str) -> dict:
    return vars(train_ppo_ray.parse(["--config", str(ROOT / "examples" / name), *flags]))


def test_the_example_for_a_cpu_is_the_quickstart():
    plan = Plan(Path("out"), TASKS["tiny"], TASKS["tiny"].full, seed=0)
    words = quickstart.training_flags(plan)
    theirs, mine = vars(train_ppo_ray.parse(words)), parse_example("cpu.yaml", "--train.seed", "1")
    assert {name for name in mine if mine[name] != theirs[name]} <= YOURS | SIZES | KEPT | NO_GPU


def test_the_example_for_a_gpu_is_the_script_for_one(tmp_path):
    theirs, mine = parse(ROOT / "examples/scripts/train_kk_small.sh", tmp_path), parse_example("gpu.yaml")
    assert {name for name in mine if str(mine[name]) != str(theirs[name])} <= YOURS


@pytest.mark.parametrize("name", ["cpu.yaml", "gpu.yaml"])
def test_the_examples_say_what_is_yours_and_their_commands_parse(name):
    text = (ROOT / "examples" / name).read_text("utf-8")
    marked = re.findall(r"^  ([\w.]+): .*# yours", text, re.M)
    yours = YOURS - {"data.apply_chat_template", "logger.wandb.run_name", "config"}
    assert sorted(marked) == sorted(key.partition(".")[2] for key in yours)
    commands = re.findall(r"^#   arlopti train --config (\S+)(.*)$", text.replace("\\\n#", ""), re.M)
    for path, flags in commands:
        train_ppo_ray.parse(["--config", str(ROOT / path), *shlex.split(flags, comments=True)])
    assert len(commands) > 1
    # Numbers are numbers for every reader of YAML, which takes 1e-6 for text.
    topics, number = yaml.safe_load(text), re.compile(r"-?[\d.]+(e-?\d+)?")
    values = [value for flags in topics.values() for value in flags.values()]
    assert len(values) > 30 and not [value for value in values if isinstance(value, str) and number.fullmatch(value)]


# `test_paper_parity.py` has the other settings of the paper.
@pytest.mark.parametrize(
    ("method", "reweights", "eta"),
    [("both", True, 0.5), ("ar", True, None), ("lopti", False, 0.5), ("none", False, None)],
)
@pytest.mark.parametrize(("name", "algo"), [("kk", "reinforce++"), ("math", "")])
def test_the_methods_with_reinforce_and_in_math(name, algo, method, reweights, eta, tmp_path):
    args = parse(ROOT / f"examples/scripts/train_{name}.sh", tmp_path, METHOD=method, **{"ALGO": algo} if algo else {})
    assert (args["algo.ar.alpha"], args["algo.lopti.eta"]) == (0.1 if reweights else None, eta)
    estimator = ("reinforce", "k1", False) if algo else ("group_norm", "k3", True)
    assert tuple(args[f"algo.{flag}"] for flag in ("advantage.estimator", "kl.estimator", "kl.use_loss")) == estimator
    assert args["reward.remote_url"] == {"kk": "kk", "math": "math_boxed"}[name]


def test_math_is_evaluated_as_in_table_1(tmp_path):
    """Greedily, but with 16 samples for AMC and AIME."""
    sampling = parse(ROOT / "examples/scripts/train_math.sh", tmp_path)["eval.sampling"]
    sampled = {source: sampling_of(source, sampling)[1:] for source in ("math500", "amc", "aime")}
    assert sampled == {"math500": (1, 0.0), "amc": (16, 1.0), "aime": (16, 1.0)}


def test_reinforce_with_the_kl_loss_of_the_authors_scripts(tmp_path):
    """The flags that train_kk.sh names beside REINFORCE++ lead to the KL loss."""
    script = ROOT / "examples/scripts/train_kk.sh"
    [flags] = re.findall(r"^# .*authors' own scripts keep\n# .* append (--.+)\.$", script.read_text(), re.M)
    args = parse(script, tmp_path, *flags.split(), ALGO="reinforce++")
    assert args["algo.advantage.estimator"] == "reinforce"
    assert args["algo.kl.use_loss"] and args["algo.kl.estimator"] == "k3"


@pytest.mark.parametrize(("variables", "on_gpu"), [({}, True), ({"SLEEP": "0", "LIGER": "0"}, False)])
def test_models_sleep_and_have_ligers_kernels_unless_they_cannot(variables, on_gpu, tmp_path):
    args = parse(ROOT / "examples/scripts/train_kk.sh", tmp_path, **variables)
    assert args["vllm.enable_sleep"] is args["ds.enable_sleep"] is args["ds.use_liger_kernel"] is on_gpu


@pytest.mark.parametrize(("name", "value"), [("ALGO", "ppo"), ("METHOD", "AR")])
def test_kk_refuses_unknown_values_in_one_line(name, value, tmp_path):
    done = launch(ROOT / "examples/scripts/train_kk.sh", tmp_path, **{name: value})
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}={value}: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "argv").exists()


def test_dapo_is_dapo_with_the_two_methods(tmp_path):
    args = parse(ROOT / "examples/scripts/train_kk_dapo.sh", tmp_path)
    assert (args["algo.ar.alpha"], args["algo.lopti.eta"]) == (0.3, 0.5)
    assert args["actor.eps_clip_low_high"] == [0.2, 0.28] and args["actor.loss_agg_mode"] == "token-mean"
    assert args["algo.dynamic_filtering_enable"] and args["reward.overlong_buffer_len"] == 1024
    assert not args["algo.kl.use_loss"] and args["algo.kl.init_coef"] == 0


def test_partial_rollouts_are_asked_for(tmp_path):
    script = ROOT / "examples/scripts/train_kk_async.sh"
    assert not parse(script, tmp_path)["train.partial_rollout_enable"]
    assert parse(script, tmp_path, PARTIAL="1")["train.partial_rollout_enable"]


def test_two_gpus(tmp_path):
    args = parse(ROOT / "examples/scripts/train_kk_small.sh", tmp_path, GPUS="2")
    assert (args["actor.num_gpus_per_node"], args["vllm.num_engines"], args["train.colocate_all"]) == (2, 2, True)


def sweep(folder: Path, **variables: str) -> list[list[str]]:
    """The commands of a sweep over runs that end at once."""
    run = folder / "run.sh"
    run.write_text('echo "${ALPHA:--} ${ETA:--} $OUT $METHOD $*" >> "$(dirname "$0")/runs"\n')
    env = {"PATH": os.environ["PATH"], "FOLDER": str(folder / "sweep")} | variables
    script = ROOT / "examples/scripts/sweep.sh"
    subprocess.run(["bash", script, "bash", run], env=env, check=True, capture_output=True, timeout=30)
    lines = (folder / "runs").read_text().splitlines()
    (folder / "runs").unlink()
    return [line.split() for line in lines]


def test_a_sweep_takes_all_values_and_leaves_out_what_is_done(tmp_path):
    values = {"ALPHAS": "0.1 0.3", "ETAS": "0.3 0.5", "SEEDS": "1 2"}
    runs = sweep(tmp_path, **values)
    assert len(runs) == 8 and len({line[2] for line in runs}) == 8
    assert ["0.3", "0.5", f"{tmp_path}/sweep/both-alpha-0.3-eta-0.5-seed-2", "both", "--train.seed", "2"] in runs
    done = Path(runs[0][2], Path(runs[0][2]).name)
    done.mkdir(parents=True)
    (done / "config.json").touch()
    assert sweep(tmp_path, **values) == runs[1:]


def test_a_sweep_takes_each_method_with_what_it_has(tmp_path):
    """Values that are not given are the script's own."""
    methods = {"METHOD": "none ar lopti both", "SEEDS": "42"}
    names = [(line[0], line[1], Path(line[2]).name) for line in sweep(tmp_path, **methods)]
    assert names == [("-", "-", f"{method}-seed-42") for method in methods["METHOD"].split()]
    names = [(line[0], line[1], Path(line[2]).name) for line in sweep(tmp_path, **methods, ALPHAS="0.1 0.2")]
    assert names == [
        ("-", "-", "none-seed-42"),
        *((alpha, "-", f"ar-alpha-{alpha}-seed-42") for alpha in ("0.1", "0.2")),
        ("-", "-", "lopti-seed-42"),
        *((alpha, "-", f"both-alpha-{alpha}-seed-42") for alpha in ("0.1", "0.2")),
    ]


def test_a_job_is_submitted_with_its_command(tmp_path):
    (tmp_path / "ray").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {shlex.quote(str(tmp_path / 'argv'))}\n")
    (tmp_path / "ray").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ADDRESS": "http://head:8265"}
    script = ROOT / "examples/scripts/ray_job.sh"
    subprocess.run(["bash", script, "bash", "train.sh", "--x", "1"], env=env, cwd=ROOT, check=True, timeout=30)
    *flags, dashes, bash, name, flag, value = (tmp_path / "argv").read_text().splitlines()
    assert flags[:5] == ["job", "submit", "--address", "http://head:8265", "--working-dir"]
    assert [dashes, bash, name, flag, value] == ["--", "bash", "train.sh", "--x", "1"]
