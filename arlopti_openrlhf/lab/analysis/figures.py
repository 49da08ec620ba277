"""Compute what Fig. 1-3 show. Each function returns its figure's data, ready for JSON."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from arlopti_openrlhf.evaluation.measures import Z_95
from arlopti_openrlhf.lab.analysis.policy import Policy, Tokens, Update, padded_pieces
from arlopti_openrlhf.lab.analysis.rollouts import Batch
from arlopti_openrlhf.token_update import advantage_weights, low_probability_mask, token_probabilities
from arlopti_openrlhf.update.token_statistics import EDGES, bin_index, logit_gradient_norm

# Most tokens of a trained policy have a probability above 0.99. In one bin with the rest they would hide it.
DIRECTION_EDGES = (0.0, 0.25, 0.5, 0.75, 0.99, 1.0)
_POINTS = 2500  # in a scatter plot
_HISTOGRAM = 50  # bins


def bin_names(edges: Sequence[float]) -> list[str]:
    """Name bins by their edges: "0.25-0.5", and "≥ 0.75" for the last."""
    names = [f"{low:g}-{high:g}" for low, high in zip(edges[:-2], edges[1:-1], strict=True)]
    return [*names, f"≥ {edges[-2]:g}"]


def bins(probabilities: Tensor, mask: Tensor, edges: tuple[float, ...]) -> list[Tensor]:
    """Return (B, A) masks that partition `mask`."""
    index = bin_index(probabilities, edges)
    return [mask & (index == i) for i in range(len(edges) - 1)]


def _quantiles(values: Tensor) -> dict[str, float] | None:
    if not len(values):
        return None
    values = values.sort().values
    shares = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95}
    at = {name: values[round(q * (len(values) - 1))].item() for name, q in shares.items()}
    return at | {"mean": values.mean().item()}


def figure_1(policy: Policy, batch: Batch, tokens: Tokens, update: Update) -> dict:
    """Compute probabilities, advantages, gradient norms and changes by one update, by quarter of the range of π.

    There are three updates: by all tokens, by the lowest quarter, and by the highest. All have the second moments and
    the learning rate of `update`, whose gradient is used up. The policy has the weights that the batch was sampled
    from.
    """
    probabilities, mask = token_probabilities(tokens.log_probs), batch.action_mask
    quarters = bins(probabilities, mask, EDGES)
    norm = logit_gradient_norm(batch.advantages, tokens.log_probs, tokens.squared_rest)
    groups, after = [], {"all": update.log_probs}
    rest = update.gradient
    for i, (name, quarter) in enumerate(zip(bin_names(EDGES), quarters, strict=True)):
        # The gradient of each quarter alone, by a backward pass. The highest, with most tokens, has what is left.
        if i < len(quarters) - 1:
            gradient = policy.gradient(batch, tokens.log_probs, batch.advantages, quarter)
            for all_of_it, part in zip(rest, gradient, strict=True):
                all_of_it -= part
        else:
            gradient = rest if (quarter & (batch.advantages != 0)).any() else policy.zeros()
        # One update each by the lowest quarter and by the highest.
        if i in (0, len(quarters) - 1):
            after["highest" if i else "lowest"] = policy.log_probs_after_step(
                batch, gradient, update.moments, update.learning_rate
            )
        groups.append(
            {
                "name": name,
                "tokens": int(quarter.sum()),
                "advantages": _quantiles(batch.advantages[quarter]),
                "gradient_norm": sum(g.square().sum().item() for g in gradient) ** 0.5,
                # The mean over the tokens of their own gradients' norms at the logits, by Eq. 15, and their share.
                "logit_gradient_norm": norm[quarter].mean().item() if quarter.any() else None,
                "logit_gradient_share": (norm[quarter].sum() / norm[mask].sum()).item(),
            }
        )
        del gradient  # as large as the model
    # The scatter plots show a sample of the tokens, the same in each.
    chosen = mask.nonzero()
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))[:_POINTS]]
    rows, columns = chosen.unbind(dim=1)
    changes = {}
    for name, log_probs in after.items():
        change = token_probabilities(log_probs) - probabilities
        changes[name] = {
            "points": change[rows, columns].tolist(),
            "mean_absolute": [change[q].abs().mean().item() if q.any() else None for q in quarters],
        }
    return {
        "edges": list(EDGES),
        "learning_rate": update.learning_rate,
        "histogram": torch.histc(probabilities[mask], _HISTOGRAM, 0, 1).long().tolist(),
        "tokens": int(mask.sum()),
        "groups": groups,
        "change": changes,
        "points": {
            "probability": probabilities[rows, columns].tolist(),
            "advantage": batch.advantages[rows, columns].tolist(),
        },
    }


def logit_gradient_bounds(probabilities: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return Proposition 4.2's bounds of the norm for |w| = 1: (1 − π) · sqrt(V / (V − 1)) and √2 · (1 − π).

    Args:
        probabilities: (...,) π.
        vocabulary: V.
    """
    rest = 1 - probabilities
    return rest * math.sqrt(vocabulary / (vocabulary - 1)), rest * math.sqrt(2)


