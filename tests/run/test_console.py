"""The console shows how far a run is, and the file gets everything else."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from arlopti_openrlhf.run import closing, console, driver, progress
from arlopti_openrlhf.run.progress import Evaluation, Progress, Step

WORKER = "\x1b[36m(PolicyModelActor pid=71, ip=10.0.0.2)\x1b[0m "


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("arlopti_openrlhf: SIGTERM\n", "arlopti_openrlhf: SIGTERM"),
        (f"{WORKER}arlopti_openrlhf: waiting\n", "arlopti_openrlhf: waiting"),
        ("(PPOTrainer pid=7) WARNING 11-22 16:08:01 health.py:45] step 3: a", "arlopti_openrlhf: warning: step 3: a"),
        ("(PPOTrainer pid=7) INFO 11-22 16:08:01 ppo_trainer.py:551] Global step 3", None),
        ("WARNING 11-22 16:08:01 [cpu.py:12] of vLLM, which a user cannot mend", None),
        ("Namespace(arlopti_openrlhf: no)", None),
        ("", None),
    ],
)
def test_what_is_meant_for_the_user(line, shown):
    assert console.for_the_user(line) == shown


def status(**more) -> dict:
    rollouts = {"rollout/reward_mean": 1.5, "rollout/num_samples": 32.0, "rollout/response_length_mean": 100.0}
    return rollouts | {"timing/step_total": 4.0} | more


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (status(), "reward 1.5, 800 tokens/s"),
        (status(score=0.25, actor_grad_norm=0.5), "reward 1.5, score 0.25, gradient norm 0.5, 800 tokens/s"),
        (
            status(**{"lopti/low/actor_grad_norm": 10.36, "lopti/high/actor_grad_norm": 4.2}),
            "reward 1.5, gradient norm 10.4, 4.2, 800 tokens/s",
        ),
    ],
)
def test_figures_of_a_step(metrics, text):
    assert progress.figures(metrics) == text


RUN = """
import os, subprocess, sys, time
from arlopti_openrlhf.run import console
from arlopti_openrlhf.run.progress import Evaluation, Progress, Step
console._POLL = 0.05
first = Evaluation(0, {"accuracy": 0.25})
one = Progress(64, Step(1, 32, "reward 0.5"), first, first)
seen = iter([Progress(), Progress(64), Progress(64, None, first, first), one])
last = Progress(64, Step(2, 64, "reward 0.75"), first, Evaluation(2, {"accuracy": 0.5}))
console.ray.is_initialized = lambda: True
console.progress.read = lambda: next(seen, last)
with console.Console(__import__("pathlib").Path(sys.argv[1])) as shown:
    print("noise of Python")
    subprocess.run(["echo", "noise of another process"])
    os.write(2, b"(A pid=1) arlopti_openrlhf: a word to the user\\n")
    time.sleep(1)
    shown.close("the last line")
    print("after it")
"""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_and_the_rest_is_kept(is_terminal, tmp_path):
    log = tmp_path / "new" / "train.log"
    outer, inner = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", RUN, str(log)], stdout=inner)
    os.close(inner)
    text = read(outer)
    assert process.wait(60) == 0
    kept = log.read_text("utf-8")
    assert oct(log.stat().st_mode & 0o777) == "0o600"
    for words in ("noise of Python", "noise of another process", "a word to the user", "the last line"):
        assert words in kept
    assert "noise" not in text and "after it" not in kept and "the last line" not in text
    assert "arlopti_openrlhf: a word to the user" in text and str(log) in text
    assert text.rstrip().endswith("after it")
    if is_terminal:
        assert re.search(r"step 2 100%\|.*reward 0\.75, held out 0\.5", text)
    else:
        assert text.count("step 1, 32 of 64 prompts: reward 0.5, held out 0.25\n") == 1
        assert text.count("step 2, 64 of 64 prompts: reward 0.75, held out 0.5\n") == 1


def read(descriptor: int) -> str:
    """Return all that comes out of a pipe or a terminal."""
    parts = []
    try:
        while part := os.read(descriptor, 65536):
            parts.append(part)
    except OSError:  # a terminal ends so
        pass
    os.close(descriptor)
    return b"".join(parts).decode()


def test_a_log_goes_on(tmp_path):
    (tmp_path / "train.log").write_text("an earlier run\n")
    shown = (
        f"from arlopti_openrlhf.run.console import *\nwith Console(Path({str(tmp_path / 'train.log')!r})): print(1)"
    )
    subprocess.run([sys.executable, "-c", shown], check=True, stdout=subprocess.DEVNULL)
    assert re.fullmatch(r"an earlier run\n\n\d{4}-.* process \d+\n1\n\n", (tmp_path / "train.log").read_text())


@pytest.mark.parametrize(("mode", "is_terminal", "wanted"), [("progress", False, True), ("all", True, False)])
def test_who_says_which_console_gets_it(mode, is_terminal, wanted, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: is_terminal))
    assert console.is_wanted(mode) == wanted and console.is_wanted("auto") == is_terminal


def test_the_cause_is_said_and_kept(tmp_path):
    program = f"""
