"""Read published data sets as rows for OpenRLHF: verl-style parquet files, and Hugging Face data sets by name."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from arlopti_openrlhf.grading.sources import reward_of
from arlopti_openrlhf.lab.data import knights_knaves
from arlopti_openrlhf.lab.scoring.inputs import Row, read_records

# The paper's prompt for base models is the problem followed by this, without a chat template.
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)\n?<\|im_end\|>\n?", re.DOTALL)
_ANSWER_BEGINS = re.compile(r"\s*(<\|im_start\|>assistant\s*(<think>\s*)?)?")
# Data sources of the published files whose names do not fit into the name of a metric.
_SOURCES = {
    "HuggingFaceH4/MATH-500": "math500",
    "aime_dsr": "aime",
    "amc_dsr": "amc",
    "minerva_dsr": "minerva",
    "olympiad_bench_dsr": "olympiad_bench",
}


class DataSet(NamedTuple):
    """Where a data set lies on the Hugging Face hub, and how its columns are called."""

    path: str
    split: str
    question: str
    answer: str
    config: str | None = None
    files: str | None = None


DATA_SETS = {
    "deepscaler": DataSet("agentica-org/DeepScaleR-Preview-Dataset", "train", "problem", "answer"),
    "orz": DataSet("Open-Reasoner-Zero/orz_math_57k_collection", "train", "0.value", "1.ground_truth.value"),
    "math500": DataSet("HuggingFaceH4/MATH-500", "test", "problem", "answer"),
    "amc": DataSet("AI-MO/aimo-validation-amc", "train", "problem", "answer"),
    "aime": DataSet("HuggingFaceH4/aime_2024", "train", "problem", "answer"),
    "minerva": DataSet("math-ai/minervamath", "test", "question", "answer"),
    "olympiad_bench": DataSet(
        "Hothan/OlympiadBench", "train", "question", "final_answer", config="OE_TO_maths_en_COMP"
    ),
} | {
    f"kk_{n}ppl_{split}": DataSet(
        "K-and-K/knights-and-knaves",
        "train",
        "quiz",
        "solution_text_format",
        files=f"{split}/people{n}_num{100 if split == 'test' else 200 if n == 2 else 1000}.jsonl",
    )
    for split in ("train", "test")
    for n in range(2, 9)
}


class Read(NamedTuple):
    """A row as it was read, or why training cannot use it."""

    origin: str  # "FILE, row 3"
    row: Row | None
    reason: str = ""
    detail: str = ""
    prompt: str | list[dict[str, str]] | None = None  # of a row whose label alone cannot be read

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}: {self.detail}"


class _BadLabel(ValueError):
    """A row has a prompt, and a label that its grader cannot read."""

    def __init__(self, problem: str, prompt: str | list[dict[str, str]]) -> None:
        super().__init__(problem)
        self.prompt = prompt


def read_file(path: str | Path, prompt_format: str) -> Iterator[Read]:
    """Yield the rows of a published verl-style parquet file, or of a file that `arlopti data` wrote.

    verl's files have the columns `prompt`, `reward_model` (whose `ground_truth` is read) and `data_source`; K&K's also
    have `names`. All turns of a prompt are kept. With the format "text", a single turn is its text to the letter. In
    K&K's files that is ChatML, up to the opening `<think>`. Several turns are rendered as ChatML. With "messages",
    ChatML in a single turn is split into its turns.

    Raises:
        OSError, ValueError: the file cannot be read, or lacks a column. The message names the file.
    """
    records = list(read_records(str(path)))
    # A column `label` tells a file of ours from one of verl's.
    columns = dict.fromkeys(name for _, record in records if isinstance(record, dict) for name in record)
    convert, wanted = (_from_prepared, "label") if "label" in columns else (_from_verl, "reward_model")
    if (missing := [name for name in ("prompt", wanted) if name not in columns]) and records:
        has = ", ".join(columns) or "no JSON objects, one a line"
        raise ValueError(f"{path}: no column {', '.join(missing)}; it has {has}")
    for origin, record in records:
        yield _read(origin, convert, record, prompt_format)


def read_data_set(name: str, prompt_format: str) -> Iterator[Read]:
    """Yield the rows of one of `DATA_SETS`, downloaded or from Hugging Face's cache.

    Raises:
        ValueError: it cannot be loaded; the message has the cause.
    """
    import datasets

    source = DATA_SETS[name]
    try:
        records = datasets.load_dataset(source.path, source.config, data_files=source.files, split=source.split)
    except Exception as error:
        raise ValueError(f"{source.path}: {' '.join(str(error).split())[:500]}") from None

    def convert(record: dict, prompt_format: str) -> Row:
        question, answer = (_column(record, column) for column in (source.question, source.answer))
        if name.startswith("kk_"):
            make = knights_knaves.chatml if prompt_format == "text" else knights_knaves.messages
            return _row(make(_text(question)), answer, re.sub(r"_(train|test)$", "", name))
        prompt = f"{_text(question).strip()} {MATH_INSTRUCTION}"
        return _row(prompt if prompt_format == "text" else [{"role": "user", "content": prompt}], answer, name)

    for number, record in enumerate(records, start=1):
        yield _read(f"{source.path}, row {number}", convert, record, prompt_format)


def _read(origin: str, convert: Callable[[dict, str], Row], record: dict, prompt_format: str) -> Read:
    try:
        if record.get("images"):
            raise ValueError("its images would be lost: give the file itself to --data.prompt_dataset")
        return Read(origin, convert(record, prompt_format))
    except _BadLabel as error:
        return Read(origin, None, "unreadable", str(error), error.prompt)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        detail = str(error) if isinstance(error, ValueError) else f"a field is missing or malformed: {error!r}"
        return Read(origin, None, "unreadable", detail)


def _column(record: dict, path: str) -> Any:
    for name in path.split("."):
        record = record[name]
    return record


def _from_prepared(record: dict, prompt_format: str) -> Row:
    prompt = record["prompt"]
    prompt = prompt if isinstance(prompt, str) else [_message(message) for message in prompt]
    return _row(prompt, record.get("label"), str(record.get("datasource") or "default"))


def _message(message: dict) -> dict[str, str]:
    if not all(isinstance(message[name], str) for name in ("role", "content")):
        raise ValueError("a message's role or content is not text")
    given = {name: value for name, value in message.items() if value is not None}  # parquet fills up with None
    return {"role": message["role"], "content": message["content"]} | given


def _from_verl(record: dict, prompt_format: str) -> Row:
    truth, prompt = _parsed(record["reward_model"])["ground_truth"], _parsed(record["prompt"])
    prompt = [_message(message) for message in prompt]
    text = prompt[0]["content"]
    # K&K's are ChatML, but for base models. Theirs are no messages.
    is_rendered = text.startswith("<|im_start|>") or (isinstance(truth, dict) and prompt_format == "messages")
    is_rendered = is_rendered and len(prompt) == 1
    source = str(record.get("data_source") or "math")
    source = _SOURCES.get(source, re.sub(r"[^\w.-]+", "_", source))
    if isinstance(truth, dict):
        if "solution_text_format" not in truth:
            raise ValueError(f"its ground_truth is no solution of Knights and Knaves: it has {', '.join(truth)}")
        truth, source = truth["solution_text_format"], knights_knaves.datasource(len(record["names"]))
    turns = _turns(text) if is_rendered else prompt
    if turns[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's, so nothing is left to answer")
    if prompt_format == "messages":
        return _row(turns, truth, source)
    return _row(_text(text) if len(prompt) == 1 else _chatml(prompt), truth, source)


def _parsed(column: Any) -> Any:
    """Return a column of verl's. Some converters write it as JSON, or a prompt as plain text."""
    if not isinstance(column, str):
        return column
    return json.loads(column) if column.lstrip()[:1] in ("[", "{") else [{"role": "user", "content": column}]


