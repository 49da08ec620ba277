"""Generates the samples of a step and of an evaluation, and evaluates with the measures of `cli.evaluate`."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import ray
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.logging_utils import init_logger
from tqdm import tqdm

from arlopti_openrlhf.evaluation.measures import Response, estimate_source
from arlopti_openrlhf.evaluation.sampling import Sampling, sampling_of
from arlopti_openrlhf.ops.lifecycle import stopping
from arlopti_openrlhf.ops.lifecycle.progress import Phase, say
from arlopti_openrlhf.ops.rollouts.prompts import Prompts, seed_of
from arlopti_openrlhf.ops.rollouts.reward_client import SCORES_ARE_REWARDS

logger = init_logger(__name__)


class SamplesGenerator(samples_generator.SamplesGenerator):
    """Restates upstream's loop over the answers, with six changes.

    1. A sample knows the place of its prompt, so a checkpoint knows which prompts have been trained.
    2. A request to stop ends the wait for samples, as `stopping.Interrupted`.
    3. Under `--train.deterministic` the samples come in the order of their prompts. Each has a seed that follows from
       `--train.seed` and the place of its prompt. Each engine gets its whole list at once, because what it computes
       may depend, in the last bits, on which requests it computes together.
    4. An evaluation samples each data source as its specification says.
    5. A sample knows whether its `scores` are its rewards, because the reward function returned none.
    6. A short rollout batch keeps as many prompts as all ranks can share equally. Upstream's ranks would wait for each
       other for good, or end the run where some get no sample.
    """

    prompts_dataloader: Prompts

    def __init__(self, *args, sampling: Sequence[Sampling], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sampling = sampling

    def generate_samples(self, **generate_kwargs) -> tuple[list[Experience], float | None, int, bool]:
        """Return upstream's samples of a step, the pass rate in %, a number of prompts, and whether the episode ends.

        The number counts the prompts that were drawn for the first time. A resumed run draws some again. What a reward
        logs of some samples alone is their mean for the others, and so the step's mean. Upstream ends there, or leaves
        it out.

        Raises:
            Interrupted: a request to stop.
        """
        prompts = self.prompts_dataloader
        before = prompts.drawn_in_all
        samples, pass_rate, _, has_ended = super().generate_samples(**generate_kwargs)
        prompts.untrained = list(dict.fromkeys(sample.place[-1] for sample in self._sample_buffer))
        logged = defaultdict(list)
        for sample in samples:
            sample.info = {name: value for name, value in sample.info.items() if not value.isnan().any()}
            for name, value in sample.info.items():
                logged[name].append(value.float())
        means = {name: torch.stack(values).mean(dim=0) for name, values in logged.items()}
        for sample in samples:
            sample.info = means | sample.info
        samples = samples[: self._trained(len(samples))]
        if pass_rate is not None:  # upstream divides samples by prompts
            pass_rate /= self.args.rollout.n_samples_per_prompt
        return samples, pass_rate, prompts.drawn_in_all - before, has_ended

    def _trained(self, count: int) -> int:
        """Return how many samples of a rollout batch are trained on: of a short one those that ranks share equally."""
        rollout = self.args.rollout
        left_out = count % rollout.least_shared
        if not left_out or count == rollout.batch_size * rollout.n_samples_per_prompt:
            return count
        logger.warning(f"{left_out} of {count} samples are left out of a short rollout batch: ranks get equally many")
        return count - left_out

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
            how = sampling_of(source, self.sampling)
            self._eval_dataloader_iter = ((("eval", source, i), batch) for i, batch in enumerate(batches))
            own = {"n_samples_per_prompt": how.n, "temperature": how.temperature}
            of_source = super().generate_eval_samples(**generate_kwargs | own)
            for sample in of_source:
                sample.datasource = source
            samples += of_source
        return samples

    def evaluate(self, **generate_kwargs) -> dict[str, float]:
        """Evaluate the weights that vLLM has, and return the metrics of `compute_eval_metrics`."""
        samples = self.generate_eval_samples(**generate_kwargs)
        n = generate_kwargs["n_samples_per_prompt"]
        return compute_eval_metrics(self.eval_dataloader, samples, n, self.sampling)

    def _generate_vllm(
        self, dataloader_iter: Iterator[tuple[tuple, tuple]], num_prompts: int, dynamic_filtering: bool, **kwargs
    ) -> tuple[list[Experience], int, bool]:
        """Return the samples of the next prompts, how many were drawn for them, and whether there are no others.

        Under dynamic filtering another prompt is drawn for each one that is filtered out.
        """
        accepted: list[Experience] = []
        pending, drawn, is_exhausted = self._draw(dataloader_iter, num_prompts, **kwargs)
        progress = tqdm(total=drawn, desc="Generate samples", disable=not drawn)
        finished = 0
        while pending:
            say("phase", Phase("rollouts", finished))
            rejected = 0
            for place, responses in self._receive(pending):
                finished += len(responses)
                group = [self._process_response_into_experience(response, **kwargs) for response in responses]
                for sample in group:
                    sample.place = place
                if dynamic_filtering and not self._passes(group):
                    rejected += 1
                    continue
                accepted += group
                progress.set_postfix({"prompts_consumed": drawn})
                progress.update()
            if rejected:
                others, count, is_exhausted = self._draw(dataloader_iter, rejected, **kwargs)
                pending, drawn = pending | others, drawn + count
        return accepted, drawn, is_exhausted

    def _draw(
        self, dataloader_iter: Iterator[tuple[tuple, tuple]], count: int, **kwargs
    ) -> tuple[dict[ray.ObjectRef, list[tuple]], int, bool]:
        """Send the next prompts to vLLM. Return each call with its prompts' places, their number, and upstream's flag.

        The flag says that fewer were left than were asked for.
        """
        prompts = list(itertools.islice(dataloader_iter, count))
        if not prompts:
            return {}, 0, True
        places, batches = zip(*prompts, strict=True)
        _, *columns = ([value for (value,) in column] for column in zip(*batches, strict=True))
        dispatch = self._dispatch_in_order if self.args.train.deterministic else self._dispatch
        return dispatch(places, *columns, **kwargs), len(prompts), len(prompts) < count

    def _dispatch(self, places: Sequence[tuple], prompts: list, labels: list, images: list, **kwargs) -> dict:
        """Send each prompt to an engine, as upstream does."""
        refs = self._dispatch_prompts_to_vllm(prompts, labels, images=images, **kwargs)
        return {ref: [place] for ref, place in zip(refs, places, strict=True)}

    def _dispatch_in_order(self, places: Sequence[tuple], prompts: list, labels: list, images: list, **kwargs) -> dict:
        """Give each engine the prompts that upstream would send it, all in one call, with a seed for each sample."""
        next_place = iter(places).__next__
        requests: list[dict[tuple, dict]] = [{} for _ in self.vllm_engines]  # by place, for each engine

        def stand_in(of_engine: dict[tuple, dict]) -> SimpleNamespace:
            def note(num_samples: int, **request) -> None:
                place = next_place()
                seeds = [seed_of(self.args.train.seed, *place, sample) for sample in range(num_samples)]
                of_engine[place] = request | {"seeds": seeds}

            return SimpleNamespace(
                generate_responses=SimpleNamespace(remote=note),
                get_num_unfinished_requests=SimpleNamespace(remote=lambda: ray.put(0)),
            )

        upstream = samples_generator.SamplesGenerator(
            self.strategy, None, None, self.tokenizer, [stand_in(of_engine) for of_engine in requests]
        )
        upstream._dispatch_prompts_to_vllm(prompts, labels, images=images, **kwargs)
        return {
            engine.generate_in_order.remote(list(of_engine.values())): list(of_engine)
            for engine, of_engine in zip(self.vllm_engines, requests, strict=True)
            if of_engine
        }

    def _passes(self, group: Sequence[Experience]) -> bool:
        """Return whether the mean score of a prompt's samples is in the range of dynamic filtering."""
        if any(sample.scores is None for sample in group):
            return True
        scores = [sample.scores[0].item() for sample in group]
        low, high = self.args.algo.dynamic_filtering_range
        mean = sum(scores) / len(scores)
        if low < mean < high:
            return True
        logger.info(f"filtered out: mean score {mean:.2f} not in ({low:.2f}, {high:.2f}), of {scores}")
        return False

    def _receive(self, pending: dict[ray.ObjectRef, list[tuple]]) -> list[tuple[tuple, list[dict]]]:
        """Wait, and return places with their responses, whose calls go from `pending`. All waiting happens here.

        Raises:
            Interrupted: a request to stop.
        """
        is_ordered = self.args.train.deterministic
        count = len(pending) if is_ordered else 1
        ready: list[ray.ObjectRef] = []
        while len(ready) < count:
            ready, _ = ray.wait(list(pending), num_returns=count, timeout=1.0)
            stopping.obey()
            answers = ray.get(ready)  # an error of one engine does not wait for the others
        groups: list[tuple[tuple, list[dict]]] = []
        for ref, answer in zip(ready, answers, strict=True):
            groups += zip(pending.pop(ref), answer if is_ordered else [answer], strict=True)
        return sorted(groups, key=lambda group: group[0])

    def _process_response_into_experience(self, response, **generate_kwargs) -> Experience:
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        # A custom agent's responses have no such entry. Their scores are its own.
        experience.scores_are_rewards = response.get(SCORES_ARE_REWARDS, False)
        return experience


