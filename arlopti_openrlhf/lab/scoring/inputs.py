"""Read what is evaluated: models by name or folder, and the problems that `arlopti data` wrote."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arlopti_openrlhf import terminal
from arlopti_openrlhf.grading.sources import reward_of
from arlopti_openrlhf.ops.preflight.model import local_folder

Row = dict[str, Any]  # prompt, label, datasource
ADAPTER = "adapter_config.json"  # in the folder of a LoRA adapter
_PATIENCE = 10.0  # seconds for an answer of the hub


def natural_key(name: str) -> list[int | str]:
    """Return a sort key that compares numbers by value: "step9" comes before "step10"."""
    # Split at its numbers, a name is text, number, text, ..., text. So only like is compared with like.
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def expand_models(values: Sequence[str], last: int | None = None) -> dict[str, str]:
    """Return {short name: model}. A directory without a model of its own stands for its last checkpoints, or all.

    The name is the directory's, or what follows the organisation on the Hugging Face hub. Names are those of folders
    and of rows in tables, so no two may be alike.

    Raises:
        ValueError: a directory holds no model, two models have one name, or a model is neither here nor on the hub.
    """
    found: list[tuple[str, str]] = []
    for value in values:
        path = Path(value)
        inside = sorted((folder.parent for folder in path.glob("*/config.json")), key=lambda f: natural_key(f.name))
        if not path.is_dir():
            found.append((value.rsplit("/", 1)[-1], value))
        elif (path / "config.json").exists() or (path / ADAPTER).exists():
            found.append((path.absolute().name, value))
        elif inside:
            found += [(folder.name, str(folder)) for folder in inside[-(last or 0) :]]
        else:
            raise ValueError(f"argument --model {value}: no config.json in the directory, nor in one below it")
    names = [name for name, _ in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"argument --model: two models have one name: {', '.join(twice)}")
    for _, model in found:
        _ask_hub(model)
    return dict(found)


def _ask_hub(model: str) -> None:
    """Raise ValueError if a model is neither a folder nor in the hub's cache, and the hub does not show it."""
    if local_folder(model):
        return
    import huggingface_hub

    try:
        huggingface_hub.model_info(model, timeout=_PATIENCE)
    except Exception as error:  # the hub's own errors, and those of the connection
        why = terminal.one_line((str(error).splitlines() or [""])[0])
        problem = "it is neither a folder nor in the hub's cache, and the hub cannot be asked for it"
        raise ValueError(f"argument --model {model}: {problem}: {type(error).__name__}: {why}") from None


def encode(
    tokenizer, prompts: Sequence[str | list[dict]], template: Mapping[str, Any] | None = None
) -> tuple[list[str], list[list[int]]]:
    """Return prompts as final texts and as token ids, as OpenRLHF gives them to vLLM.

    Texts are taken as they are, and chat messages get the tokenizer's chat template with the arguments in `template`.
    The text then already holds every special token.

    Raises:
        ValueError: the model has no chat template, or it does not take the messages, such as a system text.
    """
    try:
        texts = [
            prompt
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **(template or {}))
            for prompt in prompts
        ]
    except Exception as error:  # a template raises what it likes
        name = tokenizer.name_or_path
        raise ValueError(f"argument --model: {name}: its chat template does not render the prompts: {error}") from None
    return texts, tokenizer(texts, add_special_tokens=False)["input_ids"]


def read_records(file: str) -> Iterator[tuple[str, Any]]:
    """Yield where each record of a file stands, such as "FILE, line 3", and the record: JSON lines or parquet.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    if file.endswith(".parquet"):
        import pyarrow
        from pyarrow import parquet

        try:
            table = parquet.read_table(file).to_pylist()
        except pyarrow.ArrowException as error:
            raise ValueError(f"{file}: not a readable parquet file ({' '.join(str(error).split())})") from None
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(table, start=1))
        return
    # Line by line: `splitlines` would also split at a line separator (U+2028) inside a prompt.
    with open(file, encoding="utf-8-sig") as lines:
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file}, line {number}", json.loads(line)
        except UnicodeDecodeError as error:  # it is read in blocks
            raise ValueError(f"{file}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number}: {error}") from None


def read_rows(
    files: Sequence[str], by_source: bool = True, input_key: str = "prompt", label_key: str = "label"
) -> list[Row]:
    """Return the rows of JSON lines or parquet, in the order of the files.

    Args:
        files: their paths.
        by_source: the rule of each row's source grades, and its grader reads every label here.
        input_key, label_key: where rows have the prompt and the label. They get these as `prompt` and `label`, and
            OpenRLHF's datasource "default" if they have none.

    Raises:
        OSError, ValueError: a file cannot be read, there is no row, or one lacks prompt or label, or has a label that
            its grader cannot read.
    """
    rows = []
    for where, row in (record for file in files for record in read_records(file)):
        missing = [n for n in (input_key, label_key) if not isinstance(row, dict) or row.get(n) in (None, "", [])]
        if missing:
            raise ValueError(f"{where}: a row has no {', '.join(missing)}: {json.dumps(row, default=str)[:100]}")
        own = {"prompt": row[input_key], "label": row[label_key], "datasource": row.get("datasource") or "default"}
        row = row | own
        if not isinstance(row["datasource"], str):
            raise ValueError(f"{where}: its datasource is not text: {row['datasource']!r}")
        try:
            if by_source:
                reward_of(row["datasource"]).label_text(row["label"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        rows.append(row)
    if not rows:
        raise ValueError(f"{', '.join(files)}: no rows")
    return rows


def rows_of(args: argparse.Namespace) -> list[Row]:
    """Return the rows of `--data`, with their prompts as `cli.arguments.add_data_flags` has them.

    Raises:
        OSError, ValueError: as `read_rows`.
    """
    rows = read_rows(args.data, args.reward is None, args.input_key, args.label_key)
    for row in rows:
        if isinstance(prompt := row["prompt"], str) and args.is_message:
            row["prompt"] = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, str) and args.input_template:
            row["prompt"] = args.input_template.format(prompt)
    return rows
