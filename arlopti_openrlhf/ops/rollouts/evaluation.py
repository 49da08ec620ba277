"""Evaluates during training, with the measures of `cli.evaluate` for each data source.

The measures come from the samples' `scores`, while upstream averages rewards. Each source may also have its own number
of samples and temperature.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.logging_utils import init_logger

from arlopti_openrlhf.evaluation.measures import Response, estimate_source
from arlopti_openrlhf.evaluation.sampling import Sampling, sampling_of, unmatched
from arlopti_openrlhf.ops.rollouts.prompts import Numbered
from arlopti_openrlhf.ops.rollouts.reward_client import SCORES_ARE_REWARDS
from arlopti_openrlhf.ops.rollouts.samples import SamplesGenerator

logger = init_logger(__name__)

_upstream_metrics = ppo_trainer.compute_eval_metrics


def install(specs: Sequence[Sampling]) -> None:
    """Make OpenRLHF's trainers evaluate so. Call it on the driver, before the CLI's `train`.

    Ray pickles the trainers by value, with their modules' globals as they are on the driver.

    Args:
        specs: how to sample each source. The first matches all.
    """
    for module in (ppo_trainer, ppo_trainer_async):
        module.SamplesGenerator = functools.partial(SourceSamplesGenerator, specs=specs)
        module.compute_eval_metrics = functools.partial(compute_eval_metrics, specs=specs)


class SourceSamplesGenerator(SamplesGenerator):
    """`SamplesGenerator` with two changes.

    1. An evaluation samples each data source as its specification says.
    2. A sample knows whether its `scores` are its rewards, because the reward function returned none.
    """

    def __init__(self, *args, specs: Sequence[Sampling], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.specs = specs
        self._with_and_without_scores: set[bool] = set()  # the kinds of samples so far
        sources = {str(source) for sources, *_ in self.eval_dataloader or () for source in sources}
        for pattern in unmatched(specs[1:], sources) if sources else ():
            logger.warning(f"--eval.sampling {pattern}: matches none of the sources {', '.join(sorted(sources))}")

    def generate_eval_samples(self, **generate_kwargs) -> list[Experience]:
        """Return upstream's samples with their `datasource`, ordered by source and then by problem.

        The specifications give `temperature` and `n_samples_per_prompt`.
        """
        problems = defaultdict(list)
        for batch in self.eval_dataloader:
            for source, *problem in zip(*batch, strict=True):
                problems[str(source)].append(([source], *([part] for part in problem)))
        samples = []
        for source, batches in problems.items():
            sampling = sampling_of(source, self.specs)
            self._eval_dataloader_iter = Numbered(("eval", source), batches)
            of_source = super().generate_eval_samples(
                **generate_kwargs | {"n_samples_per_prompt": sampling.n, "temperature": sampling.temperature}
            )
            for sample in of_source:
                sample.datasource = source
            samples += of_source
        return samples

    def _process_response_into_experience(self, response, **generate_kwargs) -> Experience:
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        # A custom agent's responses have no such entry. Their scores are its own.
        experience.scores_are_rewards = response.get(SCORES_ARE_REWARDS, False)
        if experience.scores_are_rewards not in self._with_and_without_scores:
            self._with_and_without_scores.add(experience.scores_are_rewards)
            if len(self._with_and_without_scores) == 2:
                logger.warning(
                    "the reward function returns `scores` for some samples only. For the others, their reward stands "
                    "in, and a data source with such samples has no accuracy."
                )
        return experience


def compute_eval_metrics(
    eval_dataloader, samples_list: Sequence[Experience], n_samples_per_prompt: int, specs: Sequence[Sampling]
) -> dict[str, float]:
    """Return each source's measures, their mean accuracy, and upstream's metrics with scores in place of rewards.

    A measure is `<source>/<measure>`, with the ends of its 95% interval in `.../low` and `.../high`. `accuracy` is the
    mean over the sources. A source with samples without scores has upstream's metrics alone, because rewards do not
    say what is right.

    Args:
        eval_dataloader: upstream's argument, which is not needed here.
        samples_list: the samples of `SourceSamplesGenerator`.
        n_samples_per_prompt: upstream's argument. The specifications say more.
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
