"""Refuses bad input in one line with exit status 2, before a command imports what takes long."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from arlopti_openrlhf import terminal
from arlopti_openrlhf.ops.preflight import model, model_code
from arlopti_openrlhf.ops.preflight.model import local_folder

_NAMED = 3  # flags in a hint


class Parser(argparse.ArgumentParser):
    """`ArgumentParser` with two changes: an error is one line, without the usage, and an unknown flag has a hint."""

    _given: list[str] = []

    def parse_args(self, args=None, namespace=None):
        self._given = sys.argv[1:] if args is None else list(args)
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            named = [*self._unknown(unknown), *self._valueless(unknown)]
            self.error(f"unrecognized arguments: {'; '.join(named or unknown)}")
        return known

    def _unknown(self, words: Iterable[str]) -> list[str]:
        """Return the unknown flags among the words, with their hints. A value may be a key, and is left out."""
        flags = [word.partition("=")[0] for word in words if re.match(r"-+[^-\d]", word)]
        unknown = [flag for flag in flags if flag not in self._option_string_actions]
        return [f"{flag}: {hint}" if (hint := self.hint(flag)) else flag for flag in unknown]

    def _valueless(self, words: Iterable[str]) -> list[str]:
        """Return the words that follow a flag without a value, as in `--train.colocate_all true`."""
        known = self._option_string_actions
        pairs = [pair for pair in pairwise(self._given) if pair[1] in words and pair[0] in known]
        return [f"{word}: {flag} takes no value" for flag, word in pairs if known[flag].nargs == 0]

    def hint(self, flag: str) -> str:
        """Return what an unknown flag may have meant, or nothing. It may have one dash in place of two."""
        flag = f"--{flag.lstrip('-')}"
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
    """Refuse models on this machine that could not be loaded. What is odd with others is printed on standard error."""
    for name in models:
        folder = local_folder(name)
        if folder and model_code.code_of(folder):  # loading it would run the code that it brings
            continue
        for finding in model.check_model(flag, name):
            if finding.is_fatal:
                parser.error(f"argument {finding}")
            if folder:  # what is on the hub is loaded soon
                print(f"{parser.prog}: warning: {finding}", file=sys.stderr)
