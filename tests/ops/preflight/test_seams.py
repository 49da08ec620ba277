"""The installed OpenRLHF is accepted by its seams, not by its version: read from source, with nothing imported."""

import importlib.metadata
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arlopti_openrlhf.ops.preflight.seams import check
from arlopti_openrlhf.ops.preflight.seams.kinds import Body, Fields, Moved, Signature, Source, Text

UPSTREAM = """
class Trainer:
    name: str
    step: int = 0

    async def fit(self, steps, *, resume=False, **kwargs):
        '''Trains.'''
        # a comment
        return   [steps,
                  resume]

def fit(self): pass
"""


@pytest.fixture
def upstream(tmp_path, monkeypatch) -> Path:
    """Write a package whose import would fail, and put it on the path."""
    folder = tmp_path / "upstream_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "trainer.py").write_text(UPSTREAM)
    monkeypatch.syspath_prepend(tmp_path)
    return folder / "trainer.py"


def seams() -> list:
    where = ("upstream_package.trainer", "Trainer.fit")
    return [
        Signature(*where, "self steps *, resume **kwargs", "ours"),
        Text(*where, "return [ steps, resume ]", "ours"),
        Body(*where, "5d7927c497350eda", "ours"),
        Fields(where[0], "Trainer", "name step", "ours"),
    ]


def test_seams_that_have_not_moved(upstream):
    assert check.moved(seams()) == []


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("steps, *,", "count, *,", [Signature]),
        ("return   [steps,", "return   [0, steps,", [Text, Body]),
        ("# a comment", "# another", []),
        ("step: int", "steps: int", [Fields]),
        ("async def fit", "async def train", [Signature, Text, Body]),
        ("class Trainer", "class BaseTrainer", [Signature, Text, Body, Fields]),
    ],
)
def test_what_moved_is_found_by_kind(upstream, old, new, kinds):
    upstream.write_text(UPSTREAM.replace(old, new))
    found = []
    for seam in seams():
        try:
            seam.check(Source())
        except Moved:
            found.append(type(seam))
    assert found == kinds


def test_a_module_that_is_gone_and_a_package_that_is_not_installed(upstream):
    findings = check.moved(
        [Text("upstream_package.gone", "", "x", "ours: reads x"), Text("no_package.a", "", "", "ours")]
    )
    assert [f.problem for f in findings] == [
        "upstream_package.gone is gone. ours: reads x leans on it",
        "no_package is not installed. ours leans on it",
    ]


CHECK = """
import sys
from arlopti_openrlhf.ops.preflight.seams import check
print(check.moved((*check.ALWAYS, *check.PATCHED)))
print(sorted({"openrlhf", "torch", "ray", "vllm", "deepspeed"} & sys.modules.keys()))
"""


def test_the_whole_table_is_read_in_seconds_without_an_import():
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"
    assert time.monotonic() - start < 10  # 1.2 s on an idle core


@pytest.mark.parametrize(("installed", "is_fatal"), [("0.11.2", None), ("0.11.9", False), (None, True)])
def test_a_version_alone_stops_nothing(monkeypatch, installed, is_fatal):
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert [finding.is_fatal for finding in check.version()] == ([] if is_fatal is None else [is_fatal])


def test_an_openrlhf_whose_seam_moved_is_named(tmp_path, monkeypatch):
    import openrlhf

    shutil.copytree(
        Path(openrlhf.__file__).parent, tmp_path / "openrlhf", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = tmp_path / "openrlhf/trainer/ppo_utils/replay_buffer.py"
    path.write_text(path.read_text().replace("def append(self, experience", "def append(self, sample"))
    monkeypatch.delitem(sys.modules, "openrlhf")  # else its path would be taken from there
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = check.moved(check.ALWAYS)
    assert "NaiveReplayBuffer.append takes (self sample), not (self experience)" in finding.problem
    assert finding.is_fatal
