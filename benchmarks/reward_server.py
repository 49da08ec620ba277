"""Put load on the reward server: a burst of requests at once, then as many as a number of connections can send.

python benchmarks/reward_server.py [--grader kk] [--seconds 20] [--url http://host:port/get_reward]

Each request is one query, as OpenRLHF sends it, with a response of 4,096 tokens. Without --url, this command starts a
server, which shares the cores with the load generator.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from arlopti_openrlhf.lab.data import knights_knaves

CHARACTERS = 4 * 4096  # of 4,096 tokens, at four characters each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grader", default="kk", choices=["kk", "math"], help="what to grade with (default: kk)")
    parser.add_argument(
        "--workers", type=int, default=1, help="grading processes of the server started here (default: 1)"
    )
    parser.add_argument(
        "--burst", type=int, default=512, help="requests at once, each on a new connection (default: 512)"
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=64,
        help="connections kept alive, each with a request at a time (default: 64)",
    )
    parser.add_argument("--seconds", type=float, default=20, help="how long they send requests (default: 20)")
    parser.add_argument("--url", help="URL of a server that runs already")
    parser.add_argument("--json", metavar="PATH", help="file for the results")
    args = parser.parse_args()
    server, url = (None, args.url) if args.url else start_server(args.grader, args.workers)
    try:
        results = asyncio.run(load(url, requests(args.grader, url), args))
    finally:
        if server:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    print(
        f"burst of {args.burst}: {results['burst_errors']} errors, the last after {results['burst_seconds']:.2f} s\n"
        f"{args.connections} connections for {args.seconds:g} s: {results['per_s']:,.0f} gradings/s, "
        f"{results['errors']} errors, p50 {results['p50_ms']:.0f} ms, p99 {results['p99_ms']:.0f} ms"
    )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def start_server(grader: str, workers: int) -> tuple[subprocess.Popen, str]:
    """Start a reward server on a free port, and return it and its URL once it is ready."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "arlopti_openrlhf.cli.serve_rewards", "--grader", grader, "--port", str(port)]
    server = subprocess.Popen(command + ["--workers", str(workers)], stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1)
            return server, f"http://127.0.0.1:{port}/get_reward"
        except OSError:
            time.sleep(0.1)
            if server.poll() is not None:
                break
    server.kill()
    sys.exit("the server did not start")


def requests(grader: str, url: str, count: int = 256) -> list[tuple[bytes, float]]:
    """Make pairs of an HTTP request and the score that it should get. Half of the answers are right."""
    rng, parts, made = random.Random(0), urlsplit(url), []
    puzzles = knights_knaves.generate(3, rng, held_out=False)
    for i, puzzle in zip(range(count), puzzles, strict=False):
        if grader == "kk":
            answer = puzzle.solution_text
            if i % 2:
                answer = answer.replace("knight", "-").replace("knave", "knight").replace("-", "knave")
            answer, label = f"</think><answer>{answer}</answer>", puzzle.solution_text
        else:
            answer, label = f"\\boxed{{{i}/7}}", f"\\frac{{{i + i % 2}}}{{7}}"
        prompt = "<|im_start|>user\n" + puzzle.quiz + "<|im_end|>\n<|im_start|>assistant\n<think>"
        words = " ".join(rng.choice("if then so Zoey says true lies claim follows hence".split()) for _ in range(4096))
        query = prompt + words[: CHARACTERS - len(answer)].ljust(CHARACTERS - len(answer), ".") + answer
        body = json.dumps({"query": [query], "prompts": [prompt], "labels": [label]}).encode()
        head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        made.append((f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, float(i % 2 == 0)))
    return made


class Connection:
    """Speaks HTTP/1.1 on a connection that stays open, and no more. A full client would take the server's core."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.address = parts.hostname, parts.port or 80

    async def post(self, request: bytes) -> dict:
        """Send a request and return the JSON of its answer.

        Raises:
            OSError: no answer, or one with another status than 200.
        """
        if not hasattr(self, "reader"):
            self.reader, self.writer = await asyncio.open_connection(*self.address)
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])
        body = await self.reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            raise OSError(head.split(b"\r\n")[0] + body[:200])
        return json.loads(body)


async def load(url: str, requests: list[tuple[bytes, float]], args: argparse.Namespace) -> dict[str, float]:
    """Send the burst, then the steady load, and return rates, times and numbers of errors."""
    errors: list[str] = []

    async def ask(connection: Connection, i: int) -> None:
        request, score = requests[i % len(requests)]
        try:
            result = await connection.post(request)
            if result["scores"] != score:
                errors.append(f"scores {result['scores']}, not {score}")
        except (OSError, asyncio.IncompleteReadError) as error:
            errors.append(repr(error))
            connection.__dict__.pop("reader", None)

    start = time.perf_counter()
    burst = [Connection(url) for _ in range(args.burst)]
    await asyncio.gather(*(ask(connection, i) for i, connection in enumerate(burst)))
    results = {"burst_seconds": time.perf_counter() - start, "burst_errors": len(errors)}
    for error in errors[:3]:
        print(error, file=sys.stderr)
    errors.clear()

    times: list[float] = []
    start = time.perf_counter()

    async def keep_asking(connection: Connection, offset: int) -> None:
        i = offset
        while (begun := time.perf_counter()) - start < args.seconds:
            await ask(connection, i)
            times.append(time.perf_counter() - begun)
            i += 1

    await asyncio.gather(*(keep_asking(Connection(url), 7 * i) for i in range(args.connections)))
    results["per_s"] = (len(times) - len(errors)) / (time.perf_counter() - start)
    times.sort()
    results |= {
        "errors": len(errors),
        "p50_ms": 1e3 * statistics.median(times),
        "p99_ms": 1e3 * times[int(0.99 * len(times))],
    }
    for error in errors[:3]:
        print(error, file=sys.stderr)
    return results


if __name__ == "__main__":
    main()
