"""Checks the data sets: that they can be read, have the keys, fit into the context, and are graded."""

import fnmatch
import random
import statistics
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from arlopti_openrlhf.ops.preflight import images, probe, repeats
from arlopti_openrlhf.ops.preflight.finding import Finding, first_of
from arlopti_openrlhf.ops.preflight.model import is_offline, load_tokenizer, local_folder
from arlopti_openrlhf.ops.preflight.rows import NotChecked, Row, Unreadable, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TRAINING, _EVALUATION = "--data.prompt_dataset", "--eval.dataset"
# Characters of a data set that are read. `datasets` reads 62 MiB of short rows in 1.5 s.
READ_CHARACTERS = 64 * 2**20
# Rows whose prompts are rendered and counted, drawn by a seed. They take about a second.
_COUNTED = 2000
_LABELS = {"kk": 20_000, "math": 100}  # how many labels each grader reads in about a second
_LABELS_SECONDS = 60.0  # a bound, not a budget: most of it is the import of PyTorch

_Item = TypeVar("_Item")


class _Data(NamedTuple):
    """What was read of one data set."""

    flag: str  # where it was named
    name: str
    rows: list[Row]  # the first is row 1
    is_whole: bool  # these are all rows, and not the beginning of a large set


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the data sets of training and evaluation."""
    if not args.data.prompt_dataset:
        yield Finding(_TRAINING, None, "there is no data", "name a file with prompts")
        return
    training, evaluation = args.data.prompt_dataset.split(","), (args.eval.dataset or "").split(",")
    sets = []
    for name in training:
        sets.append((yield from _read(_TRAINING, name.strip(), args.data.prompt_split)))
    are_whole = all(data and data.is_whole for data in sets)
    prompts = sum(min(len(data.rows), args.data.max_samples) for data in sets if data)
    for name in evaluation if args.eval.dataset else ():
        sets.append((yield from _read(_EVALUATION, name.strip(), args.eval.split)))
    read = [data for data in sets if data]

    yield from _check_labels(read, args)
    tokenizer = _load_tokenizer(args)
    for data in read:
        yield from _check_prompts(data, args, tokenizer)
    if are_whole:
        yield from _check_count(min(prompts, args.data.max_samples), args)
    yield from _check_sampling(read, args)
    yield from repeats.check(args, *(_prompts(read, flag, args.data.input_key) for flag in (_TRAINING, _EVALUATION)))


def _prompts(sets: Sequence[_Data], flag: str, key: str) -> list[Any]:
    return [row.get(key) for data in sets if data.flag == flag for row in data.rows]


def first_prompts(args: SimpleNamespace, n: int) -> list[tuple[str, Any]]:
    """Return the first `n` prompts, as they are sent to vLLM, with their labels. None where they cannot be had."""
    try:
        rows = list(islice(read_rows(args.data.prompt_dataset.split(",")[0], args.data.prompt_split), n))
        tokenizer, label_key = _load_tokenizer(args), args.data.label_key
        prompts = [(_render(row, args, tokenizer), row[label_key] if label_key else "") for row in rows]
        return [(prompt, label) for prompt, label in prompts if isinstance(prompt, str)]
    except Exception:  # whatever it is, `check` has said it
        return []


def _read(flag: str, name: str, split: str) -> Generator[Finding, None, _Data | None]:
    """Return the data set, or None after a finding that says why not."""
    rows: list[Row] = []
    characters = 0
    try:
        for row in read_rows(name, split):
            if characters > READ_CHARACTERS:
                return _Data(flag, name, rows, is_whole=False)
            rows.append(row)
            characters += len(str(row))
        if rows:
            return _Data(flag, name, rows, is_whole=True)
        yield Finding(flag, name, "it has no rows", "give a data set with prompts")
    except Unreadable as error:
        yield Finding(flag, name, str(error), "correct the path or the data")
    except NotChecked as error:
        offline = " HF_HUB_OFFLINE is set, so only the hub's cache can have it." if is_offline() else ""
        remedy = f"look at its first rows yourself.{offline}"
        yield Finding(flag, name, f"not checked: {error}", remedy, is_fatal=False)
    return None


def _check_key(data: _Data, args: SimpleNamespace, flag: str, is_fatal: bool = True) -> Iterator[Finding]:
    """Report a key under which no row has a value (always fatal), or some have none."""
    key = vars(args.data)[flag.removeprefix("data.")]
    bad = [number for number, row in enumerate(data.rows, start=1) if _is_empty(row.get(key))]
    if len(bad) == len(data.rows):
        keys = sorted({name for row in data.rows[:1000] for name in row})
        yield Finding.of(args, flag, f"no row of {data.name} has a value there", f"the keys are {', '.join(keys)}")
    elif bad:
        problem = f"{len(bad)} of {len(data.rows)} rows have no value there, first {data.name}, row {bad[0]}"
        yield Finding.of(args, flag, problem, "leave these rows out, or complete them", is_fatal)


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or value == []


def _draw(items: Sequence[_Item], n: int) -> Sequence[_Item]:
    """Return `n` of the items, the same each time, in their order."""
    if len(items) <= n:
        return items
    return [items[i] for i in sorted(random.Random(0).sample(range(len(items)), n))]


# --- labels ----------------------------------------------------------------------------------------------------------


def _check_labels(sets: Sequence[_Data], args: SimpleNamespace) -> Iterator[Finding]:
    """Report labels that are missing, or that the package's grader of the run cannot read."""
    flag, key = "data.label_key", args.data.label_key
    grader = (args.reward.remote_url or [""])[0]
    is_read = grader in _LABELS
    if key is None:
        if is_read and sets:
            problem = f"--reward.remote_url {grader} compares each answer with a label"
            yield Finding.of(args, flag, problem, f"give one of the data's keys: {', '.join(sorted(sets[0].rows[0]))}")
        return
    labels: list[tuple[str, Any]] = []
    for data in sets:
        yield from _check_key(data, args, flag, is_fatal=is_read)
        rows = [(f"{data.name}, row {number}", row.get(key)) for number, row in enumerate(data.rows, start=1)]
        labels += _draw([(where, label) for where, label in rows if not _is_empty(label)], _LABELS.get(grader, 0))
    if not labels:
        return
    try:
        if grader == "kk":
            bad = probe.unreadable_labels(grader, labels)
        else:  # it starts processes, which end with that of the call
            function = f"{probe.__name__}:unreadable_labels"
            bad = probe.ask(function, grader, labels, seconds=_LABELS_SECONDS).result()
    except probe.NO_ANSWER as error:
        problem = f"{grader} has not read the labels: {probe.reason(error)}"
        yield Finding.of(args, flag, problem, "look at them yourself", is_fatal=False)
        return
    if bad:
        bad.sort(key=lambda label: not label[2])  # first those at which the grader raises, which ends the run
        where, (_, problem, is_fatal) = first_of([each[0] for each in bad]), bad[0]
        problem = f"{where}: {grader} cannot read the label: {problem}"
        yield Finding.of(args, flag, problem, "give the key of the solutions, or mend these rows", is_fatal)


