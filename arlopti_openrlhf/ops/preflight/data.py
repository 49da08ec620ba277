"""Checks the data sets: that they can be read, have the keys, fit into the context, and are graded."""

import fnmatch
import random
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.ops.preflight import images, probe, prompt, repeats
from arlopti_openrlhf.ops.preflight.finding import Finding, first_of
from arlopti_openrlhf.ops.preflight.model import is_offline, load_tokenizer, local_folder
from arlopti_openrlhf.ops.preflight.rows import FirstRows, NotChecked, Row, Unreadable, as_objects
from arlopti_openrlhf.ops.rollouts import prompt_text

if TYPE_CHECKING:
    from datasets import Features
    from transformers import PreTrainedTokenizerBase

_TRAINING, _EVALUATION = "--data.prompt_dataset", "--eval.dataset"
_ALL = 10**8  # rows that upstream takes of each data set to evaluate on
# Rows whose prompts are rendered and counted, drawn by a seed. They take about a second.
_COUNTED = 2000
_LABELS_SECONDS = 60.0  # a bound, not a budget: most of it is the import of PyTorch

_Item = TypeVar("_Item")


class _Data(NamedTuple):
    """What was read of one data set."""

    flag: str  # where it was named
    name: str
    rows: list[Row]  # the first is row 1
    types: "Features"  # of the columns
    is_whole: bool  # these are all rows that the run takes, and not the beginning of a large set


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the data sets of training and evaluation."""
    if not args.data.prompt_dataset:
        yield Finding(_TRAINING, None, "there is no data", "name a file with prompts")
        return
    most = args.data.max_samples if args.data.max_samples > 0 else _ALL  # `values` refuses the others
    training, prompts = yield from _blend(_TRAINING, args.data.prompt_dataset, args.data.prompt_split, most, args)
    evaluation: list[_Data] = []
    if args.eval.dataset:
        evaluation, _ = yield from _blend(_EVALUATION, args.eval.dataset, args.eval.split, _ALL, args)
    read = training + evaluation
    yield from _check_labels(read, args)
    yield from _check_all_prompts(read, args)
    if prompts is not None and args.data.max_samples > 0:
        yield from _check_count(min(prompts, most), args)
    yield from _check_sampling(read, args)
    if not args.data.max_images_per_prompt:  # otherwise one question may be asked of many images
        of_each = (_prompts(read, flag, args.data.input_key) for flag in (_TRAINING, _EVALUATION))
        yield from repeats.check(args, *of_each)


def _prompts(sets: Sequence[_Data], flag: str, key: str) -> list[Any]:
    rows = (row for data in sets if data.flag == flag for row in data.rows)
    return [row[key] for row in rows if not _is_empty(row.get(key))]


def first_prompts(args: SimpleNamespace, n: int) -> "tuple[list[tuple[str, Any]], PreTrainedTokenizerBase | None]":
    """Return the first `n` prompts, as they are sent to vLLM, with their labels, and the policy's tokenizer.

    The list is empty if they cannot be had, and the tokenizer None.
    """
    tokenizer = _load_tokenizer(args)
    try:
        name, key, label_key = args.data.prompt_dataset.split(",")[0], args.data.input_key, args.data.label_key
        rows = FirstRows(args.data.prompt_split, most_bytes=0).blend(name.strip(), n)[0]
        as_text = prompt.renderer(args, _template(args, tokenizer))
        if args.data.apply_chat_template and not tokenizer:  # the run downloads it
            as_text = itemgetter(key)
        prompts = [(as_text(row), row[label_key] if label_key else "") for row in rows]
        return [(text, label) for text, label in prompts if isinstance(text, str)], tokenizer
    except Exception:  # whatever it is, `check` has said it
        return [], tokenizer


def describe(args: SimpleNamespace) -> str | None:
    """Return the first prompt as the model gets it, or None where it cannot be had."""
    rows, tokenizer = first_prompts(args, 1)
    if not rows or not tokenizer:
        return None
    but = ", without its images" if args.data.max_images_per_prompt else ""
    but += ", unless the agent changes it" if args.train.agent_func_path else ""
    return f"the first prompt as the model gets it{but}: {prompt_text.shown(rows[0][0], tokenizer)}"


def _blend(
    flag: str, names: str, split: str, most: int, args: SimpleNamespace
) -> Generator[Finding, None, tuple[list[_Data], int | None]]:
    """Read data sets one by one, and as the run joins them.

    Return them, and how many rows they make, or None if that is not known.
    """
    first_rows = FirstRows(split)
    sets = []
    for name in names.split(","):
        sets.append((yield from _read(first_rows, flag, name.strip(), most)))
    read = [data for data in sets if data]
    if len(read) < len(sets):
        return read, None
    is_training = flag == _TRAINING
    try:
        probabilities = args.data.prompt_probs if is_training else None
        joined, _ = first_rows.blend(names, most, probabilities, args.train.seed)
        return read, len(joined) if all(data.is_whole for data in read) else None
    except Unreadable as error:
        remedy = "give each column one type in all of them: it helps to write them in one format, .jsonl or .parquet"
        yield Finding(flag, names, f"the data sets cannot be joined: {_misfit(read) or error}", remedy)
        return read, None


def _misfit(sets: Sequence[_Data]) -> str | None:
    """Return the first column that has different types in two data sets."""
    seen: dict[str, tuple[str, str]] = {}
    for data in sets:
        for column, feature in data.types.items():
            kind = f"{str(feature)[:120]}"
            if kind == "Value('null')":
                continue
            other, name = seen.setdefault(column, (kind, data.name))
            if kind != other:
                return f"the column {column} is {other} in {name} and {kind} in {data.name}"
    return None


def _read(first_rows: FirstRows, flag: str, name: str, most: int) -> Generator[Finding, None, _Data | None]:
    """Return the data set, or None after a finding that says why not."""
    try:
        blended, is_whole = first_rows.blend(name, most)
        if rows := as_objects(blended, name):
            return _Data(flag, name, rows, blended.features, is_whole)
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
    is_read = grader in REWARDS
    if key is None:
        if is_read and sets:
            problem = f"--reward.remote_url {grader} compares each answer with a label"
            yield Finding.of(args, flag, problem, f"give one of the data's keys: {', '.join(sorted(sets[0].rows[0]))}")
        return
    labels: list[tuple[str, Any]] = []
    for data in sets:
        yield from _check_key(data, args, flag, is_fatal=is_read)
        rows = [(f"{data.name}, row {number}", row.get(key)) for number, row in enumerate(data.rows, start=1)]
        # JSON has no dates, so there the reader has guessed. The type in another file is what its author gave.
        others = [where for where, label in rows if not isinstance(label, str | float | int | list | dict | None)]
        kind = str(data.types.get(key))
        if (others or kind.startswith("Json")) and data.name.endswith((".json", ".jsonl")):
            problem = 'the labels have several types, so text such as "[1,2]" is read as a list, and "7" as a number'
            if others:
                problem = f"{first_of(others, 'more rows')}: the label is read as {kind}, not as text or a number"
            yield Finding.of(args, flag, problem, "write the data set as .parquet, with text in this column", is_read)
            continue
        if is_read:
            given = [(where, label) for where, label in rows if not _is_empty(label)]
            labels += _draw(given, REWARDS[grader].labels_per_second)
    if not labels:
        return
    try:
        bad = probe.ask_about_labels(grader, labels, _LABELS_SECONDS)
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


def _template(args: SimpleNamespace, tokenizer: "PreTrainedTokenizerBase | None") -> Callable[..., str] | None:
    return tokenizer.apply_chat_template if tokenizer and args.data.apply_chat_template else None


def _check_all_prompts(sets: Sequence[_Data], args: SimpleNamespace) -> Iterator[Finding]:
    """Report prompts that are missing, cannot be rendered, are too long, or not what the model was made for."""
    tokenizer, as_chat = _load_tokenizer(args), args.data.apply_chat_template
    problem = None
    if as_chat and tokenizer and tokenizer.chat_template:
        problem = prompt.template_problem(tokenizer)
    if problem:
        remedy = "mend chat_template in its tokenizer_config.json, or chat_template.jinja"
        yield Finding.of(args, "actor.model_name_or_path", f"its chat template fails: {problem}", remedy)
    where: list[tuple[str, Row]] = []
    texts: list[str] = []
    for data in sets:
        rendered = yield from _check_prompts(data, args, tokenizer, can_render=not problem)
        where += [(f"{data.name}, {at}", row) for at, row, _ in rendered]
        texts += [text for _, _, text in rendered]
    if tokenizer and texts:
        yield from prompt.check(where, texts, args, tokenizer)


def _check_prompts(
    data: _Data, args: SimpleNamespace, tokenizer: "PreTrainedTokenizerBase | None", can_render: bool
) -> Generator[Finding, None, list[tuple[str, Row, str]]]:
    """Report prompts of one data set, and return some as they are rendered: place, row, text."""
    key, as_chat = args.data.input_key, args.data.apply_chat_template
    yield from _check_key(data, args, "data.input_key")
    rows = [(f"row {number}, {key}", row) for number, row in enumerate(data.rows, start=1)]
    bad = [f"{where}: {problem}" for where, row in rows if (problem := _malformed(row.get(key), as_chat))]
    can_render = can_render and not (as_chat and not (tokenizer and tokenizer.chat_template))
    rendered: list[tuple[str, Row, str]] = []
    if not bad and can_render:
        as_text = prompt.renderer(args, _template(args, tokenizer))
        for where, row in _draw([(where, row) for where, row in rows if not _is_empty(row.get(key))], _COUNTED):
            try:
                rendered.append((where, row, as_text(row)))
            except Exception as error:  # a template raises what it likes
                if not as_chat:  # --data.input_template, which has its own finding
                    return []
                bad.append(f"{where}: the chat template refuses it: {error}")
    if bad:
        remedy = "give text, or messages with role and content" if as_chat else "give text"
        if "chat messages" in bad[0]:
            remedy = "add --data.apply_chat_template"
        elif "refuses it" in bad[0]:
            remedy = "give messages that it takes, such as the system text in the user's turn"
        yield Finding(data.flag, data.name, first_of(bad, "more rows"), remedy)
        return []
    if rendered:
        yield from images.check_rows(data.flag, data.name, data.rows, args)
        if tokenizer and not args.data.max_images_per_prompt:
            texts = [text for _, _, text in rendered]
            ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            yield from _check_lengths(data, [len(each) for each in ids], args)
    return rendered


def _malformed(value: Any, as_chat: bool) -> str | None:
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list):
        return f"a prompt is text{' or a list of messages' if as_chat else ''}, not {type(value).__name__}"
    if not as_chat:
        return "chat messages, which only a chat template turns into text"
    for message in value:
        if not isinstance(message, dict):
            return f"a message is an object with role and content, not {str(message)[:60]}"
        for name, kinds in (("role", str), ("content", str | list)):
            if not isinstance(message.get(name), kinds) and not (name == "content" and message.get("tool_calls")):
                return f"a message without {name}: {str(message)[:60]}"
    return None


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
    if number < 1:  # which `values` refuses
        return
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
