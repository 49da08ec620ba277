r"""Asks a source of rewards about a wrong answer and about right ones.

What is right is known to the source alone, so a right answer is a label in some frame: `\boxed{LABEL}`, say. A source
that gives none of the frames more than a wrong answer may never reward anything.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from arlopti_openrlhf.grading.reward_answers import Grade, grades

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WRONG = "I do not know."
FRAMES = r'`\boxed{LABEL}`, `<answer>LABEL</answer>`, `#### LABEL`, "The answer is LABEL." and the label itself'
_THOUGHT = "\nLet me think.\n</think>\n\n"  # without the tag that opens it
# What functions of TRL and verl call their arguments. OpenRLHF passes its own three, by place.
_FOREIGN = {"completion", "completions", "solution_str", "ground_truth"}
_ANSWER_KEYS = ("ground_truth", "answer", "solution", "target", "label")
_OURS = ("the queries (prompts with their answers)", "the prompts", "the labels")


class Refused(Exception):
    """The source has no reward for an answer. The message says why, in one line."""


class LabelledRow(NamedTuple):
    """A prompt as vLLM gets it, with its label as it is in the data."""

    prompt: str
    label: Any


class Trial(NamedTuple):
    """What a source gave for the answers to some rows."""

    problem: str | None  # in one line: it rewards no right answer, or none that is like those that a model gives
    grades: list[Grade]


# Returns what a source answers for a query, its prompt and its label. Refused where it has no answer.
Ask = Callable[[str, str, Any], Any]


def try_out(ask: Ask, rows: Sequence[tuple[str, Any]], tokenizer: "PreTrainedTokenizerBase | None" = None) -> Trial:
    """Ask a source about answers to some rows, wrong ones and right ones, all at a time as a run does.

    A row whose right answers earn nothing is asked once more, with a thought before each answer. It is a problem that
    only such answers earn something, if nothing could tell the model to think.

    Args:
        ask: the source.
        rows: prompts as vLLM gets them, with their labels.
        tokenizer: the policy's, which makes the queries. None if it is not on this machine.

    Raises:
        Refused: an answer has no reward.
    """
    asked = [LabelledRow(*row) for row in rows]
    seen: list[Grade] = []

    def values(numbers: Sequence[int], responses: Sequence[Sequence[str]]) -> list[list[float]]:
        of_rows = _grades(ask, [asked[i] for i in numbers], responses, tokenizer)
        seen.extend(grade for each in of_rows for grade in each)
        return [[value(grade) for grade in each] for each in of_rows]

    wrong = [earned for [earned] in values(range(len(asked)), [[WRONG] for _ in asked])]

    def unearned(numbers: Sequence[int], responses: Sequence[Sequence[str]]) -> list[int]:
        of_rows = zip(numbers, values(numbers, responses), strict=True)
        return [i for i, each in of_rows if max(each) <= wrong[i]]

    tried = [i for i, row in enumerate(asked) if _answer_text(row.label)]
    silent = unearned(tried, [_right(asked[i], _THOUGHT if _opens_thought(asked[i]) else "") for i in tried])
    again = [i for i in silent if not _opens_thought(asked[i])]
    thoughtless = unearned(again, [_right(asked[i], "<think>" + _THOUGHT) for i in again])
    if missed := [i for i in silent if i in thoughtless or i not in again]:
        problem = (
            f"no right answer to {len(missed)} of the first {len(tried)} rows scores above a wrong one, "
            f"first for the label {_short(asked[missed[0]].label)}; tried {FRAMES}, after a thought too"
        )
        earned = set(map(value, seen))
        same = f". All of them earned {min(earned):g}, as did the wrong one" if len(earned) == 1 else ""
        return Trial(problem + same, seen)
    texts = [str(tokenizer and tokenizer.chat_template), *(asked[i].prompt for i in again)]
    if again and tokenizer and not any("think>" in text for text in texts):
        problem = (
            f"right answers to {len(again)} of the first {len(tried)} rows score only after <think>...</think>, which "
            "neither their prompts nor the model's chat template mentions"
        )
        return Trial(problem, seen)
    return Trial(None, seen)


def value(grade: Grade) -> float:
    """Return the score of an answer, or its reward if the source gives no scores. Dynamic filtering reads it, too."""
    return grade.reward if grade.score is None else grade.score


def foreign_parameters(parameters: Sequence[str]) -> str | None:
    """Return what a function gets whose parameters have other frameworks' names, or None."""
    if not _FOREIGN.intersection(parameters):
        return None
    got = ", ".join(f"`{name}` gets {ours}" for name, ours in zip(parameters, _OURS, strict=False))
    return f"It is called as reward_func(queries, prompts, labels): {got}"


def _grades(
    ask: Ask,
    rows: Sequence[LabelledRow],
    responses: Sequence[Sequence[str]],
    tokenizer: "PreTrainedTokenizerBase | None",
) -> list[list[Grade]]:
    """Return what each row's responses earn."""

    def grade(row: LabelledRow, response: str, query: str) -> Grade:
        about = f"for the label {_short(row.label)}"
        about += f" and the answer {response[:60]!r}" if response != WRONG else ""
        try:
            return grades(ask(query, row.prompt, row.label), 1)[0]
        except ValueError as error:
            raise Refused(f"reward_func returned {error} {about}") from None
        except Refused as error:
            raise Refused(f"{error} {about}") from None

    with ThreadPoolExecutor(max(1, sum(map(len, responses)))) as threads:
        asked = [
            [threads.submit(grade, row, response, _query(row.prompt, response, tokenizer)) for response in each]
            for row, each in zip(rows, responses, strict=True)
        ]
        return [[future.result() for future in each] for each in asked]


def _query(prompt: str, response: str, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Return what the run decodes: the tokens of the prompt, of the response, and the one that ends it."""
    if tokenizer is None:
        return prompt + response
    tokens = [token for text in (prompt, response) for token in _tokens(text, tokenizer)]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tokenizer.decode(tokens + end, skip_special_tokens=False)


def _tokens(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _opens_thought(row: LabelledRow) -> bool:
    return row.prompt.rstrip().endswith("<think>")


def _right(row: LabelledRow, thought: str) -> list[str]:
    """Return right answers to a row with a label, each after a thought."""
    text = _answer_text(row.label)
    answers = [f"\\boxed{{{text}}}", f"<answer>{text}</answer>", f"#### {text}", f"The answer is {text}.", text]
    return [thought + answer for answer in answers]


def _answer_text(label: Any) -> str:
    """Return the answer in a label: the first of alternatives, a usual key's, or the end of GSM8K's; else nothing."""
    if isinstance(label, str) and label.lstrip().startswith(('["', "{")):
        try:
            label = json.loads(label)
        except ValueError:
            pass  # a label that merely begins so
    if isinstance(label, dict):
        label = next((label[key] for key in _ANSWER_KEYS if key in label), None)
    if isinstance(label, list | tuple):
        label = label[0] if label else None
    if isinstance(label, bytes):
        label = label.decode(errors="replace")
    return "" if label is None else str(label).rpartition("####")[2].strip()


def _short(label: Any) -> str:
    return repr(str(label)[:60])
