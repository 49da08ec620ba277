"""Each mistake with a source of rewards is found before anything starts."""

import contextlib
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
from arlopti_openrlhf.ops.preflight import reward, right_answers
from arlopti_openrlhf.ops.rollouts.reward_process import RewardProcess


@pytest.fixture
def check(tmp_path, tiny_model):
    """check(source or FLAG=VALUE...) returns the findings as text, those that are fatal after "!"."""
    path = tmp_path / "d.jsonl"

    def run(*sources, **flags):
        rows = ({"prompt": f"puzzle {i}", "label": f"solution {i}"} for i in range(6))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
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
        (function("return [float(labels[0] in queries[0])]"), None),
        (function("return {'rewards': [1.0], 'scores': [1.0], 'extra_logs': {'x': [1]}}"), None),
        (function("return [0.5 for _ in queries]"), None),
        ("import numpy\n" + function("print('noise'); return numpy.ones(len(queries))"), None),
        ("def reward_func(queries, prompts, labels, **kwargs):\n    assert len(queries) == 1; return 1", None),
        (function("assert queries[0].startswith(prompts[0]) and labels[0][-1] in prompts[0]; return [1]"), None),
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
def test_what_a_function_answers(check, write, capfd, body, problem):
    found = check(write(body))
    assert "noise" not in "".join(capfd.readouterr())
    if problem is None:
        assert all("no right answer" in line for line in found)  # most of these are the same for every answer
    else:
        [line] = found
        assert line.startswith("!") and problem in line and "\n" not in line


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("assert 'puzzle ' + labels[0][-1] in prompts[0]; return [labels[0] in queries[0]]", None),
        ("return 1 / (labels[0][-1] != '2')", "reward_func raised ZeroDivisionError"),
        ("import os; os._exit(1)", "its process ended with status 1 while it graded this sample"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its process ended with status -9"),
    ],
)
def test_a_function_grades_the_first_rows_in_a_process_of_its_own(check, write, body, problem):
    path = write(function(body))
    found = check(path)
    assert len(found) == (problem is not None)
    assert all(line.startswith(f"!--reward.remote_url {path}: {problem}") and "\n" not in line for line in found)


def test_a_remedy_is_one_for_its_problem(check, write):
    assert check(write("import nowhere_to_be_found\n"))[0].endswith("; mend the file")
    assert check(write("def reward(queries): return 1\n"))[0].endswith(" are prompts with their answers")


@pytest.mark.parametrize("sources", [("kk",), ("math",), ()])
def test_the_packages_own_have_no_finding(check, sources):
    """`data.check` says which labels they cannot read. Nothing is imported for them here."""
    assert check(*sources) == []


