"""Each sample has a reward, or the run stops, beside servers that are away, slow, or talk nonsense."""

import asyncio
import datetime
import decimal
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from arlopti_testing.engine_fakes import Engine, Tokenizer
from arlopti_testing.processes import wait_until
from openrlhf.trainer.ppo_utils.experience import make_experience_batch, split_experience_batch
from openrlhf.utils.config import hierarchize
from vllm import SamplingParams

from arlopti_openrlhf.cli.train_ppo_ray import parse
from arlopti_openrlhf.grading.reward_answers import normalise
from arlopti_openrlhf.ops.rollouts import reward_client, reward_http
from arlopti_openrlhf.ops.rollouts import samples as rollout_samples
from arlopti_openrlhf.ops.rollouts.experience_maker import ExperienceMaker
from arlopti_openrlhf.ops.rollouts.reward_client import RewardError, RewardExecutor

GOOD = {"rewards": 3.0, "scores": 1.0, "extra_logs": {"answered": 1.0}}


def execute(executor, prompts=("prompt",), label="label"):
    """The outputs of the executor for several samples at a time."""
    parameters = SamplingParams(max_tokens=8)

    async def run():
        samples = (executor.execute(p, label, parameters, 100, Tokenizer(), Engine()) for p in prompts)
        outputs = await asyncio.gather(*samples)
        assert parameters == SamplingParams(max_tokens=8)
        return outputs

    return asyncio.run(run())


@pytest.fixture
def server():
    """server(answer) → URL; answer(number of the request, message) gives (status, JSON or bytes)."""
    servers = []

    def start(answer, port=0):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.server.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, result = answer(len(self.server.messages), self.server.messages[-1])
                body = result if isinstance(result, bytes) else json.dumps(result).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size, allow_reuse_address, daemon_threads = 128, True, True

        servers.append(Server(("127.0.0.1", port), Handler))
        servers[-1].messages = []
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        servers[-1].url = f"http://127.0.0.1:{servers[-1].server_address[1]}/get_reward"
        return servers[-1]

    yield start
    for each in servers:
        each.shutdown()
        each.server_close()


@pytest.fixture
def said(monkeypatch):
    lines = []
    for level in ("info", "warning"):
        monkeypatch.setattr(reward_client.logger, level, lines.append)
    return lines


def test_a_servers_answer(server):
    http = server(lambda n, message: (200, GOOD))
    [output] = execute(RewardExecutor([http.url]))
    assert (output["reward"], output["scores"], output["extra_logs"]) == (3.0, 1.0, {"answered": 1.0})
    assert http.messages == [{"query": ["prompt answer"], "prompts": ["prompt"], "labels": ["label"]}]


