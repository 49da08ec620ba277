"""Evaluation during training: its measures and its samples."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import _collect_prompt_batch

from arlopti_openrlhf.evaluation.sampling import Sampling
from arlopti_openrlhf.ops.rollouts.evaluation import compute_eval_metrics
from arlopti_openrlhf.ops.rollouts.samples import SamplesGenerator

# Batches of sources, prompts, labels, images. One problem occurs in two sources, once with a list of labels.
DATA = [
    (["kk_2ppl"], ["p"], ["a"], [None]),
    (["aime"], ["p"], ["a"], [None]),
    (["kk_2ppl", None], ["q", "r"], [["c", "d"], "d"], [None, None]),
]
SPECS = [Sampling("*", 2, 1.0), Sampling("aime", 4, 0.6), Sampling("Non*", 1, 0.0)]


def sample(prompt: str, label, score: float, reward: float = -0.5, source: str = "", **info: float) -> Experience:
    experience = Experience(
        prompts=[prompt],
        labels=[label],
        rewards=torch.tensor([reward]),
        scores=torch.tensor([score]),
        response_length=torch.tensor([10 + reward]),
        truncated=torch.tensor([False]),
        info={name: torch.tensor([value]) for name, value in info.items()},
    )
    experience.datasource, experience.scores_are_rewards = source, False
    return experience


def test_measures_are_those_of_the_scores():
    kk, aime = {"source": "kk_2ppl"}, {"source": "aime"}
    samples = [sample("q", ["c"], 1.0, well_formed=1.0, **kk), sample("q", ["c"], 0.0, well_formed=0.0, **kk)]
    samples += [sample("p", "a", 1.0, reward=3.0, well_formed=1.0, **kk) for _ in range(2)]
    samples += [sample("p", "a", float(i == 2), **aime) for i in range(4)]
    samples += [sample("r", "d", 1.0, reward=1.0, source="None")]
    samples[-1].scores_are_rewards = True
    logs = compute_eval_metrics(DATA, samples, 2, specs=SPECS)
    # kk_2ppl: q is right once of 2, p twice; aime: once of 4.
    assert logs["kk_2ppl/accuracy"] == pytest.approx((0.5 + 1) / 2)
    assert logs["kk_2ppl/pass@2"] == 1 and logs["kk_2ppl/well_formed"] == pytest.approx(0.75)
    assert logs["aime/accuracy"] == 0.25 and logs["aime/pass@4"] == 1
    assert logs["aime/pass@2"] == pytest.approx(1 - 3 / 6)  # of the 6 pairs, 3 lack the right one
    assert "aime/well_formed" not in logs
    assert logs["kk_2ppl/accuracy/low"] < 0.75 < logs["kk_2ppl/accuracy/high"] <= 1
    assert logs["accuracy"] == pytest.approx((0.75 + 0.25) / 2)
    # OpenRLHF's names, whose means are of scores too.
    assert logs["eval_kk_2ppl_pass1"] == pytest.approx(0.75) and logs["eval_aime_pass4"] == 1
    # Rewards in the place of scores tell nothing of accuracy.
    assert not any(name.startswith("None/") for name in logs) and logs["eval_None_pass1"] == 1
    # Scores that are more than right or wrong have a mean, too.
    graded = compute_eval_metrics(DATA, [sample("p", "a", 2.0, **kk), sample("p", "a", 0.0, **kk)], 2, specs=SPECS)
    assert graded["kk_2ppl/accuracy"] == 1.0


def test_samples_are_drawn_as_each_source_says(monkeypatch):
    calls = []

    def generate(self, dataloader_iter, num_prompts, dynamic_filtering, **kwargs):
        prompts, labels, _, exhausted = _collect_prompt_batch(dataloader_iter, num_prompts)
        calls.append((prompts, kwargs["n_samples_per_prompt"], kwargs["temperature"], kwargs["top_p"]))
        n = kwargs["n_samples_per_prompt"]
        return [sample(p, a, 0.0) for p, a in zip(prompts, labels, strict=True) for _ in range(n)], 0, exhausted

    monkeypatch.setattr(SamplesGenerator, "_generate_vllm", generate)
    args = SimpleNamespace(vllm=SimpleNamespace(enable_sleep=False), rollout=SimpleNamespace(batch_size=16))
    generator = SamplesGenerator(SimpleNamespace(args=args), None, DATA, None, [], specs=SPECS)
    for _ in range(2):  # an evaluation leaves nothing behind
        calls.clear()
        samples = generator.generate_eval_samples(n_samples_per_prompt=9, temperature=0.1, top_p=0.9)
        found = [(s.datasource, s.prompts[0]) for s in samples]
        assert found == 2 * [("kk_2ppl", "p")] + 2 * [("kk_2ppl", "q")] + 4 * [("aime", "p")] + [("None", "r")]
        assert calls == [(["p", "q"], 2, 1.0, 0.9), (["p"], 4, 0.6, 0.9), (["r"], 1, 0.0, 0.9)]
