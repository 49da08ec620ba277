"""The console command `arlopti`: one word for each of the package's commands."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from arlopti_openrlhf import __version__, interrupts

# The word -> the module in this package, and what it does.
COMMANDS = {
    "train": ("train_ppo_ray", "train with OpenRLHF's command and the flags of the methods"),
    "evaluate": ("evaluate", "measure the accuracy of models, with intervals"),
    "analyze": ("analyze", "draw the paper's figures from a policy and from runs"),
    "data": ("prepare_data", "make puzzles, or convert published data sets"),
    "model": ("prepare_model", "make a pretrained model, SmolLM2-135M"),
    "serve": ("serve_rewards", "serve rule rewards to many runs"),
    "quickstart": ("quickstart", "train the whole stack on this machine, without a GPU"),
}
_LINES = "\n".join(f"  {word:<10}  {help}" for word, (_, help) in COMMANDS.items())
_HELP = f"""usage: arlopti COMMAND [FLAGS]

{_LINES}

arlopti COMMAND --help lists the flags of a command, and arlopti --version the versions. For example:

  arlopti quickstart"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the first word names, with the words behind it.

    Args:
        argv: the words; those of the process if not given.

    Raises:
        SystemExit: with status 2 where there is no word (after the help, on standard error) or the word is no command
            (after one line), and with whatever status the command ends.
    """
    interrupts.answer()
    word, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if word in COMMANDS:
        sys.path.insert(0, os.getcwd())  # as `python -m` does. Rewards and methods may import what is there
        sys.argv = [f"arlopti {word}", *rest]  # the commands read the process's words, as under `python -m`
        importlib.import_module(f"arlopti_openrlhf.cli.{COMMANDS[word][0]}").main()
    elif word in ("-h", "--help"):
        print(_HELP)
    elif word == "--version":
        print(f"arlopti_openrlhf {__version__}, {_openrlhf()}")
    elif not word:
        print(_HELP, file=sys.stderr)
        raise SystemExit(2)
    else:
        near = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        print(f"arlopti: error: {word} is no command; {hint}", file=sys.stderr)
        raise SystemExit(2)


def _openrlhf() -> str:
    from importlib import metadata

    try:
        return f"openrlhf {metadata.version('openrlhf')}"
    except metadata.PackageNotFoundError:
        return "openrlhf is not installed"


if __name__ == "__main__":
    main()
