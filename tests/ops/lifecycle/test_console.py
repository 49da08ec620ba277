"""The console shows how far a run is, and the file gets everything else."""

import fcntl
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from arlopti_openrlhf.ops.lifecycle import console, progress, stopping
from arlopti_openrlhf.ops.lifecycle.progress import Evaluation, Progress, Prompts, Step

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
        ("\x1b[36m(pid=71)\x1b[0m arlopti_openrlhf: at start\n", "arlopti_openrlhf: at start"),
        (
            "\x1b[33m(autoscaler +8s)\x1b[0m Error: No available node types can fulfill {'GPU': 1}",
            "arlopti_openrlhf: (autoscaler +8s) Error: No available node types can fulfill {'GPU': 1}",
        ),
        ("(autoscaler +8s) Tip: use `ray status` to view detailed cluster status", None),
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
        (status(actor_grad_norm=float("nan")), "reward 1.5, grad nan, 800 tok/s"),
        (status(score=0.25, actor_grad_norm=0.5), "reward 1.5, score 0.25, grad 0.5, 800 tok/s"),
        (
            status(**{"lopti/low/actor_grad_norm": 10.36, "lopti/high/actor_grad_norm": 4.2}),
            "reward 1.5, grad 10.4 4.2, 800 tok/s",
        ),
    ],
)
def test_figures_of_a_step(metrics, text):
    assert progress.figures(metrics) == text


RUN = """
import sys, time
from arlopti_openrlhf import terminal
from arlopti_openrlhf.ops.lifecycle import console
from arlopti_openrlhf.ops.lifecycle.progress import Evaluation, Progress, Prompts, Step
sys.stdout = terminal.lenient(1)
first = Evaluation(0, {"accuracy": 0.25})
prompts = Prompts(64, 0)
one = Progress(prompts, Step(1, 32, "reward 0.5"), first, first)
last = Progress(prompts, Step(2, 64, "reward 0.75"), first, Evaluation(2, {"accuracy": 0.5}))
shown = console.Console(sys.argv[1])
shown.show(Progress(), has_ray=False)
for found in [*[Progress()] * 8, Progress(prompts), Progress(prompts, None, first, first), one, last, last]:
    shown.show(found, has_ray=True)
    time.sleep(0.2)
shown.print("arlopti_openrlhf: a word to the user")
shown.close()
print("after it")
"""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown(is_terminal, tmp_path):
    outer, inner = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", RUN, "the log"], stdout=inner)
    os.close(inner)
    text = read(outer)
    assert process.wait(60) == 0
    assert "arlopti_openrlhf: a word to the user" in text and "vLLM and DeepSpeed: the log" in text
    assert text.rstrip().endswith("after it")
    if is_terminal:
        assert "waiting for OpenRLHF's imports and for Ray" in text and "00:01" in text
        assert "waiting for the models in vLLM and DeepSpeed" in text
        assert re.search(r"step 2 100%\|.*held out 0\.5, reward 0\.75", text)
    else:
        assert text.count("step 1, 32 of 64 prompts: held out 0.25, reward 0.5\n") == 1
        assert text.count("step 2, 64 of 64 prompts: held out 0.5, reward 0.75\n") == 1


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


@pytest.mark.parametrize(("mode", "is_terminal", "wanted"), [("progress", False, True), ("all", True, False)])
def test_who_says_which_console_gets_it(mode, is_terminal, wanted, monkeypatch):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, SimpleNamespace(isatty=lambda: is_terminal))
    assert console.is_wanted(mode) == wanted and console.is_wanted("auto") == is_terminal


