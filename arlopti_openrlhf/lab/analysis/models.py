"""Analyse models one by one: sample and grade responses, then compute what the figures show of them."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from arlopti_openrlhf.lab.analysis import figures, gradient_agreement, method_effects, rollouts, words
from arlopti_openrlhf.lab.analysis.policy import Policy
from arlopti_openrlhf.lab.scoring.inputs import Row
from arlopti_openrlhf.lab.scoring.own_reward import OwnReward

STEP = 0.02  # root mean square change of log π by one update, unless a learning rate is given
LAYER_TOKENS = 300  # of Fig. 2
_FEW = 30  # positive tokens in a bin of Fig. 3


class Settings(NamedTuple):
    """How every model is asked and updated."""

    samples: int  # per prompt
    temperature: float
    max_new_tokens: int
    seed: int
    alpha: Sequence[float]
    eta: Sequence[float]
    optimizer: str  # "adamw" or "sgd"
    learning_rate: float | None  # None stands for the one at which GRPO's update changes log π by STEP
    layers: Sequence[int] | None  # of Fig. 2, from 1; None stands for first, middle and last
    micro_batch_tokens: int
    cells: str  # of the agreement: "probability" or "entropy"


def check_layers(model: str, layers: Sequence[int]) -> None:
    """Check that a model's configuration can be read and that it has all of the layers. OSError, ValueError if not."""
    number = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
    wrong = [layer for layer in layers if not 1 <= layer <= number]
    if wrong:
        raise ValueError(f"--layers {wrong[0]}: {model} has the layers 1 to {number}")


def analyze_model(
    name: str, model: str, rows: list[Row], settings: Settings, reward: OwnReward | None = None
) -> tuple[dict, dict, dict]:
    """Analyse one model's responses to the rows.

    Returns:
        The model's summary, {figure: data} for Fig. 1-3 and the agreement, and the data of Fig. 5.
    """
    print(f"{name}: {len(rows)} prompts, {settings.samples} responses each", flush=True)
    asked = (settings.samples, settings.temperature, settings.max_new_tokens, settings.seed)
    sampled = rollouts.sample(model, rows, *asked, with_end=reward is not None)
    # Grade the responses, and look at them with the weights that gave them.
    graded = rollouts.grade(rows, sampled, reward)
    scores = [g.score for g in graded if g.score is not None]
    batch = rollouts.make_batch(graded)
    policy = Policy(model, settings.temperature, settings.micro_batch_tokens, settings.optimizer)
    tokens = policy.tokens(batch)
    summary: dict[str, Any] = {
        "responses": len(graded),
        "reward": sum(g.reward for g in graded) / len(graded),
        "accuracy": sum(scores) / len(scores) if len(scores) == len(graded) else None,
        "length": sum(len(g.response_ids) for g in graded) / len(graded),
        "entropy": tokens.entropy[batch.action_mask].mean().item(),
        "low_tokens": None,
        "low_gradient": None,
        "learning_rate": settings.learning_rate,
        "parameters": sum(p.numel() for p in policy.parameters),
        "shares": None,
        "agreement": None,
        "notices": [],
    }
    # Fig. 2 needs no advantage. The rest needs an update, and so some prompt whose rewards differ.
    data = {"fig2": figures.figure_2(policy, batch, tokens, LAYER_TOKENS, settings.layers)}
    if batch.advantages.any():
        summary["shares"] = method_effects.gradient_by_probability(batch, tokens)
        summary |= {key: summary["shares"][key] for key in ("low_tokens", "low_gradient")}
        agreement = gradient_agreement.analyze(policy, batch, tokens, settings.cells, settings.seed)
        if agreement:
            data["agreement"] = agreement
            summary["agreement"] = method_effects.sentences(agreement)
        else:
            summary["notices"].append(
                f"Fewer than {gradient_agreement.LEAST_PROMPTS} prompts have responses of different reward, too few "
                "to ask whether their gradients agree. More --prompts would help."
            )
        summary["learning_rate"], updated = _analyze_update(policy, batch, tokens, settings)
        data |= updated
        summary["notices"] += empty_bins(data)
    else:
        summary["notices"].append(
            f"All {settings.samples} responses to each prompt earned the same reward. No token has an advantage, so "
            "there is no update to analyse (Fig. 1, Fig. 3). More prompts, or easier or harder ones, may help."
        )
    # Make room. vLLM, which samples the next model's responses, needs the GPU's memory.
    del policy
    gc.collect()
    torch.cuda.empty_cache()
    found = words.analyze([g.text for g in graded], [g.reward for g in graded], [g.prompt for g in graded])
    if not any(result["per_1000_words"] for result in found.values()):
        summary["notices"].append("None of the words of Fig. 5 occurs in the responses.")
    return summary, dict(sorted(data.items())), found


def _analyze_update(policy: Policy, batch: rollouts.Batch, tokens, settings: Settings) -> tuple[float, dict]:
    """Return the learning rate and the data of Fig. 1 and Fig. 3."""
    moments = policy.zeros()
    gradient = policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask, moments)
    rate = settings.learning_rate or policy.learning_rate_of(batch, tokens.log_probs, gradient, moments, STEP)
    del gradient  # as large as the model
    figure_1 = figures.figure_1(policy, batch, tokens, rate, moments)
    del moments  # as large, too
    return rate, {
        "fig1": figure_1,
        "fig3": figures.figure_3(policy, batch, tokens, rate, settings.alpha, settings.eta),
    }


def empty_bins(data: dict) -> list[str]:
    """Say in words what Fig. 1 and Fig. 3 cannot show for want of tokens."""
    empty = [group["name"] for group in data["fig1"]["groups"] if not group["tokens"]]
    notices = [f"No token has a probability in: {', '.join(empty)}."] if empty else []
    pairs = zip(data["fig3"]["bins"], data["fig3"]["positive_tokens"], strict=True)
    few = [f"{name} ({number})" for name, number in pairs if number < _FEW]
    if few:
        notices.append(f"Fig. 3 has few positive tokens in: {', '.join(few)}. More prompts or samples would help.")
    return notices


def describe(summary: dict) -> list[str]:
    """Return a model's summary as lines for the terminal."""
    accuracy = "" if summary["accuracy"] is None else f"accuracy {summary['accuracy']:.3f}, "
    lines = [
        f"mean reward {summary['reward']:.3f}, {accuracy}"
        f"{summary['length']:.0f} tokens per response, entropy {summary['entropy']:.3f} nats"
    ]
    if summary["shares"]:
        lines.append(
            f"tokens with probability < {method_effects.MIDDLE}: {summary['low_tokens']:.1%}, "
            f"{summary['low_gradient']:.1%} of the gradient"
        )
    return [f"  {line}" for line in (*lines, *(summary["agreement"] or ()), *summary["notices"])]
