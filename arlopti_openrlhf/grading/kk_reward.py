"""Rewards knights-and-knaves by the rule of Logic-RL (arXiv 2502.14768), in `grade` and in OpenRLHF's `reward_func`.

    reward = format + answer            format    +1    <think> </think> <answer> </answer> once each, in that order
                                                  -1    anything else
                                        answer    +2    every role right
                                                  -1.5  readable, but some role wrong
                                                  -2    unreadable, or the format is broken

so the only rewards are 3, -0.5, -1 and -3. OpenRLHF loads the file by path (`--reward.remote_url`).
"""

# OpenRLHF executes this file without an entry in sys.modules. So nothing here may look its own module up there, as
# @dataclass does under postponed annotations. The file imports nothing of this project.

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch

WELL_FORMED, MALFORMED = 1.0, -1.0
RIGHT, WRONG, UNREADABLE = 2.0, -1.5, -2.0

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_SOLUTION_LINE = re.compile(r"\((\d+)\) (\S|\S.*\S) is a (knight|knave)")

# Characters. A shorter end of a prompt could occur elsewhere by chance, where a round trip changed that end itself.
_MIN_ANCHOR = 8
_TURNS = (
    "<|im_start|>assistant",  # ChatML, Qwen
    "<|start_header_id|>assistant<|end_header_id|>",  # Llama 3
    "<|header_start|>assistant<|header_end|>",  # Llama 4
    "<start_of_turn>model",  # Gemma
    "[/INST]",  # Mistral, Llama 2
    "<｜Assistant｜>",  # DeepSeek
    "<|assistant|>",  # Phi, GLM, Zephyr
    "Assistant:",  # Logic-RL's base prompt
    "ASSISTANT:",  # Vicuna
)
_HEADERS = re.compile("|".join(map(re.escape, _TURNS)))


class KkGrade(NamedTuple):
    """What one response earned.

    reward: 3, -0.5, -1 or -3.
    score: 1.0 where every role is right, else 0.0. Accuracy is the mean of it.
    well_formed: each of the four tags occurs once, in order.
    answered: the answer is readable, because it names as many roles as there are people, and one for each person.
    """

    reward: float
    score: float
    well_formed: bool
    answered: bool


def grade(response: str, solution: str) -> KkGrade:
    r"""Grade one whole assistant turn, a prefilled `<think>` included, by Logic-RL's rule.

    The answer is the text between `<answer>` and `</answer>`. It is readable where the substrings "knight" and "knave"
    occur together as often as there are people, and "NAME is a knight" or "NAME is a knave" occurs for each of them.
    A name's first such sentence counts. Letter case is ignored and any white space separates words. For names of
    ASCII letters, as in all published puzzles, the pattern is Logic-RL's own:
    `\bNAME\b\s+is\s+a\s+\b(knight|knave)\b`. A name that itself holds "knight" or "knave" spoils the count, there
    and here, so such a puzzle has no right answer.

    Args:
        response: any text. None raises, and the time is linear in its length.
        solution: the published `solution_text_format`, such as "(1) Zoey is a knight\n(2) Oliver is a knave".

    Raises:
        ValueError: `solution` is not of that form.
    """
    if not isinstance(solution, str):
        raise _not_a_solution(solution)
    people = _people(solution)
    answer = _answer(response)
    if answer is None:
        return KkGrade(MALFORMED + UNREADABLE, 0.0, well_formed=False, answered=False)
    roles = _roles(answer, [sentence for sentence, _ in people])
    if roles is None:
        return KkGrade(WELL_FORMED + UNREADABLE, 0.0, well_formed=True, answered=False)
    right = roles == [role for _, role in people]
    return KkGrade(WELL_FORMED + (RIGHT if right else WRONG), float(right), well_formed=True, answered=True)


def assistant_turn(query: str, prompt: str | None) -> str:
    """Cut the assistant's turn out of `query`, which is a prompt and a response decoded together.

    The turn follows the prompt, and begins with a `<think>` if the prompt's end prefilled one. A template that
    switches thinking off prefills an empty thought or only `</think>`; then the turn begins with
    `<think></think>`. Where `query` does not start with `prompt` (cut on the left to fit, or changed by a round
    trip through the tokenizer), the prompt ends where its own end first occurs, white space apart. Without a
    prompt the turn follows the first header of a known chat template. With no header either, `query` is the turn.
    The first place always counts, because a response may quote its prompt or write headers of its own, but only
    further on.
    """
    prompt = prompt or ""
    body = prompt.rstrip()
    prefill = "<think></think>" if body.endswith("</think>") else ""
    if body.endswith("<think>"):
        prefill = prompt[len(body) - len("<think>") :]
    if prompt and query.startswith(prompt):
        return prefill + query[len(prompt) :]
    end = _prompt_end(query, prompt)
    if end is not None:
        return prefill + query[end:]
    header = _HEADERS.search(query)
    # A header that the prompt lacks was written by the model.
    if header and (not body or header[0] in prompt):
        return query[header.end() :]
    return query


