"""Tries token methods with made-up tokens, in a process that can be killed (`ops.preflight.probe`)."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from arlopti_openrlhf.token_method import Method, as_one_row, load, made_up_tokens, pass_labels


def describe(sources: Sequence[str], arguments: Sequence[str]) -> dict[str, Any]:
    """Say what `load` makes of token methods. What they print is lost.

    Returns:
        `problem`, what is wrong with them in one line, or None. Then also `doubts`, lines about weights that look
        wrong; `passes`, how many optimizer steps they take where there is one without them; `selective_only`, the
        names of those that need the selective update; and `reading_rollout_log_probs`, of those that read these.
    """
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            methods = load(sources, arguments)
            found = [doubt for method in methods for doubt in doubts(method)]
        except ValueError as error:
            return {"problem": str(error)}
    return {
        "problem": None,
        "doubts": found,
        "passes": len(pass_labels(methods)),
        "selective_only": [m.name for m in methods if m.needs_entropies or m.divides_by_kept],
        "reading_rollout_log_probs": [method.name for method in methods if method.needs_rollout_log_probs],
    }


def doubts(method: Method) -> Iterator[str]:
    """Yield what looks wrong with the weights of made-up tokens, and may be meant."""
    tokens = made_up_tokens()
    statistic = method.statistic(as_one_row(tokens))
    once, again = (method.weigh(tokens, statistic) for _ in range(2))
    if not any(weights.any() for weights in once):
        yield f"{method.name} gives all made-up tokens the weight 0, and would train nothing if it did so in a run"
    if not all(map(torch.equal, once, again)):
        yield f"{method.name} gives the same tokens other weights at each call, so no run can be repeated or resumed"
