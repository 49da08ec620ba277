"""Say how the gradient is distributed over probabilities, and what α and η make of that.

A token's share is the norm of its own gradient at the logits, by Eq. 15, so no backward pass is needed.
"""

from arlopti_openrlhf.lab.analysis.policy import Tokens
from arlopti_openrlhf.lab.analysis.rollouts import Batch
from arlopti_openrlhf.token_update import token_probabilities
from arlopti_openrlhf.update.token_statistics import logit_gradient_norm

MIDDLE = 0.5  # the paper's η
ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
ETAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def gradient_by_probability(batch: Batch, tokens: Tokens) -> dict:
    """Return the unlikely tokens' part of the tokens and of the gradient, Σ |A| · ‖e_o − P‖ over tokens.

    The batch must have an advantage somewhere.

    Returns:
        `low_tokens` and `low_gradient`, the share of tokens with π < `MIDDLE`, and theirs of the gradient.
        `low_gradient_by_alpha`, the latter as AR leaves it, by α. `low_gradient_by_eta`, the gradient's share of the
        tokens with π < η, by η.
    """
    probabilities = token_probabilities(tokens.log_probs)[batch.action_mask].double()
    norm = logit_gradient_norm(batch.advantages, tokens.log_probs, tokens.squared_rest)[batch.action_mask].double()

    def share(alpha: float, eta: float) -> float:
        weighted = norm * (alpha * probabilities + 1 - alpha)
        return (weighted[probabilities < eta].sum() / weighted.sum()).item()

    return {
        "low_tokens": (probabilities < MIDDLE).double().mean().item(),
        "low_gradient": share(0.0, MIDDLE),
        "low_gradient_by_alpha": {f"{alpha:g}": share(alpha, MIDDLE) for alpha in ALPHAS},
        "low_gradient_by_eta": {f"{eta:g}": share(0.0, eta) for eta in ETAS},
    }
