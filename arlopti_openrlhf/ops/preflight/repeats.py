"""Finds prompts that occur too often: again and again in the training set, or in the evaluation set as well."""

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from arlopti_openrlhf.ops.preflight.finding import Finding

_FEW = 0.1  # of the rows


def check(args: SimpleNamespace, training: Sequence[Any], evaluation: Sequence[Any]) -> Iterator[Finding]:
    """Yield what is repeated. Prompts are text or messages, in the order of the data."""
    trained = {_key(prompt) for prompt in training}
    if 0 < len(trained) <= _FEW * len(training):
        problem = f"its {len(training)} rows have {len(trained)} different prompt{'s' * (len(trained) > 1)}"
        remedy = "look whether the file is the right one, unless that is meant"
        yield Finding.of(args, "data.prompt_dataset", problem, remedy, is_fatal=False)
    if both := sum(_key(prompt) in trained for prompt in evaluation):
        problem = f"{both} of its {len(evaluation)} prompts are trained on, so their accuracy says nothing of new ones"
        remedy = "leave them out of --data.prompt_dataset, or give other data"
        yield Finding.of(args, "eval.dataset", problem, remedy, is_fatal=False)


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True, default=str)
