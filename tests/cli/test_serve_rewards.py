"""The reward server answers OpenRLHF's client and bad input over HTTP, and loses nothing when graders are killed."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from arlopti_testing.changed_inputs import VALUES, changed, with_other_values
from arlopti_testing.processes import free_port, wait_until
from arlopti_testing.reward_server import post, server
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arlopti_openrlhf.cli import serve_rewards
from arlopti_openrlhf.grading import kk_reward, math_reward
from arlopti_openrlhf.grading import server as grading_server
from arlopti_openrlhf.grading.grader import Limits, Refused
from arlopti_openrlhf.grading.server import read_request

PROMPT = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n<think>"
RIGHT = PROMPT + "</think><answer>(1) Zoey is a knight</answer>"
WRONG = RIGHT.replace("knight", "knave")
LABEL = "(1) Zoey is a knight"

CUSTOM = """
import os, time

def reward_func(queries, prompts, labels, **kwargs):
    if "raise" in queries:
        raise KeyError("from the reward function")
    if "surrogate" in queries:
        raise ValueError("\\ud800 from the reward function")
    if "short" in queries:
        return {"rewards": []}
    if "exit" in queries:
        os._exit(1)
    for query in queries:
        if query.startswith("sleep"):
            time.sleep(float(query.split()[1]))
    special = {"nan": float("nan"), "pid": os.getpid()}
    rewards = [special.get(query, len(query)) for query in queries]
    return {"rewards": rewards, "extra_logs": {"size": [len(query) / 2 for query in queries]}}
