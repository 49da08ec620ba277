"""Accuracy per data source, from the samples' scores."""

from collections import defaultdict

from openrlhf.trainer import ppo_trainer

_upstream_metrics = ppo_trainer.compute_eval_metrics


def install() -> None:
    """Makes OpenRLHF's evaluation report accuracy. Called on the driver, before the CLI runs."""
    ppo_trainer.compute_eval_metrics = compute_eval_metrics


def compute_eval_metrics(eval_dataloader, samples_list, n_samples_per_prompt: int) -> dict[str, float]:
    """Upstream's metrics, and `<source>/accuracy`: the mean of `scores`, 1 where the answer is right.

    Upstream's `pass1` averages *rewards*, which a shaped reward (K&K's 3, -0.5, -1, -3) makes something else.
    """
    logs = _upstream_metrics(eval_dataloader, samples_list, n_samples_per_prompt)
    source_of = {
        prompt: source
        for sources, prompts, _labels, _images in eval_dataloader
        for prompt, source in zip(prompts, sources, strict=True)
    }
    scores = defaultdict(list)
    for sample in samples_list:
        if sample.scores is not None:
            scores[source_of.get(sample.prompts[0], "unknown")].append(float(sample.scores))
    return logs | {f"{source}/accuracy": sum(values) / len(values) for source, values in scores.items()}