from pathlib import Path
from arlopti_openrlhf.run import console, driver
with console.Console(Path({str(tmp_path)!r}, "train.log")) as shown, driver.Driver(shown).ending():
    raise ValueError("no label")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"arlopti_openrlhf: run failed: ValueError: no label\nIts log: {tmp_path / 'train.log'}\n"
    kept = (tmp_path / "train.log").read_text()
    assert "Traceback" in kept and "Traceback" not in done.stdout and kept.endswith("ValueError: no label\n")


def test_a_complete_run_says_what_came_out(capsys, monkeypatch):
    monkeypatch.setattr(driver, "_shut_down", lambda code: None)
    monkeypatch.setattr(driver.progress, "read", lambda: Progress(8))
    with driver.Driver(closing=lambda found: f"{found.prompts} prompts").ending():
        pass
    assert capsys.readouterr().out == "8 prompts\n"


def arguments(**logger) -> SimpleNamespace:
    wandb = SimpleNamespace(key=None, project="p", run_name="r")
    return SimpleNamespace(
        eval=SimpleNamespace(dataset="test.jsonl"),
        ckpt=SimpleNamespace(output_dir="final"),
        logger=SimpleNamespace(**{"tensorboard_dir": "tb", "wandb": wandb} | logger),
    )


def metrics(*accuracies: float) -> dict[str, float]:
    """Return the metrics of an evaluation of two sources, and of one that has rewards alone."""
    found = {"eval_odd_pass1": -0.5, "eval_kk_2ppl_pass1": 1.0}
    for source, value in zip(("kk_2ppl", "kk_3ppl"), accuracies, strict=True):
        found |= {f"{source}/accuracy": value, f"{source}/accuracy/low": value - 0.1}
        found |= {f"{source}/accuracy/high": value + 0.1, f"{source}/pass@2": 1.0}
    return found | {"accuracy": sum(accuracies) / 2}


def test_the_closing_text():
    found = Progress(64, Step(2, 64, ""), Evaluation(0, metrics(0.25, 0.5)), Evaluation(2, metrics(0.5, 0.75)))
    assert closing.text(arguments(), found, None).splitlines() == [
        "trained 2 steps",
        "held-out accuracy   step 0                   step 2",
        "kk_2ppl             0.250 (0.150 to 0.350)   0.500 (0.400 to 0.600)",
        "kk_3ppl             0.500 (0.400 to 0.600)   0.750 (0.650 to 0.850)",
        "mean                0.375                    0.625",
        "odd, reward         -0.500                   -0.500",
        "model:   final",
        "curves:  tensorboard --logdir tb/r",
        "next:    arlopti evaluate --model final --data test.jsonl --out OUT",
    ]


def test_the_closing_text_without_an_evaluation(tmp_path):
    args = arguments(tensorboard_dir=None)
    args.logger.wandb.key = "WANDB_API_KEY"
    assert closing.text(args, Progress(), tmp_path).splitlines() == [
        "no step was trained",
        "not evaluated (--eval.steps)",
        "model:   final",
        f"log:     {tmp_path}",
        "curves:  wandb, project p, run r",
        "next:    arlopti evaluate --model final --data test.jsonl --out OUT",
    ]