def test_every_kind_of_label_is_graded(check, write, tmp_path):
    """The first rows have none like it, and the run would draw it hours later."""
    rows = [{"prompt": f"puzzle {i}", "label": None if i == 600 else f"solution {i}"} for i in range(640)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write(function("return [float(labels[0] in queries[0])]"))
    [found] = check(path, data__prompt_dataset=str(tmp_path / "long.jsonl"))
    assert found.startswith(
        f"!--reward.remote_url {path}: reward_func raised TypeError: 'in <string>' requires string"
    )
    path = write(function("return [labels[0] is not None and labels[0] in queries[0]]"))
    assert check(path, data__prompt_dataset=str(tmp_path / "long.jsonl")) == []


SOLUTION = "(1) Zoey is a knight\n(2) Oliver is a knave"
RANGE, COEFFICIENT = "--algo.dynamic_filtering_range", "--reward.stop_properly_penalty_coef"


@pytest.mark.parametrize(
    ("body", "flags", "problem"),
    [
        (
            "return [2.0 * good - 1]",
            {},
            f"!{RANGE} (0, 1): answers scored from -1 to 1, so prompts with right and wrong",
        ),
        (
            "return [4.0 * good + 1]",
            {},
            "answers scored from 1 to 5, so prompts with right and wrong ones are left out",
        ),
        ("return [2.0 * good - 1]", {"algo__dynamic_filtering_range": [-1.0, 1.0]}, None),
        ("return [2.0 * good - 1]", {"algo__dynamic_filtering_range": [-0.5, 0.5]}, None),
        ("return {'rewards': [2.0 * good - 1], 'scores': [good]}", {}, None),
        (
            "return [0.1 + 0.8 * good]",
            {},
            f"{RANGE} (0, 1): answers scored from 0.1 to 0.9, so prompts whose answers are",
        ),
        ("return [0.5]", {}, f"{RANGE} (0, 1): all answers scored 0.5, so every prompt is kept"),
        ("return [2.0 * good - 1]", {"algo__dynamic_filtering_enable": False}, None),
    ],
)
def test_the_range_of_dynamic_filtering(check, write, body, flags, problem):
    path = write(function(f"good = labels[0] in queries[0]; {body}"))
    found = check(path, **{"algo__dynamic_filtering_enable": True} | flags)
    assert [line for line in found if RANGE in line] == ([] if problem is None else found[:1])
    assert problem is None or problem in found[0] and ("give -1 1" in found[0]) == ("-1 to 1" in problem)


@pytest.mark.parametrize(
    ("coefficient", "problem"),
    [
        (
            0.0,
            f"!{COEFFICIENT} 0.0: it multiplies: a wrong answer that earned -3 would earn 0 if it were cut off",
        ),
        (0.5, f"!{COEFFICIENT} 0.5: it multiplies: a wrong answer that earned -3 would earn -1.5 if it were cut off"),
        (1.0, None),
        (-3.0, None),
        (None, None),
    ],
)
def test_a_penalty_that_rewards_what_is_cut_off(check, tmp_path, coefficient, problem):
    (tmp_path / "kk.jsonl").write_text(json.dumps({"prompt": "puzzle", "label": SOLUTION}) + "\n")
    flags = {"data__prompt_dataset": str(tmp_path / "kk.jsonl"), "reward__stop_properly_penalty_coef": coefficient}
    found = check("kk", **flags)
    assert len(found) == (problem is not None) and all(line.startswith(problem) for line in found)
    assert check("math", **flags) == []  # it gives 0 and 1


# --- right answers -----------------------------------------------------------------------------------------------

END = "<|im_end|>"  # of the policy's tokenizer
NONE = "no right answer to 4 of the first 4 rows scores above a wrong one, first for the label 'solution 0'; tried "


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (function("return ['boxed{' + labels[0] in queries[0]]"), None),
        (function("return ['<answer>' + labels[0] + '</answer>' in queries[0]]"), None),
        (function("return ['</think>' in queries[0] and 'boxed' in queries[0]]"), None),
        (function(f"return [queries[0].split('</think>')[-1].strip() == labels[0] + '{END}']"), None),
        (function(f"return [queries[0].endswith('answer is ' + labels[0] + '.{END}')]"), None),
        (function("return [queries[0].endswith('answer is ' + labels[0] + '.')]"), NONE),
        (function("return [('#### ' + labels[0]) in queries[0]]"), None),
        (function("good = labels[0] in queries[0]; return {'rewards': [-len(queries[0])], 'scores': [good]}"), None),
        (function("return [1.0]"), "All of them earned 1, as did the wrong one"),
        (function("return {'rewards': [len(queries[0])], 'scores': [0]}"), "All of them earned 0"),
        (function("return [0.0 if labels[0] in queries[0] else 1.0]"), NONE),
        (
            "def reward_func(prompts, completions, answer):\n    return [answer[0] in completions[0]]",
            "`completions` gets the prompts, `answer` gets the labels; the file needs reward_func(queries, prompts, ",
        ),
        (
            "def reward_func(source, solution_str, ground_truth):\n    return [ground_truth[0] in source[0]]",
            "It is called as reward_func(queries, prompts, labels): `source` gets the queries (prompts with their",
        ),
        (
            "def reward_func(completions, **kwargs):\n    return [1.0]",
            "!takes 1 positional argument but 3 were given for the label 'solution 0'. It is called as",
        ),
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0",
            "!it has no function `reward_func`, but compute_score(data_source, solution_str, ground_truth,",
        ),
        (
            "import os\ndef _part(x): return x\ndef reward(completions, **kwargs): return 1.0",
            "!it has no function `reward_func`, but reward(completions); the file needs",
        ),
        (
            function("return [lables[0] == 'x'] if labels[0] in queries[0] else [0.0]"),
            "!reward_func raised NameError: name 'lables' is not defined (line 2) for the label 'solution 0' and the",
        ),
        (function("return [1 / 0] if 'boxed' in queries[0] else [float(labels[0] in queries[0])]"), "!reward_func"),
        (
            function("return [float('nan')] if labels[0] in queries[0] else [0.0]"),
            "!reward_func returned rewards that",
        ),
    ],
)
def test_a_function_that_is_asked_right_answers(check, write, body, problem):
    found = check(write(body))
    assert len(found) == (problem is not None)
    for line in found:
        assert line.startswith("!") == problem.startswith("!") and problem.removeprefix("!") in line, line


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("3", "3"),
        (3.5, "3.5"),
        ('["0.01", "1%"]', "0.01"),
        (["a", "b"], "a"),
        ({"ground_truth": "7", "style": "rule"}, "7"),
        ("6 * 7 = 42 #### 42", "42"),
        ("[1, 2]", "[1, 2]"),
        (b"four", "four"),
        (0, "0"),
    ],
)
def test_the_answer_that_a_label_has(label, answer):
    rows = [("A puzzle.", label), ("A puzzle. <think>\n", label)]
    asked = []

    def ask(query, prompt, label):
        asked.append(query)
        return float(query.endswith(answer))

    assert right_answers.try_out(ask, rows).problem is None
    assert len(asked) == 12 and sum(f"\\boxed{{{answer}}}" in query for query in asked) == 2
    assert all(query.count("</think>") == ("<think>" in query) for query in asked if right_answers.WRONG not in query)


