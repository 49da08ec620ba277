"""Checks the data sets: that they can be read, have the keys, fit into the context, and are graded."""

import fnmatch
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from arlopti_openrlhf.grading.worker_pool import Died, Raised, TimedOut, WorkerPool
from arlopti_openrlhf.ops.preflight import images, probe
from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.local_model import is_offline, load_tokenizer, local_folder
from arlopti_openrlhf.ops.preflight.rows import NotChecked, Row, Unreadable, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Characters of a data set that are read. `datasets` reads 62 MiB of short rows in 1.5 s.
READ_CHARACTERS = 64 * 2**20
# Rows whose prompts are rendered and counted, drawn by a seed. They take about a second.
_COUNTED = 2000
_LABELS = {"kk": 20_000, "math": 100}  # how many labels each grader reads in about a second
_LABELS_SECONDS = 60.0  # a bound, not a budget: most of it is the import of PyTorch

_Item = TypeVar("_Item")


class _Data(NamedTuple):
    """What was read of one data set.

    flag, value: where it was named.
    rows: where each row stands, and the row.
    is_whole: these are all rows, and not the beginning of a large set.
    """

    flag: str
    value: str
    rows: list[tuple[str, Row]]
    is_whole: bool


def check(args: SimpleNamespace) -> list[Finding]:
    """Return what is wrong with the data sets of training and evaluation.

    Args:
        args: upstream's nested arguments, as its `train` gets them.
    """
    if not args.data.prompt_dataset:
        return [Finding("--data.prompt_dataset", None, "there is no data", "name a file with prompts")]
    findings = _check_template(args)
    sets, training = [], 0
    for name in args.data.prompt_dataset.split(","):
        sets += (read := _read(name, "--data.prompt_dataset", args.data.prompt_split, findings))
        training += sum(min(len(data.rows), args.data.max_samples) for data in read)
    are_whole = len(sets) == len(args.data.prompt_dataset.split(",")) and all(data.is_whole for data in sets)
    for name in args.eval.dataset.split(",") if args.eval.dataset else ():
        sets += _read(name, "--eval.dataset", args.eval.split, findings)

    # The labels are read beside the prompts, in a process of its own, which imports PyTorch for the graders.
    labels = [label for data in sets for label in _labels(data, args, findings)]
    with closing(WorkerPool(f"{probe.__name__}:unreadable_labels", 1, _LABELS_SECONDS)) as pool:
        unreadable = pool.submit(_grader(args), labels) if labels else None
        tokenizer = _load_tokenizer(args)
        for data in sets:
            prompts = _prompts(data, args, tokenizer, findings)
            findings += images.check_rows(data.flag, data.value, data.rows, args) if prompts else []
            if tokenizer and prompts and not args.data.max_images_per_prompt:
                ids = tokenizer(prompts, add_special_tokens=False, verbose=False)["input_ids"]
                findings += _check_lengths(data, [len(each) for each in ids], args)
        if unreadable:
            findings += _check_labels(unreadable, args)
    findings += _check_probabilities(args)
    if are_whole:
        findings += _check_count(min(training, args.data.max_samples), args)
    return findings + _check_sampling(sets, args)


def first_prompts(args: SimpleNamespace, n: int) -> list[tuple[str, Any]]:
    """Return the first `n` prompts, as they are sent to vLLM, with their labels. None where they cannot be had."""
    try:
        name = args.data.prompt_dataset.split(",")[0]
        rows = list(islice(read_rows(name, args.data.prompt_split), n))
        tokenizer = _load_tokenizer(args)
        label_key = args.data.label_key
        prompts = [(_render(row, args, tokenizer), row[label_key] if label_key else "") for row in rows]
        return [(prompt, label) for prompt, label in prompts if isinstance(prompt, str)]
    except Exception:  # whatever it is, `check` has said it
        return []


def _read(name: str, flag: str, split: str, findings: list[Finding]) -> list[_Data]:
    """Return the data set in a list, or an empty list after a finding that says why not."""
    name = name.strip()
    rows: list[tuple[str, Row]] = []
    characters = 0
    try:
        for row in read_rows(name, split):
            if characters > READ_CHARACTERS:
                return [_Data(flag, name, rows, is_whole=False)]
            rows.append((f"row {len(rows) + 1}", row))
            characters += len(str(row))
    except Unreadable as error:
        findings.append(Finding(flag, name, str(error), "correct the path or the data"))
        return []
    except NotChecked as error:
        offline = " HF_HUB_OFFLINE is set, so only the hub's cache can have it." if is_offline() else ""
        findings.append(
            Finding(flag, name, f"not checked: {error}", f"look at its first rows yourself.{offline}", is_fatal=False)
        )
        return []
    if not rows:
        findings.append(Finding(flag, name, "it has no rows", "give a data set with prompts"))
        return []
    return [_Data(flag, name, rows, is_whole=True)]


