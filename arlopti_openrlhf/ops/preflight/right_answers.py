r"""Asks a source of rewards about a wrong answer and about right ones.

What is right is known to the source alone, so a right answer is a label in some frame: `\boxed{LABEL}`, say. A source
that gives none of the frames more than a wrong answer may never reward anything.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from arlopti_openrlhf.grading.reward_answers import normalise

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


class Row(NamedTuple):
    """A prompt as vLLM gets it, with its label as it is in the data."""

    prompt: str
    label: Any


# Returns what a source answers for a query, its prompt and its label. Refused where it has no answer.
Ask = Callable[[str, str, Any], Any]


def unrewarded(
    ask: Ask, rows: Sequence[tuple[str, Any]], tokenizer: "PreTrainedTokenizerBase | None" = None
) -> str | None:
    """Return in one line that a source rewards no right answer to some of the rows, or None.

    A row whose answers earn nothing is asked once more, with a thought before each answer. The line also reports that
    only such answers earn something, if nothing could tell the model to think. The answers to all rows are asked for
    at a time, as a run does.

    Args:
        ask: the source.
        rows: prompts as vLLM gets them, with their labels.
        tokenizer: the policy's, which makes the queries. None if it is not on this machine.

    Raises:
        Refused: an answer has no reward.
    """
    asked = [Row(*row) for row in rows]
    wrong = [earned for [earned] in _values(ask, asked, [[WRONG] for _ in asked], tokenizer)]
    seen = set(wrong)

    def unearned(numbers: Sequence[int], responses: Sequence[Sequence[str]]) -> list[int]:
        values = _values(ask, [asked[i] for i in numbers], responses, tokenizer)
        seen.update(*values)
        return [i for i, each in zip(numbers, values, strict=True) if max(each) <= wrong[i]]

    tried = [i for i, row in enumerate(asked) if _answer_text(row.label)]
    silent = unearned(tried, [_right(asked[i], _THOUGHT if _opens_thought(asked[i]) else "") for i in tried])
    again = [i for i in silent if not _opens_thought(asked[i])]
    thoughtless = unearned(again, [_right(asked[i], "<think>" + _THOUGHT) for i in again])
    if missed := [i for i in silent if i in thoughtless or i not in again]:
        problem = (
            f"no right answer to {len(missed)} of the first {len(tried)} rows scores above a wrong one, "
            f"first for the label {_short(asked[missed[0]].label)}; tried {FRAMES}, after a thought too"
        )
        return problem + (f". All of them earned {min(seen):g}, as did the wrong one" if len(seen) == 1 else "")
    texts = [str(tokenizer and tokenizer.chat_template), *(asked[i].prompt for i in again)]
    if again and tokenizer and not any("think>" in text for text in texts):
        return (
            f"right answers to {len(again)} of the first {len(tried)} rows score only after <think>...</think>, which "
            "neither their prompts nor the model's chat template mentions"
        )
    return None


def foreign_parameters(parameters: Sequence[str]) -> str | None:
    """Return what a function gets whose parameters have other frameworks' names, or None."""
    if not _FOREIGN.intersection(parameters):
        return None
    got = ", ".join(f"`{name}` gets {ours}" for name, ours in zip(parameters, _OURS, strict=False))
    return f"It is called as reward_func(queries, prompts, labels): {got}"


def _values(
    ask: Ask,
    rows: Sequence[Row],
    responses: Sequence[Sequence[str]],
    tokenizer: "PreTrainedTokenizerBase | None",
) -> list[list[float]]:
    """Return what each row's responses earn: their scores if the source gives them, else their rewards."""

    def value(row: Row, response: str, query: str) -> float:
        about = f"for the label {_short(row.label)}"
        about += f" and the answer {response[:60]!r}" if response != WRONG else ""
        try:
            answer = normalise(ask(query, row.prompt, row.label), 1)
        except ValueError as error:
            raise Refused(f"reward_func returned {error} {about}") from None
        except Refused as error:
            raise Refused(f"{error} {about}") from None
        [number] = answer["rewards"] if answer["scores"] is None else answer["scores"]
        return number

    with ThreadPoolExecutor(max(1, sum(map(len, responses)))) as threads:
        asked = [
            [threads.submit(value, row, response, _query(row.prompt, response, tokenizer)) for response in each]
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


def _opens_thought(row: Row) -> bool:
    return row.prompt.rstrip().endswith("<think>")


def _right(row: Row, thought: str) -> list[str]:
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
