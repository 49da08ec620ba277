"""Renders prompts by OpenRLHF's own function, and checks what a template does."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from arlopti_openrlhf.ops.preflight.finding import Finding, first_of
from arlopti_openrlhf.ops.preflight.model import local_folder, read_json
from arlopti_openrlhf.ops.preflight.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ACTOR, _CHAT = "actor.model_name_or_path", "data.apply_chat_template"
# JSON, or what Python prints.
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content)\1\s*:""")
_QUESTION, _ANSWER = "zqx", "qzy"  # which no template has of its own
# Roles that templates know. Whatever else a template names, it knows, too.
_ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}


def is_vision_language(args: SimpleNamespace) -> bool | None:
    """Return whether the policy is a vision-language model, as upstream's `is_vlm_model` decides. None: not known."""
    folder = local_folder(args.actor.model_name_or_path)
    try:
        config = read_json(folder / "config.json") if folder else {}
    except ValueError:
        return None
    return "vision_config" in config if config else None


def renderer(args: SimpleNamespace, template: Callable[..., Any] | None) -> Callable[[Row], str]:
    """Return a function that makes a row's prompt as the run makes it.

    `template` takes the messages, if the run has a chat template.
    """
    from openrlhf.datasets.prompts_dataset import preprocess_data

    return lambda row: preprocess_data(row, args.data.input_template, args.data.input_key, None, template)[0]


class Template:
    """What the chat template of a tokenizer does.

    Args:
        tokenizer: one with a chat template.

    Raises:
        Exception: the template renders no plain question.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        question = {"role": "user", "content": _QUESTION}
        prompt = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        after = prompt.rpartition(_QUESTION)[2].strip()
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special.discard(str(tokenizer.bos_token))
        self.missing = ""
        self.marks = sorted({token for token in special if token in prompt} | ({after} if len(after) > 3 else set()))
        try:
            whole = tokenizer.apply_chat_template(
                [question, {"role": "assistant", "content": _ANSWER}], tokenize=False
            )
            before, _, after = whole.rpartition(_ANSWER)
            # What the template puts before an answer and leaves out where one is asked for. Some begin no answer.
            bare = tokenizer.apply_chat_template([question], tokenize=False)
            if prompt == bare and before.startswith(prompt):
                self.missing = before.removeprefix(prompt).strip()
            # The tokens that follow an answer, or None if the template takes no answer.
            self.closing: list[int] | None = tokenizer(after, add_special_tokens=False)["input_ids"]
        except Exception:  # a template raises what it likes
            self.closing = None

    def is_in(self, text: str) -> bool:
        """Return whether a text has been rendered already."""
        return any(mark in text for mark in self.marks)


def stops(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the ids at which vLLM ends an answer: the tokenizer's, and those of the model's files."""
    file = "generation_config.json" if (folder / "generation_config.json").exists() else "config.json"
    given = read_json(folder / file).get("eos_token_id")
    eos = tokenizer.eos_token_id
    of_model = given if isinstance(given, list) else [given]
    return [] if eos is None else [eos], [each for each in of_model if isinstance(each, int)]