def _check_template(args: SimpleNamespace) -> list[Finding]:
    template = args.data.input_template
    if not template:
        return []
    flag = "--data.input_template"
    if args.data.apply_chat_template:
        remedy = "leave one of the two flags out"
        return [Finding(flag, repr(template), "unused beside --data.apply_chat_template", remedy, is_fatal=False)]
    try:
        template.format("")
    except (IndexError, KeyError, ValueError) as error:
        problem = f"Python's format cannot fill it ({type(error).__name__}: {error})"
        return [Finding(flag, repr(template), problem, "write {{ and }} for braces of its own, and {} once")]
    if "\\n" in template:
        remedy = "write $'...\\n...' in Bash for line breaks"
        return [Finding(flag, repr(template), "it holds a backslash and an n, no line break", remedy, is_fatal=False)]
    return []


# --- keys ------------------------------------------------------------------------------------------------------------


def _check_key(data: _Data, key: str, flag: str, is_fatal: bool) -> list[Finding]:
    """Report a key under which no row has a value (always fatal), or some have none."""
    bad = [where for where, row in data.rows if _is_empty(row.get(key))]
    if len(bad) == len(data.rows):
        keys = sorted({name for _, row in data.rows[:1000] for name in row})
        return [Finding(flag, key, f"no row of {data.value} has a value there", f"the keys are {', '.join(keys)}")]
    if bad:
        problem = f"{len(bad)} of {len(data.rows)} rows have no value there, first {data.value}, {bad[0]}"
        return [Finding(flag, key, problem, "leave these rows out, or complete them", is_fatal)]
    return []


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or value == []


def _grader(args: SimpleNamespace) -> str | None:
    """Return which of the package's graders the run asks in process."""
    sources = args.reward.remote_url or [""]
    return sources[0] if sources[0] in _LABELS else None


def _labels(data: _Data, args: SimpleNamespace, findings: list[Finding]) -> list[tuple[str, Any]]:
    """Return labels of a data set for the run's grader, with where each stands. Report those that are missing."""
    key, grader = args.data.label_key, _grader(args)
    if key is None:
        if grader and not any(finding.flag == "--data.label_key" for finding in findings):
            problem = f"--reward.remote_url {grader} compares each answer with a label"
            remedy = f"give one of the data's keys: {', '.join(sorted(data.rows[0][1]))}"
            findings.append(Finding("--data.label_key", None, problem, remedy))
        return []
    findings += _check_key(data, key, "--data.label_key", is_fatal=grader is not None)
    rows = [(f"{data.value}, {where}", row[key]) for where, row in data.rows if not _is_empty(row.get(key))]
    return list(_draw(rows, _LABELS[grader])) if grader else []


# --- prompts ---------------------------------------------------------------------------------------------------------


def _load_tokenizer(args: SimpleNamespace) -> "PreTrainedTokenizerBase | None":
    """Return the actor's tokenizer, or None where there is none. The check of the model says so."""
    folder = local_folder(args.actor.model_name_or_path) if args.actor.model_name_or_path else None
    try:
        return load_tokenizer(folder) if folder else None
    except (OSError, ValueError):
        return None


def _prompts(
    data: _Data, args: SimpleNamespace, tokenizer: "PreTrainedTokenizerBase | None", findings: list[Finding]
) -> list[str]:
    """Return prompts of a data set as vLLM gets them. None after a finding, or where they cannot be rendered here."""
    key = args.data.input_key
    findings += _check_key(data, key, "--data.input_key", is_fatal=True)
    texts: list[str] = []
    bad: list[tuple[str, str]] = []
    for where, row in data.rows:
        if problem := _malformed(row.get(key), args.data.apply_chat_template):
            bad.append((where, problem))
    if not bad:
        for where, row in _draw(data.rows, _COUNTED):
            try:
                texts += [] if _is_empty(row.get(key)) else [_render(row, args, tokenizer)]
            except Exception as error:  # a template raises what it likes
                if not args.data.apply_chat_template:  # --data.input_template, which has its own finding
                    return []
                bad.append((where, f"the chat template refuses it: {error}"))
    if bad:
        where, problem = bad[0]
        others = f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else ""
        remedy = "give text, or messages with role and content" if args.data.apply_chat_template else "give text"
        if "chat messages" in problem:
            remedy = "add --data.apply_chat_template"
        findings.append(Finding(data.flag, data.value, f"{where}, {key}: {problem}{others}", remedy))
        return []
    return [] if args.data.apply_chat_template and not (tokenizer and tokenizer.chat_template) else texts


