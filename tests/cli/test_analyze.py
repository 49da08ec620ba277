"""The command writes every figure and its data. It refuses mistakes in one line."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from arlopti_testing.analysis_fakes import RIGHT, WRONG, fake_sample, write_log, write_logs

from arlopti_openrlhf.cli import analyze
from arlopti_openrlhf.lab.analysis import figures, models, rollouts

FIGURES = ["fig1", "fig2", "fig3", "fig5", "fig6", "fig7", "fig8"]


def run(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["analyze", *map(str, arguments)])
    analyze.main()


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> list[str]:
    return write_logs(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def analysis(tiny_model, tiny_data, logs, tmp_path_factory) -> Path:
    """Return the folder that the command leaves for one model and runs of two labels."""
    out = tmp_path_factory.mktemp("analysis")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rollouts, "sample", fake_sample([RIGHT, WRONG, "no"]))
        run(
            monkeypatch,
            *asked(tiny_model, tiny_data, out),
            "--runs",
            f"GRPO={logs[0]},{logs[1]}",
            f"{Path(tiny_model).name}={logs[2]}",  # a label that the model has, too
        )
    return out


def asked(model, data, out) -> list[object]:
    of_update = ["--alpha", 0.3, "--eta", 0.1]
    return ["--model", model, "--data", data, "--out", out, "--prompts", 8, "--samples", 3, *of_update]


def test_every_figure_is_a_picture_and_its_data(analysis):
    assert sorted(path.stem for path in analysis.glob("*.png")) == FIGURES
    for name in FIGURES:
        png = (analysis / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG\r\n\x1a\n") and len(png) > 5000, name
        assert json.loads((analysis / f"{name}.json").read_text(encoding="utf-8")), name
    directions = json.loads((analysis / "fig3.json").read_text(encoding="utf-8"))
    assert list(directions["right_direction"]) == ["GRPO", "AR α=0.3", "Lopti η=0.1"]
    groups = json.loads((analysis / "fig1.json").read_text(encoding="utf-8"))["groups"]
    assert sum(group["logit_gradient_share"] for group in groups) == pytest.approx(1)
    (words,) = json.loads((analysis / "fig5.json").read_text(encoding="utf-8")).values()
    assert words["Causal indicator"]["correlation"] > 0.9  # only the right responses say "since"
    summary, *runs = json.loads((analysis / "summary.json").read_text(encoding="utf-8")).values()
    assert len(runs) == 3
    assert summary["accuracy"] == pytest.approx(1 / 3) and summary["responses"] == 24
    assert 0 <= summary["low_tokens"] <= 1 and 0 <= summary["low_gradient"] <= 1


def test_the_same_command_keeps_responses(analysis, tiny_model, tiny_data, tmp_path, monkeypatch):
    out = shutil.copytree(analysis, tmp_path / "out")
    monkeypatch.setattr(rollouts, "sample", lambda *args: pytest.fail("sampled again"))
    run(monkeypatch, *asked(tiny_model, tiny_data, out), "--eta", 0.2, "--figures", "fig3")
    assert "Lopti η=0.2" in json.loads((out / "fig3.json").read_text("utf-8"))["right_direction"]


def test_what_is_done_before_an_interruption_is_there(tiny_model, tiny_data, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(rollouts, "sample", fake_sample([RIGHT, WRONG, "no"]))
    monkeypatch.setattr(figures, "figure_3", stop)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, *asked(tiny_model, tiny_data, tmp_path / "out"), "--figures", "fig1", "fig3")
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {"responses.jsonl", "fig1.json", "fig1.png"}


def test_a_large_model_on_a_cpu_gets_less(monkeypatch):
    monkeypatch.setattr(models, "num_parameters", int)
    flags = dict.fromkeys(models._DEFAULTS) | {"samples": 16}
    small, large = (SimpleNamespace(**flags) for _ in range(2))
    models.set_defaults(small, ["1000000"])
    models.set_defaults(large, ["1000000", "160000000"])
    assert (small.samples, small.max_new_tokens, small.tokens) == (16, 1024, None)
    assert (large.samples, large.max_new_tokens, large.tokens) == (16, 256, 8_125)


def test_models_side_by_side_and_responses_of_equal_reward(tiny_model, tiny_data, tmp_path, monkeypatch, capsys):
    for name in ("global_step10", "global_step9"):
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        (tmp_path / "checkpoints" / name).symlink_to(tiny_model)
    monkeypatch.setattr(rollouts, "sample", fake_sample([WRONG, WRONG]))
    out = tmp_path / "out"
    run(monkeypatch, "--model", tmp_path / "checkpoints", "--data", tiny_data, "--out", out, "--prompts", 2)
    assert list(json.loads((out / "summary.json").read_text(encoding="utf-8"))) == ["global_step9", "global_step10"]
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*.png"))
    assert files == ["fig5.png", "global_step10/fig2.png", "global_step9/fig2.png"]
    said = capsys.readouterr().out
    assert said.count("earned the same reward") == 2


def test_runs_side_by_side(tmp_path, monkeypatch, capsys):
    for name, alpha, accuracy in (("grpo", "0.0", [0.1, 0.5, 0.4]), ("ar", "0.3", [0.1, 0.2, 0.6])):
        evaluated = {f"eval/kk/accuracy{end}": dict(enumerate(accuracy)) for end in ("", "/low", "/high")}
        rewards = {"train/rollout/reward_mean": {1: -1.0, 2: 1.0}, "train/timing/step_total": {1: 3.0, 2: 4.0}}
        write_log(tmp_path / name / "tensorboard", evaluated | rewards)
        (tmp_path / name / "ckpt").mkdir()
        flags = f"algo.ar.alpha: {alpha}\nactor.adam.lr: 1e-6\nckpt.path: /somewhere/{name}\n"
        (tmp_path / name / "ckpt" / "config.yaml").write_text(flags)
    write_log(tmp_path / "bare", {"train/rollout/reward_mean": {1: 0.25}})
    names = [str(tmp_path / name) for name in ("grpo", "ar", "bare")]
    run(monkeypatch, "--runs", names[0], f"AR={names[1]}/tensorboard", names[2], "--out", tmp_path / "out")
    said = capsys.readouterr().out
    assert (
        f"| {names[0]} | accuracy, kk | 0.100 (0.100 to 0.100), step 0 | 0.500 (0.500 to 0.500), step 1 "
        "| 0.400 (0.400 to 0.400), step 2 | 2 | 3.5 |\n"
    ) in said
    assert "| AR | accuracy, kk |" in said and "AR: --algo.ar.alpha 0.3\n" in said
    assert f"| {names[2]} | training reward | 0.250, step 1 | 0.250, step 1 | 0.250, step 1 | 1 |  |\n" in said
    assert f"{names[2]}: its config.yaml was not found" in said and "0.0 minutes" not in said
    summary = json.loads((tmp_path / "out" / "summary.json").read_text("utf-8"))
    assert summary["AR"]["flags"] == {"algo.ar.alpha": "0.3"} and summary["AR"]["accuracy"]["kk"]["best"]["step"] == 2
    assert (tmp_path / "out" / "fig6.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--out O", "give --model, or --runs"),
        ("--out O --model M", "--model and --data go together"),
        ("--out O --model M M --data D", "two models have one name"),
        ("--out O --model M --data D --layers 3", "--layers 3: M has the layers 1 to 2"),
        ("--out O --model M --data D --alpha 1.5", "argument --alpha: 1.5 is not a number in (0, 1]"),
        ("--out O --model M --data D --eta 1", "argument --eta: 1 is not a number in (0, 1)"),
        ("--out O --model M --data D --samples 1", "argument --samples: 1 is not an integer of at least 2"),
        ("--out O --model M --data D --temperature 0", "argument --temperature"),
        ("--out O --runs GRPO=", "argument --runs: 'GRPO=' is not of the form"),
        ("--out O --runs A=EMPTY A=EMPTY", "a label is given twice"),
    ],
)
def test_mistakes_are_one_line_and_come_first(
    arguments, message, tiny_model, tiny_data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(rollouts, "sample", lambda *args: pytest.fail("sampling began"))
    (tmp_path / "empty").mkdir()
    places = {"O": tmp_path / "out", "M": tiny_model, "D": tiny_data, "EMPTY": tmp_path / "empty"}
    for name, place in places.items():
        arguments = " ".join(str(place) if word == name else word for word in arguments.split())
        arguments = arguments.replace(f"={name}", f"={place}")
        message = message.replace(": M ", f": {place} ") if name == "M" else message
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *arguments.split())
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and message in last_line
    assert not (tmp_path / "out").exists()
