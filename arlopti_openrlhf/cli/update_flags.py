"""The flags of AR and Lopti, and of how the update is computed."""

import argparse

from arlopti_openrlhf.cli.arguments import number
from arlopti_openrlhf.preflight.combinations import LOPTI_DEFAULTS, SELECTIVE, STOCK, UNCHECKED


def add_update_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to OpenRLHF's parser."""
    group = parser.add_argument_group("token-level update (arXiv 2505.12929)")
    group.add_argument(
        "--algo.ar.alpha",
        type=number(0, 1, include_low=True, include_high=True),
        default=0.0,
        metavar="FLOAT",
        help="α of Advantage Reweighting (Eq. 4), in [0, 1]. 0 is off (default). The paper takes 0.3 for K&K and 0.1 "
        "for math.",
    )
    group.add_argument(
        "--algo.lopti.eta",
        type=number(0, 1),
        metavar="FLOAT",
        help="η of Lopti, in (0, 1): tokens of a lower probability are updated apart from the rest. Off by default. "
        "The paper takes 0.5.",
    )
    group.add_argument(
        "--algo.lopti.quantile",
        type=number(0, 1),
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
        "--actor.update",
        choices=[STOCK, SELECTIVE, UNCHECKED],
        help="stock computes the update as OpenRLHF does, with logits of every position, each prompt once per "
        "response, and old log-probs in a pass of their own. selective computes only what the update needs, with "
        "equal gradients. Before its first pass each model computes some log-probs both ways. Where they differ by "
        "more than rounding, it says so and keeps stock's layout. selective_unchecked leaves that out. Default: "
        "selective with AR or Lopti, else stock, to the last bit.",
    )