def _malformed(prompt: Any, as_chat: bool) -> str | None:
    if prompt is None or isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return f"a prompt is text{' or a list of messages' if as_chat else ''}, not {type(prompt).__name__}"
    if not as_chat:
        return "chat messages, which only a chat template turns into text"
    for message in prompt:
        if not isinstance(message, dict):
            return f"a message is an object with role and content, not {str(message)[:60]}"
        for name, kinds in (("role", str), ("content", str | list)):
            if not isinstance(message.get(name), kinds):
                return f"a message without {name}: {str(message)[:60]}"
    return None


def _render(row: Row, args: SimpleNamespace, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Return the prompt as upstream's `preprocess_data` makes it. Without a chat template, "" for messages."""
    prompt = row[args.data.input_key]
    if args.data.apply_chat_template:
        if not (tokenizer and tokenizer.chat_template):
            return prompt if isinstance(prompt, str) else ""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return tokenizer.apply_chat_template(images.as_parts(messages), tokenize=False, add_generation_prompt=True)
    template = args.data.input_template
    return template.format(prompt) if template else prompt


def _draw(rows: Sequence[_Item], n: int) -> Sequence[_Item]:
    """Return `n` of the rows, the same at each look, in their order."""
    return rows if len(rows) <= n else [rows[i] for i in sorted(random.Random(0).sample(range(len(rows)), n))]


def _check_lengths(data: _Data, lengths: Sequence[int], args: SimpleNamespace) -> list[Finding]:
    """Compare the prompts' lengths in tokens with what upstream's `SingleTurnAgentExecutor` keeps of them."""
    reserved = args.rollout.max_new_tokens
    limit = args.data.max_len - (1 if reserved is None else reserved)
    longest = max(lengths)
    too_long = sum(length > limit for length in lengths)
    if not too_long:
        return []
    beside = f"leaves {max(limit, 0)} tokens" + (f" beside --rollout.max_new_tokens {reserved}" if reserved else "")
    problem = (
        f"it {beside}, and {too_long} of {len(lengths)} prompts of {data.value} are longer (median "
        f"{statistics.median_low(lengths)}, longest {longest}): they lose their beginning"
    )
    remedy = f"give at least {longest + (reserved or 1)}" + ("" if reserved else ", and more for the responses")
    return [Finding("--data.max_len", args.data.max_len, problem, remedy, is_fatal=2 * too_long > len(lengths))]


# --- labels ----------------------------------------------------------------------------------------------------------


def _check_labels(unreadable: Future, args: SimpleNamespace) -> list[Finding]:
    """Report the labels that the grader cannot read."""
    grader, key = _grader(args), args.data.label_key
    try:
        bad = unreadable.result()
    except (TimedOut, Died, Raised, RuntimeError) as error:
        problem = f"{grader} could not be asked to read the labels: {str(error).strip()[-200:]}"
        return [Finding("--data.label_key", key, problem, "look at them yourself", is_fatal=False)]
    if not bad:
        return []
    where, problem, is_fatal = bad[0]
    others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    problem = f"{where}{others}: {grader} cannot read the label: {problem}"
    return [Finding("--data.label_key", key, problem, "give the key of the solutions, or mend these rows", is_fatal)]


# --- the whole ---------------------------------------------------------------------------------------------------


def _check_probabilities(args: SimpleNamespace) -> list[Finding]:
    text = args.data.prompt_probs
    if text is None:
        return []
    sets = len(args.data.prompt_dataset.split(","))
    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        values = []
    if len(values) == sets and all(value >= 0 for value in values) and abs(sum(values) - 1) < 1e-6:
        return []
    remedy = f"give {sets} numbers, with commas between them, that add up to 1"
    return [Finding("--data.prompt_probs", text, f"no probabilities for {sets} data sets", remedy)]


def _check_count(prompts: int, args: SimpleNamespace) -> list[Finding]:
    samples = prompts * args.rollout.n_samples_per_prompt
    if samples < args.train.batch_size:
        problem = f"{prompts} prompts with {args.rollout.n_samples_per_prompt} samples each are no whole batch"
        return [Finding("--train.batch_size", args.train.batch_size, problem, f"give {samples} at most, or more data")]
    if prompts < args.rollout.batch_size:
        problem = f"there are {prompts} prompts, so each rollout has that many"
        remedy = f"give {prompts} at most, or more data"
        return [Finding("--rollout.batch_size", args.rollout.batch_size, problem, remedy, is_fatal=False)]
    return []


def _check_sampling(sets: Sequence[_Data], args: SimpleNamespace) -> list[Finding]:
    """Report patterns of --eval.sampling that match no source of the evaluation's rows."""
    rows = [row for data in sets if data.flag == "--eval.dataset" for _, row in data.rows]
    sources = sorted({str(row.get("datasource", "default")) for row in rows})
    return [
        Finding(
            "--eval.sampling",
            spec.pattern,
            "it matches no source of the evaluation",
            f"the sources are {', '.join(sources)}",
            is_fatal=False,
        )
        for spec in args.eval.sampling
        if sources and not fnmatch.filter(sources, spec.pattern)
    ]