class Characters:
    """A tokenizer of characters, whose last one ends a text."""

    eos_token_id = ord("$")

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, **_) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


OWN = "right answers to 1 of the first 1 rows score only after <think>...</think>, which neither their prompts nor"


@pytest.mark.parametrize(
    ("prompt", "template", "problem"),
    [
        ("A puzzle.", None, OWN),
        ("A puzzle.", "{{ messages }}", OWN),
        ("A puzzle.", "{{ content.split('</think>') }}", None),
        ("A puzzle. Think in <think></think>.", None, None),
        ("A puzzle. <think>\n", None, None),
    ],
)
def test_a_reward_that_wants_a_thought(prompt, template, problem):
    """The model has to be told of it: by its prompt, or by the template that it was trained with."""

    def ask(query, prompt, label):
        assert query.endswith("$")
        return float("</think>" in query[len(prompt) :] and query.endswith("4$"))

    found = right_answers.try_out(ask, [(prompt, "4")], Characters(template)).problem
    assert found is None if problem is None else found.startswith(problem)


@pytest.mark.parametrize("label", [None, "", []])
def test_without_a_label_nothing_is_right(label):
    assert right_answers.try_out(lambda *sample: 1.0, [("A puzzle.", label)]).problem is None


def test_all_answers_are_asked_for_at_a_time(check, write):
    """As in a run. A function that asks a service for two seconds would not answer 24 times one by one."""
    body = "import time\n" + function("time.sleep(2); return [labels[0] in queries[0]]")
    assert check(write(body)) == []


ALARM = """
import signal
import threading

def stop(*args):
    raise TimeoutError

def reward_func(queries, prompts, labels):
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(5)
    try:
        return [float(labels[0] in queries[0])]
    finally:
        signal.alarm(0)
"""
MATH_VERIFY = """
from math_verify import parse, verify

def reward_func(queries, prompts, labels):
    try:
        return [float(verify(parse(f"${labels[0][-1]}$"), parse(queries[0][len(prompts[0]):])))]
    except Exception:
        return [0.0]
"""
LOOP = """
import asyncio

async def score(query, label):
    return float(label in query)

def reward_func(queries, prompts, labels):
    return [asyncio.get_event_loop().run_until_complete(score(queries[0], labels[0]))]
"""


@pytest.mark.parametrize("body", [ALARM, MATH_VERIFY, LOOP], ids=["alarm", "math-verify", "event loop"])
def test_what_works_in_the_run_passes(check, write, body):
    assert check(write(body)) == []


def test_the_check_calls_as_the_run_does(check, write, monkeypatch):
    calls = []
    monkeypatch.setattr(RewardProcess, "call", lambda self, *sample: calls.append(sample) or 1.0)
    check(write(function("return 1 / 0")))
    assert len(calls) == 24 and calls[0][1:] == (calls[0][0].removesuffix(f"{right_answers.WRONG}{END}"), "solution 0")
    assert all(query.endswith(END) for query, *_ in calls)


