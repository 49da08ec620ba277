"""Analyse models one by one: sample and grade responses, then compute what the figures show of them.

Responses are written as they come, so an analysis that was interrupted samples only the rest.
"""

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from arlopti_openrlhf import cpu
from arlopti_openrlhf.lab.analysis import figures, plots, rollouts, words
from arlopti_openrlhf.lab.analysis.policy import Policy, Tokens, Update
from arlopti_openrlhf.lab.scoring.inputs import Row
from arlopti_openrlhf.lab.scoring.own_reward import OwnReward
from arlopti_openrlhf.ops.preflight.model import num_parameters
from arlopti_openrlhf.token_update import low_probability_mask
from arlopti_openrlhf.update.token_statistics import logit_gradient_norm

STEP = 0.02  # root mean square change of log π by one update, unless a learning rate is given
_FEW = 30  # positive tokens in a bin of Fig. 3
_MIDDLE = 0.5  # the paper's η
# What an unset flag is, and what it is for a model of more than _SMALL parameters on a CPU. That takes 20 minutes.
_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "samples": (8, 4),
    "max_new_tokens": (1024, 256),
    "tokens": (None, None),  # the latter follows from _WORK
    "alpha": ([0.1, 0.3, 0.5], [0.3]),
    "eta": ([0.3, 0.5, 0.7], [0.5]),
    "layer_tokens": (300, 100),
    "micro_batch_tokens": (4096, 1024),
}
_SMALL = 20_000_000
_WORK = 1.3e12  # parameters times tokens


class FigureSettings(NamedTuple):
    """How every model is asked and updated."""

    samples: int  # per prompt
    temperature: float
    template: Mapping[str, Any]  # arguments of the chat template
    max_new_tokens: int
    tokens: int | None  # of prompts and responses, at most; None stands for any number
    seed: int
    figures: Sequence[str]
    alpha: Sequence[float]
    eta: Sequence[float]
    optimizer: str  # "adamw" or "sgd"
    learning_rate: float | None  # None stands for the one at which GRPO's update changes log π by STEP
    layers: Sequence[int] | None  # of Fig. 2, from 1; None stands for first, middle and last
    layer_tokens: int  # of Fig. 2
    micro_batch_tokens: int


def check_layers(model: str, layers: Sequence[int]) -> None:
    """Check that a model's configuration can be read and that it has all of the layers. OSError, ValueError if not."""
    number = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
    wrong = [layer for layer in layers if not 1 <= layer <= number]
    if wrong:
        raise ValueError(f"--layers {wrong[0]}: {model} has the layers 1 to {number}")


def set_defaults(args: argparse.Namespace, models: Sequence[str]) -> None:
    """Give the flags that are unset their values for the largest of the models on this machine. Print smaller ones."""
    largest = max(filter(None, map(num_parameters, models)), default=0)
    is_slow = cpu.uses_cpu() and largest > _SMALL
    values = {name: of_both[is_slow] for name, of_both in _DEFAULTS.items()}
    if is_slow:
        values["tokens"] = int(_WORK / largest)
    unset = {name: value for name, value in values.items() if getattr(args, name) is None}
    for name, value in unset.items():
        setattr(args, name, value)
    if is_slow and unset:
        words = {
            name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in unset.items()
        }
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in words.items())
        print(f"{largest / 1e6:.0f}M parameters on a CPU: {flags}", flush=True)


def analyze_model(
    name: str, model: str, rows: list[Row], settings: FigureSettings, folder: Path, reward: OwnReward | None = None
) -> tuple[dict, dict]:
    """Analyse one model's responses to the rows. The folder gets the responses, and each figure once it is done.

    Returns:
        The model's summary, and the data of Fig. 5.
    """
    limit = f", at most {settings.tokens:,} tokens in all (--tokens)" if settings.tokens else ""
    print(f"{name}: {settings.samples} responses to each of {len(rows)} prompts{limit}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    asked = rollouts.Asked(
        settings.samples,
        settings.temperature,
        settings.max_new_tokens,
        settings.seed,
        with_end=reward is not None,
        template=settings.template,
    )
    sampled = rollouts.answer(folder / "responses.jsonl", model, rows, asked, settings.tokens)
    # Grade the responses, and look at them with the weights that gave them.
    graded = rollouts.grade(rows[: len(sampled)], sampled, reward)
    batch = rollouts.make_batch(graded)
    policy = Policy(model, settings.temperature, settings.micro_batch_tokens, settings.optimizer)
    tokens = policy.tokens(batch)
    summary = _summarize(graded, batch, tokens) | {"parameters": sum(p.numel() for p in policy.parameters)}
    if len(sampled) < len(rows):
        summary["notices"].append(f"Shown are the first {len(sampled)} of {len(rows)} prompts, which fill --tokens.")
    wanted, notices = _possible(settings, batch)
    summary["notices"] += notices
    data = {}
    for figure, values in _made(policy, batch, tokens, settings, wanted):
        plots.write(figure, values, folder)
        data[figure] = values
    for figure in ("fig1", "fig3"):
        if figure in data:
            summary["learning_rate"] = data[figure]["learning_rate"]
    summary["notices"] += empty_bins(data)
    # Make room. vLLM, which samples the next model's responses, needs the GPU's memory.
    del policy
    gc.collect()
    torch.cuda.empty_cache()
    found = words.analyze([g.text for g in graded], [g.reward for g in graded], [g.prompt for g in graded])
    if not any(result["per_1000_words"] for result in found.values()):
        summary["notices"].append("None of the words of Fig. 5 occurs in the responses.")
    return summary, found


