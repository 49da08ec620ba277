"""Evaluation during training: the measures of `cli.evaluate` for each data source, from the samples' `scores`.

Upstream averages rewards. Here each source may also have its own number of samples and temperature.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from arlopti_openrlhf.measures import Response, measure
from arlopti_openrlhf.sampling import Sampling, sampling_of

_upstream_metrics = ppo_trainer.compute_eval_metrics


def install(specs: Sequence[Sampling]) -> None:
    """Makes OpenRLHF's trainers evaluate so. Called on the driver, before the CLI's `train`.

    Ray pickles the trainers by value, with their modules' globals as they are on the driver.

    Args:
        specs: how each source is sampled; the first matches all.
    """
    for module in (ppo_trainer, ppo_trainer_async):
        module.SamplesGenerator = functools.partial(SourceSamplesGenerator, specs=specs)
        module.compute_eval_metrics = functools.partial(compute_eval_metrics, specs=specs)


class SourceSamplesGenerator(SamplesGenerator):
    """`SamplesGenerator`; the only change: evaluation samples each data source as its specification says."""

    def __init__(self, *args, specs: Sequence[Sampling], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.specs = specs

    def generate_eval_samples(self, **generate_kwargs) -> list[Experience]:
        """Upstream's samples, those of one problem together; `temperature` and `n_samples_per_prompt` are ours."""
        problems = defaultdict(list)
        for batch in self.eval_dataloader:
            for source, *problem in zip(*batch, strict=True):
                sampling = sampling_of(source, self.specs)
                problems[sampling.n, sampling.temperature].append(([source], *([part] for part in problem)))
        samples = []
        for (n, temperature), batches in problems.items():
            self._eval_dataloader_iter = iter(batches)
            samples += super().generate_eval_samples(
                **generate_kwargs | {"n_samples_per_prompt": n, "temperature": temperature}
            )
        return samples


def compute_eval_metrics(
    eval_dataloader, samples_list: Sequence[Experience], n_samples_per_prompt: int, specs: Sequence[Sampling]
) -> dict[str, float]:
    """The measures of each source, as `<source>/<measure>` with its 95% interval `.../low` and `.../high`; `accuracy`,
    the mean over the sources; and upstream's metrics, which averaged rewards, from scores.

    Scores outside [0, 1] do not say what is right (a reward function without scores has its rewards in their place):
    such a source has upstream's metrics alone.

    Args:
        eval_dataloader: batches of sources, prompts, labels and images.
        samples_list: of `SourceSamplesGenerator`.
        n_samples_per_prompt: upstream's; the specifications say more.
    """
    source_of = {
        (prompt, label): source
        for sources, prompts, labels, _images in eval_dataloader
        for source, prompt, label in zip(sources, prompts, labels, strict=True)
    }
    problems: dict[str, list[list[Experience]]] = defaultdict(list)
    position = 0
    while position < len(samples_list):
        first = samples_list[position]
        source = source_of[first.prompts[0], first.labels[0]]
        n = sampling_of(source, specs).n
        problems[source].append(list(samples_list[position : position + n]))
        position += n

    logs: dict[str, float] = {}
    for source, samples in problems.items():
        tells_right = all(s.scores is not None and 0 <= s.scores.item() <= 1 for p in samples for s in p)
        if tells_right:
            samples = [[replace(s, rewards=s.scores) for s in problem] for problem in samples]
            for name, estimate in measure([[_response(s) for s in problem] for problem in samples]).items():
                logs[f"{source}/{name}"] = estimate.value
                logs[f"{source}/{name}/low"], logs[f"{source}/{name}/high"] = estimate.low, estimate.high
        flat = [s for problem in samples for s in problem]
        # Upstream finds a sample's source by its prompt alone.
        own_data = [([source], s.prompts, s.labels, [None]) for s in flat]
        upstream = _upstream_metrics(own_data, flat, len(samples[0]))
        logs |= {name: value for name, value in upstream.items() if name.startswith(f"eval_{source}_")}
    accuracies = [logs[f"{source}/accuracy"] for source in problems if f"{source}/accuracy" in logs]
    if accuracies:
        logs["accuracy"] = sum(accuracies) / len(accuracies)
    return logs


def _response(sample: Experience) -> Response:
    well_formed = sample.info.get("well_formed")
    return Response(
        score=sample.scores.item(),
        well_formed=None if well_formed is None else bool(well_formed.item()),
        length=int(sample.response_length.item()),
        truncated=bool(sample.truncated.item()),
    )
