"""Asks reward sources about a few rows, in a process that can be killed (`grading.worker_pool`)."""

import contextlib
import importlib.util
import inspect
import io
import json
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from arlopti_openrlhf.grading.reward_answers import normalise, to_json

_RESPONSE = "I do not know."


def unreadable_labels(grader: str, labels: Sequence[tuple[str, Any]]) -> list[tuple[str, str, bool]]:
    """Return the labels that a grader cannot read: where each stands, why, and whether the grader raises there.

    The math grader does not raise where a label can only be matched letter by letter. Nobody may ever earn it.

    Args:
        grader: "kk" or "math".
        labels: where each stands, and the label.
    """
    from arlopti_openrlhf.grading import kk_reward, math_reward

    def problem_of(label: Any) -> tuple[str, bool] | None:
        try:
            if grader == "kk":
                kk_reward.grade("", label)
            else:
                math_reward.label_text(label)
        except ValueError as error:
            return str(error), True
        if grader == "kk" or math_reward.is_readable(label):
            return None
        return f"{str(label)[:60]!r} is not recognised as an answer to itself", False

    with ThreadPoolExecutor(math_reward.WORKERS) as threads:
        problems = threads.map(problem_of, [label for _, label in labels])
        return [(where, *problem) for (where, _), problem in zip(labels, problems, strict=True) if problem]


def reward_problem(path: str, rows: Sequence[tuple[str, Any]]) -> str | None:
    """Return what keeps a reward file from grading the rows, or None where it grades them.

    Args:
        path: the file, which is loaded and called as upstream's `SingleTurnAgentExecutor` does: one sample at a time.
        rows: prompts and labels.
    """
    # What it prints is not for the list of findings.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            spec = importlib.util.spec_from_file_location("reward_func", path)
            assert spec and spec.loader  # the name ends in .py
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            return f"its import fails: {_said(error, path)}"
        function = getattr(module, "reward_func", None)
        if not callable(function):
            return "it has no function `reward_func`"
        for prompt, label in rows:
            sample = [prompt + _RESPONSE], [prompt], [label]
            try:
                inspect.signature(function).bind(*sample)
            except TypeError as error:
                return f"it is called as reward_func(queries, prompts, labels): {error}"
            except ValueError:  # no Python function, so nobody knows its signature
                pass
            try:
                answer = json.loads(to_json(function(*sample)))
            except (Exception, SystemExit) as error:
                return f"reward_func raised {_said(error, path)} for the label {str(label)[:60]!r}"
            try:
                normalise(answer, 1)
            except ValueError as error:
                return f"reward_func returned {error}"
    return None


def _said(error: BaseException, path: str) -> str:
    """Return an error with the last line of the file that it comes from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}" + (f" (line {lines[-1]})" if lines else "")