def test_the_guides_server_rewards_knights_and_knaves(tmp_path, monkeypatch):
    """An answer as a trained model writes it, with the special tokens that a query keeps."""
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text("utf-8")
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), importlib.import_module("my_server").Handler) as guides:
        threading.Thread(target=guides.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{guides.server_port}/get_reward"
        prompt, label = "<|im_start|>assistant\n<think>", "(1) Zoey is a knight\n(2) Oliver is a knave"
        answers = [f"He lies.</think>\n<answer>\n{text}\n</answer><|im_end|>" for text in (label, label[::-1])]
        found = [normalise(asyncio.run(reward_http.post(url, prompt + a, prompt, label)), 1) for a in answers]
        guides.shutdown()
    assert [(answer["rewards"], answer["scores"]) for answer in found] == [([1.0], [1.0]), ([-1.0], [0.0])]
    assert found[0]["extra_logs"]["response_chars"] == [float(len("<think>" + answers[0]))]


@pytest.mark.parametrize("failure", [(500, {"error": "down"}), (503, b""), (429, b""), (200, b"<html>starting")])
def test_a_server_that_fails_is_asked_again(server, said, failure):
    http = server(lambda n, message: failure if n < 3 else (200, GOOD))
    [output] = execute(RewardExecutor([http.url]))
    assert output["reward"] == 3.0 and len(http.messages) == 3
    assert any("samples wait" in line for line in said) and "answers again" in said[-1]


def test_a_server_that_is_away_for_a_while_loses_no_sample(server, said):
    """64 samples wait; the run says so once, and once that it goes on."""
    http = server(lambda n, message: (200, GOOD))
    port = http.server_address[1]
    http.shutdown()
    http.server_close()

    def come_back():
        time.sleep(3)
        server(lambda n, message: (200, GOOD | {"rewards": float(message["prompts"][0])}), port)

    threading.Thread(target=come_back).start()
    outputs = execute(RewardExecutor([http.url]), prompts=[str(i) for i in range(64)])
    assert [output["reward"] for output in outputs] == list(range(64))
    assert len(said) == 2 and "wait for" in said[0] and "answers again" in said[1]


def test_a_second_server_takes_over(server, said):
    """The log says once that samples wait, and once that they are answered, however often the first one fails."""
    bad, good = server(lambda n, message: (500, b"")), server(lambda n, message: (200, GOOD))
    executor = RewardExecutor([bad.url, good.url])
    outputs = [output for _ in range(3) for output in execute(executor, prompts=["a", "b", "c", "d"])]
    assert [output["reward"] for output in outputs] == [3.0] * 12
    assert len(said) == 2 and "wait for" in said[0] and "answers again" in said[1]


def test_the_time_limit(server, said):
    http = server(lambda n, message: (500, {"error": "always down"}))
    start = time.monotonic()
    with pytest.raises(RewardError, match="no reward from .*retry_minutes.*always down"):
        execute(RewardExecutor([http.url], retry_minutes=2 / 60))
    assert 0.5 < time.monotonic() - start < 5


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_request_that_is_refused_is_not_repeated(server, status):
    http = server(lambda n, message: (status, {"error": "labels is missing"}))
    with pytest.raises(RewardError, match=f"status {status}.*labels is missing") as error:
        execute(RewardExecutor([http.url]))
    assert "query: prompt answer" in str(error.value)
    assert len(http.messages) == 1


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (float("nan"), "returned rewards that are not finite: nan"),
        ("\x1b[2J\narlopti_openrlhf: done", r"not one number: \x1b[2J\narlopti_openrlhf: done"),
    ],
)
def test_a_reward_that_is_no_number_is_refused(server, answer, problem):
    http = server(lambda n, message: (200, {"rewards": answer}))
    with pytest.raises(RewardError) as error:
        execute(RewardExecutor([http.url]))
    line, label, query = str(error.value).splitlines()
    assert line.endswith(problem) and label == "label: label" and query.startswith("query: prompt answer")


def write(path, body):
    imports = "import os, re, subprocess, threading, time"
    path.write_text(f"{imports}\n\ndef reward_func(queries, prompts, labels, **kwargs):\n    {body}\n")
    return str(path)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_reward_function_that_raises(tmp_path):
    path = write(tmp_path / "r.py", 'raise KeyError("of the function")')
    with pytest.raises(RewardError, match="reward_func raised KeyError: 'of the function'") as error:
        execute(RewardExecutor([path]))
    assert "query: prompt answer" in str(error.value)
    assert 'r.py", line 4, in reward_func' in str(error.value.__cause__)


@pytest.mark.parametrize(
    "body",
    ["time.sleep(0 if labels[0] != 'slow' else 60)", "labels[0] != 'slow' or re.match('(a*)*b', 'a' * 40)"],
    ids=["sleeps", "holds Python's lock"],
)
def test_a_reward_function_that_takes_too_long(tmp_path, body):
    executor = RewardExecutor([write(tmp_path / "r.py", f"{body}\n    return [1.0]")], timeout_seconds=1)
    [output] = execute(executor)
    assert output["reward"] == 1.0
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"r.py: reward_func gave no result after 1 s \(--reward.timeout") as error:
        execute(executor, label="slow")
    assert time.monotonic() - start < 10 and "label: slow\nquery: prompt answer" in str(error.value)
    assert 'r.py", line 4 in reward_func' in str(error.value)
    with pytest.raises(ProcessLookupError):
        os.kill(executor._process.pid, 0)