def _chatml(turns: list[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in turns) + "<|im_start|>assistant\n"


def _row(prompt: str | list[dict[str, str]], label: Any, datasource: str) -> Row:
    # Labels are read by their graders now, and not first by a training run.
    try:
        return {"prompt": prompt, "label": reward_of(datasource).label_text(label), "datasource": datasource}
    except ValueError as error:
        raise _BadLabel(str(error), prompt) from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("the prompt is empty")
    return value


def _turns(text: str) -> list[dict[str, str]]:
    turns = [{"role": role, "content": content} for role, content in _TURN.findall(text)]
    if not turns:
        raise ValueError(f"the prompt is not ChatML text: {text[:80]!r}")
    if not _ANSWER_BEGINS.fullmatch(rest := _TURN.sub("", text)):
        raise ValueError(f"the prompt has text outside its ChatML turns: {rest[:80]!r}")
    return turns


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    """Return a prompt's text, without roles where it is chat messages."""
    return prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)


def prompt_key(prompt: str | list[dict[str, str]]) -> str:
    """Return a prompt's text without white space, template, roles and system text.

    Prompts with one key ask the same.
    """
    if isinstance(prompt, str):
        turns = _TURN.findall(prompt) or [("user", prompt)]
    else:
        turns = [(message["role"], message["content"]) for message in prompt]
    asked = [content for role, content in turns if role != "system"] or [content for _, content in turns]
    return "".join("".join(asked).split()).removesuffix("".join(MATH_INSTRUCTION.split()))
