"""Say how the gradient is distributed over tokens, and which token methods would lower noise in it and which signal.

A token's share is the norm of its own gradient at the logits, by Eq. 15, so no backward pass is needed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from arlopti_openrlhf import token_method
from arlopti_openrlhf.lab.analysis.policy import Tokens
from arlopti_openrlhf.lab.analysis.rollouts import Batch
from arlopti_openrlhf.methods import built_in
from arlopti_openrlhf.token_update import token_probabilities
from arlopti_openrlhf.update.token_statistics import logit_gradient_norm

MIDDLE = 0.5  # the paper's η
_ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_ETAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Of the whole gradient at the logits. A cell whose share falls by less is left as it is.
_LEAST_CHANGE = 0.005
# {name in the report: (method, arguments)} of what is no file of its own.
_RELATIVES = {"ar alpha=-0.2 (Direction)": ("ar", ["ar.alpha=-0.2"])}


def gradient_sizes(batch: Batch, tokens: Tokens) -> Tensor:
    """Return the norm (B, A) of each token's own gradient at the logits, by Eq. 15."""
    return logit_gradient_norm(batch.advantages, tokens.log_probs, tokens.squared_rest)


def gradient_by_probability(batch: Batch, tokens: Tokens) -> dict:
    """Return the unlikely tokens' part of the tokens and of the gradient, Σ |A| · ‖e_o − P‖ over tokens.

    The batch must have an advantage somewhere.

    Returns:
        `low_tokens` and `low_gradient`, the share of tokens with π < `MIDDLE`, and theirs of the gradient.
        `low_gradient_by_alpha`, the latter as AR leaves it, by α. `low_gradient_by_eta`, the gradient's share of the
        tokens with π < η, by η.
    """
    probabilities = token_probabilities(tokens.log_probs)[batch.action_mask].double()
    norm = gradient_sizes(batch, tokens)[batch.action_mask].double()

    def share(alpha: float, eta: float) -> float:
        weighted = norm * (alpha * probabilities + 1 - alpha)
        return (weighted[probabilities < eta].sum() / weighted.sum()).item()

    return {
        "low_tokens": (probabilities < MIDDLE).double().mean().item(),
        "low_gradient": share(0.0, MIDDLE),
        "low_gradient_by_alpha": {f"{alpha:g}": share(alpha, MIDDLE) for alpha in _ALPHAS},
        "low_gradient_by_eta": {f"{eta:g}": share(0.0, eta) for eta in _ETAS},
    }


def method_weights(batch: Batch, tokens: Tokens) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Ask every built-in token method, at its default constants, for the weights of a rollout batch.

    Returns:
        {method: (B, A) weights, summed over its passes}, and {method: why it gives none}.
    """
    seen = token_method.Tokens(
        tokens.log_probs,
        batch.advantages,
        batch.action_mask,
        tokens.entropy,
        rollout_log_probs=tokens.log_probs,  # the policy has drawn the batch itself
    )
    row = token_method.Tokens(*(values[batch.action_mask][None] for values in seen))
    weights, left_out = {}, {}
    requested: dict[str, tuple[str, list[str]]] = {name: (name, []) for name in built_in()} | _RELATIVES
    for label, (name, arguments) in requested.items():
        try:
            (method,) = token_method.load([name], arguments)
        except ValueError as error:  # a constant that has no default
            left_out[label] = str(error)
            continue
        weights[label] = torch.stack(method.weigh(seen, method.statistic(row))).sum(dim=0)
    return weights, left_out


def gradient_shares(sizes: Tensor, cells: Sequence[Tensor]) -> list[float] | None:
    """Return each cell's share of a sum over tokens, or None where the sum is 0.

    `sizes` (B, A) are 0 outside the cells, whose (B, A) masks divide the tokens.
    """
    sums = torch.stack([sizes[cell].double().sum() for cell in cells])
    return (sums / sums.sum()).tolist() if sums.sum() > 0 else None


def effect(before: Sequence[float], after: Sequence[float] | None, agrees: Sequence[bool]) -> dict:
    """Say whether a method lowers noise or signal.

    It lowers a cell whose share of the gradient falls by at least `_LEAST_CHANGE`. We compare shares: a common factor
    only rescales the learning rate, and AdamW cancels even that.

    `before` and `after` (C,) are the cells' shares without and with the method. None stands for one that leaves no
    token, and so lowers both. `agrees` (C,) tells which cells agree with the whole on other prompts. The others are
    noise, as far as the batch can tell.

    Returns:
        `after`; `noise` and `signal`, the shares that the lowered cells of each kind lose; `lowers`, "noise",
        "signal", "both" or "neither"; `agreeing_before` and `agreeing_after`, the share of all cells that agree.
    """
    if after is None:
        after = [0.0] * len(before)
    lost = {True: 0.0, False: 0.0}
    for share, new, agreeing in zip(before, after, agrees, strict=True):
        if share - new >= _LEAST_CHANGE:
            lost[agreeing] += share - new
    noise, signal = lost[False], lost[True]
    of_agreeing = [sum(share for share, yes in zip(shares, agrees, strict=True) if yes) for shares in (before, after)]
    return {
        "after": list(after),
        "noise": noise,
        "signal": signal,
        "lowers": "both" if noise and signal else "noise" if noise else "signal" if signal else "neither",
        "agreeing_before": of_agreeing[0],
        "agreeing_after": of_agreeing[1],
    }


def sentences(data: dict) -> list[str]:
    """Return in words what `gradient_agreement.analyze` found."""
    whole = data["whole"]
    if whole is None:
        return ["No cell of tokens has a gradient."]
    first = (
        f"{data['prompts']} prompts have a gradient. Between that of one half of them and that of the other the "
        f"cosine is {whole['cosine']:.2f} (95%: {whole['low']:.2f} to {whole['high']:.2f})."
    )
    if not data["methods"]:
        no_verdict = "Too little agrees to tell signal from noise, so no token method is judged. Give more --prompts."
        return [first, no_verdict]
    agreeing = [cell for cell in data["cells"] if cell["found"] == "agrees"]
    whole_share, logit_share = (sum(cell[key] for cell in agreeing) for key in ("share", "logit_share"))
    second = (
        f"Cells that agree on other prompts carry {whole_share:.0%} of the gradient over all parameters, and "
        f"{logit_share:.0%} token by token at the logits. The others are noise or oppose them, as far as this batch "
        "can tell."
    )
    by_kind: dict[str, list[str]] = {"noise": [], "signal": [], "both": [], "neither": []}
    for name, found in data["methods"].items():
        sizes = f" (noise by {100 * found['noise']:.1f} points, signal by {100 * found['signal']:.1f})"
        by_kind[found["lowers"]].append(name + (sizes if found["lowers"] == "both" else ""))
    lowered = "; ".join(f"{', '.join(names)} lower {kind}" for kind, names in by_kind.items() if names)
    return [first, second, f"At their default constants, {lowered}."]
