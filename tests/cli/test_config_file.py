"""Flags in a file: what they become, what is refused, and that a run's own file gives the same flags again."""

import argparse
import re

import pytest
import yaml

from arlopti_openrlhf.cli import command_line, config_file, flags, train_ppo_ray
from arlopti_openrlhf.ops.lifecycle import credentials

FLAGS = """
actor:
  model_name_or_path: some/model   # nested
  adam.lr: 1e-6                    # and dotted
  eps_clip_low_high: [0.2, 0.24]
  muon: {nesterov: false}
algo.ar.alpha: 0.3
algo.lopti: {eta: 0.5}
algo.advantage.estimator: group_norm
algo.kl: {estimator: k3, use_loss: true, target: null}
rollout.n_samples_per_prompt: 8
ds.packing_samples: true
ds.adam_offload: false
logger.probability_stats: off
eval: {dataset: data.jsonl, steps: 10}
reward.remote_url: kk
eval.sampling: ["*:n=4,t=1", "aime:n=16,t=0.7"]
"""


@pytest.fixture
def parse(tmp_path):
    """Return parse(text, *words), the flat namespace of a file and a command line."""

    def of(text: str, *words: str) -> dict:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return vars(train_ppo_ray.parse([f"--config={tmp_path}/run.yaml", *words]))

    return of


def test_names_may_be_nested_or_dotted_and_values_keep_their_text(parse):
    args = parse(FLAGS)
    assert args["actor.model_name_or_path"] == "some/model"
    assert args["actor.adam.lr"] == 1e-6 and args["actor.eps_clip_low_high"] == [0.2, 0.24]
    assert args["actor.muon.nesterov"] is False
    assert (args["algo.ar.alpha"], args["algo.lopti.eta"], args["algo.kl.target"]) == (0.3, 0.5, None)
    assert args["algo.kl.use_loss"] is args["ds.packing_samples"] is True and args["ds.adam_offload"] is False
    assert args["logger.probability_stats"] == "off"  # which YAML takes for a truth value
    assert [str(sampling) for sampling in args["eval.sampling"][1:]] == ["*:n=4,t=1", "aime:n=16,t=0.7"]


def test_the_command_line_wins(parse):
    args = parse(FLAGS, "--algo.ar.alpha", "0.1", "--eval.sampling", "aime:n=1,t=0")
    assert args["algo.ar.alpha"] == 0.1 and args["algo.lopti.eta"] == 0.5
    assert str(args["eval.sampling"][-1]) == "aime:n=1,t=0"  # the last match counts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("algo.ar.alhpa: 0.3", "algo.ar.alhpa is no flag; did you mean --algo.ar.alpha?"),
        ("algo: {ar: {beta: 1}}", "algo.ar.beta is no flag"),
        ("help: true", "help is no flag"),
        ("ds.packing_samples: yes", "ds.packing_samples: yes is neither true nor false"),
        ("ds.packing_samples: [true]", "is neither true nor false"),
        ("ds.grad_accum_dtype: float32", "invalid choice: 'float32'"),
        ("actor.lr_scheduler: cosine-with-min-lr", "invalid choice: 'cosine-with-min-lr'"),
        ("critic.lr_scheduler: reduce_lr_on_plateau", "invalid choice"),
        ("algo.ar.alpha: [0.1, 0.2]", "algo.ar.alpha: takes one value, not a list"),
        ("actor.eps_clip_low_high: [[0.1], 0.2]", "actor.eps_clip_low_high: is no list of plain values"),
        ("algo: {ar.alpha: 0.3}\nalgo: {lopti.eta: 0.5}", "algo is there twice"),
        ("algo: {ar: {alpha: 0.3}, ar: {alpha: 0.1}}", "algo.ar is there twice"),
        ("algo: {ar.alpha: 0.3}\nalgo.ar.alpha: 0.1", "algo.ar.alpha is there twice"),
        ("- 1", "holds no names of flags with values"),
        ("a: [", "no YAML: "),
        ("algo.ar.alpha: 7", "7 is not a number in"),
        ("actor.policy_loss_type: dpo", "invalid choice: 'dpo'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(parse, capsys, text, problem):
    with pytest.raises(SystemExit) as exit:
        parse(text)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and problem in error and error.count("\n") == 1


def test_a_file_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as exit:
        train_ppo_ray.parse(["--conf", "nowhere.yaml"])  # argparse takes the beginnings of names
    assert exit.value.code == 2 and "argument --config: nowhere.yaml: " in capsys.readouterr().err


def test_the_kept_file_gives_the_same_flags(tmp_path, parse, monkeypatch):
    monkeypatch.setenv(credentials.WANDB, "")
    words = ["--logger.wandb.key", "secret", "--reward.clip_range", "-5", "5", "--vllm.num_engines", "1"]
    words += ["--ckpt.path", "/a/b", "--ckpt.output_dir", "/a"]  # relative ones become absolute
    assert "load_changed" not in config_file.text(command_line.parse(["--ckpt.load_changed"]))  # for one start alone
    (tmp_path / "run.yaml").write_text(FLAGS, encoding="utf-8")
    first = command_line.parse(["--config", str(tmp_path / "run.yaml"), *words])
    credentials.hide(first)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".config.yaml").touch(0o644)  # of a run that was killed
    config_file.keep(first, tmp_path / "folder")
    assert (tmp_path / "folder" / "config.yaml").stat().st_mode & 0o777 == 0o600
    [kept] = (tmp_path / "folder").iterdir()
    text = kept.read_text(encoding="utf-8")
    again = command_line.parse(["--config", str(kept)])
    assert same(first) == same(again) and "secret" not in text
    assert text == config_file.text(first)
    # By topic, for people, and with numbers as YAML reads them.
    topics = yaml.safe_load(text)
    assert topics["actor"]["adam.lr"] == 1e-6 and topics["actor"]["eps_clip_low_high"] == [0.2, 0.24]
    assert topics["ds"]["lora.target_modules"] == "all-linear" and topics["logger"]["probability_stats"] == "off"
    assert topics["dry_run"] is False and topics["ckpt"]["max_mem"] == "inf"
    assert not [name for name in topics if "." in name]