def test_what_is_said_is_read(monkeypatch):
    """`first` is the first evaluation of the process, and stays."""
    store: dict[str, bytes] = {}
    monkeypatch.setattr(stopping, "put", lambda name, value: store.update({name: value.encode()}))
    monkeypatch.setattr(stopping, "get", store.get)
    assert progress.of(progress.read()) == Progress()
    said = {"prompts": Prompts(64, 8), "step": Step(1, 32, "reward 1.5")}
    said |= {"first": Evaluation(0, {"accuracy": 0.25}), "last": Evaluation(2, {"accuracy": math.nan})}
    for name, value in said.items():
        progress.say(name, value)
    progress.say("first", said["last"])
    assert str(progress.of(progress.read())) == str(Progress(**said))  # NaN is not equal to itself
    sources = {f"bigbench_source_{i}/{name}": 0.123456789 for i in range(500) for name in ("accuracy", "pass@2")}
    progress.say("last", Evaluation(4, sources | {"accuracy": 0.5}))
    found = progress.brief(progress.read())
    assert progress.of(found).last == Evaluation(4, {"accuracy": 0.5}) and len(str(found)) < 1000


def test_a_store_that_does_not_answer_stops_no_training(monkeypatch, capsys):
    monkeypatch.setattr(stopping, "put", lambda name, value: 1 / 0)
    progress.say("step", Step(1, 32, ""))
    assert capsys.readouterr().out.startswith("arlopti_openrlhf: progress is not shown: ZeroDivisionError")


def arguments(folder, lora_rank: int = 0, **logger) -> SimpleNamespace:
    wandb = SimpleNamespace(key=None, project="p", run_name="r")
    return SimpleNamespace(
        eval=SimpleNamespace(dataset="test.jsonl,my data/more.parquet"),
        ckpt=SimpleNamespace(output_dir="final", path=str(folder), load_enable=True),
        ds=SimpleNamespace(lora=SimpleNamespace(rank=lora_rank)),
        logger=SimpleNamespace(**{"tensorboard_dir": "tb", "wandb": wandb} | logger),
    )


def metrics(*accuracies: float) -> dict[str, float]:
    """Return the metrics of an evaluation of two sources, and of one that has rewards alone."""
    found = {"eval_odd_pass1": -0.5, "eval_kk_2ppl_pass1": 1.0}
    for source, value in zip(("kk_2ppl", "kk_3ppl"), accuracies, strict=True):
        found |= {f"{source}/accuracy": value, f"{source}/accuracy/low": value - 0.1}
        found |= {f"{source}/accuracy/high": value + 0.1, f"{source}/pass@2": 1.0}
    return found | {"accuracy": sum(accuracies) / 2}


def test_the_closing_text(tmp_path):
    found = Progress(
        Prompts(64, 0), Step(2, 64, ""), Evaluation(0, metrics(0.25, 0.5)), Evaluation(2, metrics(0.5, 0.75))
    )
    assert progress.closing_text(arguments(tmp_path), found, None).splitlines() == [
        "trained 2 steps",
        "held-out accuracy   step 0                   step 2",
        "kk_2ppl             0.250 (0.150 to 0.350)   0.500 (0.400 to 0.600)",
        "kk_3ppl             0.500 (0.400 to 0.600)   0.750 (0.650 to 0.850)",
        "mean                0.375                    0.625",
        "odd, reward         -0.500                   -0.500",
        "model:   final",
        "curves:  tensorboard --logdir tb/r",
    ]


def test_the_closing_text_of_a_resumed_run_with_lora(tmp_path):
    """The run has kept its name. An adapter alone cannot be evaluated, and there was no evaluation."""
    (tmp_path / "run.json").write_text('{"run_name": "kept", "wandb_id": "1"}')
    args = arguments(tmp_path, lora_rank=8)
    args.logger.wandb.key = "WANDB_API_KEY"
    assert progress.closing_text(args, Progress(), tmp_path).splitlines() == [
        "no step was trained",
        "not evaluated (--eval.steps)",
        "model:   final",
        f"log:     {tmp_path}",
        "curves:  tensorboard --logdir tb/kept",
        "curves:  wandb, project p, run kept",
    ]
