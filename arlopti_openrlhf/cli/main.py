"""The console command `arlopti`: one word for each of the package's commands."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from arlopti_openrlhf import __version__, interrupts, upstream

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
        SystemExit: with status 2 if there is no word (after the help, on standard error), if the word is no command or
            OpenRLHF is not installed (after one line), and with whatever status the command ends.
    """
    interrupts.answer()
    word, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if word in COMMANDS:
        if "openrlhf" not in upstream.installed():
            _fail("; ".join(map(str, upstream.check_version())))
        # Rewards and methods may import what is in the working folder. It comes last, because a math.py there is no
        # reason for Python's own modules to fail.
        sys.path.append(os.getcwd())
        sys.argv = [f"arlopti {word}", *rest]  # the commands read the process's words, as under `python -m`
        importlib.import_module(f"arlopti_openrlhf.cli.{COMMANDS[word][0]}").main()
    elif word in ("-h", "--help"):
        print(_HELP)
    elif word == "--version":
        versions = {"arlopti_openrlhf": __version__, "openrlhf": "is not installed", **upstream.installed()}
        print(", ".join(f"{package} {version}" for package, version in versions.items()))
    elif not word:
        print(_HELP, file=sys.stderr)
        raise SystemExit(2)
    else:
        near = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        _fail(f"{word} is no command; {hint}")


def _fail(problem: str) -> NoReturn:
    print(f"arlopti: error: {problem}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
