"""A client that sends a head without end, or none, costs a moment and 64 KiB. One may wait between requests."""

import socket
import threading
import time

import pytest
import uvicorn
from arlopti_testing.processes import free_port, wait_until

from arlopti_openrlhf.grading import bounded_heads

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n"


async def answer(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def connect(monkeypatch):
    """Return connect(), a socket to a server whose clients have half a second for a head."""
    monkeypatch.setattr(bounded_heads, "HEAD_SECONDS", 0.5)
    config = uvicorn.Config(answer, port=free_port(), http=bounded_heads.BoundedHeads, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert wait_until(lambda: server.started)
    yield lambda: socket.create_connection(("127.0.0.1", config.port), timeout=10)
    server.should_exit = True
    thread.join(20)


def read(client: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    parts = []
    while part := client.recv(2**16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("start", "more"),
    [(b"GET /", b"a"), (b"GET / HTTP/1.1\r\n", b"a: b\r\n"), (b"GET / HTTP/1.1\r\na: ", b"b"), (CHUNKED, b"a: b\r\n")],
    ids=["path", "headers", "a header", "after a body"],
)
def test_what_is_no_body_has_a_size(connect, start, more):
    with connect() as client, pytest.raises(ConnectionError):
        client.sendall(start)
        for _ in range(2**10):
            client.sendall(more * 2**14)


def test_a_head_that_is_too_long_is_said_to_be(connect):
    with connect() as client:
        client.sendall(b"GET /" + b"a" * 2**16)
        assert read(client).startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


@pytest.mark.parametrize("start", [b"", b"POST", REQUEST + b"body", REQUEST + b"bodyPOST"])
def test_a_head_has_an_end_in_time(connect, start):
    """Each byte of it comes soon enough."""
    with connect() as client:
        client.sendall(start)
        begin, head = time.monotonic(), iter(b"\r\n" * 3 + REQUEST)
        with pytest.raises(ConnectionError):
            while time.monotonic() < begin + 5:
                client.sendall(bytes([next(head)]))
                time.sleep(0.1)
        assert time.monotonic() - begin < 3


def test_without_a_byte_the_connection_ends(connect):
    with connect() as client:
        assert read(client).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_a_pause_between_requests_and_one_in_a_body_are_allowed(connect):
    with connect() as client:
        for _ in range(2):
            client.sendall(REQUEST + b"bo")
            time.sleep(0.8)
            client.sendall(b"dy")
            assert client.recv(2**16).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.8)