def check(
    where: Sequence[tuple[str, Row]], texts: Sequence[str], args: SimpleNamespace, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[Finding]:
    """Warn of prompts that a model reads otherwise than their author means.

    Args:
        where: rows, with what to call each.
        texts: their prompts as rendered.
        args: the nested arguments.
        tokenizer: of the policy.
    """
    key, model, as_chat = args.data.input_key, args.actor.model_name_or_path, args.data.apply_chat_template
    folder = local_folder(model)
    try:
        template = Template(tokenizer) if tokenizer.chat_template else None
    except Exception:  # a template raises what it likes
        template = None
    by_tokenizer, by_model = stops(folder, tokenizer) if folder else ([], [])
    ends = {*by_tokenizer, *by_model}
    is_closed = template and template.closing is not None and bool(ends & {*template.closing})

    def of(rows: Iterable[str], problem: str, flag: str, remedy: str) -> Iterator[Finding]:
        if named := list(rows):
            problem = f"{first_of(named, 'more rows')}: {problem}"
            yield Finding.of(args, flag, problem, remedy, is_fatal=False)

    if as_chat and template:
        yield from of(
            (at for at, row in where if any(template.is_in(text) for text in _texts(row[key]))),
            "the prompt holds the chat template already, and gets it twice",
            _CHAT,
            "leave the flag out, or give the messages only",
        )
        if template.missing:
            problem = f"its chat template ends a prompt without {template.missing!r}, which stands before each answer"
            remedy = "add it to the template, for add_generation_prompt"
            yield Finding.of(args, _ACTOR, problem, remedy, is_fatal=False)
        chats = [(at, row[key]) for at, row in where if isinstance(row[key], list)]
        yield from of(
            (at for at, chat in chats if chat[-1]["role"] == "assistant"),
            "the last message is the assistant's, so the model is asked after an answer",
            _CHAT,
            "leave that message out",
        )
        known = [(at, m["role"]) for at, chat in chats for m in chat]
        yield from of(
            (f"{at}: role {role!r}" for at, role in known if not (role in _ROLES or role in tokenizer.chat_template)),
            "the chat template does not know this role",
            _CHAT,
            "use system, user and assistant",
        )
    elif template and is_closed and not args.data.input_template:
        yield from of(
            (at for (at, _), text in zip(where, texts, strict=True) if not template.is_in(text)),
            f"the prompt is plain text, and {model} is a chat model: its tokenizer has a template, which is not used",
            _CHAT,
            "add --data.apply_chat_template, or --data.input_template '{}' if this is meant",
        )
    if template and template.closing and not is_closed and (as_chat or all(map(template.is_in, texts))):
        closing, eos = (tokenizer.decode(ids).strip() for ids in (template.closing, sorted(ends)))
        problem = f"its chat template ends an answer with {closing!r}, and vLLM stops at {eos!r}: answers may not end"
        remedy = "correct eos_token_id in generation_config.json, or eos_token in tokenizer_config.json"
        yield Finding.of(args, _ACTOR, problem, remedy, is_fatal=False)
    if by_tokenizer and by_model and not {*by_tokenizer} & {*by_model}:
        ours, theirs = (tokenizer.decode(ids) for ids in (by_tokenizer, by_model))
        problem = f"its tokenizer's eos is {ours!r}, and generation_config.json ends an answer with {theirs!r}"
        remedy = "correct the one that is wrong: vLLM stops at either, and the model has learned one"
        yield Finding.of(args, _ACTOR, problem, remedy, is_fatal=False)
    yield from _check_bos(where, texts, args, tokenizer)
    yield from _check_form(where, texts, args, tokenizer)


def _check_form(
    where: Sequence[tuple[str, Row]], texts: Sequence[str], args: SimpleNamespace, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[Finding]:
    """Report prompts that reach the model as the text of a data structure, and tools that do not reach it at all."""
    key, as_chat = args.data.input_key, args.data.apply_chat_template
    data = zip(where, texts, strict=True)
    if quoted := [at for at, row in where if isinstance(row[key], str) and _MESSAGES.match(row[key])]:
        problem = f"{first_of(quoted, 'more rows')}: the prompt is text that spells out a list of messages"
        remedy = "store the list itself, as .jsonl and .parquet can" + ", with --data.apply_chat_template" * (
            not as_chat
        )
        # In other data, some prompts may be about such lists.
        yield Finding.of(args, "data.input_key", problem, remedy, is_fatal=2 * len(quoted) > len(where))
    if listed := [at for (at, row), text in data if any(str(parts) in text for parts in _parts(row[key]))]:
        problem = f"{first_of(listed, 'more rows')}: the chat template takes text, and writes a list of parts as it is"
        yield Finding.of(args, "data.input_key", problem, "give each message's content as one text")
    if as_chat and "tools" in str(tokenizer.chat_template):
        if with_tools := [at for at, row in where if row.get("tools")]:
            problem = (
                f"{first_of(with_tools, 'more rows')}: OpenRLHF does not give the row's tools to the chat template"
            )
            yield Finding.of(args, _CHAT, problem, "describe them in a system message", is_fatal=False)


def _parts(prompt: Any) -> list[list]:
    messages = [] if isinstance(prompt, str) else prompt
    return [m["content"] for m in messages if isinstance(m.get("content"), list) and m["content"]]


def _texts(prompt: Any) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m.get("content"), str)]


def _check_bos(
    where: Sequence[tuple[str, Row]], texts: Sequence[str], args: SimpleNamespace, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[Finding]:
    """Warn if the tokenizer puts a token first and the run, which tokenizes without special tokens, does not."""
    bos = tokenizer.bos_token
    if bos is None or tokenizer("x")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    without = [at for (at, _), each in zip(where, ids, strict=True) if each[:1] != [tokenizer.bos_token_id]]
    if not without:
        return
    problem = (
        f"its tokenizer puts {bos} first, and OpenRLHF tokenizes prompts without special tokens: {first_of(without)}"
    )
    remedy = f"add --data.input_template '{bos}{args.data.input_template or '{}'}'"
    if args.data.apply_chat_template:
        remedy = "let its chat template begin with {{ bos_token }}"
    yield Finding.of(args, _ACTOR, problem, remedy, is_fatal=False)
