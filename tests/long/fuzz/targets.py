"""What is fuzzed: each target takes a JSON value, and raises where the code does what it must not."""

import contextlib
import io
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fuzz import requests
from fuzz.oracles import judged_kk, judged_math

from arlopti_openrlhf.cli import prepare_data
from arlopti_openrlhf.grading import kk_reward, math_reward
from arlopti_openrlhf.lab.data import knights_knaves

SOLUTION = "(1) Zoey is a knight\n(2) Oliver is a knave"
TURN = f"<think>If Zoey is a knave, ...</think>\n<answer>{SOLUTION}</answer><|im_end|>"
PROMPT = knights_knaves.chatml("You meet 2 inhabitants: Zoey, and Oliver. Zoey said that Oliver is a knave.")


class Broken(Exception):
    """Says which promise was broken."""


class Target(NamedTuple):
    """Says what to call, with what inputs to begin, and what has to run before."""

    check: Callable[[Any], None]
    seeds: list[Any]
    start: Callable[[], object] = lambda: None


def check_kk(case: dict) -> None:
    """A response earns one of four rewards, in a time that grows with its length alone."""
    response, solution = case.get("response"), case.get("solution")
    if not isinstance(response, str) or not _is_label(lambda: kk_reward.grade("", solution)):
        return
    with _at_most(1 + len(response) / 1e6):
        reward = kk_reward.grade(response, solution).reward
    if reward not in (3.0, -0.5, -1.0, -3.0):
        raise Broken(f"a reward of {reward}")


def check_turn(case: dict) -> None:
    """The turn is what follows the prompt."""
    query, prompt = case.get("query"), case.get("prompt")
    if not isinstance(query, str) or not isinstance(prompt, str | None):
        return
    with _at_most(1 + len(query) / 1e6):
        turn = kk_reward.assistant_turn(query, prompt)
        whole = kk_reward.assistant_turn((prompt or "") + query, prompt)
    if not isinstance(turn, str) or (prompt and not whole.endswith(query)):
        raise Broken("the response is not all there")


def check_math(case: dict) -> None:
    """A response is right or wrong, within the time limit. `score`, if given, says which."""
    response, label = case.get("response"), case.get("label")
    if not isinstance(response, str) or not _is_label(lambda: math_reward.label_text(label)):
        return
    with _at_most(math_reward.TIMEOUT + 3):
        score = math_reward.grade(response, label).score
    if score not in case.get("score", (0.0, 1.0)):
        raise Broken(f"a score of {score}")


def check_kk_answer(case: dict) -> None:
    """An answer earns what Logic-RL's rule says, written down a second time."""
    response, expected = judged_kk(ascii(case.get("seed")), SOLUTION)
    if (reward := kk_reward.grade(response, SOLUTION).reward) != expected:
        raise Broken(f"a reward of {reward} in place of {expected} for {response!r}")


def check_math_answer(case: dict) -> None:
    """An answer made from a label is right where its value is the label's."""
    response, label, expected = judged_math(ascii(case.get("seed")))
    grade = math_reward.grade(response, label)
    if grade.score != expected and not grade.timed_out:
        raise Broken(f"a score of {grade.score} for {response!r} and the label {label!r}")


def check_data(case: dict) -> None:
    """The command writes rows that it can read again, or ends with one line and status 2."""
    lines = case.get("lines")
    if not isinstance(lines, list):
        return
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        source.write_bytes(text.encode("utf-8", "surrogatepass"))
        if not _prepared(source, out):
            return
        again = Path(folder, "again.jsonl")
        # A label may meet the grader's time limit the second time.
        left = again.read_text("utf-8").splitlines() if _prepared(out, again) else []
        if not set(left) <= set(out.read_text("utf-8").splitlines()):
            raise Broken("what the command wrote is not what it reads")