_upstream_metrics = ppo_trainer.compute_eval_metrics


# The sources of this run that have had a score outside [0, 1]. They have no accuracy from then on, so that its mean is
# over the same sources in each evaluation. Upstream's controller calls the function, so they are kept here.
_graded: set[str] = set()


def compute_eval_metrics(
    eval_dataloader, samples_list: Sequence[Experience], n_samples_per_prompt: int, sampling: Sequence[Sampling]
) -> dict[str, float]:
    """Return each source's measures, their mean accuracy, and upstream's metrics with scores in place of rewards.

    A measure is `<source>/<measure>`, with the ends of its 95% interval in `.../low` and `.../high`. `accuracy` is the
    mean over the sources that have one. A source with samples without scores has upstream's metrics alone, because
    rewards do not say what is right.

    Args:
        eval_dataloader, n_samples_per_prompt: upstream's arguments, which are not needed here.
        samples_list: those of `SamplesGenerator.generate_eval_samples`.
        sampling: how each source was sampled. The last that matches counts.
    """
    logs: dict[str, float] = {}
    accuracies = []
    for source, group in itertools.groupby(samples_list, key=lambda sample: sample.datasource):
        samples, n = list(group), sampling_of(source, sampling).n
        if all(sample.scores is not None and not sample.scores_are_rewards for sample in samples):
            samples = [replace(sample, rewards=sample.scores) for sample in samples]
            problems = defaultdict(list)
            for i in range(0, len(samples), n):
                problem = samples[i].prompts[0], str(samples[i].labels[0])
                problems[problem].append([_response(sample) for sample in samples[i : i + n]])
            measures = estimate_source(problems, source not in _graded)
            for name, estimate in measures.items():
                logs[f"{source}/{name}"] = estimate.value
                logs[f"{source}/{name}/low"], logs[f"{source}/{name}/high"] = estimate.low, estimate.high
            if "accuracy" in measures:
                accuracies.append(measures["accuracy"].value)
            else:
                _graded.add(source)
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
