"""Advantage Reweighting, and with a negative α the reweighting of "On the Direction of RLVR Updates".

- Papers: arXiv 2505.12929, Eq. 4, and arXiv 2603.22117.
- Formula: w = α · π_old + 1 − α. With α = −c that is 1 + c · (1 − π_old), Direction's.
- Code read: github.com/zhyang2226/AR-Lopti at cbeb333, github.com/Hesse73/RLVR-Directions at af8f20a.
- Constants: AR takes α = 0.3 for K&K and 0.1 for math; Direction c = 0.2 (7B, math) and 0.1 (8B), so α = −0.2 and
  −0.1.
- Deviations: none known. Neither renormalises, and neither do we.
"""

from collections.abc import Mapping

from torch import Tensor

from arlopti_openrlhf.token_method import Tokens, WeightSums
from arlopti_openrlhf.token_update import advantage_weights


def weigh(tokens: Tokens, *, alpha: float = 0.3) -> Tensor:
    """Return α · π_old + 1 − α, (B, A). Above 0 α makes rare tokens count less (AR), below 0 more (Direction)."""
    return advantage_weights(tokens.log_probs, alpha)


def metrics(sums: Mapping[str, WeightSums], statistic: None) -> dict[str, float]:
    """Return the mean weight, under the name that AR's flag has had from the start."""
    return {"ar/mean_weight": sums[""].mean}
