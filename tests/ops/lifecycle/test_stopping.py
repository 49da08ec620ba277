"""A wait ends with the first error, and with a request to stop, whatever is still pending."""

import pytest

from arlopti_openrlhf.ops.lifecycle import stopping


@pytest.fixture
def ray_with(monkeypatch):
    """Return ray_with(ready): a Ray in which these references are ready, with their results, and no other ever is."""

    def put(ready: dict, signum: int | None = None) -> None:
        def get(refs):
            for ref in refs:
                if isinstance(ready[ref], Exception):
                    raise ready[ref]
            return [ready[ref] for ref in refs]

        def wait(refs, num_returns, timeout):
            assert num_returns == len(refs)
            return [ref for ref in refs if ref in ready], [ref for ref in refs if ref not in ready]

        monkeypatch.setattr(stopping.ray, "wait", wait)
        monkeypatch.setattr(stopping.ray, "get", get)
        monkeypatch.setattr(stopping, "stop_requested", lambda: signum)

    return put


def test_results_come_in_order(ray_with):
    ray_with({"b": 2, "a": 1})
    assert stopping.wait(["a", "b"]) == [1, 2]


def test_an_error_does_not_wait_for_the_others(ray_with):
    ray_with({"b": KeyError("b")})
    with pytest.raises(KeyError):
        stopping.wait(["a", "b"])


def test_a_request_to_stop_ends_the_wait(ray_with):
    ray_with({"b": 2}, signum=15)
    with pytest.raises(stopping.Interrupted) as ended:
        stopping.wait(["a", "b"])
    assert ended.value.exit_code == 143 and str(ended.value) == "SIGTERM received"
