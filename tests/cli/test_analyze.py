"""The command writes every figure and its data, and a page for any browser. It refuses mistakes in one line."""

import json
from pathlib import Path

import pytest
from arlopti_testing.analysis_fakes import RIGHT, WRONG, fake_sample, write_logs
from arlopti_testing.browser import CHROMIUM, chromium

from arlopti_openrlhf.cli import analyze
from arlopti_openrlhf.lab.analysis import report, rollouts

FIGURES = ["agreement", "fig1", "fig2", "fig3", "fig5", "fig6", "fig7", "fig8"]


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
            *("--model", tiny_model, "--data", tiny_data, "--out", out, "--prompts", 8, "--samples", 3, "--report"),
            *("--alpha", 0.3, "--eta", 0.1, "--runs", f"GRPO={logs[0]},{logs[1]}", f"<Lopti>={logs[2]}"),
        )
    return out


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
    (summary,) = json.loads((analysis / "summary.json").read_text(encoding="utf-8")).values()
    assert summary["accuracy"] == pytest.approx(1 / 3) and summary["responses"] == 24


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, False), (390, True)])
def test_report_in_a_browser(analysis, tmp_path, width, dark):
    with chromium(tmp_path / "profile") as page:
        page.open(analysis / "report.html", width, dark)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = "[...document.querySelectorAll('main > *')].filter(e => e.getBoundingClientRect().right > innerWidth)"
        assert page.evaluate(f"{wide}.length") == 0
        assert all(url.startswith(("file:", "data:")) for url in page.requests)
        pictures = page.evaluate("[...document.images].map(i => [i.naturalWidth, i.alt.length, i.currentSrc.length])")
        assert len(pictures) == len(FIGURES) and all(w > 500 and alt > 20 for w, alt, _ in pictures)
        # The dark picture is shown in dark mode, and it is another one.
        shown = page.evaluate("[...document.images].map(i => i.currentSrc != i.src)")
        assert set(shown) == {dark}
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
        assert page.evaluate("document.scripts.length") == 0
        assert "<Lopti>" in page.evaluate("document.body.innerText")  # escaped, not a tag
        assert page.screenshot().startswith(b"\x89PNG\r\n\x1a\n")


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
    assert capsys.readouterr().out.count("earned the same reward") == 2


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
        ("--out O --runs GRPO", "argument --runs: 'GRPO' is not of the form"),
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


def test_report_without_models():
    page = report.page({}, {"": {}}, {"--out": "x"})
    assert "training runs" in page and page.endswith("</html>\n")