def _summarize(graded: Sequence[rollouts.Graded], batch: rollouts.Batch, tokens: Tokens) -> dict[str, Any]:
    scores = [g.score for g in graded if g.score is not None]
    norm = logit_gradient_norm(batch.advantages, tokens.log_probs, tokens.squared_rest)
    low = low_probability_mask(tokens.log_probs, batch.action_mask, _MIDDLE)
    has_gradient = bool(batch.advantages.any())
    return {
        "responses": len(graded),
        "reward": sum(g.reward for g in graded) / len(graded),
        "accuracy": sum(scores) / len(scores) if len(scores) == len(graded) else None,
        "length": sum(len(g.response_ids) for g in graded) / len(graded),
        "entropy": tokens.entropy[batch.action_mask].mean().item(),
        "low_tokens": (low.sum() / batch.action_mask.sum()).item() if has_gradient else None,
        "low_gradient": (norm[low].sum() / norm[batch.action_mask].sum()).item() if has_gradient else None,
        "learning_rate": None,
        "notices": [],
    }


def _possible(settings: FigureSettings, batch: rollouts.Batch) -> tuple[list[str], list[str]]:
    """Return the figures that the batch allows, and in words why not the others."""
    wanted, notices = list(settings.figures), []
    # Fig. 2 needs no advantage. The rest needs an update, and so some prompt whose rewards differ.
    if not batch.advantages.any():
        wanted = [figure for figure in wanted if figure == "fig2"]
        notices.append(
            f"All {settings.samples} responses to each prompt earned the same reward. No token has an advantage, so "
            "there is no update to analyse (Fig. 1, Fig. 3). More prompts, or easier or harder ones, may help."
        )
    return wanted, notices


def _made(
    policy: Policy, batch: rollouts.Batch, tokens: Tokens, settings: FigureSettings, wanted: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the data of each wanted figure once it is computed."""
    if wanted:
        print(f"makes {', '.join(wanted)}", flush=True)
    if "fig2" in wanted:
        yield "fig2", figures.figure_2(policy, batch, tokens, settings.layer_tokens, settings.layers)
    if {"fig1", "fig3"} & set(wanted):
        update = _update(policy, batch, tokens, settings)
        if "fig1" in wanted:
            yield "fig1", figures.figure_1(policy, batch, tokens, update)
        update = update._replace(gradient=[], moments=[])  # as large as the model, each
        if "fig3" in wanted:
            yield "fig3", figures.figure_3(policy, batch, tokens, update, settings.alpha, settings.eta)


def _update(policy: Policy, batch: rollouts.Batch, tokens: Tokens, settings: FigureSettings) -> Update:
    """Make GRPO's update."""
    moments = policy.zeros()
    gradient = policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask, moments)
    rate = settings.learning_rate or policy.learning_rate_of(batch, tokens.log_probs, gradient, moments, STEP)
    return Update(gradient, moments, rate, policy.log_probs_after_step(batch, gradient, moments, rate))


def empty_bins(data: dict) -> list[str]:
    """Say in words what Fig. 1 and Fig. 3 cannot show for want of tokens."""
    empty = [group["name"] for group in data["fig1"]["groups"] if not group["tokens"]] if "fig1" in data else []
    notices = [f"No token has a probability in: {', '.join(empty)}."] if empty else []
    pairs = zip(data["fig3"]["bins"], data["fig3"]["positive_tokens"], strict=True) if "fig3" in data else ()
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
    if summary["low_tokens"] is not None:
        lines.append(
            f"tokens with probability < {_MIDDLE}: {summary['low_tokens']:.1%}, "
            f"{summary['low_gradient']:.1%} of the gradient"
        )
    return [f"  {line}" for line in (*lines, *summary["notices"])]
