"""Evaluates during training, with the measures of `cli.evaluate` for each data source.

The measures come from the samples' `scores`, while upstream averages rewards. Each source may also have its own number
of samples and temperature.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ppo_utils.experience import Experience

from arlopti_openrlhf.evaluation.measures import Response, estimate_source
from arlopti_openrlhf.evaluation.sampling import Sampling, sampling_of
from arlopti_openrlhf.ops.rollouts.samples import SamplesGenerator

_upstream_metrics = ppo_trainer.compute_eval_metrics


def install(specs: Sequence[Sampling]) -> None:
    """Make OpenRLHF's trainers evaluate so. `specs` say how to sample each source, and the first matches all."""
    for module in (ppo_trainer, ppo_trainer_async):
        module.SamplesGenerator = functools.partial(SamplesGenerator, specs=specs)
        module.compute_eval_metrics = functools.partial(compute_eval_metrics, specs=specs)


def compute_eval_metrics(
    eval_dataloader, samples_list: Sequence[Experience], n_samples_per_prompt: int, specs: Sequence[Sampling]
) -> dict[str, float]:
    """Return each source's measures, their mean accuracy, and upstream's metrics with scores in place of rewards.

    A measure is `<source>/<measure>`, with the ends of its 95% interval in `.../low` and `.../high`. `accuracy` is the
    mean over the sources. A source with samples without scores has upstream's metrics alone, because rewards do not
    say what is right.

    Args:
        eval_dataloader, n_samples_per_prompt: upstream's arguments, which are not needed here.
        samples_list: those of `SamplesGenerator.generate_eval_samples`.
        specs: how each source was sampled.
    """
    logs: dict[str, float] = {}
    accuracies = []
    for source, group in itertools.groupby(samples_list, key=lambda sample: sample.datasource):
        samples, n = list(group), sampling_of(source, specs).n
        if all(sample.scores is not None and not sample.scores_are_rewards for sample in samples):
            samples = [replace(sample, rewards=sample.scores) for sample in samples]
            responses = list(map(_response, samples))
            for name, estimate in estimate_source([responses[i : i + n] for i in range(0, len(responses), n)]).items():
                logs[f"{source}/{name}"] = estimate.value
                logs[f"{source}/{name}/low"], logs[f"{source}/{name}/high"] = estimate.low, estimate.high
            accuracies.append(logs[f"{source}/accuracy"])
        # Upstream looks a sample's source up by its prompt, which another source may have too.
        own_data = [([source], sample.prompts, sample.labels, [None]) for sample in samples]
        upstream = _upstream_metrics(own_data, samples, n)
        logs |= {name: value for name, value in upstream.items() if name.startswith(f"eval_{source}_")}
    return logs | ({"accuracy": sum(accuracies) / len(accuracies)} if accuracies else {})


def _response(sample: Experience) -> Response:
    well_formed = sample.info.get("well_formed")
    return Response(
        score=sample.scores.item(),
        well_formed=None if well_formed is None else bool(well_formed.item()),
        length=int(sample.response_length.item()),
        truncated=bool(sample.truncated.item()),
    )
