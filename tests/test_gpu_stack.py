"""`benchmarks/gpu_stack.py`: what it blanks in vLLM's libraries, and parts that arrive one by one."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_stack  # noqa: E402
import gpu_wheels  # noqa: E402


def test_versions_are_those_of_the_lock():
    assert set(gpu_stack.NAMES) <= set(gpu_wheels.pinned())
    assert set(gpu_wheels.FROM_SOURCE) <= set(gpu_stack.NAMES)


def entry(kind: int, gpu: int, code: bytes) -> bytes:
    return struct.pack("<HHIQQII", kind, 0, 64, len(code), 0, 0, gpu).ljust(64, b"\1") + code


def container(*entries: bytes) -> bytes:
    return gpu_stack._CONTAINER + struct.pack("<HHQ", 1, 16, sum(map(len, entries))) + b"".join(entries)


def test_code_for_other_gpus_and_types_is_blanked_in_place(tmp_path):
    """An image of kind 1 is source that the driver would compile."""
    hopper, half, ampere, source = (
        entry(2, 90, b"sm90"),
        entry(2, 90, b"half"),
        entry(2, 80, b"sm80"),
        entry(1, 90, b"ptx!"),
    )
    text = b"text" + gpu_stack._CONTAINER + b"no container"
    library = tmp_path / "library.so"
    library.write_bytes(text + container(hopper, ampere, half) + text + container(source, hopper))
    gpu_stack.strip(library, lambda code: code != b"half")
    blank = entry(2, 120, bytes(4))
    expected = text + container(hopper, blank, blank) + text + container(entry(1, 120, bytes(4)), hopper)
    assert library.read_bytes() == expected


@pytest.fixture
def stack(tmp_path, monkeypatch) -> Path:
    """A stack of two packages, in parts of 200 bytes."""
    folder = tmp_path / "made"
    for name in ("site/one", "wheels"):
        (folder / name).mkdir(parents=True)
    (folder / "site/one/__init__.py").write_text("__version__ = '1.2'")
    (folder / "site/broken.py").write_text("raise OSError('no such library')")
    (folder / "wheels/model.whl").write_bytes(bytes(range(256)))
    monkeypatch.setattr(gpu_stack, "PART", 200)
    monkeypatch.setattr(gpu_stack, "STACK", tmp_path / "there")
    monkeypatch.setattr(gpu_stack, "IMPORTS", ["one", "broken"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "parts").mkdir()
    gpu_stack.write_parts(folder, tmp_path / "parts")
    return tmp_path


def test_parts_arrive_one_by_one(stack, capsys):
    parts = sorted((stack / "parts").glob("part-*"))
    assert len(parts) > 2
    for number, part in enumerate(parts):
        call = stack / f"call{number}"
        call.mkdir()
        part.rename(call / part.name)
        (call / "SUMS").write_text((stack / "parts/SUMS").read_text())
        assert not (stack / "there/site").exists()
        capsys.readouterr()
        gpu_stack.unpack(call, len(parts))
    said = capsys.readouterr().out
    assert "ok    one 1.2" in said and "FAIL  broken: OSError: no such library" in said
    assert (stack / "there/wheels/model.whl").read_bytes() == bytes(range(256))


def test_a_part_that_was_damaged_is_not_unpacked(stack):
    part = stack / "parts/part-1"
    part.write_bytes(part.read_bytes()[:-1] + b"\0")
    with pytest.raises(SystemExit, match="SUMS"):
        gpu_stack.unpack(stack / "parts", len(list((stack / "parts").glob("part-*"))))


def test_the_script_has_the_stages_that_it_names():
    script = BENCHMARKS / "gpu_stack.sh"
    text = script.read_text("utf-8")
    assert re.findall(r"^    (\w+)\) ", text, re.M) == re.findall(r"^#   (\w+)  ", text, re.M)
    subprocess.run(["bash", "-n", script], check=True)
