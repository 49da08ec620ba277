"""Clients that send slowly, too much, or leave, against a real server in this process."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import uvicorn
from uvicorn.server import ServerState

from arlopti_openrlhf.grading import limited_protocol
from arlopti_openrlhf.grading.limited_protocol import LimitedProtocol

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def app(scope, receive, send):
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def connection(left):
    state = ServerState()
    config = uvicorn.Config(app, log_config=None)
    server = await asyncio.get_running_loop().create_server(
        lambda: LimitedProtocol(config, state, {}, on_left=lambda: left.append(1)), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    yield reader, writer, state
    writer.close()
    server.close()


def converse(*parts, left=None, pause=0.0, shutdown=False):
    """Send the parts, and return what came back until the server closed, and how long that took in seconds."""

    async def run():
        async with connection([] if left is None else left) as (reader, writer, state):
            start = time.monotonic()
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause)
                if shutdown:
                    [protocol] = state.connections
                    protocol.shutdown()
                answer = await asyncio.wait_for(reader.read(), 10)
            except ConnectionError:
                answer = b""
            return answer, time.monotonic() - start

    return asyncio.run(run())


@pytest.mark.parametrize("parts", [(), (b"POST",), (HEAD,), (b"P", b"O", b"S", b"T", b" ")])
def test_a_slow_head_is_cut_off(parts, monkeypatch):
    monkeypatch.setattr(limited_protocol, "HEAD_SECONDS", 0.3)
    answer, seconds = converse(*parts, pause=0.05)
    assert answer == b"" and seconds < 6


def test_the_second_head_of_a_connection_is_cut_off_too(monkeypatch):
    monkeypatch.setattr(limited_protocol, "HEAD_SECONDS", 0.3)
    answer, seconds = converse(HEAD + b"Content-Length: 0\r\n\r\n", HEAD, pause=0.05)
    assert answer.endswith(b"ok") and seconds < 6


def test_a_connection_may_idle_between_requests_and_a_body_may_take_longer(monkeypatch):
    monkeypatch.setattr(limited_protocol, "HEAD_SECONDS", 0.4)
    request = HEAD + b"Content-Length: 1\r\n\r\n"
    left = []
    answer, _ = converse(request, b"x", request, b"x", HEAD + b"Connection: close\r\n\r\n", pause=0.5, left=left)
    assert answer.count(b"200 OK") == 3 and not left


def test_a_huge_head_is_cut_off_and_a_large_body_is_not():
    answer, _ = converse(HEAD, *[b"X-A: " + b"a" * 8000 + b"\r\n"] * 1000)
    assert answer == b""
    size = 3 * 2**20
    answer, _ = converse(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % size, *[bytes(2**20)] * 3)
    assert answer.endswith(b"ok")


@pytest.mark.parametrize("part", [b"POST", HEAD + b"Content-Length: 9\r\n\r\n", HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_a_client_that_leaves_is_counted_once(part):
    left = []

    async def run():
        async with connection(left) as (_, writer, _):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.sleep(0.1)

    asyncio.run(run())
    assert left == [1]


def test_a_half_body_delays_the_end_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr(limited_protocol, "SHUTDOWN_SECONDS", 0.3)
    half = HEAD + b"Content-Length: 9\r\n\r\n{"
    answer, seconds = converse(half, pause=0.05, shutdown=True)
    assert answer == b"" and seconds < 6
