"""Refuses bad input in one line with exit status 2, before a command imports what takes long."""

import argparse
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from arlopti_openrlhf.ops.preflight import model
from arlopti_openrlhf.ops.preflight.local_model import local_folder
from arlopti_openrlhf.ops.preflight.reward import defined_names


class Parser(argparse.ArgumentParser):
    """`ArgumentParser` with one change: an error is one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def check_out(parser: argparse.ArgumentParser, out: Path, is_file: bool = False) -> None:
    """Refuse an --out that cannot be made or written. Nothing is made here.

    Args:
        parser: says the error.
        out: a folder.
        is_file: it is a file.
    """
    if is_file and out.is_dir():
        parser.error(f"argument --out: {out} is a folder, not a file")
    folder = out.absolute().parent if is_file else out.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing.is_dir():
        parser.error(f"argument --out: {out}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK) or (is_file and out.exists() and not os.access(out, os.W_OK)):
        parser.error(f"argument --out: {out}: no permission to write in {existing}")


def check_files(parser: argparse.ArgumentParser, flag: str, files: Iterable[str]) -> None:
    """Refuse files that are not there or cannot be read."""
    for file in files:
        if not os.path.exists(file):
            parser.error(f"argument {flag}: {file}: there is no such file")
        if os.path.isdir(file):
            parser.error(f"argument {flag}: {file} is a folder, not a file")
        if not os.access(file, os.R_OK):
            parser.error(f"argument {flag}: {file}: no permission to read it")


def check_models(parser: argparse.ArgumentParser, flag: str, models: Sequence[str]) -> None:
    """Refuse models that could not be loaded. The hub is asked whether it has one that is not all on this machine."""
    for name in models:
        findings = list(model.check_folder(flag, name))
        for finding in findings:
            if finding.is_fatal:
                parser.error(f"argument {finding}")
        if findings:  # warnings of what the hub is to give
            _ask_the_hub(parser, flag, name)


def check_tokenizer(parser: argparse.ArgumentParser, name: str) -> None:
    """Refuse a --tokenizer that is neither on this machine nor on the hub. It needs no weights beside it."""
    if local_folder(name) is not None:
        return
    finding = model.not_here("--tokenizer", name)
    if finding.is_fatal:
        parser.error(f"argument {finding}")
    _ask_the_hub(parser, "--tokenizer", name)


def _ask_the_hub(parser: argparse.ArgumentParser, flag: str, name: str) -> None:
    """Refuse a model that the hub does not have, or that it cannot be asked for. Nothing is downloaded."""
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
    except (OSError, SyntaxError, ValueError) as error:
        parser.error(f"argument {flag}: {path} does not parse: {error}")
    if not names & {"reward_func", "*"}:
        parser.error(f"argument {flag}: {path} has no function `reward_func`")


def check_port(parser: argparse.ArgumentParser, host: str, port: int) -> None:
    """Refuse an address that nobody could listen on now: a port in use, or another machine's host."""
    if not 0 <= port < 2**16:  # the resolver would take the rest of a division
        parser.error(f"argument --port: {port} is not a number from 0 to 65535")
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as listener:
            # As the server does, so that connections of an earlier one that are still closing do no harm.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        parser.error(
            f"argument --port: nobody can listen on {host}:{port}: {getattr(error, 'strerror', None) or error}"
        )
