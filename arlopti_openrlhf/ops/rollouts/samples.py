"""Generates the samples of a step and of an evaluation, and evaluates with the measures of `cli.evaluate`."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import ray
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import _collect_prompt_batch
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.logging_utils import init_logger
from tqdm import tqdm
from vllm import SamplingParams

from arlopti_openrlhf.evaluation.measures import Response, estimate_source
from arlopti_openrlhf.evaluation.sampling import Sampling, sampling_of
from arlopti_openrlhf.ops.lifecycle import stopping
from arlopti_openrlhf.ops.lifecycle.progress import Phase, say
from arlopti_openrlhf.ops.rollouts.prompts import Numbered, Prompts, seed_of
from arlopti_openrlhf.ops.rollouts.reward_client import SCORES_ARE_REWARDS

logger = init_logger(__name__)


class SamplesGenerator(samples_generator.SamplesGenerator):
    """Restates upstream's loops, with five changes.

    1. `Prompts` keeps the samples that a step leaves over, so a checkpoint knows which prompts have been trained.
    2. A request to stop ends the wait for samples, as `stopping.Interrupted`.
    3. Under `--train.deterministic` the samples come in the order of their prompts. Each has a seed that follows from
       `--train.seed` and the place of its prompt. Each engine gets its whole list at once, because what it computes
       may depend, in the last bits, on which requests it computes together.
    4. An evaluation samples each data source as its specification says.
    5. A sample knows whether its `scores` are its rewards, because the reward function returned none.
    """

    prompts_dataloader: Prompts
    _has_ended = False  # the caller knows that the episode is over

    def __init__(self, *args, sampling: Sequence[Sampling], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sampling = sampling

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs) -> tuple[list[Experience], float | None, int, bool]:
        """Return the samples of a step, the pass rate in %, how many prompts were drawn, and whether the episode ends.

        Raises:
            Interrupted: a request to stop. The prompts drawn are then neither trained nor left over.
        """
        prompts, rollout = self.prompts_dataloader, self.args.rollout
        if self._has_ended:
            prompts.begin_next_episode()
        size = rollout.batch_size * rollout.n_samples_per_prompt
        pass_rate, drawn = None, 0
        if len(prompts.leftover) < size and not prompts.is_drawn:
            is_filtered = self.args.algo.dynamic_filtering_enable
            if self.args.vllm.enable_sleep:
                batch_vllm_engine_call(self.vllm_engines, "wake_up")
            samples, drawn, _ = self._generate_vllm(
                prompts.rest, rollout.vllm_generate_batch_size or rollout.batch_size, is_filtered, **generate_kwargs
            )
            if self.args.vllm.enable_sleep:
                batch_vllm_engine_call(self.vllm_engines, "sleep")
            if is_filtered and drawn:
                pass_rate = len(samples) / drawn * 100
            prompts.leftover += samples
        of_step, prompts.leftover = prompts.leftover[:size], prompts.leftover[size:]
        self._has_ended = prompts.is_drawn and not prompts.leftover
        return of_step, pass_rate, drawn, self._has_ended

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
            self._eval_dataloader_iter = Numbered(("eval", source), batches)
            own = {"n_samples_per_prompt": how.n, "temperature": how.temperature}
            of_source = super().generate_eval_samples(**generate_kwargs | own)
            for sample in of_source:
                sample.datasource = source
            samples += of_source
        return samples

    def _generate_vllm(
        self, dataloader_iter: Numbered, num_prompts: int, dynamic_filtering: bool, **generate_kwargs
    ) -> tuple[list[Experience], int, bool]:
        """Return the samples of the next prompts, how many were drawn for them, and whether there are no others.

        Under dynamic filtering another prompt is drawn for each one that is filtered out.
        """
        accepted: list[Experience] = []
        pending, drawn, is_exhausted = self._draw(dataloader_iter, num_prompts, **generate_kwargs)
        progress = tqdm(total=drawn, desc="Generate samples", disable=not drawn)
        finished = 0
        while pending:
            say("phase", Phase("rollouts", finished))
            groups, pending = self._receive(pending)
            finished += sum(map(len, groups))
            rejected = 0
            for responses in groups:
                group = [self._process_response_into_experience(response, **generate_kwargs) for response in responses]
                if dynamic_filtering and not self._passes(group):
                    rejected += 1
                    continue
                accepted += group
                progress.set_postfix({"prompts_consumed": drawn})
                progress.update()
            if rejected:
                others, count, is_exhausted = self._draw(dataloader_iter, rejected, **generate_kwargs)
                pending, drawn = pending + others, drawn + count
        return accepted, drawn, is_exhausted

    def _draw(self, dataloader_iter: Numbered, count: int, **generate_kwargs) -> tuple[list[ray.ObjectRef], int, bool]:
        """Send the next prompts to vLLM. Return the calls, how many prompts, and whether there are no others."""
        place = (*dataloader_iter.name, dataloader_iter.drawn)
        prompts, labels, images, is_exhausted = _collect_prompt_batch(dataloader_iter, count)
        if not prompts:
            return [], 0, is_exhausted
        if self.args.train.deterministic:
            refs = self._dispatch_in_order(place, prompts, labels, images, **generate_kwargs)
        else:
            refs = self._dispatch_prompts_to_vllm(prompts, labels, images=images, **generate_kwargs)
        return refs, len(prompts), is_exhausted

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

    def _receive(self, pending: Sequence[ray.ObjectRef]) -> tuple[list[list[dict]], list[ray.ObjectRef]]:
        """Wait, and return responses by prompt, and what is still pending. All waiting for samples happens here.

        Raises:
            Interrupted: a request to stop.
        """
        if self.args.train.deterministic:
            by_engine = stopping.wait(pending)
            # Prompt i is with engine i mod the number of engines.
            engines, count = len(by_engine), sum(map(len, by_engine))
            return [by_engine[i % engines][i // engines] for i in range(count)], []
        while True:
            ready, waiting = ray.wait(list(pending), num_returns=1, timeout=1.0)
            stopping.obey()
            if ready:
                return ray.get(ready), waiting

    def _dispatch_in_order(
        self, place: tuple, prompts: list[str], labels: list, images: list, **generate_kwargs
    ) -> list[ray.ObjectRef]:
        """Give each engine every so many-th prompt, all in one call, and return the calls.

        Args:
            place: what the prompts are for, and the number of the first.
            prompts, labels, images: one entry per prompt.
        """
        *name, first = place
        samples = generate_kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        requests = [
            {
                "prompt": prompt,
                "label": label,
                "images": image,
                "seeds": [seed_of(self.args.train.seed, *name, first + i, sample) for sample in range(samples)],
            }
            for i, (prompt, label, image) in enumerate(zip(prompts, labels, images, strict=True))
        ]
        engines = self.vllm_engines[: len(requests)]
        parameters, max_length = self._sampling_params(**generate_kwargs), generate_kwargs.get("max_len", 2048)
        return [
            engine.generate_in_order.remote(requests[i :: len(engines)], parameters, max_length, self.tokenizer)
            for i, engine in enumerate(engines)
        ]

    def _sampling_params(self, **generate_kwargs) -> SamplingParams:
        """Return upstream's parameters."""
        return SamplingParams(
            temperature=generate_kwargs.get("temperature", 1.0),
            top_p=generate_kwargs.get("top_p", 1.0),
            top_k=generate_kwargs.get("top_k", -1),
            max_tokens=generate_kwargs.get("max_new_tokens"),
            min_tokens=generate_kwargs.get("min_new_tokens", 1),
            skip_special_tokens=generate_kwargs.get("skip_special_tokens", False),
            logprobs=1 if self.args.algo.advantage.is_correction_level != "off" else None,
        )

    def _process_response_into_experience(self, response, **generate_kwargs) -> Experience:
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        # A custom agent's responses have no such entry. Their scores are its own.
        experience.scores_are_rewards = response.get(SCORES_ARE_REWARDS, False)
        return experience


_upstream_metrics = ppo_trainer.compute_eval_metrics


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
            responses = list(map(_response, samples))
            for name, estimate in estimate_source([responses[i : i + n] for i in range(0, len(responses), n)]).items():
                logs[f"{source}/{name}"] = estimate.value
                logs[f"{source}/{name}/low"], logs[f"{source}/{name}/high"] = estimate.low, estimate.high
            if f"{source}/score" not in logs:
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
