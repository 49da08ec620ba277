"""Checks the data sets: that they can be read, have the keys, fit into the context, and are graded."""

import fnmatch
import random
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.ops.preflight import prompt, repeats
from arlopti_openrlhf.ops.preflight.finding import Finding, first_of
from arlopti_openrlhf.ops.preflight.model import load_tokenizer, local_folder
from arlopti_openrlhf.ops.preflight.placement import least_shared
from arlopti_openrlhf.ops.preflight.rows import EVALUATION, TRAINING, DataSet, Row, read
from arlopti_openrlhf.ops.rollouts import prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RENDERED = 10_000  # rows of a data set whose prompts are rendered and counted, drawn by a seed. They take seconds
_Item = TypeVar("_Item")


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the data sets of training and evaluation."""
    training, total, found = read(TRAINING, args)
    evaluation, evaluated, of_evaluation = read(EVALUATION, args)
    yield from found + of_evaluation
    yield from _check_labels(training + evaluation, args)
    yield from _check_all_prompts(training + evaluation, args)
    if total is not None:
        yield from _check_count(total, args)
    if evaluated is not None:  # otherwise there are sources that nobody has seen
        yield from _check_sampling(evaluation, args)
    if not args.data.max_images_per_prompt:  # otherwise one question may be asked of many images
        yield from repeats.check(args, *(_prompts(sets, args.data.input_key) for sets in (training, evaluation)))


def _prompts(sets: Sequence[DataSet], key: str) -> list[Any]:
    return [row[key] for data in sets for row in data.rows if not _is_empty(row.get(key))]


def first_prompts(args: SimpleNamespace, n: int) -> "tuple[list[tuple[str, Any]], PreTrainedTokenizerBase | None]":
    """Return the first `n` prompts, and the first with each other kind of label, and the policy's tokenizer.

    Prompts are as they are sent to vLLM, each with its label. The list is empty if they cannot be had, and the
    tokenizer None.
    """
    tokenizer, key, label_key = _load_tokenizer(args), args.data.input_key, args.data.label_key
    chosen: list[tuple[str, Any]] = []
    kinds = set()
    try:
        as_text = prompt.renderer(args, _template(args, tokenizer))
        if args.data.apply_chat_template and not tokenizer:  # the run downloads it
            as_text = itemgetter(key)
        for row in (row for flag in (TRAINING, EVALUATION) for data in read(flag, args)[0] for row in data.rows):
            label = row[label_key] if label_key else ""
            kind = type(label), _is_empty(label)
            if len(chosen) < n or kind not in kinds:
                chosen.append((as_text(row), label))
                kinds.add(kind)
        return [(text, label) for text, label in chosen if isinstance(text, str)], tokenizer
    except Exception:  # whatever it is, `check` has said it
        return [], tokenizer


def describe(args: SimpleNamespace) -> Iterator[str]:
    """Yield the first prompt as the model gets it, if it can be had."""
    rows, tokenizer = first_prompts(args, 1)
    if rows and tokenizer:
        but = ", without its images" if args.data.max_images_per_prompt else ""
        but += ", unless the agent changes it" if args.train.agent_func_path else ""
        yield f"the first prompt as the model gets it{but}: {prompt_text.shown(rows[0][0], tokenizer)}"


def _check_key(
    data: DataSet, args: SimpleNamespace, flag: str, is_empty: Callable[[Any], bool], is_fatal: bool = True
) -> Iterator[Finding]:
    """Report rows that have no value under a key. It is always fatal if no row has one."""
    key = vars(args.data)[flag.removeprefix("data.")]
    bad = [number for number, row in enumerate(data.rows, start=1) if is_empty(row.get(key))]
    if not bad:
        return
    problem = f"{len(bad)} of {len(data.rows)} rows have no value there, first {data.name}, row {bad[0]}"
    is_whole = len(bad) == len(data.rows)
    keys = ", ".join(sorted({name for row in data.rows[:1000] for name in row}))
    remedy = f"{'give the right key' if is_whole else 'leave these rows out, or complete them'}: the keys are {keys}"
    yield Finding.of(args, flag, problem, remedy, is_fatal or is_whole)


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or value == []


def _asks_nothing(prompt: Any) -> bool:
    """Return whether a prompt is empty, or has a question that is."""
    if _is_empty(prompt):
        return True
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    asked = [each.get("content") for each in messages if isinstance(each, dict) and each.get("role") == "user"]
    return any(isinstance(text, str) and not text.strip() for text in asked)


def _draw(items: Sequence[_Item], n: int) -> Sequence[_Item]:
    """Return `n` of the items, the same each time, in their order."""
    if len(items) <= n:
        return items
    return [items[i] for i in sorted(random.Random(0).sample(range(len(items)), n))]


# --- labels ----------------------------------------------------------------------------------------------------------


def _check_labels(sets: Sequence[DataSet], args: SimpleNamespace) -> Iterator[Finding]:
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
        yield from _check_key(data, args, flag, _is_empty, is_fatal=is_read)
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
            # What raises ends a run. What cannot be read takes long to find out.
            raising = [one for one in given if _raises(grader, one[1])]
            labels += raising or _draw(given, REWARDS[grader].labels_per_second)
    if not labels:
        return
    bad = unreadable_labels(grader, labels)
    if bad:
        bad.sort(key=lambda label: not label[2])  # first those at which the grader raises, which ends the run
        where, (_, problem, is_fatal) = first_of([each[0] for each in bad]), bad[0]
        problem = f"{where}: {grader} cannot read the label: {problem}"
        yield Finding.of(args, flag, problem, "give the key of the solutions, or mend these rows", is_fatal)


def _raises(grader: str, label: Any) -> bool:
    try:
        REWARDS[grader].label_text(label)
    except ValueError:
        return True
    return False


def unreadable_labels(grader: str, labels: Sequence[tuple[str, Any]]) -> list[tuple[str, str, bool]]:
    """Return the labels that a grader cannot read: where each stands, why, and whether the grader raises there."""
    reward = REWARDS[grader]

    def problem_of(label: Any) -> tuple[str, bool] | None:
        try:
            reward.label_text(label)
            problem = reward.label_problem(label)
        except ValueError as error:
            return str(error), True
        return (problem, False) if problem else None

    with ThreadPoolExecutor() as threads:
        each = threads.map if reward.has_workers else map
        problems = each(problem_of, [label for _, label in labels])
        return [(where, *problem) for (where, _), problem in zip(labels, problems, strict=True) if problem]


# --- prompts ---------------------------------------------------------------------------------------------------------


def _load_tokenizer(args: SimpleNamespace) -> "PreTrainedTokenizerBase | None":
    """Return the actor's tokenizer, or None where there is none. The check of the model says so."""
    folder = local_folder(args.actor.model_name_or_path)
    try:
        return prompt_text.with_arguments(load_tokenizer(folder), args.data.chat_template_args) if folder else None
    except Exception:  # transformers raises anything
        return None