def test_samples_that_were_graded_beside_the_slow_one_name_it(tmp_path):
    path = write(tmp_path / "r.py", "time.sleep(60 if prompts[0] == 'slow' else 2.9)\n    return [1.0]")
    executor = RewardExecutor([path], timeout_seconds=3)

    async def run():
        async def later(prompt):
            await asyncio.sleep(2 if prompt != "slow" else 0)
            return await asyncio.to_thread(executor._process.call, prompt, prompt, "label")

        return await asyncio.gather(*map(later, ["slow", "good"]), return_exceptions=True)

    for result in asyncio.run(run()):
        assert isinstance(result, RewardError) and "query: slow" in str(result)


def test_a_reward_function_that_ends_its_process_and_leaves_another_behind(tmp_path):
    note = f"open({str(tmp_path / 'child')!r}, 'w').write(str(subprocess.Popen(['sleep', '99']).pid))"
    executor = RewardExecutor([write(tmp_path / "r.py", f"{note}; os._exit(7)")])
    for _ in range(2):
        with pytest.raises(RewardError, match="its process ended with status 7") as error:
            execute(executor)
        assert "query: prompt answer" in str(error.value)
    assert wait_until(lambda: is_gone(int((tmp_path / "child").read_text())))


def test_a_module_keeps_its_state_and_serves_many_at_a_time(tmp_path):
    path = write(tmp_path / "r.py", "seen.append(1); barrier.wait(20); return [float(len(seen))]")
    with open(path, "a") as file:
        file.write("\nseen, barrier = [], threading.Barrier(4)\n")
    outputs = execute(RewardExecutor([path]), prompts="abcd")
    assert [output["reward"] for output in outputs] == [4.0] * 4


MAIN_THREAD = """
import signal, threading, time
seen = []

def stop(*args):
    raise TimeoutError("alarm")

{AT_IMPORT}

def reward_func(queries, prompts, labels):
    seen.append(prompts[0])
    try:
        {CALL}
    except ValueError:
        return [0.0]
    return [float(len(seen)) + (threading.current_thread() is threading.main_thread()) / 2]
"""


@pytest.mark.parametrize(
    ("at_import", "call"),
    [
        ("", "signal.signal(signal.SIGALRM, stop); signal.alarm(9); signal.alarm(0)"),
        ("signal.signal(signal.SIGALRM, stop)", "signal.alarm(9); signal.alarm(0)"),
        ("from signal import SIGALRM, setitimer, signal as handle", "handle(SIGALRM, stop); setitimer(0, 9)"),
        ("import math_verify", "math_verify.verify(math_verify.parse('$1$'), math_verify.parse('1'))"),
    ],
)
def test_a_function_that_needs_the_main_thread_gets_it(tmp_path, at_import, call):
    """Each call that was made in a thread is made again, and then those of the main thread share the file's state."""
    (tmp_path / "r.py").write_text(MAIN_THREAD.replace("{AT_IMPORT}", at_import).replace("{CALL}", call))
    executor = RewardExecutor([f"{tmp_path}/r.py"])
    [output] = execute(executor)
    assert output["reward"] == 2.5  # the second time, in the main thread
    rewards = [output["reward"] for output in execute(executor, prompts="abcdefgh")]
    assert sorted(rewards) == [3.5 + i for i in range(8)]


def test_an_alarm_of_the_function_ends_its_own_call_and_nothing_else(tmp_path):
    body = "signal.setitimer(signal.ITIMER_REAL, 0.2); time.sleep({'long': 30}.get(labels[0], 0))"
    text = MAIN_THREAD.replace("{AT_IMPORT}", "signal.signal(signal.SIGALRM, stop)").replace("{CALL}", body)
    (tmp_path / "r.py").write_text(text)
    executor = RewardExecutor([f"{tmp_path}/r.py"], timeout_seconds=20)
    with pytest.raises(RewardError, match=r"r.py: reward_func raised TimeoutError: alarm \(line \d+\)"):
        execute(executor, label="long")
    execute(executor)  # and leaves an alarm
    time.sleep(0.4)
    [output] = execute(executor)
    assert output["reward"] == 4.5


