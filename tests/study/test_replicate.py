"""The replication plans, goes on with what is not done, and its tables equal arithmetic by hand. A script trains."""

import json
import re
import shlex
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from torch.utils.tensorboard import SummaryWriter

from arlopti_openrlhf.cli import train_ppo_ray
from arlopti_openrlhf.cli.quickstart_tasks import TASKS
from study import replicate, replicate_report
from study.replicate_arms import SMALL, Experiment, write_puzzles
from study.summary import CURVES, MEASURES, NORMS

ROOT = Path(__file__).parents[2]
MODEL = ("--actor.model_name_or_path", "m", "--data.prompt_dataset", "d")

# Writes down its arguments, and either fails once, with the status that is asked for, or leaves what a run leaves.
PYTHON = """#!/bin/sh
printf '%s\\0' "$@" > "$OUT.argv"
if [ -e "$OUT.fails" ]; then echo "no memory"; mv "$OUT.fails" "$OUT.failed"; exit "$(cat "$OUT.failed")"; fi
for i in 1 2 3 4 5; do echo "(pid=1) Global step $i: {'a': 0, 'timing/step_total': $i.5}"; done
rm -rf "$OUT/tensorboard" && cp -r LOG "$OUT/tensorboard"
mkdir -p "$OUT/$(basename "$OUT")" "$OUT/checkpoints" && touch "$OUT/$(basename "$OUT")/config.json"
"""


def write_log(folder: Path, evaluations: int) -> Path:
    """Write the TensorBoard log of a run of five steps, each of 36 s, with an evaluation before and after each."""
    with SummaryWriter(str(folder)) as writer:
        for step in range(1, 6):
            for name in (*CURVES, *NORMS, *(f"train/timing/{n}" for n in ("step_total", "generation", "ppo_train"))):
                writer.add_scalar(name, 36.0, step)
        for step in range(evaluations):
            for people in (3, 4, 5, 6, 7):
                for measure in MEASURES:
                    writer.add_scalar(f"eval/kk_{people}ppl/{measure}", step / 10 + people / 100, step)
    return folder


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return write_log(tmp_path_factory.mktemp("log"), evaluations=6)