def test_calls_one_after_another_have_a_limit_together(check, write, monkeypatch):
    """24 calls of 2 s in the main thread would take 48 s. No call takes too long, so that is no error."""
    monkeypatch.setattr(reward, "_PROBE_SECONDS", 4.0)
    path, start = (
        write(ALARM.replace("return [", "time.sleep(2); return [").replace("signal\n", "signal, time\n", 1)),
        time.monotonic(),
    )
    [found] = check(path, reward__timeout_seconds=3.5)
    assert time.monotonic() - start < 25
    assert found.startswith(f"--reward.remote_url {path}: it has not graded 4 rows: no result after 3.5 s")


def test_an_import_that_takes_long_is_a_warning(check, write, monkeypatch):
    """The run has no limit for it."""
    monkeypatch.setattr(reward, "_IMPORT_SECONDS", 1.0)
    [found] = check(write("import time; time.sleep(60)\n" + function("return 1")))
    assert (
        "its import takes more than 1 s, so no reward was tried; make sure that it ends" in found
        and not found.startswith("!")
    )


def test_prompts_that_cannot_be_rendered_are_the_datas_finding(check, write, tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "Hi"}], "label": "x"}\n')
    flags = {"data__prompt_dataset": str(tmp_path / "chat.jsonl"), "data__apply_chat_template": False}
    assert check(write(function("return 1")), **flags) == []


ASYNC = (
    "reward_func raised TypeError: it is async def, and nothing awaits it: make it a plain def that calls asyncio.run"
)


@pytest.mark.parametrize(
    "body",
    [
        "async def reward_func(queries, prompts, labels): return [1.0]",
        "async def score(query): return 1.0\n" + function("return [score(query) for query in queries]"),
    ],
)
def test_a_function_that_is_async(check, write, body):
    [found] = check(write(body))
    assert found.startswith("!") and ASYNC in found


def test_an_agent_is_not_run(check, write):
    assert check(train__agent_func_path=write("")) == []


def test_a_file_that_is_not_there(check):
    [found] = check("nowhere.py")
    assert found.startswith("!--reward.remote_url nowhere.py: its import fails: FileNotFoundError")


