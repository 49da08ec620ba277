"""Each mistake with a source of rewards is found before anything starts."""

import functools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import uvicorn
from arlopti_testing.preflight_command import changed
from arlopti_testing.processes import free_port, wait_until

from arlopti_openrlhf.grading.grader import Limits
from arlopti_openrlhf.grading.server import RewardServer
from arlopti_openrlhf.ops.preflight import probe, reward


@pytest.fixture
def check(tmp_path, tiny_model):
    """check(source or FLAG=VALUE...) returns the findings as text, those that are fatal after "!"."""
    path = tmp_path / "d.jsonl"
    rows = ({"prompt": f"puzzle {i}", "label": f"solution {i}"} for i in range(6))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def run(*sources, **flags):
        base = {"actor__model_name_or_path": tiny_model, "data__prompt_dataset": str(path)}
        base["reward__remote_url"] = list(sources) or None
        return ["!" * finding.is_fatal + str(finding) for finding in reward.check(changed(**base | flags))]

    return run


@pytest.fixture
def write(tmp_path):
    def write(body: str, name: str = "reward.py") -> str:
        (tmp_path / name).write_text(body, encoding="utf-8")
        return str(tmp_path / name)

    return write


def function(body: str) -> str:
    return f"def reward_func(queries, prompts, labels):\n    {body}\n"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (function("return {'rewards': [1.0], 'scores': [1.0], 'extra_logs': {'x': [1]}}"), None),
        (function("return [0.5 for _ in queries]"), None),
        ("import numpy\n" + function("print('noise'); return numpy.ones(len(queries))"), None),
        ("def reward_func(queries, prompts, labels, **kwargs):\n    assert len(queries) == 1; return 1", None),
        (function("assert queries[0].startswith(prompts[0]) and prompts[0][-1] == labels[0][-1]; return [1]"), None),
        ("reward_func = max\n" + function("return 0"), None),
        ("def reward_func(:\n", "its import fails: SyntaxError: invalid syntax"),
        ("x = 1\nimport nowhere_to_be_found\n", "its import fails: ModuleNotFoundError: No module named"),
        ("raise SystemExit('usage')", "its import fails: SystemExit: usage (line 1)"),
        ("def reward(queries): return 1\n", "it has no function `reward_func`"),
        ("reward_func = 3\n", "it has no function `reward_func`"),
        ("def reward_func(queries): return [1]\n", "reward_func raised TypeError: reward_func() takes 1 positional"),
        (function("return None"), "reward_func returned no dict with `rewards`"),
        (function("return {'reward': 1}"), "reward_func returned no dict with `rewards`"),
        (function("return [1, 2]"), "reward_func returned rewards for one sample that are not one number: [1, 2]"),
        (function("return float('nan')"), "reward_func returned rewards that are not finite: nan"),
        (function("return labels[0]['x']"), "reward_func raised TypeError: string indices must be integers"),
        (
            function("raise ValueError('no\\nway')"),
            "reward_func raised ValueError: no (line 2) for the label 'solution",
        ),
        (
            function("return 1 / (labels[0][-1] != '2')"),
            "ZeroDivisionError: division by zero (line 2) for the label 'so",
        ),
    ],
)
def test_what_a_function_answers(write, capsys, body, problem):
    found = probe.reward_problem(write(body), [(f"puzzle {i}", f"solution {i}") for i in range(4)])
    assert capsys.readouterr() == ("", "")
    assert found == problem if problem is None else problem in found and "\n" not in found


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("assert 'puzzle ' + labels[0][-1] in prompts[0]; return [1]", None),
        ("return 1 / (labels[0][-1] != '2')", "reward_func raised ZeroDivisionError"),
        ("import os; os._exit(1)", "it has not graded 4 rows: its process ends"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it has not graded 4 rows: its process ends"),
    ],
)
def test_a_function_grades_the_first_rows_in_a_process_of_its_own(check, write, body, problem):
    path = write(function(body))
    found = check(path)
    assert len(found) == (problem is not None)
    assert all(line.startswith(f"!--reward.remote_url {path}: {problem}") and "\n" not in line for line in found)


@pytest.mark.parametrize("sources", [("kk",), ("math",), ()])
def test_the_packages_own_have_no_finding(check, sources):
    assert check(*sources) == []


def test_prompts_that_cannot_be_rendered_are_the_datas_finding(check, write, tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "Hi"}], "label": "x"}\n')
    flags = {"data__prompt_dataset": str(tmp_path / "chat.jsonl"), "data__apply_chat_template": False}
    assert check(write(function("return 1")), **flags) == []


def test_a_file_that_is_not_there(check):
    assert check("nowhere.py") == ["!--reward.remote_url nowhere.py: there is no such file; correct the path"]


@pytest.mark.parametrize("limit, fatal", [(1.5, True), (300.0, False)])
def test_a_function_that_never_returns(check, write, monkeypatch, limit, fatal):
    """It may only be slow, as a reward that asks another model is. It is refused where the run would end it, too."""
    monkeypatch.setattr(reward, "_PROBE_SECONDS", 2.0)
    path, start = write(function("while True: pass")), time.monotonic()
    [found] = check(path, reward__timeout_seconds=limit)
    assert time.monotonic() - start < 20
    assert found.startswith(
        "!" * fatal + f"--reward.remote_url {path}: it has not graded 4 rows: no result after {min(limit, 2.0):g} s"
    )
    assert f"ends a call after {limit:g} s (--reward.timeout_seconds)" in found