@pytest.mark.parametrize("label", ["slow", "raises"])
def test_calls_in_the_main_thread_have_the_same_limits(tmp_path, label):
    body = "signal.alarm(0); {'slow': lambda: time.sleep(60), 'raises': lambda: 1 / 0}.get(labels[0], int)()"
    text = MAIN_THREAD.replace("{AT_IMPORT}", "").replace("{CALL}", body)
    (tmp_path / "r.py").write_text(text)
    executor = RewardExecutor([f"{tmp_path}/r.py"], timeout_seconds=2)
    problem = "gave no result after 2 s" if label == "slow" else "raised ZeroDivisionError"
    with pytest.raises(RewardError, match=f"reward_func {problem}") as error:
        execute(executor, label=label)
    assert f"label: {label}" in str(error.value) and (label != "slow" or "in reward_func" in str(error.value))


def test_calls_that_wait_for_the_main_thread_are_in_time(tmp_path):
    """The limit is one call's. Eight that take 0.5 s one after another are within 2 s each."""
    text = MAIN_THREAD.replace("{AT_IMPORT}", "").replace("{CALL}", "signal.alarm(0); time.sleep(0.5)")
    (tmp_path / "r.py").write_text(text)
    assert len(execute(RewardExecutor([f"{tmp_path}/r.py"], timeout_seconds=2), prompts="abcdefgh")) == 8


@pytest.mark.parametrize(
    "body",
    [
        "asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))",
        "asyncio.run(asyncio.sleep(0)); asyncio.get_event_loop_policy()",
        "loop = asyncio.get_event_loop(); loop.run_until_complete(asyncio.sleep(0)); loop.close()",
    ],
)
def test_each_call_has_an_event_loop(tmp_path, body):
    path = write(tmp_path / "r.py", f"import asyncio; {body}; return 1.0")
    executor = RewardExecutor([path])
    for _ in range(3):
        assert [output["reward"] for output in execute(executor, prompts="ab")] == [1.0] * 2


def test_the_files_functions_can_be_pickled_for_forked_processes(tmp_path):
    body = "return multiprocessing.get_context('fork').Pool(1).map(double, [1.0])"
    path = write(tmp_path / "r.py", body)
    with open(path, "a") as file:
        file.write("\nimport multiprocessing\ndef double(x): return 2 * x\n")
    assert execute(RewardExecutor([path]))[0]["reward"] == 2.0