def assistant_turns(queries: Sequence[str], prompts: Sequence[str | None], labels: Sequence[object]) -> list[str]:
    """Cut the turn out of each sample that a `reward_func` gets. ValueError where the three differ in length."""
    if not len(queries) == len(prompts) == len(labels):
        raise ValueError(
            "queries, prompts and labels must be equally long, "
            f"but they have {len(queries)}, {len(prompts)} and {len(labels)} items"
        )
    return list(map(assistant_turn, queries, prompts))


def reward_func(
    queries: Sequence[str], prompts: Sequence[str | None], labels: Sequence[str], **kwargs: Any
) -> dict[str, Any]:
    """Grade B decoded samples against their solutions, by OpenRLHF's contract (`SingleTurnAgentExecutor`).

    Args:
        queries: prompt and response, decoded together with their special tokens.
        prompts: the prompts after the chat template.
        labels: the solutions, in the form that `grade` takes.
        kwargs: ignored; OpenRLHF passes none.

    Returns:
        `rewards` (B,), which the advantages come from, `scores` (B,), which dynamic filtering reads, and `extra_logs`
        with `well_formed` (B,) and `answered` (B,). All are float32 tensors, because OpenRLHF reads one element of
        each per sample and would nest a list.
    """
    grades = list(map(grade, assistant_turns(queries, prompts, labels), labels))
    columns = torch.tensor(list(zip(*grades, strict=True)), dtype=torch.float32)  # each contiguous, or Ray fails
    rewards, scores, well_formed, answered = columns.reshape(len(KkGrade._fields), -1)
    return {"rewards": rewards, "scores": scores, "extra_logs": {"well_formed": well_formed, "answered": answered}}


@lru_cache(maxsize=1024)  # the responses to one puzzle are graded close together
def _people(solution: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return each person's true role, after the pattern of the sentence that states a role."""
    lines = [line.strip() for line in solution.split("\n") if line.strip()]
    matches = [match for line in lines if (match := _SOLUTION_LINE.fullmatch(line))]
    if not lines or len(matches) < len(lines):
        raise _not_a_solution(solution)
    numbers, names, roles = zip(*(match.groups() for match in matches), strict=True)
    if list(numbers) != [str(number) for number in range(1, len(lines) + 1)]:
        raise _not_a_solution(solution)
    # The patterns ignore case, so two names must differ in more. A name with " is a " in it is two people on one line.
    if len({name.lower() for name in names}) < len(names) or any(" is a " in name for name in names):
        raise _not_a_solution(solution)
    return tuple((_sentence(name, names), role) for name, role in zip(names, roles, strict=True))


def _sentence(name: str, names: Sequence[str]) -> re.Pattern[str]:
    # `\b` would fail at an edge such as the "." of ".net" or the "+" of "A.B+". On the right, the white space that
    # must follow is boundary enough.
    start = r"\b" if re.match(r"\w", name) else r"(?<!\w)"
    # "Mary Ann is a knave" says nothing of Ann where the puzzle has both.
    for other in names:
        longer = re.fullmatch(f"(.+){re.escape(name)}", other, re.IGNORECASE)
        if longer:
            start += f"(?<!{re.escape(longer[1])})"
    return re.compile(rf"{start}{re.escape(name)}\s+is\s+a\s+(knight|knave)\b", re.IGNORECASE)


def _not_a_solution(solution: object) -> ValueError:
    shown = repr(solution)
    if len(shown) > 200:
        shown = f"{shown[:200]}... ({len(shown)} characters)"
    return ValueError(
        'a solution is numbered lines "(1) NAME is a knight" or "(1) NAME is a knave", '
        f"counting from 1, with distinct names; got {shown}"
    )


def _answer(response: str) -> str | None:
    """Return the text between the answer tags, or None where the response is malformed."""
    if any(response.count(tag) != 1 for tag in _TAGS):
        return None
    places = [response.index(tag) for tag in _TAGS]
    if places != sorted(places):
        return None
    return response[places[2] + len("<answer>") : places[3]]


def _roles(answer: str, sentences: Sequence[re.Pattern[str]]) -> list[str] | None:
    """Return the role that the answer states for each person, or None where it is unreadable."""
    # The count catches whatever hedges ("Zoey is a knight or a knave") or lists both outcomes.
    text = answer.lower()
    if text.count("knight") + text.count("knave") != len(sentences):
        return None
    stated = [match for sentence in sentences if (match := sentence.search(answer))]
    # A pattern that ignores case also takes a dotless i, and the role is never right with it.
    return [match[1].lower() for match in stated] if len(stated) == len(sentences) else None


def _prompt_end(query: str, prompt: str) -> int | None:
    """Return where in `query` the prompt's own end first occurs, white space apart, or None where it does not."""
    tail = "".join(prompt.split())
    if not tail:
        return None
    # An end that occurs once in the prompt is not found too early, in an earlier turn of the prompt. It is not found
    # too late either, because a quotation comes after what it quotes. The shorter the end, the less of the prompt has
    # to have survived.
    size = _MIN_ANCHOR
    while tail.index(tail[-size:]) + size < len(tail):
        size *= 2
    anchor = tail[-size:]
    start = "".join(query.split()).find(anchor)
    if start < 0:
        return None
    places = (place for place, char in enumerate(query) if not char.isspace())
    return next(islice(places, start + len(anchor) - 1, None)) + 1