@pytest.mark.parametrize("limit, fatal", [(1.5, True), (300.0, False)])
def test_a_function_that_never_returns(check, write, monkeypatch, limit, fatal):
    """It may only be slow, as a reward that asks another model is. It is refused where the run would end it, too."""
    monkeypatch.setattr(reward, "_PROBE_SECONDS", 2.0)
    path, start = write(function("import time; time.sleep(60)")), time.monotonic()
    [found] = check(path, reward__timeout_seconds=limit)
    assert time.monotonic() - start < 20
    assert found.startswith(
        "!" * fatal + f"--reward.remote_url {path}: it has not graded 4 rows: no result after {min(limit, 2.0):g} s"
    )
    assert f"ends a call after {limit:g} s (--reward.timeout_seconds)" in found


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
                    self.send_header("Location", body)
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
    "status, body",
    [(200, "<html>Welcome</html>"), (200, '{"status": "ok"}'), (200, "[]"), (404, ""), (302, "http://127.0.0.1:9/")],
)
def test_a_strangers_server_is_asked_for_its_health_alone_and_is_a_warning(check, server, status, body):
    url, requests = server(status, body)
    [found] = check(url.replace("//", "//user:password@"))
    assert found.startswith("--reward.remote_url http://127.0.0.1:")
    assert "something answers, but not this package's server, so rewards are not checked" in found
    assert "secret" not in found and "password" not in found
    assert requests == ["GET /health"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """ours(token) returns the base of our own server's URLs. It starts its graders' processes when they are asked."""
    running, folder = {}, tmp_path_factory.mktemp("graders")
    (folder / "same.py").write_text("def reward_func(queries, prompts, labels): return [1.0 for _ in queries]")
    (folder / "file.py").write_text(
        "def reward_func(*lists): return [label in query for query, _, label in zip(*lists)]"
    )
    graders = {"file": f"{folder}/file.py", "same": f"{folder}/same.py", "kk": "kk", "math": "math"}

    def start(token: str | None) -> str:
        app = RewardServer(graders, 1, Limits(), token).app()
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


@pytest.mark.parametrize("sent", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_without_an_end_is_a_strangers(check, sent):
    """Each part comes in time, in the head or in the body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.wfile.write(sent)
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.1)

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    begun = time.monotonic()
    [found] = check(f"http://127.0.0.1:{http.server_port}/get_reward")
    http.shutdown()
    http.server_close()
    assert "something answers, but not this package's server" in found and time.monotonic() - begun < 30


@pytest.mark.parametrize("path", ["/get_reward", "/file/get_reward", "/math/get_reward"])
def test_where_our_own_server_grades(check, ours, path, monkeypatch):
    assert check(ours(None) + path) == []
    monkeypatch.setenv("ARLOPTI_REWARD_TOKEN", "t0ken")
    assert check(ours("t0ken") + path) == []


def test_our_own_server_is_asked_right_answers(check, ours):
    url = ours(None)
    [found] = check(f"{url}/same/get_reward")
    assert found.startswith(f"--reward.remote_url {url}: {NONE}") and "All of them earned 1" in found
    [found] = check(f"{url}/kk/get_reward")
    assert found.startswith(f"!--reward.remote_url {url}: refuses the request with status 422: ")
    assert "a solution is numbered lines" in found and "for the label 'solution 0'" in found


@pytest.mark.parametrize("path", ["/mth/get_reward", "/math", "/", ""])
def test_a_path_that_our_own_server_does_not_serve(check, ours, path):
    """The run would end at its first request."""
    for url in (ours(None) + path, f"{ours('t0ken')}/get_reward"):  # the other has no token
        [found] = check(url)
        assert (
            found.startswith("!--reward.remote_url http://127.0.0.1:") and "refuses the request with status 4" in found
        )


@pytest.mark.parametrize("url", ["{}/${{GRADER}}/get_reward", "${{BASE}}/file/get_reward", "{}/${{GRADER}}/${{PATH}}"])
def test_variables_stand_for_any_part_of_a_url(check, ours, monkeypatch, url):
    base = ours(None)
    for name, value in {"GRADER": "math", "BASE": base.partition("//")[2], "PATH": "get_reward"}.items():
        monkeypatch.setenv(name, value)
    url = url.format(base).replace("${BASE}", "http://${BASE}")
    assert check(url) == []
    monkeypatch.setenv("GRADER", "wrong")
    assert bool(check(url)) == ("GRADER" in url)


def test_a_variable_that_is_not_set(check, ours, monkeypatch):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    [found] = check(ours(None) + "/${NO_TOKEN}/get_reward")
    assert found.startswith("!--reward.remote_url") and "${NO_TOKEN}/get_reward: NO_TOKEN is not in the env" in found


def test_a_server_that_is_not_there(check, server, monkeypatch):
    nowhere = "http://user:password@127.0.0.1:9/token/get_reward"
    [found] = check(nowhere)
    assert found.startswith("!--reward.remote_url http://127.0.0.1:9: no answer: ") and "start the server" in found
    found = check(nowhere, server(200)[0])
    assert all(line.startswith("--reward.remote_url") for line in found) and len(found) == 2  # the other one can serve
    assert check("http://host:port/x")[0].startswith("!--reward.remote_url http://host:port: no answer: ")


def test_a_date_reaches_the_function_as_in_the_run(check, write, tmp_path):
    """The run pickles labels, so the function gets the date that the reader made of a text."""
    rows = [{"prompt": "x", "label": f"2024-01-0{day}"} for day in range(1, 7)]
    (tmp_path / "dates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write(function("return [float(labels[0].year == 2024 and str(labels[0]) in queries[0])]"))
    assert check(path, data__prompt_dataset=str(tmp_path / "dates.jsonl")) == []


@pytest.mark.parametrize("key", ["ground_truth", "answer", "solution", "target", "label"])
def test_the_answer_in_a_label_that_is_json(key):
    """As docs/migration.md puts other columns into the label."""
    asked = []

    def ask(query, prompt, label):
        asked.append(query)
        return float("\\boxed{40}" in query)

    for label in (json.dumps({key: "40", "data_source": "aime"}, indent=1), {key: ["40", "40.0"]}):
        asked.clear()
        assert right_answers.try_out(ask, [("P", label)]).problem is None and "P\\boxed{40}" in asked
    asked.clear()
    assert right_answers.try_out(ask, [("P", '{"tests": "1"}')]).problem is None and asked == [
        "P" + right_answers.WRONG
    ]