def _template(args: SimpleNamespace, tokenizer: "PreTrainedTokenizerBase | None") -> Callable[..., str] | None:
    return tokenizer.apply_chat_template if tokenizer and args.data.apply_chat_template else None


def _check_all_prompts(sets: Sequence[DataSet], args: SimpleNamespace) -> Iterator[Finding]:
    """Report prompts that are missing, cannot be rendered, are too long, or not what the model was made for."""
    tokenizer = _load_tokenizer(args)
    flag, given = "data.chat_template_args", args.data.chat_template_args
    if given and not args.data.apply_chat_template:
        yield Finding.of(args, flag, "no chat template is applied", "add --data.apply_chat_template")
    elif given and tokenizer and (names := ", ".join(prompt_text.not_in_template(tokenizer, given))):
        yield Finding.of(args, flag, f"the model's chat template does not read {names}", "correct the name")
    where: list[tuple[str, Row]] = []
    texts: list[str] = []
    for data in sets:
        rendered = yield from _check_prompts(data, args, tokenizer)
        where += [(f"{data.name}, {at}", row) for at, row, _ in rendered]
        texts += [text for _, _, text in rendered]
    if tokenizer and texts:
        yield from prompt.check(where, texts, args, tokenizer)


def _check_prompts(
    data: DataSet, args: SimpleNamespace, tokenizer: "PreTrainedTokenizerBase | None"
) -> Generator[Finding, None, list[tuple[str, Row, str]]]:
    """Report prompts of one data set, and return some as they are rendered: place, row, text."""
    key, as_chat = args.data.input_key, args.data.apply_chat_template
    yield from _check_key(data, args, "data.input_key", _asks_nothing)
    rows = [(f"row {number}, {key}", row) for number, row in enumerate(data.rows, start=1)]
    rows = [(where, row) for where, row in rows if not _is_empty(row.get(key))]
    form = "text, or messages with role and content" if as_chat else "text"
    strange = [(where, row[key]) for where, row in rows if not _is_prompt(row[key], as_chat)]
    bad = [f"{where}: it is not {form}: {str(value)[:60]}" for where, value in strange]
    rendered = []
    if not bad and (tokenizer or not as_chat):
        as_text = prompt.renderer(args, _template(args, tokenizer))
        for where, row in _draw(rows, _RENDERED):
            try:
                rendered.append((where, row, as_text(row)))
            except Exception as error:  # a template raises what it likes
                bad.append(f"{where}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    if bad:
        has_messages = not as_chat and any(isinstance(value, list) for _, value in strange)
        remedy = "add --data.apply_chat_template" if has_messages else "give prompts that the run's template takes"
        yield Finding(data.flag, data.name, first_of(bad, "more rows"), remedy)
        return []
    yield from _check_images(data, args)
    if tokenizer and rendered and not args.data.max_images_per_prompt:
        texts = [text for _, _, text in rendered]
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        yield from _check_lengths(data, [len(each) for each in ids], args)
    return rendered


def _is_prompt(value: Any, as_chat: bool) -> bool:
    """Return whether a value is one. A template makes a text of anything else too."""
    if isinstance(value, str) or not as_chat:
        return isinstance(value, str)
    return isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), str | list) or message.get("tool_calls"))
        for message in value
    )