def figure_2(policy: Policy, batch: Batch, tokens: Tokens, count: int, layers: Sequence[int] | None = None) -> dict:
    """Compute the gradient of single tokens' log π at the activations of some layers, against 1 - π (Proposition 4.2).

    The norm is over all positions that the token's loss reaches, with weight w = 1. About `count` tokens are spread
    evenly over the range of probabilities. Layers count from 1; by default they are the first, middle and last.
    """
    probabilities = token_probabilities(tokens.log_probs)
    # As many tokens from each tenth of the range, although most tokens have a probability near 1.
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for tenth in bins(probabilities, batch.action_mask, tuple(i / 10 for i in range(11))):
        places = tenth.nonzero()
        drawn.append(places[torch.randperm(len(places), generator=generator)[: max(1, count // 10)]])
    chosen = torch.cat(drawn)
    blocks = decoder_layers(policy.model)
    numbers = layers or sorted({1, (len(blocks) + 1) // 2, len(blocks)})
    modules = {"embedding": policy.model.get_input_embeddings()}
    modules |= {f"layer {n} of {len(blocks)}": blocks[n - 1] for n in numbers}
    norms = activation_gradient_norms(policy, batch, chosen, modules)
    rows, columns = chosen.unbind(dim=1)
    rest = 1 - probabilities[rows, columns]
    # At the logits, Eq. 15 gives the norm, and Proposition 4.2 its bounds.
    log_probs, squared_rest = tokens.log_probs[rows, columns], tokens.squared_rest[rows, columns]
    expected = logit_gradient_norm(torch.ones(len(rows)), log_probs, squared_rest)
    vocabulary = policy.model.get_output_embeddings().weight.shape[0]
    lower, upper = logit_gradient_bounds(1 - rest, vocabulary)
    at_logits = norms["logits"]
    inside = (at_logits >= lower * (1 - 1e-3) - 1e-6) & (at_logits <= upper * (1 + 1e-3) + 1e-6)  # float32
    panels = []
    for name, values in norms.items():
        correlation = torch.corrcoef(torch.stack([rest, values]))[0, 1].item()
        panels.append(
            {
                "layer": name,
                "norm": values.tolist(),
                "slope": _quantiles((values / rest)[rest > 1e-3]),  # near 1 - π = 0 it is nothing but rounding
                "correlation": correlation if math.isfinite(correlation) else None,  # where one of the two is constant
            }
        )
    return {
        "one_minus_probability": rest.tolist(),
        "layers": panels,
        "vocabulary": vocabulary,
        "logit_slopes": [(vocabulary / (vocabulary - 1)) ** 0.5, 2**0.5],
        "inside_bounds": inside.float().mean().item(),
        "largest_gap_to_eq_15": (at_logits - expected).abs().max().item(),
    }


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the model's decoder layers. ValueError where no list of modules has as many members as it has layers."""
    number = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return module
    raise ValueError(f"{type(model).__name__}: no list of its {number} decoder layers was found")


def activation_gradient_norms(
    policy: Policy, batch: Batch, chosen: Tensor, modules: dict[str, nn.Module]
) -> dict[str, Tensor]:
    """Return {layer: (N,) norms} of the gradients of N tokens' log π, at the modules' outputs and at the "logits".

    The logits are those of the policy, divided by its temperature, as in Eq. 15.

    Every token, a row and a column in `chosen` (N, 2), gets a row of its own, cut before it. Rows do not interact, so
    one backward pass gives all their gradients.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str):
        def hook(module, inputs, output):
            outputs[name] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    norms: dict[str, list[Tensor]] = {name: [] for name in (*modules, "logits")}
    # Rows of like length share a micro-batch.
    stops = chosen[:, 1] + 1
    order = stops.argsort()
    for piece in padded_pieces(order, stops, policy.micro_batch_tokens):
        prefixes = [batch.sequences[row, :stop] for row, stop in zip(chosen[piece, 0], stops[piece], strict=True)]
        # Padded on the left, so the last position of each row predicts its token.
        attention_mask = pad_sequence([torch.ones_like(p) for p in prefixes], True, padding_side="left")
        logits = policy.model(
            pad_sequence(prefixes, True, padding_side="left").to(policy.device),
            attention_mask=attention_mask.to(policy.device),
            position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0).to(policy.device),
            logits_to_keep=1,
        ).logits
        outputs["logits"] = logits[:, -1].float() / policy.temperature
        targets = batch.sequences[chosen[piece, 0], stops[piece]].to(policy.device)
        loss = outputs["logits"].log_softmax(dim=-1).gather(1, targets[:, None]).sum()
        gradients = torch.autograd.grad(loss, [outputs[name] for name in norms])
        for name, gradient in zip(norms, gradients, strict=True):
            norms[name].append(gradient.flatten(1).norm(dim=1).cpu())
        outputs.clear()
    for handle in handles:
        handle.remove()
    # Back to the order of the chosen tokens.
    back = order.argsort()
    return {name: torch.cat(values)[back] for name, values in norms.items()}


def figure_3(
    policy: Policy,
    batch: Batch,
    tokens: Tokens,
    grpo: Update,
    alphas: Sequence[float],
    etas: Sequence[float],
) -> dict:
    """Compute the share of positive tokens whose probability rises in one update, by probability and method.

    Every update starts from the same weights and batch, and has the learning rate of `grpo`. Shares have a 95%
    interval, clustered by prompt. The rounding of log π is returned too: the median difference between two passes with
    other micro-batches.
    """
    positive = batch.action_mask & (batch.advantages > 0)
    selections = [*bins(token_probabilities(tokens.log_probs), positive, DIRECTION_EDGES), positive]
    # Every method is one update. AR changes the advantages, Lopti takes two stages.
    variants = []
    for alpha in alphas:
        advantages = advantage_weights(tokens.log_probs, alpha) * batch.advantages
        variants.append((f"AR α={alpha:g}", advantages, [batch.action_mask]))
    for eta in etas:
        low = low_probability_mask(tokens.log_probs, batch.action_mask, eta)
        stages = [low, batch.action_mask & ~low]
        variants.append((f"Lopti η={eta:g}", batch.advantages, [stage for stage in stages if stage.any()]))
    # Both log-probs of a comparison come from the same micro-batches, which round alike.
    rises = {"GRPO": grpo.log_probs > tokens.log_probs}
    before = policy.log_probs(batch, positive)
    for name, advantages, stages in variants:
        after = policy.log_probs_after_update(
            batch, tokens.log_probs, advantages, stages, grpo.learning_rate, positive
        )
        rises[name] = after > before
    results = {
        name: [_share(right, selected, batch.prompts) for selected in selections] for name, right in rises.items()
    }
    rounding = (before - tokens.log_probs)[positive].abs().median().item()
    return {
        "edges": list(DIRECTION_EDGES),
        "learning_rate": grpo.learning_rate,
        "bins": [*bin_names(DIRECTION_EDGES), "all"],
        "positive_tokens": [int(selected.sum()) for selected in selections],
        "right_direction": results,
        "median_rounding_of_log_probs": rounding,
    }


def _share(right: Tensor, selected: Tensor, prompts: Tensor) -> dict[str, float] | None:
    """Return Σ right / Σ selected and its 95% half-width, linearised and clustered by prompt. None for 0 / 0.

    The tokens of a single prompt say nothing of others: their half-width is None.
    """
    total = int(selected.sum())
    if not total:
        return None
    share = ((right & selected).sum() / total).item()
    residual = ((right & selected).sum(dim=1) - share * selected.sum(dim=1)).double()
    by_prompt = torch.zeros(int(prompts.max()) + 1, dtype=torch.float64).index_add_(0, prompts, residual)
    count = len(prompts[selected.any(dim=1)].unique())
    error = (by_prompt.square().sum() * count / (count - 1)).sqrt().item() / total if count > 1 else None
    return {"share": share, "ci95": None if error is None else Z_95 * error}
