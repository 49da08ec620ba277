"""The paper's two methods as pure functions of torch tensors, without ray, deepspeed or openrlhf.

Shapes: B samples, A action (response) positions. `action_log_probs` is log π_old(o_t | q, o_<t) at the sampling
temperature (OpenRLHF's `experience.action_log_probs`). π_old is the policy at the start of the update. In synchronous
training it has sampled the batch; in asynchronous training it may be newer than the policy that did. `action_mask` is
nonzero on response tokens and zero on padding. Equations are those of arXiv 2505.12929.
"""

import torch


def token_probabilities(action_log_probs: torch.Tensor) -> torch.Tensor:
    """Return π_old of each token, shape as given, in at least float32.

    Both methods and the quantile read probabilities through this one function, so that a threshold taken from it and
    a comparison made with it agree to the last bit.
    """
    dtype = torch.promote_types(action_log_probs.dtype, torch.float32)
    return action_log_probs.to(dtype).exp()


def advantage_weights(action_log_probs: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the factor by which AR scales each advantage (Eq. 4): Â[i,t] = (α · π_old(o[i,t]) + (1 − α)) · A[i,t].

    Args:
        action_log_probs: (...,) log π_old.
        alpha: α in [0, 1]; 0 leaves the advantages as they are. Below 0 rare tokens count more.

    Returns:
        (...,), in at least float32, above 0: with α = 1 the probability of a token may round to 0, and a token of
        weight 0 would leave the KL and entropy terms too.

    Raises:
        ValueError: `alpha` is no number in [−1, 1].
    """
    if not isinstance(alpha, int | float) or not -1 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [-1, 1], got {alpha}")
    weights = alpha * token_probabilities(action_log_probs) + (1 - alpha)
    return weights.clamp(min=torch.finfo(weights.dtype).tiny)


def low_probability_mask(action_log_probs: torch.Tensor, action_mask: torch.Tensor, eta: float) -> torch.BoolTensor:
    """Select Lopti's low group (Algorithm 1): response tokens with π_old < η, strictly, and never padding.

    Args:
        action_log_probs: (B, A) log π_old.
        action_mask: (B, A).
        eta: η in (0, 1]. The flag takes (0, 1); a quantile may reach 1 where most tokens are certain.

    Returns:
        BoolTensor (B, A). The high group is the rest of the response.

    Raises:
        ValueError: the shapes differ or are not (B, A), or `eta` lies outside (0, 1].
    """
    _check_same_shape(action_log_probs=action_log_probs, action_mask=action_mask)
    if not 0 < eta <= 1:
        raise ValueError(f"eta must lie in (0, 1], got {eta}")
    return (token_probabilities(action_log_probs) < eta) & action_mask.bool()


def probability_quantile(action_log_probs: torch.Tensor, action_mask: torch.Tensor, q: float) -> float:
    """Return the η below which a share `q` of the response tokens lies, the linearly interpolated q-quantile of π_old.

    With N distinct probabilities the share of tokens that `low_probability_mask` then selects differs from `q` by less
    than 1/N. Tied probabilities are selected all together or not at all. The η lies in (0, 1], even where rounding
    puts π_old at 0 or above 1.

    Args:
        action_log_probs: (B, A) log π_old.
        action_mask: (B, A), with at least one token.
        q: in (0, 1).

    Raises:
        ValueError: the shapes differ or are not (B, A), `q` lies outside (0, 1), or the mask selects no token.
    """
    _check_same_shape(action_log_probs=action_log_probs, action_mask=action_mask)
    if not 0 < q < 1:
        raise ValueError(f"q must lie in (0, 1), got {q}")
    # Sorted by hand: torch.quantile refuses more than 2^24 elements, which one rollout batch can hold.
    probabilities = token_probabilities(action_log_probs)[action_mask.bool()].sort().values
    if not len(probabilities):
        raise ValueError("action_mask selects no token: there is no probability to take a quantile of")
    position = q * (len(probabilities) - 1)
    lower, upper = (
        probabilities[int(position)].item(),
        probabilities[min(int(position) + 1, len(probabilities) - 1)].item(),
    )
    eta = lower + (position - int(position)) * (upper - lower)
    return min(max(eta, torch.finfo(torch.float32).tiny), 1.0)


def _check_same_shape(**tensors: torch.Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(
            "expected tensors of one shape (B, A), got " + ", ".join(f"{n} {s}" for n, s in shapes.items())
        )