def _prepared(source: Path, out: Path) -> bool:
    """Return whether the command wrote rows."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            prepare_data.main(["--from", str(source), "--out", str(out)])
        except SystemExit as end:
            if end.code != 2 or said.getvalue().count("\n") != 1:
                raise Broken(f"status {end.code}: {said.getvalue()}") from None
            return False
    return True


class Server:
    """Runs the reward server in a process of its own, and sends it bytes."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None

    def check(self, case: dict) -> None:
        """Any bytes get an answer or an end, without a traceback, and the next request is answered."""
        sent = case.get("bytes")
        if not isinstance(sent, str):
            return
        answer = self._ask(sent.encode("utf-8", "surrogatepass"), seconds=0.05)
        if answer and not re.match(rb"HTTP/1\.1 (100|200|400|404|405|413|422|431|503) ", answer):
            raise Broken(f"the answer {answer[:200]!r}")
        health = self._ask(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", seconds=20)
        if not health.startswith(b"HTTP/1.1 200 "):
            raise Broken(f"no health, but {health[:200]!r}")
        if b"Traceback" in (log := self.log.read_bytes()):
            self.log.write_bytes(b"")
            raise Broken(log.decode(errors="replace")[-3000:])
        if self.process is None or self.process.poll() is not None:
            raise Broken("the server has ended")

    def check_request(self, case: dict) -> None:
        """A request gets the reward function's own answer, or a refusal where it is malformed."""
        sent = requests.as_http(case)
        if sent is not None:
            requests.check(case, self._ask(sent, seconds=20))

    def start(self) -> None:
        """Start the process if it does not run."""
        if self.process is not None and self.process.poll() is None:
            return
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.address = s.getsockname()
        self.folder = tempfile.TemporaryDirectory()
        self.log = Path(self.folder.name, "log")
        command = [sys.executable, "-m", "arlopti_openrlhf.cli.serve_rewards", "--grader", "kk", "--grader", "math"]
        command += ["--workers", "1", "--port", str(self.address[1])]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stderr=log)
        for _ in range(600):
            with contextlib.suppress(OSError):
                socket.create_connection(self.address).close()
                return
            time.sleep(0.2)
        raise RuntimeError(f"the reward server did not start: {self.log.read_text()}")

    def close(self) -> None:
        """End the process, which must not take long."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)
            self.folder.cleanup()
            self.process = None

    def _ask(self, sent: bytes, seconds: float) -> bytes:
        """Send bytes, and return what comes back within the time."""
        parts = []
        with contextlib.suppress(TimeoutError, ConnectionError), socket.create_connection(self.address, 20) as client:
            client.sendall(sent)
            client.settimeout(seconds)
            while part := client.recv(2**16):
                parts.append(part)
        return b"".join(parts)


def _request(message: object, path: str = "/get_reward") -> dict:
    body = json.dumps(message)
    return {"bytes": f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"}


def _is_label(read: Callable[[], object]) -> bool:
    try:
        read()
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _at_most(seconds: float):
    start = time.monotonic()
    yield
    if (taken := time.monotonic() - start) > seconds:
        raise Broken(f"it took {taken:.1f} s, more than {seconds:.1f} s")


def _start_grader() -> None:
    math_reward.worker_pool().start()


SERVER = Server()
_ROW = {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "label": "2", "datasource": "math"}
TARGETS = {
    "kk": Target(check_kk, [{"response": TURN, "solution": SOLUTION}]),
    "turn": Target(check_turn, [{"query": PROMPT + TURN, "prompt": PROMPT}, {"query": TURN, "prompt": None}]),
    "math": Target(
        check_math,
        [
            {"response": f"So it is \\boxed{{{answer}}}.<|im_end|>", "label": label}
            for answer, label in (
                ("\\frac{14}{3}", "14/3"),
                ("x = 42 \\text{ cm}", "42"),
                ("(-\\infty, 2] \\cup \\{3, \\sqrt{5}\\}", "(-\\infty, 2] \\cup \\{\\sqrt{5}, 3\\}"),
                ("8.7 \\times 10^{8}", ["870000000", "8.7e8"]),
                (
                    "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
                    "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
                ),
                ("17 \\equiv 2 \\pmod{5}, \\quad 50\\%", "2, \\frac{1}{2}"),
            )
        ]
        + [{"response": "Thus \\[ x = 3 \\] and the final answer is $\\frac{1}{2}$.", "label": "0.5"}],
        _start_grader,
    ),
    "kk_answers": Target(check_kk_answer, [{"seed": "an answer"}]),
    "math_answers": Target(check_math_answer, [{"seed": "an answer"}], _start_grader),
    "data": Target(
        check_data,
        [
            {"lines": [_ROW, _ROW | {"label": ["0.5", "0.6"]}]},
            {"lines": [{"prompt": PROMPT, "label": SOLUTION, "datasource": "kk_2ppl"}]},
            {"lines": [json.dumps(_ROW, ensure_ascii=False)]},
            {
                "lines": [
                    {
                        "prompt": [{"role": "user", "content": PROMPT}],
                        "reward_model": {"ground_truth": {"solution_text_format": SOLUTION}, "style": "rule"},
                        "names": ["Zoey", "Oliver"],
                        "data_source": "kk_logic",
                    }
                ]
            },
        ],
        _start_grader,
    ),
    "http": Target(
        SERVER.check,
        [
            _request({"query": [PROMPT + TURN], "prompts": [PROMPT], "labels": [SOLUTION]}),
            _request(
                {"query": ["\\boxed{42}"] * 3, "prompts": [None] * 3, "labels": ["42", 42, ["42"]]}, "/math/get_reward"
            ),
            {"bytes": "POST /kk/get_reward HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n"},
            {"bytes": "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /ready HTTP/1.0\r\n\r\n"},
        ],
        SERVER.start,
    ),
    "requests": Target(SERVER.check_request, requests.battery(PROMPT + TURN, PROMPT, SOLUTION), SERVER.start),
}