@pytest.fixture
def start(log, tmp_path, monkeypatch):
    """Return start(*flags), which runs the command with the script above for `python`, in tmp_path/out."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON.replace("LOG", shlex.quote(str(log))))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(replicate, "FULL", replicate.FULL._replace(held_out=10))
    return lambda *flags: replicate.main(["--out", str(tmp_path / "out"), "--steps=5", *flags])


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.long
def test_it_goes_on_where_it_was_ended(start, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "double-steps-0.fails").write_text("7")
    arms = ("--arms", "grpo", "double-steps", "--seeds=2")
    with pytest.raises(SystemExit, match="^7$"):
        start(*arms)
    assert [(row["arm"], row["seed"]) for row in rows(out)] == [("grpo", 0)]
    said, failed = capsys.readouterr()
    assert re.search("(?s)no memory.*double-steps-0 ended with status 7 .*the same command again goes on", failed)
    # The median of 2.5, 3.5 and 4.5 s. A run has 5 steps, and 6 evaluations of 50 x 8 answers, as in 4.6875 steps.
    assert "| GRPO | 0 of 2 | not known before its first steps |  |" in said
    assert f"| GRPO | 0 of 2 | {3.5 * 9.6875 / 3600:.2f} | {3.5 * 9.6875 / 1800:.2f} |" in said
    (out / "grpo-0.argv").unlink()
    start(*arms)
    assert [(row["arm"], row["seed"]) for row in rows(out)] == [
        *[("grpo", 0), ("double-steps", 0)],
        *[("grpo", 1), ("double-steps", 1)],
    ]
    assert not (out / "grpo-0.argv").exists()
    assert len(list((out / "double-steps-0").glob("start*.log"))) == 2
    assert not (out / "grpo-0" / "checkpoints").exists()
    row = rows(out)[0]
    assert row["held_out"]["accuracy"]["kk_3ppl"] == [0.03, 0.13, 0.23, 0.33, 0.43, 0.53]
    assert row["versions"]["openrlhf"] and row["commit"] and row["machine"]["cores"]
    assert row["configuration"]["held_out_by"] == "structure" and len(row["puzzles_sha256"]["test"]) == 16
    assert rows(out)[0]["puzzles_sha256"] == rows(out)[1]["puzzles_sha256"] != rows(out)[2]["puzzles_sha256"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    start("--dry-run", *arms)
    hours = 36 * 9.6875 / 3600
    said = capsys.readouterr().out
    assert f"| GRPO | 2 of 2 | {hours:.2f} | 0.00 |" in said
    assert "Unlike the paper: at most 1,536 tokens an answer, new puzzles, held out by structure, 8 answers" in said
    with pytest.raises(SystemExit):
        start("--dry-run", "--gpus=8")
    assert "has a run with other settings, grpo-0" in capsys.readouterr().err
    start("--dry-run", "--arms", "grpo", "--seeds=1")
    assert f"| GRPO | 1 of 1 | {hours:.2f} | 0.00 |" in capsys.readouterr().out


def test_a_run_that_was_begun_with_other_settings_is_refused(start, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ar-0.fails").write_text("7")
    for flags, status in (((), 7), (("--model", "another/model"), 2), ((), 0)):
        with suppress(SystemExit) if not status else pytest.raises(SystemExit) as end:
            start("--arms", "ar", "--seeds=1", *flags)
        assert not status or end.value.code == status
    assert "has a run with other settings, ar-0" in capsys.readouterr().err
    assert len(rows(tmp_path / "out")) == 1


def test_a_run_that_diverges_gets_no_row_and_the_others_go_on(start, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ar-0.fails").write_text("3")
    with pytest.raises(SystemExit) as end:
        start("--arms", "ar", "both", "--seeds=1")
    assert end.value.code == 3 and [row["arm"] for row in rows(tmp_path / "out")] == ["both"]
    assert "Diverged, and so without a row: ar-0." in capsys.readouterr().out
    assert "Diverged, and so missing from every mean and difference: ar-0." in (tmp_path / "out/table.md").read_text()


def test_a_run_that_lost_its_last_evaluation_goes_on(start, tmp_path):
    """It may have saved its model all the same."""
    out = tmp_path / "out"
    start("--arms", "ar", "--seeds=1")
    for gone in (out / "rows.jsonl", out / "ar-0.argv"):
        gone.unlink()
    shutil.rmtree(out / "ar-0" / "tensorboard")
    write_log(out / "ar-0" / "tensorboard", evaluations=5)
    start("--arms", "ar", "--seeds=1")
    assert (out / "ar-0.argv").exists()
    assert rows(out)[0]["held_out"]["accuracy"]["kk_3ppl"][-1] == 0.53


def test_what_a_kill_after_the_last_row_left_is_done(start, tmp_path, capsys):
    out = tmp_path / "out"
    start("--arms", "ar", "--seeds=1")
    (out / "table.md").unlink()
    (out / "ar-0" / "checkpoints").mkdir()
    start("--arms", "ar", "--seeds=1")
    assert (out / "table.md").exists() and not (out / "ar-0" / "checkpoints").exists()


def test_a_run_that_ended_between_its_model_and_its_row_is_not_trained_again(start, tmp_path):
    out = tmp_path / "out"
    start("--arms", "ar", "--seeds=1")
    for name in ("rows.jsonl", "ar-0.argv"):
        (out / name).unlink()
    start("--arms", "ar", "--seeds=1")
    assert len(rows(out)) == 1 and not (out / "ar-0.argv").exists()


def test_every_arm_is_what_it_is_called(start, tmp_path):
    """Flags of the script and of the command together, by the real parser."""
    start("--seeds=1")
    found = {}
    for arm in replicate.ARMS:
        module_flag, module, *argv = (tmp_path / "out" / f"{arm}-0.argv").read_text().split("\0")[:-1]
        assert (module_flag, module) == ("-m", "arlopti_openrlhf.cli.train_ppo_ray")
        found[arm] = vars(train_ppo_ray.parse(argv))
    names = ("algo.ar.alpha", "algo.token_method_normalize", "algo.lopti.eta", "train.batch_size")
    assert {arm: tuple(args[name] for name in names) for arm, args in found.items()} == {
        "grpo": (None, False, None, 256),
        "double-steps": (None, False, None, 128),
        "ar": (0.3, False, None, 256),
        "ar-mean-one": (0.3, True, None, 256),
        "lopti": (None, False, 0.5, 256),
        "both": (0.3, False, 0.5, 256),
    }
    for args in found.values():
        assert (args["rollout.batch_size"], args["rollout.n_samples_per_prompt"]) == (64, 8)
        assert (args["rollout.temperature"], args["rollout.max_new_tokens"]) == (0.7, 1536)
        assert (args["train.num_episodes"], args["eval.steps"], args["train.seed"]) == (5, 1, 1)
        assert args["ckpt.load_enable"] and args["vllm.enable_sleep"] and args["actor.num_gpus_per_node"] == 4
    # Nothing else tells the arms apart, but where they are.
    own = {*names, "ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir", "logger.wandb.run_name"}
    common = [{name: value for name, value in args.items() if name not in own} for args in found.values()]
    assert all(args == common[0] for args in common)


def test_a_small_run_is_the_quickstarts_task_in_one_process(start, tmp_path):
    with pytest.raises(SystemExit):  # the log of the script above is that of other sources
        flags = ("--", "--actor.adam.lr", "0.007")  # wins over the task's own
        start("--small", "sums", "--model", "m", "--seeds=1", "--arms", "double-steps", *flags)
    _, module, *argv = (tmp_path / "out" / "double-steps-0.argv").read_text().split("\0")[:-1]
    args, of = vars(train_ppo_ray.parse(argv)), TASKS["sums"]
    assert args["actor.adam.lr"] == 0.007
    assert "0.007" in json.loads((tmp_path / "out" / "double-steps-0" / "configuration.json").read_text())["flags"]
    assert module == "study.in_process" and args["ds.zero_stage"] == 2 and not args["ds.use_liger_kernel"]
    assert args["train.batch_size"] == of.prompts_per_step * 8 // 4
    assert (args["data.max_len"], args["rollout.max_new_tokens"]) == (of.max_len, of.max_new_tokens)
    assert args["reward.remote_url"] == "math"
    (row, *_) = (tmp_path / "out" / "puzzles-0" / "test.jsonl").read_text("utf-8").splitlines()
    assert json.loads(row)["datasource"] == "math"


def test_the_arms_that_explain_a_lead_differ_in_what_they_are_called(tmp_path):
    x = Experiment("m", 1, SMALL["lines"], tmp_path)
    found = {}
    for name, arm in x.size.arms.items():
        args = vars(train_ppo_ray.parse([*MODEL, *x.flags(arm, 4)]))
        names = (
            "train.batch_size",
            "train.max_epochs",
            "actor.max_norm",
            "actor.adam.lr",
            "algo.token_method",
            "algo.token_method_args",
        )
        found[name] = (arm.method, *(args[flag] for flag in names))
    random = [str(ROOT / "study" / "random_groups.py")], ["random_groups.seed=5"]
    assert found == {
        "grpo": ("none", 32, 1, 1.0, 2e-5, [], []),
        "double-steps": ("none", 16, 1, 1.0, 1e-5, [], []),
        "two-epochs": ("none", 32, 2, 1.0, 1e-5, [], []),
        "lopti": ("lopti", 32, 1, 1.0, 1e-5, [], []),
        "random-groups": ("none", 32, 1, 1.0, 2e-5, *random),
        "double-steps-unclipped": ("none", 16, 1, 1000.0, 1e-5, [], []),
        "lopti-unclipped": ("lopti", 32, 1, 1000.0, 1e-5, [], []),
        "random-groups-unclipped": ("none", 32, 1, 1000.0, 1e-5, *random),
    }


def test_short_lines_are_asked_for_with_two_examples(tmp_path):
    x = Experiment("m", 1, SMALL["lines"], tmp_path)
    write_puzzles(15, x)
    sums = Experiment("m", 1, SMALL["sums"], tmp_path / "sums")
    write_puzzles(15, sums)
    for name, count in (("train", 64), ("test", 123)):
        rows = [json.loads(line) for line in (x.puzzles(15) / f"{name}.jsonl").read_text("utf-8").splitlines()]
        plain = [json.loads(line) for line in (sums.puzzles(15) / f"{name}.jsonl").read_text("utf-8").splitlines()]
        assert len(rows) == count and [row["label"] for row in rows] == [row["label"] for row in plain[:count]]
        for row, other in zip(rows, plain, strict=False):
            *turns, question = row["prompt"]
            assert [question] == other["prompt"]
            assert [turn["role"] for turn in turns] == ["system"] + ["user", "assistant"] * 2
            assert turns[0]["content"] == "Answer with one short line."
            assert turns[-1]["content"] == "20 times 4 makes 80."


@pytest.mark.parametrize("flags", [["--steps=7"], ["--steps=8", "--evaluations=4"]])
def test_steps_that_make_no_whole_epochs_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        replicate.main([*flags, "--dry-run"])
    assert f"argument {flags[0].replace('=', ': ')} is no multiple of 5, the number of e" in capsys.readouterr().err


@pytest.mark.long
def test_seeds_and_evaluations_are_chosen(start, tmp_path, capsys):
    """Other seeds are other runs. Fewer evaluations are another run, which the folder refuses."""
    start("--arms", "ar", "--seeds=1")
    start("--arms", "ar", "--seeds=3-4")
    assert [row["seed"] for row in rows(tmp_path / "out")] == [0, 3, 4]
    assert "--train.seed\x005" in (tmp_path / "out" / "ar-4.argv").read_text()
    capsys.readouterr()
    start("--dry-run", "--arms", "ar", "--seeds=2-4")
    assert "| AR (α = 0.3) | 2 of 3 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        start("--dry-run", "--arms", "ar", "--evaluations=1")
    assert "has a run with other settings, ar-0" in capsys.readouterr().err
    start("--arms", "ar", "--seeds=1", "--evaluations=1", "--out", str(tmp_path / "other"))
    (row,) = rows(tmp_path / "other")
    assert row["evaluated_at"] == [0, 5] and row["held_out"]["accuracy"]["kk_3ppl"] == [0.03, 0.53]
    assert "--eval.steps\x005" in (tmp_path / "other" / "ar-0.argv").read_text()
    assert "| AR (α = 0.3) | 0.050 | 0.550 |" in (tmp_path / "other" / "table.md").read_text()


@pytest.mark.parametrize("asked", ["0", "4-3", "-1", "1-", "a", "1,2", "\u0663", ""])
def test_seeds_that_are_none_are_refused(asked, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        replicate.main([f"--seeds={asked}", "--dry-run"])
    assert "is neither a number of seeds nor a range such as 3-5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--actor.adamm.lr", "1"], "unrecognized arguments: --actor.adamm.lr: did you mean --actor.adam.lr?"),
        (["--actor.num_nodes", "1", "--train.seed=3"], "argument FLAG: the study sets --train.seed itself"),
    ],
)
def test_flags_that_cannot_be_handed_on_are_refused_before_anything_is_written(flags, said, tmp_path, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        replicate.main(["--toy", "--out", str(tmp_path / "out"), "--", *flags])
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def row(arm: str, seed: int, accuracy: float) -> dict:
    curve: dict = {"kk_3ppl": [0.1, accuracy], "kk_4ppl": [0.1, accuracy]}
    held_out = {"accuracy": curve, "pass@8": {source: [0.8, 0.9] for source in curve}}
    return {"arm": arm, "seed": seed, "evaluated_at": [0, 80], "held_out": held_out, "curves": {"reward": [-1.0, 1.0]}}


def test_the_tables_by_hand():
    accuracies = {"grpo": (0.36, 0.40, 0.44), "ar": (0.51, 0.55, 0.56), "ar-mean-one": (0.50, 0.46), "lopti": (0.50,)}
    made = [row(arm, seed, accuracy) for arm, of in accuracies.items() for seed, accuracy in enumerate(of)]
    made[-1]["held_out"]["accuracy"]["kk_3ppl"][0] = None  # lost by a kill
    titles = {"grpo": "GRPO", "ar": "AR", "ar-mean-one": "AR, mean one", "lopti": "Lopti", "both": "Both"}
    text = replicate_report.table(titles, made)
    # GRPO: mean 0.40, s = 0.04, 4.303 · 0.04 / √3 = 0.099.
    assert "| GRPO | 3 | 0.400 ± 0.099 | 0.900 ± 0.000 | 1.00 ± 0.00 |" in text
    # AR: differences 0.15, 0.15 and 0.12: mean 0.14, s = 0.0173, 4.303 · 0.0173 / √3 = 0.043. With two degrees of
    # freedom t = 14 has p = 1 - 14 / √(14² + 2) = 0.0051, which is the smallest of three.
    assert "| AR − GRPO | 3 | +0.140 ± 0.043 | 0.005 | 0.015 | +0.000 ± 0.000 |" in text
    # One degree of freedom: 0.14 and 0.06 are 0.10 ± 12.706 · 0.04, t = 2.5 and p = 2 / π · arctan(1 / 2.5). 0.01 and
    # 0.09 are 0.05 ± the same, p = 2 / π · arctan(1 / 1.25). Its correction is not below that of the smaller p.
    assert "| AR, mean one − GRPO | 2 | +0.100 ± 0.508 | 0.242 | 0.484 |" in text
    assert "| AR − AR, mean one | 2 | +0.050 ± 0.508 | 0.430 | 0.484 |" in text
    assert "| Lopti − GRPO | 1 | +0.140 |  |  | +0.000 |" in text
    assert "| Lopti | 1 | 0.500 | 0.900 |" in text and "| Both | 0 | missing | missing |" in text
    assert "| Both − GRPO | 0 | missing |" in text and "twice" not in text
    # Between two arms without a difference: t · s · √(2/3), of GRPO's runs 4.303 · 0.04 · 0.816 = 0.141.
    assert (
        "accuracies, from the runs of GRPO: a standard deviation of 0.040 between seeds (2 degrees of freedom)" in text
    )
    assert "differ by up to 0.141 by chance" in text
    # With AR's, whose s² is 0.0007, and 0.0008: √((2 · 0.0016 + 2 · 0.0007 + 0.0008) / 5) = 0.0329. The smallest arm
    # has one seed: 2.571 · 0.0329 · √2 = 0.119.
    assert "accuracies, from all arms: a standard deviation of 0.033 between seeds (5 degrees of freedom)" in text
    assert "differ by up to 0.119 by chance" in text
    assert "Noise of pass@8, from all arms: a standard deviation of 0.000" in text
    assert "| AR | 0.100 ± 0.000 | 0.540 ± 0.066 |" in text and "| Lopti | - | 0.500 |" in text


def test_what_the_page_says_of_three_seeds():
    """A standard deviation of 3 points, then of 6: by three pairs alone, and by all six arms together."""
    page = (ROOT / "docs" / "reproduce.md").read_text("utf-8")
    for points in (3, 6):
        values = [-points, 0, points]  # whose standard deviation is `points`
        alone, together = (replicate_report.noise([values] * arms).band for arms in (1, 6))
        assert f"| {points} points | ± {alone:.1f} | ± {together:.1f} |" in page


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_toy_survives_two_kills(tmp_path):
    """All arms on the real stack. It is killed between two runs, and within one, and goes on."""
    command = [sys.executable, "-m", "study.replicate", "--toy", "--seeds=1", "--out", str(tmp_path)]
    # Killed within the second run once it has saved its first step.
    saved = tmp_path / "double-steps-0" / "checkpoints" / "_actor" / "latest"
    moments = [(tmp_path / "rows.jsonl").exists, lambda: saved.exists() and saved.read_text() == "global_step1"]
    for start, is_moment in enumerate([*moments, lambda: False]):
        with open(tmp_path / f"start{start}.txt", "w", encoding="utf-8") as output:
            process = psutil.Popen(command, stdout=output, stderr=output, cwd=ROOT)
        try:
            while process.poll() is None and not is_moment():
                time.sleep(0.1)
            status = process.poll()
        finally:
            with suppress(psutil.NoSuchProcess):
                # The second time the run too. The first time, it ends by itself.
                for victim in [process, *(process.children(recursive=True) if start else [])]:
                    victim.kill()
            process.wait()
        said = (tmp_path / f"start{start}.txt").read_text("utf-8")
        assert status == (0 if start == len(moments) else None), said
    made = rows(tmp_path)
    assert [row["arm"] for row in made] == list(replicate.ARMS)
    for row in made:
        # What is killed between the checkpoint of step 1 and its evaluation lacks that.
        first, second, last = row["held_out"]["accuracy"]["kk_2ppl"]
        assert None not in (first, last) and (second is not None or row["arm"] == "double-steps")
    logs = sorted((tmp_path / "double-steps-0").glob("start*.log"))
    assert re.search(r"resumes from \S*global_step1", logs[-1].read_text("utf-8", errors="replace"))
    assert "missing" not in (tmp_path / "table.md").read_text("utf-8")
