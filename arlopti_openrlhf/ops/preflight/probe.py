"""Asks a user's code, or a grader, in a process that can be killed (`grading.worker_pool`)."""

import contextlib
import io
import json
import runpy
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from arlopti_openrlhf.grading.reward_answers import normalise, to_json
from arlopti_openrlhf.grading.worker_pool import Died, Raised, TimedOut, WorkerPool

NO_ANSWER = (TimedOut, Died, Raised, RuntimeError)  # RuntimeError: the function cannot be loaded
_RESPONSE = "I do not know."
_UNLIMITED = 2.0**20  # GiB


def ask(function: str, *args: Any, seconds: float) -> Future:
    """Call a function "package.module:name" in a process of its own, which ends with the call.

    The result raises one of `NO_ANSWER` where there is none.
    """
    pool = WorkerPool(function, 1, seconds, memory_gib=_UNLIMITED)
    answer = pool.submit(*args)
    answer.add_done_callback(lambda _: pool.close())
    return answer


def reason(error: Exception) -> str:
    """Return in words why there is no answer."""
    if isinstance(error, Died):
        return "its process ends"
    return f"{error}, imports included" if isinstance(error, TimedOut) else f"cannot be asked: {str(error)[-200:]}"


def unreadable_labels(grader: str, labels: Sequence[tuple[str, Any]]) -> list[tuple[str, str, bool]]:
    """Return the labels that kk or math cannot read: where each stands, why, and whether the grader raises there.

    The math grader does not raise where a label can only be matched letter by letter, so no answer may earn it.
    """
    from arlopti_openrlhf.grading import kk_reward, math_reward

    def problem_of(label: Any) -> tuple[str, bool] | None:
        try:
            if grader == "kk":
                kk_reward.grade("", label)
            elif math_reward.label_text(label) and not math_reward.is_readable(label):
                return f"{str(label)[:60]!r} is not recognised as an answer to itself", False
        except ValueError as error:
            return str(error), True
        return None

    with ThreadPoolExecutor(math_reward.WORKERS) as threads:
        problems = threads.map(problem_of, [label for _, label in labels])
        return [(where, *problem) for (where, _), problem in zip(labels, problems, strict=True) if problem]


def reward_problem(path: str, rows: Sequence[tuple[str, Any]]) -> str | None:
    """Return what keeps a reward file from grading prompts and labels, or None where it grades them.

    It is loaded and called as in the run (`ops.rollouts.reward_process`), with one sample at a time.
    """
    # What it prints is not for the list of findings.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            function = runpy.run_path(path, run_name="reward_func").get("reward_func")
        except (Exception, SystemExit) as error:
            return f"its import fails: {_message(error, path)}"
        if not callable(function):
            return "it has no function `reward_func`"
        for prompt, label in rows:
            try:
                answer = json.loads(to_json(function([prompt + _RESPONSE], [prompt], [label])))
            except (Exception, SystemExit) as error:
                return f"reward_func raised {_message(error, path)} for the label {str(label)[:60]!r}"
            try:
                normalise(answer, 1)
            except ValueError as error:
                return f"reward_func returned {error}"
    return None


def _message(error: BaseException, path: str) -> str:
    """Return an error with the last line of the file that it comes from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}" + (f" (line {lines[-1]})" if lines else "")
