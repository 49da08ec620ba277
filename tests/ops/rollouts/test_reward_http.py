"""A reward server costs neither memory nor tells its samples to others."""

import asyncio
import gzip
import json
import resource
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from arlopti_openrlhf.ops.rollouts import reward_http
from arlopti_openrlhf.ops.rollouts.reward_process import RewardError

GOOD = json.dumps({"rewards": 3.0}).encode()


@pytest.fixture
def server():
    """server(answer) returns its URL and the paths that were asked; answer(path) gives status, headers and body."""
    servers = []

    def start(answer) -> tuple[str, list[str]]:
        asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                asked.append(self.path)
                status, headers, body = answer(self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/get_reward", asked

    yield start
    for each in servers:
        each.shutdown()
        each.server_close()


def ask(url: str):
    return asyncio.run(reward_http.post(url, "query", "prompt", "label"))


@pytest.mark.parametrize("coding, said", [("gzip", "compressed"), (None, "longer than 1048576 bytes")])
def test_an_answer_takes_no_memory(server, coding, said):
    zeros = b"[" + b"0," * 2**27 + b"0]"  # 256 MiB
    body = gzip.compress(zeros, 1) if coding else zeros
    del zeros
    url, _ = server(lambda path: (200, {"Content-Encoding": coding} if coding else {}, body))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=said):
        ask(url)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 2**10  # KiB


def test_an_answer_that_comes_by_the_byte_is_cut_off(monkeypatch):
    monkeypatch.setattr(reward_http, "SECONDS", 0.5)
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not ended.wait(0.1):
                connection.sendall(b"1")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        dripping = threading.Thread(target=drip, args=(listener,))
        dripping.start()
        with pytest.raises(OSError, match=r"no whole answer in 0\.5 s"):
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}/get_reward")
        ended.set()
        dripping.join()


def test_a_long_error_is_cut(server):
    url, _ = server(lambda path: (500, {}, b"x" * 2**24))
    with pytest.raises(OSError, match=r"status 500: x{500}$"):
        ask(url)


def test_a_redirection_is_refused(server):
    other, asked = server(lambda path: (200, {}, GOOD))
    for status in (301, 302, 303, 307, 308):
        url, _ = server(lambda path, status=status: (status, {"Location": f"{other}/secret"}, b""))
        with pytest.raises(RewardError, match=f"get_reward refuses the request with status {status}"):
            ask(url)
    assert asked == []
