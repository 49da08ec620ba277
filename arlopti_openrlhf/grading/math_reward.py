r"""Rewards math with math-verify: 1 where the final answer equals the label, else 0. OpenRLHF loads the file by path.

The final answer is what the last `\boxed{}` outside of thoughts holds. Without a box, it is what math-verify
extracts. To compare two answers is symbolic mathematics, and an answer such as `9^{9^{9^9}}` can keep it busy for
hours. So it runs in worker processes with a limit of time and one of memory (`grading.runner`), and an answer
that meets either is wrong.
"""

# OpenRLHF executes this file without an entry in sys.modules, and calls `reward_func` from threads.

import functools
import json
import math
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any, NamedTuple

import torch

from arlopti_openrlhf.grading.kk_reward import assistant_turns
from arlopti_openrlhf.grading.math_text import final_answer, leaves_work, numbers, plain, repeats
from arlopti_openrlhf.grading.runner import Died, Raised, TimedOut, WorkerPool

TIMEOUT = float(os.environ.get("ARLOPTI_MATH_TIMEOUT", "2"))  # seconds of processor time per answer
_PATIENCE = 3  # times as long by the clock, for a busy machine must not make right answers wrong
WORKERS = int(os.environ.get("ARLOPTI_MATH_WORKERS", min(8, os.cpu_count() or 1)))
# Characters. No label of the public sets is a fourth as long. A longer answer is wrong unread.
MAX_ANSWER = 2_000
# Characters at the end of a response without a box, where an answer is looked for.
MAX_TAIL = 2_000
# Characters at the end of a response where a box is looked for. No response of 64k tokens is longer.
MAX_RESPONSE = 2**18

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_EMPTY = re.compile(
    r"(?:\s|~|\$|\{|\}|\\[ ,;:!]|\\q?quad(?![a-z])|\\[hv]?phantom\{[^{}]*\}|\\(?:text|mathrm)(?=\{\s*\}))*"
)
_EMPTY_BOX = re.compile(rf"\\(?:boxed|fbox)\s*\{{{_EMPTY.pattern}\}}")
# What may stand between two boxes of one list.
_BLANK = r"(?:\s|\$|~|\*|\\[ ,;:!()\[\]]|\\q?quad(?![a-z]))*+"  # possessive, so that its time is linear
_JOINT = re.compile(
    rf"{_BLANK}"
    r"([,;=/]?\s*+(?:(?:\\text\{\s*)?(?:or|and)(?:\s*\})?|\\(?:approx|equiv|lor|vee|sim|to|cup)(?![a-z])|[≈、&])?)"
    rf"{_BLANK}"
)
# OpenRLHF decodes special tokens too, and math-verify finds no number right before one.
_ANNOUNCES = re.compile(r"\banswer\b", re.IGNORECASE)
_CLOSING = re.compile(r"^####\s*+(.+)\Z", re.MULTILINE)  # GSM8K's last line
_END = re.compile(r"(?:<\|[^<>|]{1,30}\|>|</s>|<eos>|<end_of_turn>|\s)+\Z")


class MathGrade(NamedTuple):
    """What one response earned.

    score: 1.0 where the final answer equals the label, else 0.0. It is the reward.
    boxed: the final answer stood in a box.
    timed_out: the comparison met the time limit or the memory limit.
    """

    score: float
    boxed: bool
    timed_out: bool


def grade(response: str, answer: object, prompt: str = "") -> MathGrade:
    r"""Grade one response against its label.

    Args:
        response: any text; none raises, and once a worker is free, each takes at most `TIMEOUT` seconds of
            processor time, and three times as long by the clock.
        answer: the label. It is a number, or text as in the public sets (LaTeX, with or without dollars or `\boxed`),
            or a list of alternatives, any of which is right. A list may also be JSON of strings, as in `["0.01"]`.
        prompt: the question. Arithmetic of its numbers that is left to do, as 2^{10} for "What is 2^{10}?", is
            no answer.

    Raises:
        ValueError: the label is empty or of another type.
    """
    labels = _alternatives(answer)
    response = _outside_thoughts(response)
    box = last_box(response[-MAX_RESPONSE:])
    if box == "":
        return MathGrade(0.0, boxed=False, timed_out=False)
    if box is None:
        return _compare(_END.sub("", response[-MAX_TAIL:]), labels, boxed=False, question=numbers(prompt))
    if len(box) > MAX_ANSWER or (leaves_work(box, labels) and repeats(box, numbers(prompt))):
        return MathGrade(0.0, boxed=True, timed_out=False)
    return _compare(box.strip(), labels, boxed=True)


def reward_func(
    queries: Sequence[str], prompts: Sequence[str | None], labels: Sequence[object], **kwargs: Any
) -> dict[str, Any]:
    """Grade B decoded samples against their labels, by OpenRLHF's contract (`SingleTurnAgentExecutor`).

    Args:
        queries: prompt and response, decoded together with their special tokens.
        prompts: the prompts after the chat template.
        labels: as `grade` takes them.
        kwargs: ignored; OpenRLHF passes none.

    Returns:
        `rewards` and `scores` (B,), 1 or 0, and `extra_logs` with `well_formed` (the answer is boxed) and `timed_out`
        (B,). All are float32 tensors.
    """
    turns = assistant_turns(queries, prompts, labels)
    # A model that the template made begin a thought may answer without an end of it.
    turns = [
        turn.removeprefix("<think>") if (prompt or "").rstrip().endswith("<think>") else turn
        for turn, prompt in zip(turns, prompts, strict=True)
    ]
    if len(turns) == 1:  # OpenRLHF sends one at a time, which needs no threads
        grades = [grade(turns[0], labels[0], prompts[0] or "")]
    else:
        with ThreadPoolExecutor(WORKERS) as threads:
            grades = list(threads.map(grade, turns, labels, [prompt or "" for prompt in prompts]))
    columns = torch.tensor(list(zip(*grades, strict=True)), dtype=torch.float32)  # each contiguous, or Ray fails
    scores, boxed, timed_out = columns.reshape(len(MathGrade._fields), -1)
    return {"rewards": scores, "scores": scores.clone(), "extra_logs": {"well_formed": boxed, "timed_out": timed_out}}