def test_the_kept_file_gives_the_same_run_from_another_folder(tmp_path, monkeypatch):
    """Paths are absolute there. Names of the hub, of rewards and of methods stay names, also beside such a folder."""
    for name in ("model", "kk", "ar", "elsewhere"):
        (tmp_path / name).mkdir()
    for name in ("a.jsonl", "b.jsonl", "method.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    words = "--actor.model_name_or_path model --reward.model_name_or_path org/name --data.prompt_dataset"
    words += " --eval.dataset b.jsonl --reward.remote_url kk --algo.token_method ar method.py --ckpt.path ckpt"
    first, _, rest = words.partition(" --eval.dataset")
    words = [*first.split(), "a.jsonl, b.jsonl,elsewhere@sub,org/d", *f"--eval.dataset{rest}".split()]
    kept = config_file.read(config_file.text(command_line.parse(words)))
    expected = {
        "actor.model_name_or_path": f"{tmp_path}/model",
        "reward.model_name_or_path": "org/name",
        "data.prompt_dataset": f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl,{tmp_path}/elsewhere@sub,org/d",
        "eval.dataset": f"{tmp_path}/b.jsonl",
        "reward.remote_url": "kk",
        "algo.token_method": ["ar", f"{tmp_path}/method.py"],
        "ckpt.path": f"{tmp_path}/ckpt",
        "ckpt.output_dir": f"{tmp_path}/ckpt",
    }
    assert {name: kept[name] for name in expected} == expected


# Why a flag whose name or help sounds like a path has none.
NO_PATHS = {
    "data.prompt_probs": "numbers",
    "data.input_key": "a column of the data",
    "data.label_key": "a column of the data",
    "data.image_key": "a column of the data, whose paths OpenRLHF takes from there",
}
SOUNDS_LIKE_A_PATH = re.compile(r"path|folder|director|file|dataset|\bdir\b|_dir\b", re.IGNORECASE)


def test_no_path_stays_relative_in_the_kept_file(tmp_path, monkeypatch):
    """A run may be resumed from another folder. A new flag that takes a path needs one in its row of `cli.flags`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    named = {
        action.dest
        for action in command_line.make_parser()._actions
        if SOUNDS_LIKE_A_PATH.search(f"{action.dest} {action.metavar} {action.help}")
        and (action.nargs != 0 and not action.choices and action.type in (None, str) and action.dest != "config")
    }
    assert len(named) > 12 and NO_PATHS.keys() <= named
    kept = {
        name: config_file.read(config_file.text(command_line.parse([f"--{name}", "x.py"])))[name] for name in named
    }
    relative = {name for name, value in kept.items() if value not in (f"{tmp_path}/x.py", [f"{tmp_path}/x.py"])}
    assert relative == NO_PATHS.keys()


def test_every_row_is_a_flags():
    assert flags.ROWS.keys() <= {action.dest for action in command_line.make_parser()._actions}


def same(flat: argparse.Namespace) -> dict:
    """The values, with lists for tuples and without the file's name."""
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(flat).items()}
    return {name: v for name, v in values.items() if name != "config"}