# --- prompts ---------------------------------------------------------------------------------------------------------


def _load_tokenizer(args: SimpleNamespace) -> "PreTrainedTokenizerBase | None":
    """Return the actor's tokenizer, or None where there is none. The check of the model says so."""
    folder = local_folder(args.actor.model_name_or_path)
    try:
        return load_tokenizer(folder) if folder else None
    except (OSError, ValueError):
        return None


def _check_prompts(
    data: _Data, args: SimpleNamespace, tokenizer: "PreTrainedTokenizerBase | None"
) -> Iterator[Finding]:
    """Report prompts that are missing, cannot be rendered, or are too long."""
    key, as_chat = args.data.input_key, args.data.apply_chat_template
    yield from _check_key(data, args, "data.input_key")
    rows = [(f"row {number}, {key}", row) for number, row in enumerate(data.rows, start=1)]
    texts: list[str] = []
    bad = [f"{where}: {problem}" for where, row in rows if (problem := _malformed(row.get(key), as_chat))]
    if not bad:
        for where, row in _draw(rows, _COUNTED):
            try:
                texts += [] if _is_empty(row.get(key)) else [_render(row, args, tokenizer)]
            except Exception as error:  # a template raises what it likes
                if not as_chat:  # --data.input_template, which has its own finding
                    return
                bad.append(f"{where}: the chat template refuses it: {error}")
    if bad:
        remedy = "give text, or messages with role and content" if as_chat else "give text"
        if "chat messages" in bad[0]:
            remedy = "add --data.apply_chat_template"
        yield Finding(data.flag, data.name, first_of(bad, "more rows"), remedy)
    elif texts and not (as_chat and not (tokenizer and tokenizer.chat_template)):
        yield from images.check_rows(data.flag, data.name, data.rows, args)
        if tokenizer and not args.data.max_images_per_prompt:
            ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            yield from _check_lengths(data, [len(each) for each in ids], args)


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
        if tokenizer and tokenizer.chat_template:
            messages = images.as_messages(prompt)
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return prompt if isinstance(prompt, str) else ""
    template = args.data.input_template
    return template.format(prompt) if template else prompt


