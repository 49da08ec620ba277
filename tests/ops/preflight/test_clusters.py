"""A Ray cluster that runs on the machine is named, with the two ways out, and one that is asked for has to answer."""

import socket
from types import SimpleNamespace

import pytest

from arlopti_openrlhf.ops.preflight import clusters

NOBODY = "127.0.0.1:1"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check(`ray start`'s address, RAY_ADDRESS) returns the findings. {} stands for an address that answers."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def run(started: str, named: str) -> list[str]:
            (tmp_path / "ray" / "ray_current_cluster").write_text(started.format(address))
            monkeypatch.setenv("RAY_ADDRESS", named.format(address))
            found = list(clusters.check(SimpleNamespace()))
            assert all(finding.is_fatal for finding in found)
            return [str(finding).replace(address, "HERE") for finding in found]

        yield run


@pytest.mark.parametrize(
    ("started", "named", "problem"),
    [
        ("{}", "", "runs on this machine, at HERE; RAY_ADDRESS=HERE joins it, RAY_ADDRESS=local starts one for this"),
        (NOBODY, "", None),
        ("{}", "local", None),
        ("{}", "auto", None),
        (NOBODY, "{}", None),
        (NOBODY, "ray://{}", None),
        ("{}", f"ray://{NOBODY}", f"RAY_ADDRESS ray://{NOBODY}: no Ray cluster answers there"),
    ],
)
def test_what_the_run_would_join(check, started, named, problem):
    found = check(started, named)
    assert len(found) == (problem is not None)
    assert all(problem in line and "\n" not in line for line in found)
