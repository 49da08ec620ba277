"""A wait ends with the first error, and with a request to stop, whatever is still pending."""

import pytest

from arlopti_openrlhf.ops.lifecycle import stopping

READY = {"a": 1, "b": 2, "failed": KeyError("b")}  # no other reference ever is


@pytest.fixture(autouse=True)
def request_to_stop(monkeypatch):
    """Return a list that holds the signal of a request to stop, where there is one."""

    def get(refs):
        for error in (READY[ref] for ref in refs if ref == "failed"):
            raise error
        return [READY[ref] for ref in refs]

    def wait(refs, num_returns, timeout):
        assert num_returns == len(refs)
        return [ref for ref in refs[::-1] if ref in READY], [ref for ref in refs if ref not in READY]

    requested: list[int] = []
    monkeypatch.setattr(stopping.ray, "wait", wait)
    monkeypatch.setattr(stopping.ray, "get", get)
    monkeypatch.setattr(stopping, "stop_requested", lambda: sum(requested))
    return requested


def test_results_come_in_order():
    assert stopping.wait(["a", "b"]) == [1, 2]


def test_an_error_does_not_wait_for_the_others():
    with pytest.raises(KeyError):
        stopping.wait(["pending", "failed"])


def test_a_request_to_stop_ends_the_wait(request_to_stop):
    request_to_stop.append(15)
    with pytest.raises(stopping.Interrupted) as ended:
        stopping.wait(["pending", "b"])
    assert ended.value.exit_code == 143 and str(ended.value) == "SIGTERM received"
