"""The flags of AR, Lopti and other token methods, and of how the update is computed."""

import argparse

from arlopti_openrlhf import methods
from arlopti_openrlhf.cli.arguments import number
from arlopti_openrlhf.cli.method_checks import LOPTI_DEFAULTS, SELECTIVE, STOCK


def add_update_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to OpenRLHF's parser."""
    group = parser.add_argument_group("token-level update (arXiv 2505.12929)")
    group.add_argument(
        "--algo.ar.alpha",
        type=number("[0, 1]"),
        default=0.0,
        metavar="FLOAT",
        help="α of Advantage Reweighting (Eq. 4), in [0, 1]. 0 is off (default). The paper takes 0.3 for K&K and 0.1 "
        "for math. Short for --algo.token_method ar with ar.alpha.",
    )
    group.add_argument(
        "--algo.lopti.eta",
        type=number("(0, 1)"),
        metavar="FLOAT",
        help="η of Lopti, in (0, 1): tokens of a lower probability are updated apart from the rest. Off by default. "
        "The paper takes 0.5. Short for --algo.token_method lopti with lopti.eta, as are quantile, order and groups.",
    )
    group.add_argument(
        "--algo.lopti.quantile",
        type=number("(0, 1)"),
        metavar="FLOAT",
        help="Share of the tokens in the low group, in (0, 1). η follows from each rollout batch, over all ranks.",
    )
    group.add_argument(
        "--algo.lopti.scope",
        choices=["batch", "minibatch"],
        default=LOPTI_DEFAULTS["scope"],
        help="batch (default) updates all mini-batches of an epoch with the first group and then all with the second. "
        "minibatch updates both groups within each mini-batch.",
    )
    group.add_argument(
        "--algo.lopti.order",
        choices=["low_first", "high_first"],
        default=LOPTI_DEFAULTS["order"],
        help="Which group is updated first (default: low_first). high_first is the ablation of Fig. 6b.",
    )
    group.add_argument(
        "--algo.lopti.groups",
        choices=["both", "low", "high"],
        default=LOPTI_DEFAULTS["groups"],
        help="Update both groups (default), or only one, which is the ablation of Fig. 6a.",
    )
    group.add_argument(
        "--algo.token_method",
        nargs="+",
        default=[],
        metavar="NAME|FILE.py",
        help=f"Token methods, whose weights multiply: {', '.join(methods.built_in())}, or a Python file with "
        'weigh(tokens), as examples/token_method.py. ar takes α in [-1, 1]: below 0 it raises rare tokens, as in "On '
        'the Direction of RLVR Updates". docs/token_methods.md has the papers.',
    )
    group.add_argument(
        "--algo.token_method_args",
        nargs="+",
        type=_argument,
        default=[],
        metavar="NAME.KEY=VALUE",
        help="Constants of token methods in place of the published ones, as in ar.alpha=-0.2 stapo.tau=0.01.",
    )
    group.add_argument(
        "--algo.token_method_normalize",
        action="store_true",
        help="Divide the product of the token methods' weights by its mean over each rollout batch, so that its mean "
        "is 1. That takes away what a method does by the mere size of its weights.",
    )
    group.add_argument(
        "--actor.update",
        choices=[STOCK, SELECTIVE],
        help="stock computes the update as OpenRLHF does, with logits of every position, each prompt once per "
        "response, and old log-probs in a pass of their own. selective computes only what the update needs, with "
        "equal gradients. Before its first pass each model computes some log-probs both ways. Where they differ by "
        "more than rounding, it says so and keeps stock's layout. Default: selective with AR, Lopti or a token "
        "method, else stock.",
    )


def _argument(text: str) -> str:
    """Refuse an argument of a token method that has not the form NAME.KEY=VALUE."""
    try:
        methods.parse_argument(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
