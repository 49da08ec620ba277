"""Refuses bad input in one line with exit status 2, before a command imports what takes long."""

import argparse
import difflib
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from arlopti_openrlhf import terminal
from arlopti_openrlhf.ops.preflight import model, model_code
from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.model import local_folder
from arlopti_openrlhf.ops.preflight.reward import defined_names

_NAMED = 3  # flags in a hint
# In what argparse says of a float, and in what `cli.arguments` does.
_DECIMAL_COMMA = re.compile(r"(?:invalid float value: '|: )(?P<number>-?\d*,\d+(?:[eE]-?\d+)?)(?:'$| is not a number)")


class Parser(argparse.ArgumentParser):
    """`ArgumentParser` with two changes: an error is one line, without the usage, and an unknown flag has a hint."""

    renamed: Mapping[str, str] = {}  # flags of earlier versions, with what took their place
    _given: list[str] = []

    def parse_args(self, args=None, namespace=None):
        self._given = sys.argv[1:] if args is None else list(args)
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {'; '.join(self._unknown(unknown) or unknown)}")
        return known

    def _unknown(self, words: Iterable[str]) -> list[str]:
        """Return the unknown flags among the words, with their hints. A value may be a key, and is left out."""
        flags = [word.partition("=")[0] for word in words if re.match(r"-+[^-\d]", word)]
        unknown = [flag for flag in flags if flag not in self._option_string_actions]
        return [f"{flag}: {hint}" if (hint := self.hint(flag)) else flag for flag in unknown]

    def hint(self, flag: str) -> str:
        """Return what an unknown flag may have meant, or nothing. It may have one dash in place of two."""
        flag = f"--{flag.lstrip('-')}"
        if flag in self.renamed:
            return f"now {self.renamed[flag]}"
        flags = list(self._option_string_actions)
        # Either the end of a flag, such as --eta, or its words, such as --max_ckpt_num, or one with a slip of the pen.
        near = [known for known in flags if known.rpartition(".")[2] == flag.removeprefix("--")]
        if not near and len(words := set(re.findall(r"[^\W_]+", flag))) > 1:
            parts = {known: set(re.findall(r"[^\W_]+", known)) for known in flags}
            near = [known for known in flags if parts[known] == words]
            near = near or [known for known in flags if words <= parts[known] and len(parts[known]) <= len(words) + 1]
        near = near or difflib.get_close_matches(flag, flags, n=1, cutoff=0.8)
        return f"did you mean {' or '.join(near[:_NAMED])}?" if near else ""

    def error(self, message: str) -> NoReturn:
        if "required" in message and (unknown := self._unknown(self._given)):  # what is missing may be among them
            message = f"unrecognized arguments: {'; '.join(unknown)}"
        if comma := _DECIMAL_COMMA.search(message):
            message += f"; write {comma['number'].replace(',', '.')}"
        self.exit(2, f"{self.prog}: error: {terminal.one_line(' '.join(message.split()))}\n")


def command_parser(word: str, text: str | None) -> Parser:
    """Return the parser of `arlopti word`, with `text` as its help."""
    return Parser(prog=f"arlopti {word}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def check_out(parser: argparse.ArgumentParser, out: Path, is_file: bool = False) -> None:
    """Refuse an --out, a folder or a file, that cannot be made or written. Nothing is made here."""
    if is_file and out.is_dir():
        parser.error(f"argument --out: {out} is a folder, not a file")
    folder = out.absolute().parent if is_file else out.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing.is_dir():
        parser.error(f"argument --out: {out}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK) or (is_file and out.exists() and not os.access(out, os.W_OK)):
        parser.error(f"argument --out: {out}: no permission to write in {existing}")


def check_files(parser: argparse.ArgumentParser, flag: str, files: Iterable[str]) -> None:
    """Refuse files that cannot be read."""
    for file in files:
        try:
            open(file, "rb").close()
        except OSError as error:
            parser.error(f"argument {flag}: {file}: {error.strerror}")


def check_models(parser: argparse.ArgumentParser, flag: str, models: Iterable[str]) -> None:
    """Refuse models that could not be loaded. The hub has to have what is not on this machine.

    What is odd with a model that can be loaded is printed on standard error.
    """
    for name in models:
        folder = local_folder(name)
        # Loading it would run the code that it brings.
        findings = [] if folder and model_code.code_of(folder) else list(model.check_model(flag, name))
        _check_model(parser, flag, name, findings)


def check_tokenizer(parser: argparse.ArgumentParser, flag: str, name: str) -> None:
    """Refuse a tokenizer that is neither on this machine nor on the hub. It needs no weights."""
    if local_folder(name) is None:
        _check_model(parser, flag, name, list(model.check_model(flag, name)))


def _check_model(parser: argparse.ArgumentParser, flag: str, name: str, findings: list[Finding]) -> None:
    """Refuse a model that is broken, or that the hub is to give and does not. Nothing is downloaded."""
    for finding in findings:
        if finding.is_fatal:
            parser.error(f"argument {finding}")
    if Path(name).is_dir():
        for finding in findings:
            print(f"{parser.prog}: warning: {finding}", file=sys.stderr)
        return
    if not findings:
        return
    from httpx import HTTPError
    from huggingface_hub import model_info
    from huggingface_hub.errors import HFValidationError

    try:
        model_info(name, timeout=30)
    except (HTTPError, OSError, HFValidationError) as error:  # what the hub raises, and what the connection to it does
        parser.error(f"argument {flag}: {name} has to come from the hub, which does not give it: {error}")


def check_reward_file(parser: argparse.ArgumentParser, flag: str, path: str) -> None:
    """Refuse a Python file that does not parse or has no `reward_func`. It is not run."""
    try:
        names = defined_names(path)
    except OSError as error:
        parser.error(f"argument {flag}: {path}: {error.strerror}")
    except (SyntaxError, ValueError) as error:
        parser.error(f"argument {flag}: {path} does not parse: {error}")
    if not names & {"reward_func", "*"}:
        parser.error(f"argument {flag}: {path} has no function `reward_func`")


def check_port(parser: argparse.ArgumentParser, host: str, port: int) -> None:
    """Refuse an address that a server cannot listen on: a port in use, or another machine's host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET  # as uvicorn
    try:
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:  # the latter for what is no port
        parser.error(f"argument --port: cannot listen on {host}:{port}: {error}")