def test_a_file_imports_a_module_next_to_it_after_all_others(tmp_path, monkeypatch):
    (tmp_path / "next_to_it.py").write_text("REWARD = 2.0")
    (tmp_path / "torch.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir("/")
    path = write(tmp_path / "r.py", "import torch; return next_to_it.REWARD * len(torch.ones(1))")
    with open(path, "a") as file:
        file.write("\nimport next_to_it\n")
    assert execute(RewardExecutor([path]))[0]["reward"] == 2.0


LABELS = [
    decimal.Decimal("42.50"),
    datetime.date(2020, 1, 2),
    datetime.datetime(2020, 1, 2, 3),
    b"42",
    2**62,
    1.5,
    None,
    {"ground_truth": {"a": [1, None]}},
    [1, "x"],
    np.arange(3),
]


@pytest.mark.parametrize("label", LABELS, ids=lambda label: type(label).__name__)
def test_a_label_reaches_a_function_as_it_is(tmp_path, label):
    path = write(tmp_path / "r.py", "return float(repr(labels) == EXPECTED)")
    with open(path, "a") as file:
        file.write(f"\nimport numpy\nEXPECTED = {repr([label])!r}\n")
    assert execute(RewardExecutor([path]), label=label)[0]["reward"] == 1.0


@pytest.mark.parametrize("label", LABELS, ids=lambda label: type(label).__name__)
def test_a_label_reaches_a_server_as_json_or_is_refused(server, label):
    http = server(lambda n, message: (200, GOOD))
    if isinstance(label, bytes):
        with pytest.raises(RewardError, match="a label that is bytes cannot be sent to a server; store it as text"):
            execute(RewardExecutor([http.url]), label=label)
        return
    execute(RewardExecutor([http.url]), label=label)
    texts = (decimal.Decimal, datetime.date)
    expected = str(label) if isinstance(label, texts) else label.tolist() if isinstance(label, np.ndarray) else label
    assert http.messages[0]["labels"] == [expected]


@pytest.mark.parametrize("text", [None, "def reward_func(:", "def other(): pass", "import os; os._exit(3)"])
def test_a_file_that_gives_no_function(tmp_path, text):
    path = tmp_path / "r.py"
    if text is not None:
        path.write_text(text)
    why = r"(its import fails|it has no function `reward_func`, but other\(\)|its process ended with status 3)"
    with pytest.raises(RuntimeError, match=f"{path}: {why}"):
        RewardExecutor([str(path)])


def test_the_process_ends_with_its_engine(tmp_path):
    path = write(tmp_path / "r.py", "return 1.0")
    code = f"""if True:
        from arlopti_openrlhf.ops.rollouts.reward_process import RewardProcess
        process = RewardProcess({path!r}, 10)
        print(process.call("", "", ""), process.pid, flush=True)
        __import__("os").kill(__import__("os").getpid(), 9)
    """
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100).stdout.split()
    assert out[0] == "1.0"
    assert wait_until(lambda: is_gone(int(out[1])))


@pytest.mark.parametrize("is_path", [False, True])
@pytest.mark.parametrize(
    "name, reward, metrics", [("kk", -3.0, {"well_formed", "answered"}), ("math", 0.0, {"well_formed", "timed_out"})]
)
def test_the_packages_rewards_by_name_and_as_files_for_openrlhf(name, is_path, reward, metrics, monkeypatch, tmp_path):
    """They work in a folder with a `rewards` package of its own."""
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "__init__.py").write_text("raise ImportError('not these')")
    monkeypatch.chdir(tmp_path)
    file = Path(__file__).parents[3] / "rewards" / f"{name}_reward.py"
    [output] = execute(RewardExecutor([str(file) if is_path else name]), label="(1) Zoey is a knight")
    assert output["reward"] == reward and output["extra_logs"].keys() == metrics
    assert not output["scores_are_rewards"]


def test_samples_with_and_without_scores_make_a_batch(tmp_path):
    """They pass upstream's executor, samples generator, micro-batches and replay buffer, as in a run."""
    only_some = '({"scores": [1.0]} if labels[0] == "b" else {})'
    path = write(tmp_path / "r.py", f'return {{"rewards": [0.5]}} | {only_some}')
    executor = RewardExecutor([path])
    outputs = [output for label in "abab" for output in execute(executor, label=label)]
    flags = "--actor.model_name_or_path m --algo.advantage.estimator group_norm --rollout.micro_batch_size 4"
    strategy = SimpleNamespace(args=hierarchize(parse(flags.split())))
    generator = rollout_samples.SamplesGenerator(strategy, None, None, None, [], sampling=[])
    samples = [generator._process_response_into_experience(output) for output in outputs]
    assert [sample.scores_are_rewards for sample in samples] == [True, False, True, False]
    maker = ExperienceMaker(None, None, None, None, None, strategy, SimpleNamespace(pad_token_id=0))
    [batch] = maker.split_rollout_samples(samples)
    info = make_experience_batch(split_experience_batch(batch)).info
    assert torch.stack(info["score"]).tolist() == [0.5, 1.0, 0.5, 1.0]


def test_without_a_reward_source_only_responses():
    [output] = execute(RewardExecutor(None))
    assert output["reward"] is None
