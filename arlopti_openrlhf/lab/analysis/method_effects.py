"""Say which token methods would lower noise on a batch, and which would lower signal."""

from collections.abc import Sequence

import torch
from torch import Tensor

from arlopti_openrlhf import token_method
from arlopti_openrlhf.lab.analysis.policy import Tokens
from arlopti_openrlhf.lab.analysis.rollouts import Batch
from arlopti_openrlhf.methods import built_in
from arlopti_openrlhf.update.token_statistics import logit_gradient_norm

# Of the whole gradient at the logits. A cell whose share falls by less is left as it is.
LEAST_CHANGE = 0.005
# {name in the report: (method, arguments)} of what is no file of its own.
RELATIVES = {"ar alpha=-0.2 (Direction)": ("ar", ["ar.alpha=-0.2"])}
LOWERS = ("noise", "signal", "both", "neither")


def method_weights(batch: Batch, tokens: Tokens) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Ask every built-in token method, at its default constants, for the weights of a rollout batch.

    Returns:
        {method: (B, A) weights, summed over its passes}, and {method: why it gives none}.
    """
    mask = batch.action_mask
    seen = token_method.Tokens(tokens.log_probs, batch.advantages, mask, tokens.entropy)
    row = token_method.Tokens(*(values[mask][None] for values in seen))
    weights, left_out = {}, {}
    asked: dict[str, tuple[str, list[str]]] = {name: (name, []) for name in built_in()} | RELATIVES
    for label, (name, arguments) in asked.items():
        try:
            (method,) = token_method.load([name], arguments)
        except ValueError as error:  # a constant that has no default
            left_out[label] = str(error)
            continue
        weights[label] = torch.stack(method.weigh(seen, method.statistic(row))).sum(dim=0)
    return weights, left_out


def gradient_sizes(batch: Batch, tokens: Tokens) -> Tensor:
    """Return the norm (B, A) of each token's own gradient at the logits, by Eq. 15."""
    return logit_gradient_norm(batch.advantages, tokens.log_probs, tokens.squared_rest)


def gradient_shares(sizes: Tensor, cells: Sequence[Tensor]) -> list[float] | None:
    """Return each cell's share of a sum over tokens, or None where the sum is 0.

    Args:
        sizes: (B, A), 0 outside the cells.
        cells: the (B, A) mask of each of C cells, which divide the tokens.
    """
    sums = torch.stack([sizes[cell].double().sum() for cell in cells])
    return (sums / sums.sum()).tolist() if sums.sum() > 0 else None


def effect(before: Sequence[float], after: Sequence[float] | None, agrees: Sequence[bool]) -> dict:
    """Say whether a method lowers noise or signal.

    It lowers a cell whose share of the gradient falls by at least `LEAST_CHANGE`. Shares, because a factor that all
    weights have in common is a matter of the learning rate, and of nothing under AdamW.

    Args:
        before: (C,) the cells' shares without the method.
        after: (C,) with it, or None where it leaves no token.
        agrees: (C,) whether a cell agrees with the whole on other prompts. Elsewhere it is noise, as far as the batch
            can tell.

    Returns:
        `after`; `noise` and `signal`, the shares that the lowered cells of each kind lose; `lowers`, one of `LOWERS`;
        `agreeing_before` and `agreeing_after`, the share of all cells that agree. A method that leaves no token lowers
        both, by all that there is.
    """
    if after is None:
        after = [0.0] * len(before)
    lost = {True: 0.0, False: 0.0}
    for share, new, agreeing in zip(before, after, agrees, strict=True):
        if share - new >= LEAST_CHANGE:
            lost[agreeing] += share - new
    noise, signal = lost[False], lost[True]
    lowers = "both" if noise and signal else "noise" if noise else "signal" if signal else "neither"
    of_agreeing = [sum(share for share, yes in zip(shares, agrees, strict=True) if yes) for shares in (before, after)]
    return {
        "after": list(after),
        "noise": noise,
        "signal": signal,
        "lowers": lowers,
        "agreeing_before": of_agreeing[0],
        "agreeing_after": of_agreeing[1],
    }


def sentences(data: dict) -> list[str]:
    """Return in words what `gradient_agreement.analyze` found."""
    whole = data["whole"]
    if whole is None:
        return ["No cell of tokens has a gradient."]
    said = [
        f"{data['prompts']} prompts have a gradient. Between that of one half of them and that of the other the "
        f"cosine is {whole['cosine']:.2f} (95%: {whole['low']:.2f} to {whole['high']:.2f})."
    ]
    if not data["methods"]:
        no_verdict = "Too little agrees to tell signal from noise, so no token method is judged. Give more --prompts."
        return [*said, no_verdict]
    agreeing = [cell for cell in data["cells"] if cell["found"] == "agrees"]
    whole_share, logit_share = (sum(cell[key] for cell in agreeing) for key in ("share", "logit_share"))
    said.append(
        f"Cells that agree on other prompts carry {whole_share:.0%} of the gradient over all parameters, and "
        f"{logit_share:.0%} token by token at the logits. The others are noise or oppose them, as far as this batch "
        "can tell."
    )
    found = [f"{names} lower {kind}" for kind in LOWERS if (names := _named(data["methods"], kind))]
    return [*said, f"At their default constants, {'; '.join(found)}."]


def _named(methods: dict[str, dict], kind: str) -> str:
    chosen = {name: found for name, found in methods.items() if found["lowers"] == kind}
    if kind != "both":
        return ", ".join(chosen)
    return ", ".join(
        f"{name} (noise by {100 * found['noise']:.1f} points, signal by {100 * found['signal']:.1f})"
        for name, found in chosen.items()
    )
