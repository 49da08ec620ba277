"""Read published data sets as rows for OpenRLHF: verl-style parquet files, and Hugging Face data sets by name."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from arlopti_openrlhf.grading import kk_reward, math_reward
from arlopti_openrlhf.lab.data import knights_knaves

Row = dict[str, Any]

# The paper's prompt for base models is the problem followed by this, without a chat template.
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)\n?<\|im_end\|>\n?", re.DOTALL)
# Data sources of the published files whose names do not fit into the name of a metric.
_SOURCES = {
    "HuggingFaceH4/MATH-500": "math500",
    "aime_dsr": "aime",
    "amc_dsr": "amc",
    "minerva_dsr": "minerva",
    "olympiad_bench_dsr": "olympiad_bench",
}


class DataSet(NamedTuple):
    """Says where a data set lies on the Hugging Face hub, and how its columns are called."""

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
    """Holds one row as it was read, or the reason why there is none."""

    origin: str  # "file: row number"
    row: Row | None
    reason: str = ""


def read_file(path: str | Path, prompt_format: str) -> Iterator[Read]:
    """Yield the rows of a published verl-style parquet file, or of a file that `prepare_data` wrote.

    verl's files have the columns `prompt`, `reward_model` (whose `ground_truth` is read) and `data_source`; K&K's also
    have `names`.

    Args:
        path: a .parquet file, or JSON lines.
        prompt_format: with "text", a K&K prompt is the published ChatML text to the letter, up to the opening
            `<think>`. With "messages", it is split into its turns.

    Raises:
        ValueError: the file cannot be read, or lacks a column. The message names the file.
    """
    import pyarrow
    from pyarrow import parquet

    path = Path(path)
    try:
        if path.suffix == ".parquet":
            records = parquet.read_table(path).to_pylist()
        else:
            # Line by line: `splitlines` would also split at a line separator (U+2028) inside a prompt.
            with open(path, encoding="utf-8") as lines:
                records = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"{path}: not a readable parquet file or JSON lines ({' '.join(str(error).split())})"
        ) from None
    # A column `label` tells a file of ours from one of verl's.
    columns = dict.fromkeys(name for record in records if isinstance(record, dict) for name in record)
    prepared = "label" in columns
    missing = [name for name in ("prompt", "label" if prepared else "reward_model") if name not in columns]
    if missing and records:
        raise ValueError(f"{path}: no column {', '.join(missing)}; it has {', '.join(columns)}")
    for number, record in enumerate(records):
        yield _read(f"{path}: row {number}", _from_prepared if prepared else _from_verl, record, prompt_format)


def read_data_set(name: str, prompt_format: str, load: Callable | None = None) -> Iterator[Read]:
    """Yield the rows of one of `DATA_SETS`, downloaded or from Hugging Face's cache.

    Args:
        name: one of `DATA_SETS`.
        prompt_format: "messages" or "text".
        load: the function to load it with, `datasets.load_dataset` by default.

    Raises:
        ValueError: it cannot be loaded; the message has the cause.
    """
    if load is None:
        import datasets

        load = datasets.load_dataset
    source = DATA_SETS[name]
    try:
        records = load(source.path, source.config, data_files=source.files, split=source.split)
    except Exception as error:
        raise ValueError(f"{source.path}: {' '.join(str(error).split())[:500]}") from None
    datasource = re.sub(r"_(train|test)$", "", name)
    make = _kk_row if name.startswith("kk_") else _math_row
    for number, record in enumerate(records):
        yield _read(
            f"{source.path}: row {number}",
            lambda record, form: make(
                _column(record, source.question), _column(record, source.answer), datasource, form
            ),
            record,
            prompt_format,
        )


def _read(origin: str, convert, record: dict, prompt_format: str) -> Read:
    try:
        return Read(origin, convert(record, prompt_format))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"a field is missing or malformed: {error!r}"
        return Read(origin, None, reason)


def _column(record: dict, path: str) -> Any:
    for name in path.split("."):
        record = record[name]
    return record


def _from_prepared(record: dict, prompt_format: str) -> Row:
    prompt = record["prompt"]
    prompt = prompt if isinstance(prompt, str) else [_message(message) for message in prompt]
    datasource, label = str(record.get("datasource") or "default"), record.get("label")
    label = _kk_label(label) if datasource.startswith("kk_") else math_reward.label_text(label)
    return {"prompt": prompt, "label": label, "datasource": datasource}


def _message(message: dict) -> dict[str, str]:
    if not all(isinstance(message[name], str) for name in ("role", "content")):
        raise ValueError("a message's role or content is not text")
    return dict(message)


def _from_verl(record: dict, prompt_format: str) -> Row:
    truth, text = record["reward_model"]["ground_truth"], record["prompt"][0]["content"]
    if isinstance(truth, dict):
        prompt = text if prompt_format == "text" else _turns(text)
        return {
            "prompt": prompt,
            "label": _kk_label(truth["solution_text_format"]),
            "datasource": knights_knaves.datasource(len(record["names"])),
        }
    source = str(record.get("data_source") or "math")
    return {
        "prompt": _text(text) if prompt_format == "text" else [{"role": "user", "content": _text(text)}],
        "label": math_reward.label_text(truth),
        "datasource": _SOURCES.get(source, re.sub(r"[^\w.-]+", "_", source)),
    }


def _kk_row(quiz: str, solution: str, datasource: str, prompt_format: str) -> Row:
    make = knights_knaves.chatml if prompt_format == "text" else knights_knaves.messages
    return {"prompt": make(_text(quiz)), "label": _kk_label(solution), "datasource": datasource}


def _math_row(question: str, answer: Any, datasource: str, prompt_format: str) -> Row:
    prompt = f"{_text(question).strip()} {MATH_INSTRUCTION}"
    return {
        "prompt": prompt if prompt_format == "text" else [{"role": "user", "content": prompt}],
        "label": math_reward.label_text(answer),
        "datasource": datasource,
    }


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("the prompt is empty")
    return value


def _kk_label(solution: Any) -> str:
    kk_reward.grade("", solution)  # raises on what the reward could not read, before a training run does
    return solution


def _turns(text: str) -> list[dict[str, str]]:
    turns = [{"role": role, "content": content} for role, content in _TURN.findall(_text(text))]
    if not turns:
        raise ValueError(f"the prompt is not ChatML text: {text[:80]!r}")
    return turns


def prompt_key(prompt: str | list[dict[str, str]]) -> str:
    """Return a prompt's text without white space, template and roles: prompts with one key ask the same."""
    text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
    parts = _TURN.findall(text)
    if parts:
        text = "".join(content for _, content in parts)
    return "".join(text.split())
