"""A Ray cluster that runs on the machine is named, with the two ways out."""

import socket
from types import SimpleNamespace

import pytest

from arlopti_openrlhf.ops.preflight import clusters


@pytest.fixture
def address(tmp_path, monkeypatch):
    """Listen where `ray start` says that a cluster is."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        yield address


def test_it_is_named_with_the_two_ways_out(address):
    [finding] = clusters.check(SimpleNamespace())
    assert finding.is_fatal and "\n" not in str(finding)
    assert f"RAY_ADDRESS={address} joins" in str(finding) and "RAY_ADDRESS=local starts" in str(finding)


@pytest.mark.parametrize("variable", ["local", "192.0.2.1:6379"])
def test_the_user_decides(address, variable, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert not clusters.check(SimpleNamespace())


def test_an_address_that_nobody_answers_is_no_cluster(tmp_path, monkeypatch, address):
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    assert not clusters.check(SimpleNamespace())