"""


def metrics(process):
    return urllib.request.urlopen(process.url + "/metrics").read().decode()


def ask(query, prompts=None, labels=None):
    query = query if isinstance(query, list) else [query]
    return {"query": query, "prompts": prompts or [PROMPT] * len(query), "labels": labels or [LABEL] * len(query)}


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "length.py").write_text(CUSTOM)
    flags = ["--grader", "kk", "--grader", "math", "--grader", folder / "length.py", "--workers", "2"]
    flags += ["--grading-seconds", "3", "--max-body-mib", "1", "--max-batch", "64"]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))  # the server raises it, or a burst would hang
    with server(*flags, log=folder / "log") as process:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        process.log = folder / "log"
        yield process


def test_one_query_gets_numbers_and_more_get_lists(custom):
    one = post(custom.url + "/get_reward", ask(RIGHT))
    assert one == (200, {"rewards": 3.0, "scores": 1.0, "extra_logs": {"well_formed": 1.0, "answered": 1.0}})
    status, two = post(custom.url + "/kk/get_reward", ask([RIGHT, WRONG]))
    assert (status, two["rewards"], two["scores"]) == (200, [3.0, -0.5], [1.0, 0.0])
    assert post(custom.url + "/math/get_reward", ask("\\boxed{1/2}", labels=["0.5"]))[1]["rewards"] == 1.0
    expected = {"rewards": 3.0, "extra_logs": {"size": 1.5}}  # no scores, as its reward function gives none
    assert post(custom.url + "/length/get_reward", ask("abc")) == (200, expected)


def test_openrlhfs_own_client(custom):
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    client = SingleTurnAgentExecutor(custom.url + "/get_reward")
    [result] = asyncio.run(client._fetch_rewards_via_http([WRONG], [PROMPT], [LABEL]))
    assert result["rewards"] == -0.5 and result["scores"] == 0.0


@pytest.mark.parametrize(
    "body, status, field",
    [
        (b"not JSON", 422, None),
        (b"[" * 100_000, 422, None),
        (b"[]", 422, None),
        ({"prompts": [""], "labels": [""]}, 422, "query"),
        ({"query": "text", "prompts": [""], "labels": [""]}, 422, "query"),
        ({"query": [], "prompts": [], "labels": []}, 422, "query"),
        ({"query": ["a"], "prompts": ["a", "b"], "labels": ["c"]}, 422, "prompts"),
        ({"query": ["a"], "prompts": ["a"], "labels": []}, 422, "labels"),
        ({"query": ["a", 1], "prompts": ["a", "b"], "labels": ["c", "d"]}, 422, "query[1]"),
        ({"query": ["a"] * 65, "prompts": ["a"] * 65, "labels": ["c"] * 65}, 413, "query"),
        (b"x" * (2**20 + 1), 413, None),
    ],
)
def test_malformed_requests_are_refused(custom, body, status, field):
    refused, answer = post(custom.url + "/get_reward", body)
    assert refused == status and answer.get("field") == field and answer["error"]


GRADERS = {"kk": kk_reward.reward_func, "math": math_reward.reward_func}
REQUEST = {"query": [RIGHT, "\\boxed{1}"], "prompts": [PROMPT, None], "labels": [LABEL, LABEL]}


@given(
    st.sampled_from(list(GRADERS)),
    st.sampled_from([REQUEST, {name: values[:1] for name, values in REQUEST.items()}, REQUEST | {"more": 1}])
    .flatmap(with_other_values)
    .map(json.dumps)
    | st.tuples(*(st.sampled_from(VALUES) for _ in REQUEST)).map(
        lambda items: json.dumps({name: [REQUEST[name][0], item] for name, item in zip(REQUEST, items, strict=True)})
    )
    | changed(json.dumps(REQUEST)),
)
def test_a_request_gets_what_the_reward_function_says_or_is_refused(custom, grader, text):
    body = text.encode("utf-8", "surrogatepass")
    try:
        columns = read_request(body, Limits(batch=64))
        answer = GRADERS[grader](*columns)
    except (Refused, ValueError):
        status, answer = post(f"{custom.url}/{grader}/get_reward", body)
        assert status in (413, 422) and answer["error"]
        return
    extra_logs = {name: values.tolist() for name, values in answer.pop("extra_logs").items()}
    parts = {name: values.tolist() for name, values in answer.items()}
    if len(columns[0]) == 1:
        extra_logs, parts = ({name: values[0] for name, values in part.items()} for part in (extra_logs, parts))
    status, found = post(f"{custom.url}/{grader}/get_reward", body)
    # A busy machine may hold a comparison up, here or there.
    assume(not any("1" in str(logs.get("timed_out")) for logs in (extra_logs, found["extra_logs"])))
    assert (status, found) == (200, parts | {"extra_logs": extra_logs})


def exchange(server, sent: bytes, seconds: float) -> bytes:
    """Send bytes, and return what comes back within the time."""
    parts = []
    with contextlib.suppress(TimeoutError, ConnectionError):
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":")[-1])), 20) as client:
            client.sendall(sent)
            client.settimeout(seconds)
            while part := client.recv(2**16):
                parts.append(part)
    return b"".join(parts)


BODY = json.dumps(ask(RIGHT))
POST = "POST /kk/get_reward HTTP/1.1\r\nHost: x\r\n"
SENT = [
    f"{POST}Content-Length: {len(BODY)}\r\n\r\n{BODY}",
    f"{POST}Transfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n",
    "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /ready HTTP/1.0\r\n\r\n",
]


@settings(max_examples=settings().max_examples // 2)
@given(st.sampled_from(SENT).flatmap(changed))
def test_any_bytes_get_an_answer_or_an_end_without_a_traceback(custom, sent):
    before = custom.log.read_text().count("Traceback")
    answer = exchange(custom, sent.encode("utf-8", "surrogatepass"), seconds=0.05)
    assert not answer or re.match(rb"HTTP/1\.1 (100|200|400|404|405|413|422|431|503) ", answer)
    health = exchange(custom, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", seconds=20)
    assert health.startswith(b"HTTP/1.1 200 ") and custom.poll() is None
    assert custom.log.read_text().count("Traceback") == before


def test_unknown_paths(custom):
    assert post(custom.url + "/other/get_reward", ask(RIGHT))[0] == 404


@pytest.mark.parametrize(
    "query, status, said",
    [
        ("raise", 422, "KeyError: 'from the reward function'"),
        ("surrogate", 422, "\ud800 from the reward function"),
        ("nan", 422, "not finite"),
        ("short", 422, "rewards"),
        ("exit", 500, "died"),
        ("sleep 20", 504, "too long"),
    ],
)
def test_a_graders_crash_is_an_error_and_the_server_lives(custom, query, status, said):
    answered, answer = post(custom.url + "/length/get_reward", ask(query))
    assert answered == status and said in answer["error"]
    assert post(custom.url + "/length/get_reward", ask("abc"))[0] == 200


def test_one_bad_request_among_many_fails_alone(custom):
    queries = ["abc", "raise", "abcd", "exit", "nan"] * 20
    with ThreadPoolExecutor(50) as threads:
        answers = list(threads.map(lambda q: post(custom.url + "/length/get_reward", ask(q)), queries))
    for query, (status, answer) in zip(queries, answers, strict=True):
        expected = 200 if query[0] == "a" else 500 if query == "exit" else 422
        assert (status, answer.get("rewards")) == (expected, len(query) if expected == 200 else None)
        assert "scores" not in answer


def test_killed_grader_processes_drop_no_request(custom):
    stop = threading.Event()

    def kill():
        while not stop.wait(0.1):
            status, answer = post(custom.url + "/length/get_reward", ask("pid"))
            if status == 200:
                os.kill(int(answer["rewards"]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: post(custom.url + "/length/get_reward", ask("abc")), range(1500)))
    stop.set()
    killer.join()
    assert {status for status, _ in answers} <= {200, 500}
    assert sum(status == 200 for status, _ in answers) > 1400
    assert float(re.search(r'reward_grader_deaths_total{grader="length"} (\S+)', metrics(custom))[1]) > 0


def test_a_grader_whose_processes_are_gone_starts_again_for_a_probe(custom):
    """Who is not ready is sent no work: readiness must not wait for a call."""
    [template] = [c for c in psutil.Process(custom.pid).children() if "length.py" in " ".join(c.cmdline())]
    os.killpg(template.pid, signal.SIGKILL)
    seen, deadline = [], time.monotonic() + 60
    while seen[-2:] != [503, 200] and time.monotonic() < deadline:
        try:
            seen.append(urllib.request.urlopen(custom.url + "/ready").status)
        except urllib.error.HTTPError as error:
            seen.append(error.code)
        time.sleep(0.02)
    assert seen[-2:] == [503, 200]
    assert post(custom.url + "/length/get_reward", ask("abc"))[0] == 200


def test_health_metrics_and_logs(custom):
    post(custom.url + "/kk/get_reward", ask([RIGHT, WRONG]))
    post(custom.url + "/kk/get_reward", b"[]")
    for path in ("/health", "/ready"):
        assert urllib.request.urlopen(custom.url + path).status == 200
    shown = metrics(custom)
    for line in (
        r'reward_requests_total{grader="kk",status="200"} \d',
        r'reward_requests_total{grader="kk",status="422"} \d',
        r'reward_gradings_total{grader="kk"} \d',
        r'reward_request_seconds_bucket{grader="kk",le="0.1"} \d',
        r'reward_grader_timeouts_total{grader="math"} 0',
        r'reward_queue{grader="kk"} 0',
    ):
        assert re.search(line, shown), line
    entries = [json.loads(line) for line in Path(custom.log).read_text().splitlines() if line.startswith("{")]
    assert any(e["event"] == "request" and e["grader"] == "kk" and e["queries"] == 2 for e in entries)


def test_a_burst_of_512(custom):
    async def one(i):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(custom.url.rsplit(":")[-1]))
        body = json.dumps(ask(RIGHT.replace("</think>", "word " * 3200 + "</think>"))).encode()
        writer.write(f"POST /get_reward HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode())
        writer.write(b"Connection: close\r\n\r\n" + body)
        answer = await reader.read()
        writer.close()
        return answer.startswith(b"HTTP/1.1 200") and b'"rewards":3.0' in answer

    async def burst():
        return await asyncio.gather(*(one(i) for i in range(512)))

    assert all(asyncio.run(burst()))


def test_token(tmp_path):
    (tmp_path / "token").write_text("s3cret-token\n")
    with server("--grader", "kk", "--token-file", tmp_path / "token", "--workers", "1", log=tmp_path / "log") as s:
        assert post(s.url + "/get_reward", ask(RIGHT))[0] == 401
        assert post(s.url + "/get_reward", ask(RIGHT), Authorization="Bearer wrong")[0] == 401
        assert post(s.url + "/get_reward", ask(RIGHT), Authorization="Bearer s3cret-token")[0] == 200
        for path in ("/s3cret-token/get_reward", "/s3cret-token/kk/get_reward"):  # config.yaml would keep it
            assert post(s.url + path, ask(RIGHT))[0] in (401, 404)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(s.url + "/metrics")
        assert urllib.request.urlopen(s.url + "/ready").status == 200
    log = (tmp_path / "log").read_text()
    assert '"request"' in log and "s3cret" not in log


@pytest.mark.parametrize("host, warns", [("0.0.0.0", True), ("::", True), ("127.0.0.1", False), ("localhost", False)])
def test_a_server_for_other_machines_without_a_token_is_warned_of(host, warns, monkeypatch, capsys):
    monkeypatch.setattr(grading_server, "serve", lambda *args: None)
    monkeypatch.setattr(grading_server.RewardServer, "start", lambda self: None)
    for token in (None, "t0ken"):
        monkeypatch.setenv("ARLOPTI_REWARD_TOKEN", token or "") if token else monkeypatch.delenv(
            "ARLOPTI_REWARD_TOKEN", raising=False
        )
        serve_rewards.main(["--grader", "kk", "--host", host, "--port", str(free_port())])
        said = capsys.readouterr().err
        assert said.startswith(f"arlopti serve: warning: no token: whoever reaches {host}:") == (warns and not token)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_it_answer_what_was_accepted(signum, tmp_path):
    (tmp_path / "length.py").write_text(CUSTOM)
    with server("--grader", tmp_path / "length.py", "--workers", "2") as s, ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(post, s.url + "/get_reward", ask("sleep 0.4")) for _ in range(8)]
        time.sleep(1)
        s.send_signal(signum)
        assert [a.result() for a in answers] == [(200, {"rewards": 9.0, "extra_logs": {"size": 4.5}})] * 8
        assert s.wait(20) == 128 + signum


def test_half_requests_and_clients_that_leave_cost_neither_the_end_nor_a_traceback(tmp_path):
    head = b"POST /get_reward HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    with server("--grader", "kk", "--workers", "1", "--max-seconds", "3", log=tmp_path / "log") as s:
        address = ("127.0.0.1", int(s.url.rsplit(":")[-1]))
        for part in (b"POST", head, head + b"{"):
            with socket.create_connection(address) as client:
                client.sendall(part)
                time.sleep(0.1)
        assert wait_until(lambda: "\nreward_clients_left_total 2.0" in metrics(s))
        with socket.create_connection(address) as first, socket.create_connection(address) as second:
            first.sendall(b"POST")
            second.sendall(head + b"{")
            time.sleep(0.2)
            s.send_signal(signal.SIGTERM)
            assert s.wait(15) == 128 + signal.SIGTERM
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "sent", [b"GET /health HTTP/1.1\r\nX: ", b"GET /", b"GET /health HTTP/1.1\r\n" + b"X: 1\r\n" * 9]
)
def test_a_head_has_a_limit_of_size(custom, sent):
    with socket.create_connection(("127.0.0.1", int(custom.url.rsplit(":")[-1])), 20) as client:
        client.sendall(sent)
        with pytest.raises(ConnectionError):
            for _ in range(1024):  # 64 MiB
                client.sendall(b"x" * 2**16)
    assert psutil.Process(custom.pid).memory_info().rss < 2**29


def test_a_body_is_read_in_linear_time(monkeypatch):
    """64 MiB in parts of 16 KiB. A copy for each part would move 128 GiB."""
    server = grading_server.RewardServer({}, 1, Limits(), None)

    class Request:
        async def stream(self):
            for _ in range(4096):
                yield b"x" * 2**14

    begun = time.process_time()
    assert len(asyncio.run(server._read_body(Request()))) == 2**26
    assert time.process_time() - begun < 2


def test_a_port_in_use_is_refused_before_the_graders_start():
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        command = [sys.executable, "-m", "arlopti_openrlhf", "serve", "--grader", "kk", "--port", str(port)]
        result = subprocess.run(command, capture_output=True, text=True)
    expected = (
        f"arlopti serve: error: argument --port: 127.0.0.1:{port} cannot be listened on: Address already in use\n"
    )
    assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


def test_a_reward_file_that_cannot_be_imported(tmp_path):
    """Its own traceback, and then one line. Nothing has listened."""
    path = tmp_path / "reward.py"
    path.write_text("import nowhere\n\ndef reward_func(queries, prompts, labels):\n    return 1\n")
    command = [sys.executable, "-m", "arlopti_openrlhf", "serve", "--grader", str(path), "--port", "0"]
    result = subprocess.run([*command, "--grader", "kk"], capture_output=True, text=True)
    *traceback, line = result.stderr.splitlines()
    assert result.returncode == 2 and "No module named 'nowhere'" in traceback[-1]
    assert result.stderr.count("Traceback") == 1 and not [entry for entry in traceback if entry.startswith("{")]
    assert f"error: argument --grader: {path}: its import fails: ModuleNotFoundError" in line


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--workers", "two", "two is not an integer of at least 1"),
        ("--workers", "0", "0 is not an integer of at least 1"),
        ("--max-seconds", "-1", "-1 is not a number in (0, inf)"),
        ("--grader", "kk", "two graders have one name: kk, kk"),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(capsys, flag, value, said):
    with pytest.raises(SystemExit):
        serve_rewards.main(["--grader", "kk", flag, value])
    assert f"argument {flag}: {said}" in capsys.readouterr().err