def _check_lengths(data: _Data, lengths: Sequence[int], args: SimpleNamespace) -> Iterator[Finding]:
    """Compare the prompts' lengths in tokens with what upstream's `SingleTurnAgentExecutor` keeps of them."""
    reserved = args.rollout.max_new_tokens
    limit = args.data.max_len - (1 if reserved is None else reserved)
    longest, too_long = max(lengths), sum(length > limit for length in lengths)
    if too_long:
        of_responses = f" beside --rollout.max_new_tokens {reserved}" if reserved else ""
        problem = (
            f"it leaves {max(limit, 0)} tokens{of_responses}, and {too_long} of {len(lengths)} prompts of {data.name} "
            f"are longer (median {statistics.median_low(lengths)}, longest {longest}): they lose their beginning"
        )
        remedy = f"give at least {longest + (reserved or 1)}" + ("" if reserved else ", and more for the responses")
        yield Finding.of(args, "data.max_len", problem, remedy, is_fatal=2 * too_long > len(lengths))


# --- the whole -------------------------------------------------------------------------------------------------------


def _check_count(prompts: int, args: SimpleNamespace) -> Iterator[Finding]:
    number = args.rollout.n_samples_per_prompt
    # The flags that this follows from are named, so where one of their values is refused, only that is shown.
    of_flag = "--data.max_samples " if prompts == args.data.max_samples else ""
    if prompts * number < args.train.batch_size:
        problem = f"{of_flag}{prompts} prompts x --rollout.n_samples_per_prompt {number} are no whole batch"
        yield Finding.of(args, "train.batch_size", problem, f"give {prompts * number} at most, or more data")
    elif prompts < args.rollout.batch_size:
        problem = f"there are {of_flag}{prompts} prompts, so each rollout has that many"
        remedy = f"give {prompts} at most, or more data"
        yield Finding.of(args, "rollout.batch_size", problem, remedy, is_fatal=False)


def _check_sampling(sets: Sequence[_Data], args: SimpleNamespace) -> Iterator[Finding]:
    """Report patterns of --eval.sampling that match no source of the evaluation's rows."""
    rows = [row for data in sets if data.flag == _EVALUATION for row in data.rows]
    sources = sorted({str(row.get("datasource", "default")) for row in rows})
    for spec in args.eval.sampling if sources else ():
        if not fnmatch.filter(sources, spec.pattern):
            problem, remedy = "it matches no source of the evaluation", f"the sources are {', '.join(sources)}"
            yield Finding("--eval.sampling", spec.pattern, problem, remedy, is_fatal=False)