def _check_images(data: DataSet, args: SimpleNamespace) -> Iterator[Finding]:
    """Report images that nobody looks at."""
    key, most, flag = args.data.image_key, args.data.max_images_per_prompt, "data.max_images_per_prompt"
    of_rows = [images for row in data.rows if (images := _images(row.get(key)))]
    has_vision = prompt.is_vision_language(args)
    if of_rows and (not most or has_vision is False):
        problem = f"{len(of_rows)} of {len(data.rows)} rows of {data.name} have images, which the model does not see"
        remedy = f"give {max(map(len, of_rows))}, with a vision-language model"
        yield Finding.of(args, flag, problem, remedy, is_fatal=bool(most or has_vision))
    elif most and not of_rows:
        problem = f"no row of {data.name} has images under --data.image_key {key}"
        yield Finding.of(args, flag, problem, f"the keys are {', '.join(sorted(data.rows[0]))}")


def _images(value: Any) -> list:
    """Return the images of a row. Upstream takes one or a list, and leaves out those that are None."""
    return [image for image in (value if isinstance(value, list) else [value]) if image is not None and image != ""]


def _check_lengths(data: DataSet, lengths: Sequence[int], args: SimpleNamespace) -> Iterator[Finding]:
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
    of_flag = "--data.max_samples " if prompts == args.data.max_samples else ""
    if prompts * number < args.train.batch_size:
        problem = f"{of_flag}{prompts} prompts x --rollout.n_samples_per_prompt {number} are no whole batch"
        yield Finding.of(args, "train.batch_size", problem, f"give {prompts * number} at most, or more data")
    elif prompts < args.rollout.batch_size:
        problem = f"there are {of_flag}{prompts} prompts, so no rollout has more"
        remedy = f"give {prompts} at most, or more data"
        is_fatal = prompts * number < least_shared(args)  # all would be left out
        yield Finding.of(args, "rollout.batch_size", problem, remedy, is_fatal)


def _check_sampling(evaluation: Sequence[DataSet], args: SimpleNamespace) -> Iterator[Finding]:
    """Report patterns of --eval.sampling that match no source of the rows that are evaluated."""
    sources = sorted({str(row.get("datasource", "default")) for data in evaluation for row in data.rows})
    for spec in args.eval.sampling if sources else ():
        if not fnmatch.filter(sources, spec.pattern):
            problem, remedy = "it matches no source of the evaluation", f"the sources are {', '.join(sources)}"
            yield Finding("--eval.sampling", spec.pattern, problem, remedy)
