"""The flag by which `evaluate` and `analyze` take the reward of a training, and what they say without it."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from arlopti_openrlhf import terminal
from arlopti_openrlhf.cli.bad_input import Parser
from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.grading.sources import reward_of
from arlopti_openrlhf.lab.data import published
from arlopti_openrlhf.lab.scoring.inputs import Row
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.preflight import values

if TYPE_CHECKING:
    from arlopti_openrlhf.lab.scoring.own_reward import OwnReward

_HELP = (
    f"what grades, as in `arlopti train`: {', '.join(REWARDS)}, a Python file with reward_func, or URLs of reward "
    f"servers (default: by datasource, {', '.join(f'{row.name} for {row.sources}*' for row in REWARDS.values())})"
)


def add_flag(parser: Parser) -> None:
    """Add --reward, which has its name in `arlopti train` too."""
    metavar, type_ = f"{'|'.join(REWARDS)}|PATH.py|URL,...", credentials.without_user
    parser.add_argument("--reward", "--reward.remote_url", metavar=metavar, type=type_, help=_HELP)


def check(parser: Parser, reward: str | None, rows: Sequence[Row], says: bool = True) -> None:
    """Refuse what is no source of rewards. A file is not run, and no server is asked.

    Without one, `says` prints which data sources are graded as any other for want of a rule of their own.
    """
    if reward is None:
        sources = sorted({row["datasource"] for row in rows})
        unknown = [name for name in sources if not reward_of(name).sources and name not in published.DATA_SETS]
        if unknown and says:
            named = terminal.one_line(", ".join(unknown))
            line = f"no rule for {named}: graded as {reward_of('').name}. --reward takes another"
            print(f"{parser.prog}: {line}", file=sys.stderr)
    elif not values.is_reward_source(reward):
        parser.error(f"argument --reward: {reward} {values.NO_SOURCE}; {values.SOURCES}")


def load(parser: Parser, args: argparse.Namespace) -> "OwnReward | None":
    """Return the reward of the arguments, or None. One that cannot be loaded ends the command in one line."""
    if args.reward is None:
        return None
    from arlopti_openrlhf import cpu

    cpu.enable()  # before openrlhf is imported
    from arlopti_openrlhf.lab.scoring.own_reward import OwnReward

    try:
        return OwnReward(args.reward)
    except RuntimeError as error:
        parser.error(f"argument --reward: {str(error).splitlines()[0]}")
