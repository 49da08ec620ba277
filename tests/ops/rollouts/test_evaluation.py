"""Evaluation during training: its measures, its samples, and what chooses the best checkpoint."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
from openrlhf.trainer.ppo_utils.samples_generator import _collect_prompt_batch

from arlopti_openrlhf.evaluation.sampling import Sampling
from arlopti_openrlhf.ops import controller
from arlopti_openrlhf.ops.health.divergence import BadSteps
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


class Trainer(controller.Controller, ppo_trainer.BasePPOTrainer):
    """Upstream's choice of the best checkpoint, with an actor group that only lists what it is asked to save."""

    def __init__(self, key: str) -> None:
        self.best_eval_metric_key, self.best_eval_metric_value, self.critic_model_group = key, float("-inf"), None
        self.args = SimpleNamespace(ckpt=SimpleNamespace(best_metric_key=key))
        self.actor_model_group, self.saved, self.kl_ctl = self, [], FixedKLController(0.1)
        self.bad_steps = BadSteps(3, counts_refusals=True)

    def async_run_method(self, method_name, tag, **kwargs):
        self.saved.append((method_name, tag))
        return []


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    """What the actor group answers is there at once."""
    monkeypatch.setattr(ppo_trainer.ray, "get", lambda refs: refs)


def test_accuracy_chooses_the_best_checkpoint():
    trainer = Trainer(key="")
    for step, accuracy in ((0, 0.9), (10, 0.3), (20, 0.2), (30, 0.4)):
        trainer.save_best_checkpoint({"accuracy": accuracy, "eval_kk_pass1": -accuracy}, step)
        assert trainer.evaluated_step == step
    assert trainer.saved == [("save_checkpoint", "best_global_step10"), ("save_checkpoint", "best_global_step30")]


def test_a_metric_key_that_does_not_exist_is_refused_before_the_first_step():
    Trainer(key="none").save_best_checkpoint({"accuracy": 1.0}, 0)
    Trainer(key="aime/accuracy").save_best_checkpoint({"accuracy": 1.0, "aime/accuracy": 1.0}, 0)
    with pytest.raises(ValueError, match="--ckpt.best_metric_key: aime/acc is none of .*: accuracy, aime/accuracy"):
        Trainer(key="aime/acc").save_best_checkpoint({"accuracy": 1.0, "aime/accuracy": 1.0}, 0)
    trainer = Trainer(key="")
    trainer.save_best_checkpoint({"accuracy": 1.0}, 0)
    trainer.save_best_checkpoint({"eval_kk_pass1": 1.0}, 10)  # later, nothing stops a run


def test_a_failing_last_evaluation_does_not_lose_the_model():
    trainer = Trainer(key="")
    trainer.async_run_method = lambda method_name: trainer.saved.append(method_name) or []
    with pytest.raises(OSError, match="reward server"):
        with trainer._saving_the_model():
            raise OSError("no reward server")
    assert trainer.saved == ["save_model"]
