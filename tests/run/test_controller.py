"""The controller hands the statistics by probability to the trackers, and takes the prompts in the seed's order."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.logging_utils import TensorboardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arlopti_openrlhf.run import controller
from arlopti_openrlhf.update.token_statistics import HISTOGRAMS


class Trainer(controller.Controller, ppo_trainer.BasePPOTrainer):
    """Upstream's trainer without models; `ppo_train` is what rank 0 would answer."""

    def __init__(self, tmp_path, logged: list) -> None:
        logger = SimpleNamespace(tensorboard_dir=str(tmp_path), wandb=SimpleNamespace(run_name="run"), logging_steps=1)
        self.args = SimpleNamespace(logger=logger, ckpt=SimpleNamespace(save_steps=float("inf")))
        self.tensorboard_logger = TensorboardLogger(self.args)
        self.wandb_logger = object.__new__(WandbLogger)
        self.wandb_logger.handle = SimpleNamespace(log=logged.append)


def test_statistics_go_to_the_trackers_alone(tmp_path, monkeypatch):
    counts, norms = [0.0] * 48 + [3.0, 5.0], [2.0] + [0.0] * 49
    answer = {"policy_loss": 0.5, "tokens/p0.00-0.25/share": 0.1, HISTOGRAMS: counts + norms}
    monkeypatch.setattr(ppo_trainer.BasePPOTrainer, "ppo_train", lambda self, step: dict(answer))
    logged: list[dict] = []
    trainer = Trainer(tmp_path, logged)
    for step in (1, 2):
        status = trainer.ppo_train(step)
        assert status == {"policy_loss": 0.5}
        trainer.save_logs_and_checkpoints(step, status)
    trainer.tensorboard_logger.close()

    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"histograms": 0})
    events.Reload()
    assert [e.value for e in events.Scalars("train/tokens/p0.00-0.25/share")] == pytest.approx([0.1, 0.1])
    histogram = events.Histograms("train/tokens/probability")[1]
    assert histogram.step == 2 and histogram.histogram_value.num == 8
    filled = dict(zip(histogram.histogram_value.bucket_limit, histogram.histogram_value.bucket, strict=True))
    assert filled[1.0] == 5 and filled[0.98] == 3

    scalars, by_probability, by_norm = logged[:3]
    assert scalars["train/tokens/p0.00-0.25/share"] == 0.1 and scalars["train/global_step"] == 1
    assert list(by_probability["train/tokens/probability"].histogram) == counts
    assert list(by_norm["train/tokens/logit_grad_norm_by_probability"].histogram) == norms


@pytest.mark.parametrize("trainer", [controller.PPOTrainer, controller.GenerateSamplesActor])
def test_prompts_come_in_the_order_of_the_seed(trainer, monkeypatch):
    """Upstream builds its loader in a process of its own, without torch.distributed and without a seed."""

    class ItIsBuilt(Exception):
        pass

    def order(seed: int) -> list[int]:
        def build(strategy, tokenizer):
            loader = DeepspeedStrategy.setup_dataloader(strategy, list(range(40)), batch_size=1)
            raise ItIsBuilt([int(item) for batch in loader for item in batch])

        for module in (ppo_trainer, ppo_trainer_async):
            monkeypatch.setattr(module, "prepare_datasets", build)
            monkeypatch.setattr(module, "get_tokenizer", lambda *args, **kwargs: None)
        args = {"train": {"seed": seed}, "eval": {"steps": -1}, "ckpt": {"save_steps": -1}}
        args["data"] = {"disable_fast_tokenizer": True}
        args = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in args.items()})
        rest = {"vllm_engines": None} | dict.fromkeys(
            ("vllm_lock", "rollout_queue", "rollout_slots")
            if trainer is controller.GenerateSamplesActor
            else (f"{model}_model_group" for model in ("actor", "critic", "reward", "reference"))
        )
        with pytest.raises(ItIsBuilt) as built:
            controller._plain(trainer)("", SimpleNamespace(args=args), **rest)
        return built.value.args[0]

    torch.seed()
    first = order(1)
    torch.seed()
    assert order(1) == first != order(2)
    assert sorted(first) == list(range(40)) != first
