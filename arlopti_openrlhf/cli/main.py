"""The console command `arlopti`: one word for each of the package's commands."""

import importlib
import sys
from collections.abc import Sequence

from arlopti_openrlhf import __version__, interrupts

# The word -> the module in this package, and what it does.
COMMANDS = {
    "train": ("train_ppo_ray", "train with OpenRLHF's command and the flags of the methods"),
    "evaluate": ("evaluate", "measure the accuracy of models, with intervals"),
    "analyze": ("analyze", "draw the paper's figures from a policy and from runs"),
    "data": ("prepare_data", "make puzzles, or convert published data sets"),
    "serve": ("serve_rewards", "serve rule rewards to many runs"),
    "quickstart": ("quickstart", "train the whole stack on this machine, without a GPU"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first word names, with the words behind it.

    Args:
        argv: the words; those of the process if not given.

    Raises:
        SystemExit: with status 0 after the help or the version, with status 2 where there is no word (after the help,
            on standard error) or the word is no command (after one line), and with whatever status the command ends.
    """
    interrupts.answer()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(usage(), file=sys.stderr)
        raise SystemExit(2)
    word = words[0]
    if word in ("-h", "--help"):
        print(usage())
        raise SystemExit(0)
    if word == "--version":
        print(f"arlopti_openrlhf {__version__}, {_openrlhf()}")
        raise SystemExit(0)
    if word == "completion":
        print(completion(words[1] if len(words) == 2 else ""))
        raise SystemExit(0)
    if word not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        print(f"arlopti: error: {word} is no command; {hint}", file=sys.stderr)
        raise SystemExit(2)
    # The commands read the process's words, as under `python -m`.
    sys.argv = [f"arlopti {word}", *words[1:]]
    importlib.import_module(f"arlopti_openrlhf.cli.{COMMANDS[word][0]}").main()


def usage() -> str:
    """Return the help: a line for each command, and an example."""
    width = max(map(len, COMMANDS))
    lines = [f"  {word:<{width}}  {help}" for word, (_, help) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: arlopti COMMAND [FLAGS]",
            "",
            *lines,
            "",
            "arlopti COMMAND --help lists the flags of a command, and arlopti --version the versions. For example:",
            "",
            "  arlopti quickstart",
            "",
            "arlopti completion bash, or zsh or tcsh, prints what makes the shell complete all of them:",
            "",
            '  eval "$(arlopti completion bash)"',
        ]
    )


def completion(shell: str) -> str:
    """Return the script by which a shell completes the commands and their flags.

    Raises:
        SystemExit: with status 2 after one line on standard error, for another shell than these.
    """
    import argparse

    import shtab

    if shell not in shtab.SUPPORTED_SHELLS:
        print(f"arlopti: error: completion takes one of {', '.join(shtab.SUPPORTED_SHELLS)}", file=sys.stderr)
        raise SystemExit(2)
    parser = argparse.ArgumentParser(prog="arlopti")
    words = parser.add_subparsers()
    for word, (module, help) in COMMANDS.items():
        own = importlib.import_module(f"arlopti_openrlhf.cli.{module}").make_parser()
        words.add_parser(word, help=help, parents=[own], add_help=False)
    return shtab.complete(parser, shell)


def _openrlhf() -> str:
    from importlib import metadata

    try:
        return f"openrlhf {metadata.version('openrlhf')}"
    except metadata.PackageNotFoundError:
        return "openrlhf is not installed"


if __name__ == "__main__":
    main()
