"""The rows of docs/reproduce.md have the runs and hours that they name, and a dry run of each run finds no error."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_scripts import ROOT, TRAIN

from arlopti_openrlhf.cli import train_ppo_ray

PAGE = (ROOT / "docs/reproduce.md").read_text("utf-8")
# "# Fig. 4 and 7, 3B: 4 runs, 87 hours", and the command below it.
ROWS = {row[0]: row[1:] for row in re.findall(r"^# (.+): (\d+) runs?, (.+) hours\n(.+)$", PAGE, re.M)}
# Table 6's seconds of a step, without Lopti and with it.
SECONDS = {"Qwen/Qwen2.5-3B-Instruct": (45.4, 65.9), "Qwen/Qwen2.5-7B-Instruct-1M": (140.2, 196.3)}
STEPS, GPUS = 4500 // 64 * 5, 4
MATH_HOURS = (37, 48)  # of a run on four GPUs, by Appendix C.2


def trainings(command: str, folder: Path) -> list[list[str]]:
    """Run a command of the page with programs that write their arguments down. Return the flags of each training."""
    argv = folder / "argv"
    for program in (folder / "python", folder / "arlopti"):
        program.write_text(
            f"#!/bin/sh\nprintf '%s\\0' \"$@\" >> {shlex.quote(str(argv))}\necho >> {shlex.quote(str(argv))}\n"
        )
        program.chmod(0o755)
    argv.write_text("")
    subprocess.run(["bash", "-c", f"PATH={folder}:$PATH\n{command}"], cwd=ROOT, check=True, timeout=60)
    words = [line.split("\0") for line in argv.read_text("utf-8").split("\0\n")[:-1]]
    starts = {"-m": ["-m", TRAIN], "train": ["train"]}  # train_kk.sh also starts the study's module
    assert all(started[: len(starts[started[0]])] == starts[started[0]] for started in words)
    return [started[len(starts[started[0]]) :] for started in words]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[list[str]]]:
    """Return {a row's title: the flags of its trainings}."""
    return {title: trainings(row[2], tmp_path_factory.mktemp("run")) for title, row in ROWS.items()}


def hours(argv: list[str]) -> tuple[float, float]:
    """Return how many hours of one GPU a training takes, from and to."""
    args = vars(train_ppo_ray.parse(argv))
    assert args["actor.num_gpus_per_node"] == GPUS
    if args["reward.remote_url"] != "kk":
        return MATH_HOURS[0] * GPUS, MATH_HOURS[1] * GPUS
    has_two_passes = args["algo.lopti.eta"] is not None and args["algo.lopti.groups"] == "both"
    one = SECONDS[args["actor.model_name_or_path"]][has_two_passes] * STEPS * GPUS / 3600
    return one, one


def test_each_row_has_the_runs_and_hours_that_it_names(rows):
    assert len(rows) == 10
    for title, (count, named, _) in ROWS.items():
        low, high = (round(sum(ends)) for ends in zip(*map(hours, rows[title]), strict=True))
        assert (int(count), named) == (len(rows[title]), f"{low}" if low == high else f"{low} to {high}"), title


@pytest.fixture(scope="module")
def yours(tmp_path_factory, tiny_model) -> dict[str, list[str]]:
    """Return {reward: flags of a model and of data that are here}. The model takes prompts as long as Qwen's."""
    folder = tmp_path_factory.mktemp("yours")
    model = shutil.copytree(tiny_model, folder / "model")
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}), "utf-8")
    labels = {"kk": ("(1) Zoey is a knight", ["kk_3ppl"]), "math": ("2", ["math500", "amc", "aime"])}
    for reward, (label, sources) in labels.items():
        rows = [{"prompt": f"{i} + {i}?", "label": label, "datasource": sources[i % len(sources)]} for i in range(134)]
        for name, some in (("train", rows[6:]), ("test", rows[:6])):
            (folder / f"{reward}_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), "utf-8")
    own = f"--actor.model_name_or_path {model} --ckpt.path {folder}/checkpoints --ckpt.output_dir {folder}/final"
    own += f" --logger.tensorboard_dir {folder}/curves"
    files = "--data.prompt_dataset {0}_train.jsonl --eval.dataset {0}_test.jsonl"
    return {reward: f"{own} {files.format(folder / reward)}".split() for reward in labels}


IN_THE_GATE = "Table 1 and Fig. 9, DSR-Uniform"


@pytest.mark.parametrize("title", [pytest.param(t, marks=() if t == IN_THE_GATE else pytest.mark.long) for t in ROWS])
def test_a_dry_run_finds_no_error(title, rows, yours, monkeypatch, capsys):
    """All of a row at 3B, and the last run of any other, whose method's flags are those of a row at 3B."""
    for argv in rows[title] if "3B" in title else rows[title][-1:]:
        reward = "kk" if argv[argv.index("--reward.remote_url") + 1] == "kk" else "math"
        monkeypatch.setattr(sys, "argv", ["arlopti", *argv, *yours[reward], "--dry-run"])
        with pytest.raises(SystemExit) as end:
            train_ppo_ray.main()
        said = capsys.readouterr()
        assert end.value.code == 0, f"{shlex.join(argv)}\n{said.err}"
        assert "the run can start. Nothing has been started." in said.out
