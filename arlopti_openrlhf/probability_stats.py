"""What an update does to tokens of each probability (Fig. 1-3), from tensors that it has at hand.

Pure functions of torch tensors. By Eq. 15 the gradient of one token's loss at the logits is w · (e_o − P), so its norm
is known from the token's weight and its distribution: no backward pass is needed to measure it.
"""

import math

import torch
from torch import Tensor

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)


def logit_gradient_norm(weights: Tensor, log_probs: Tensor, squared_rest: Tensor) -> Tensor:
    """‖∂L/∂logits‖ of each token, Eq. 15: |w| · sqrt(1 − 2π + Σ_j P_j²).

    Computed as |w| · sqrt((1 − π)² + Σ_{j≠o} P_j²), the same without cancellation where π is near 1, as it is for most
    tokens.

    Args:
        weights: (...,) w = ∂L/∂ log π of the token.
        log_probs: (...,) log π of the sampled token, under the policy that is differentiated.
        squared_rest: (...,) Σ_{j≠o} P_j² of its distribution, without the sampled token.

    Returns:
        (...,), in the logits' own unit: logits that are divided by a temperature T have 1/T of it.
    """
    return weights.abs() * (torch.expm1(log_probs).square() + squared_rest).sqrt()


def logit_gradient_bounds(probabilities: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """What the norm lies between for |w| = 1, Proposition 4.2 at the logits: (1 − π) · sqrt(V / (V − 1)), √2 · (1 − π).

    Args:
        probabilities: (...,) π.
        vocabulary: V.
    """
    rest = 1 - probabilities
    return rest * math.sqrt(vocabulary / (vocabulary - 1)), rest * math.sqrt(2)


def bin_index(probabilities: Tensor, edges: tuple[float, ...] = EDGES) -> Tensor:
    """(...,) index of each token's bin: bin i is [edges[i], edges[i + 1]), the last one closed.

    An edge belongs to the bin above it, as η belongs to Lopti's high group.
    """
    inner = torch.tensor(edges[1:-1], dtype=probabilities.dtype, device=probabilities.device)
    return torch.bucketize(probabilities, inner, right=True)