@pytest.mark.parametrize(
    "body, problem",
    [
        (None, "there is no such Python file"),
        ("class AgentExecutor(:\n", "it does not parse: invalid syntax"),
        ("class Agent: pass\n", "it has no class `AgentExecutor`"),
        ("class AgentExecutor: pass\n", None),
        ("from elsewhere import Mine as AgentExecutor\n", None),
        ("from elsewhere import *\n", None),
        ("import functools\nAgentExecutor = functools.partial\n", None),
    ],
)
def test_agents(check, write, body, problem):
    path = "nowhere.py" if body is None else write(body, "agent.py")
    found = check("agent", train__agent_func_path=path)
    assert len(found) == (problem is not None)
    assert all(line.startswith(f"!--train.agent_func_path {path}: {problem}") for line in found)


# --- servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """server(status of /health, its body) returns a URL and the list of requests."""
    servers = []

    def start(status: int, body: str = "") -> tuple[str, list[str]]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                requests.append(f"GET {self.path}")
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", self.path)
                self.send_header("Content-Type", "text/html" if body.startswith("<") else "application/json")
                self.end_headers()
                self.wfile.write(body.encode())

            def do_POST(self):
                requests.append(f"POST {self.path}")

            def log_message(self, *args):
                pass

        requests: list[str] = []
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/secret/get_reward", requests

    yield start
    for each in servers:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize(
    "status, body, kind",
    [
        (200, "<html>Welcome</html>", "status 200, text/html"),
        (200, '{"status": "ok"}', "status 200, application/json"),
        (200, "[]", "status 200"),
        (404, "", "status 404"),
    ],
)
def test_a_strangers_server_is_asked_for_its_health_alone_and_is_a_warning(check, server, status, body, kind):
    url, requests = server(status, body)
    [found] = check(url.replace("//", "//user:password@"))
    assert found.startswith("--reward.remote_url http://127.0.0.1:")
    assert f"something answers, but not this package's server (/health: {kind}" in found
    assert "secret" not in found and "password" not in found
    assert requests == ["GET /health"]


def test_a_server_that_redirects_without_end_is_a_warning(check, server):
    [found] = check(server(302)[0])
    assert "something answers at /health, and redirects without end" in found


@pytest.fixture(scope="module")
def ours():
    """ours(token) returns the base of our own server's URLs. It listens, and its graders' processes do not run."""
    running = {}

    def start(token: str | None) -> str:
        app = RewardServer({"kk": "kk", "math": "math"}, 1, Limits(), token).app()
        server = uvicorn.Server(uvicorn.Config(app, port=free_port(), log_config=None))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running[server] = thread
        wait_until(lambda: server.started)
        return f"http://127.0.0.1:{server.config.port}"

    yield functools.cache(start)
    for server, thread in running.items():
        server.should_exit = True
        thread.join(20)


@pytest.mark.parametrize("path", ["/get_reward", "/kk/get_reward", "/math/get_reward", "/math/get_reward/"])
def test_where_our_own_server_grades(check, ours, path):
    assert check(ours(None) + path) == check(f"{ours('t0ken')}/t0ken{path}") == []


@pytest.mark.parametrize("path", ["/mth/get_reward", "/math/get_rewards", "/math", "/", ""])
def test_a_path_that_our_own_server_does_not_serve(check, ours, path):
    where = "at /get_reward or /kk/get_reward or /math/get_reward; correct the URL"
    url = ours(None)
    good = f"{url}/get_reward"
    assert (
        check(url + path)
        == check(url + path, good)
        == [f"!--reward.remote_url {url}: the server has no rewards at {path or '/'}, but {where}"]
    )
    url = ours("t0ken")
    assert check(f"{url}/t0ken{path}")[0].startswith(f"!--reward.remote_url {url}: the server has no rewards at ")
    for wrong in (url + path, f"{url}/wrong{path}"):
        [found] = check(wrong)
        assert found.startswith(f"!--reward.remote_url {url}: the token that the server wants is not there, or wrong")


def test_a_server_that_is_not_there(check, server, monkeypatch):
    monkeypatch.setattr(reward, "_RETRIES", 0)
    nowhere = "http://user:password@127.0.0.1:9/token/get_reward"
    [found] = check(nowhere)
    assert found.startswith("!--reward.remote_url http://127.0.0.1:9: no answer: ") and "start the server" in found
    found = check(nowhere, server(200)[0])
    assert all(line.startswith("--reward.remote_url") for line in found) and len(found) == 2  # the other one can serve
    assert check("http://host:port/x")[0].startswith("!--reward.remote_url http://host:port: no answer: Invalid port")


def test_a_label_that_the_probe_cannot_send(check, write, tmp_path):
    """The run pickles labels, so it is not known whether the function takes a date."""
    rows = [{"prompt": "x", "label": f"2024-01-0{day}"} for day in range(1, 7)]
    (tmp_path / "dates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [found] = check(write(function("return [1.0]")), data__prompt_dataset=str(tmp_path / "dates.jsonl"))
    assert found.startswith("--reward.remote_url ") and "not tried: Object of type datetime" in found