def _outside_thoughts(response: str) -> str:
    """Return what follows the last thought. One that was cut off has no answer."""
    return response.rpartition("</think>")[2].partition("<think>")[0]


def last_box(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{}` that is not inside another. An empty box is none.

    Without such a box, return "" if one never closes, and else None. Boxes that only a comma, a relation or a word
    such as "or" stands between are one list, with all their contents.
    """
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    # One entry per open brace: where its box and its content begin, or None for a brace that opens no box.
    opened: list[tuple[int, int] | None] = []
    boxes, end = 0, 0
    found: list[str] = []
    for token in _BRACES.finditer(text):
        if token[0] == "}":
            if opened and (start := opened.pop()):
                boxes -= 1
                content = text[start[1] : token.start()]
                if not boxes and not _EMPTY.fullmatch(content):
                    if found and (joint := _JOINT.fullmatch(text, end, start[0])):
                        found += [joint[1] or " ", content]
                    else:
                        found = [content]
                    end = token.end()
        elif token[0].endswith("{") and token[0] != "\\{":
            is_box = len(token[0]) > 1
            boxes += is_box
            opened.append((token.start(), token.end()) if is_box else None)
    if not found:
        return "" if boxes else None
    # The answer may stand in two boxes.
    return found[0] if len(set(map(str.strip, found[::2]))) == 1 else "".join(found)


def label_text(answer: object) -> str:
    """Return a label as one text, for data files. Alternatives become JSON. ValueError as in `grade`."""
    labels = _alternatives(answer)
    return labels[0] if len(labels) == 1 else json.dumps(list(labels), ensure_ascii=False)


def is_readable(answer: object) -> bool:
    """Return whether the grader would accept each alternative of a label as an answer to it, in time."""
    try:
        return all(worker_pool().call(label, [label], True) for label in _alternatives(answer))
    except (ValueError, TimedOut, Died, Raised):
        return False


def _alternatives(answer: object) -> tuple[str, ...]:
    if isinstance(answer, str) and answer.lstrip().startswith('["'):
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError):
            pass  # a label that merely begins so
    labels = answer if isinstance(answer, list | tuple) else [answer]
    if not labels:
        raise ValueError("a label is empty: a list without alternatives")
    return tuple(map(_label, labels))


def _label(value: object) -> str:
    if isinstance(value, Decimal) and value.is_finite():  # parquet's decimal128
        value = f"{value:f}"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(
            f"a label is a number, text or a list of these; got {str(value)[:200]!r} ({type(value).__name__})"
        )
    if isinstance(value, float) and not math.isfinite(value):  # pandas writes a missing label so
        raise ValueError(f"a label is no finite number: {value}")
    if isinstance(value, float) and abs(value) >= 2**53:
        raise ValueError(f"a label was rounded when the file was read: {value}; write it as text")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and re.match(r'\s*\{\s*"[^"]*"\s*:', value):
        raise ValueError(f"a label is a JSON object: {value[:80]!r}")
    text = _without_dollars(str(value))
    box = last_box(text) or None  # it may be a whole solution
    if box is None and (closing := _CLOSING.search(text)):
        box = closing[1]
    text = text if box is None else _without_dollars(box)
    if not text or _EMPTY_BOX.fullmatch(text):
        raise ValueError("a label is empty")
    if box is None and _ANNOUNCES.search(text) and (found := final_answer(text)):  # a whole solution
        return found
    return text


def _without_dollars(text: str) -> str:
    text = text.strip()
    inner = text.strip("$")
    return text if "$" in inner else inner.strip()


# --- the comparison, in worker processes (`math_compare`) ------------------------------------------------------------

_pool: WorkerPool | None = None
_pool_lock = threading.Lock()


def worker_pool(workers: int = WORKERS) -> WorkerPool:
    """Return the processes that compare answers. The first call decides how many there are."""
    global _pool
    with _pool_lock:
        if _pool is None or _pool.closed:  # a server in this process may have ended
            compare = "arlopti_openrlhf.grading.math_compare:compare"
            _pool = WorkerPool(compare, workers, TIMEOUT, memory_gib=1.0, patience=_PATIENCE)
        return _pool


def _compare(answer: str, labels: tuple[str, ...], boxed: bool, question: tuple[str, ...] = ()) -> MathGrade:
    try:
        return _finished(answer, labels, boxed, question)
    except (TimedOut, Died):
        return MathGrade(0.0, boxed, timed_out=True)


# The responses to one prompt are graded close together, and many agree. A comparison that was not finished raises and
# is not kept, for the machine may have been slow.
@functools.lru_cache(maxsize=2**14)
def _finished(answer: str, labels: tuple[str, ...], boxed: bool, question: tuple[str, ...]) -> MathGrade:
    if boxed and any(plain(answer) == plain(label) for label in labels):
        return MathGrade(1.0, boxed, timed_out=False)
    try:
        return MathGrade(float(worker_pool().call(answer, labels, boxed, question)), boxed, timed_out=False)
    except Raised as error:  # what math-verify lets through comes from the answer, such as deep recursion
        return MathGrade(0.0, boxed, timed_out="MemoryError" in str(error.__cause__))
