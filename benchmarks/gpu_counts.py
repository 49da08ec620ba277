"""Kernels and waits of one micro-batch on a GPU, counted without one.

python benchmarks/gpu_counts.py [--layers 24] [--flags ...]

The project's own trainer updates a small model in bf16 whose tensors claim to be on a GPU (`claimed_gpu`). What a
micro-batch takes is the difference between an update of two and one of three. DeepSpeed's own kernels are not counted:
its engine is a stand-in. The LM head is in plain torch, and the layers are without Liger's kernels.
"""

import argparse
import copy
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import torch

from arlopti_openrlhf import cpu

cpu.enable()

import rollouts  # noqa: E402
from claimed_gpu import Counts, claimed_gpu  # noqa: E402
from hardware import free_port  # noqa: E402
from openrlhf.utils.deepspeed import DeepspeedStrategy  # noqa: E402
from torch import distributed as dist  # noqa: E402
from update_bench import training_flags  # noqa: E402

from arlopti_openrlhf.forward.selective_actor import SelectiveActor  # noqa: E402
from arlopti_openrlhf.patching import replaced_attribute  # noqa: E402
from arlopti_openrlhf.update import trainer  # noqa: E402
from arlopti_openrlhf.update.old_log_probs import unknown  # noqa: E402
from arlopti_openrlhf.update.plan import cost  # noqa: E402
from arlopti_openrlhf.update.sample import by_prompt, numbered  # noqa: E402

SETTINGS = {
    "GRPO": [],
    "AR + Lopti": ["--algo.ar.alpha", "0.3", "--algo.lopti.eta", "0.005"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--by-name", action="store_true", help="list the kernels")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, help="of the training command, in place of the two settings"
    )
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    settings = {" ".join(args.flags): args.flags} if args.flags else SETTINGS
    print("| | kernels | waits | of which |\n|---|---|---|---|")
    for name, flags in settings.items():
        found = of_a_micro_batch(flags, args.layers)
        total, waits = found.kernels.total(), found.waits
        print(f"| {name} | {total:,} | {waits.total()} | {', '.join(f'{n} {k}' for k, n in waits.items())} |")
        for mixture in found.mixtures:
            print(f"two devices: {mixture}")
        if args.by_name:
            print(", ".join(f"{count} {kernel}" for kernel, count in found.kernels.most_common()))


class Found(NamedTuple):
    """What a micro-batch takes, by name, and all mixtures of devices."""

    kernels: Counter[str]
    waits: Counter[str]
    mixtures: Counter[str]


def of_a_micro_batch(flags: list[str], layers: int) -> Found:
    """Return what one more micro-batch takes.

    A micro-batch holds eight responses to a prompt, and takes part in each pass. Layers are alike, so that one and two
    of them show what more take.
    """
    made = {(n, prompts): update(flags, n, prompts) for n in (1, 2) for prompts in (2, 3)}

    def counted(what: str) -> Counter[str]:
        one, two = (_minus(vars(made[n, 3])[what], vars(made[n, 2])[what]) for n in (1, 2))
        return +Counter({name: one[name] + (layers - 1) * (two[name] - one[name]) for name in two})

    mixtures = sum((counts.mixtures for counts in made.values()), Counter())
    return Found(counted("kernels"), counted("waits"), mixtures)


def _minus(a: Counter[str], b: Counter[str]) -> Counter[str]:
    return Counter({name: a[name] - b[name] for name in a})


def update(flags: list[str], layers: int, prompts: int) -> Counts:
    """Take one update of so many micro-batches, after one that settles what is settled once."""
    rollouts.SHAPES["counted"] = rollouts.Shape("counted", 32, 64, layers, 4, 2, vocab_size=211)
    sizes = argparse.Namespace(shape="counted", prompts=prompts, mini_batches=1, micro_batch_size=8)
    sizes.prompt_length = sizes.response_length = None
    args = training_flags(sizes, flags)
    samples = rollouts.rollout(sizes, scale=0.03)
    for sample in samples:
        sample.base_action_log_probs = torch.full(sample.action_mask.shape, -5.0)
        sample.rollout_log_probs = torch.full(sample.action_mask.shape, -5.3)
    model = rollouts.make_model("counted", "sdpa")
    costliest = max(map(cost, by_prompt(numbered(rollouts.unpadded(samples)))))
    with (
        _alone(),
        claimed_gpu() as counts,
        replaced_attribute(trainer, "tqdm", lambda steps, **bar: steps),
    ):
        for tensor in (*model.parameters(), *model.buffers()):
            counts.claim(tensor)
        driver = _trainer(model, args, prompts)
        with replaced_attribute(driver.planner, "_fit", lambda mini_batches: costliest):
            for _ in range(2):
                counts.clear()
                for sample in copy.deepcopy(samples):
                    sample.action_log_probs = _old_log_probs(driver, sample)
                    driver.replay_buffer.append(sample)
                driver.ppo_train(args.algo.kl.init_coef)
                driver.replay_buffer.clear()
    return counts


@contextmanager
def _alone() -> Iterator[None]:
    """Make this process a group of one rank while the context lasts."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _old_log_probs(driver: trainer.TokenUpdateTrainer, sample) -> torch.Tensor:
    if driver.defers_old_log_probs:
        return unknown(sample.action_mask)
    return torch.full(sample.action_mask.shape, -5.3)


def _trainer(model: torch.nn.Module, args: SimpleNamespace, micro_batches: int) -> trainer.TokenUpdateTrainer:
    actor = SelectiveActor(model)
    actor.packing_samples, actor.is_vlm, actor.model = args.ds.packing_samples, False, _Engine(model, micro_batches)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    return trainer.TokenUpdateTrainer(
        _Strategy(args),
        actor,
        ema_model=None,
        actor_optim=optimizer,
        actor_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        micro_train_batch_size=args.train.micro_batch_size,
    )


class _Engine(torch.nn.Module):
    """DeepSpeed's engine as far as the trainer asks it. It adds gradients up and takes no step."""

    def __init__(self, module: torch.nn.Module, micro_batches: int) -> None:
        super().__init__()
        self.module, self.micro_batches = module, micro_batches
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.optimizer = SimpleNamespace(overflow=False, zero_grad=lambda: None, micro_step_id=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def gradient_accumulation_steps(self) -> int:
        return self.micro_batches

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        pass

    def zero_optimization_stage(self) -> int:
        return 2

    def step(self) -> None:
        self.global_steps += 1


class _Strategy:
    """OpenRLHF's strategy of one rank, without DeepSpeed."""

    all_reduce = DeepspeedStrategy.all_reduce

    def __init__(self, args: SimpleNamespace) -> None:
        self.args, self.ring_attn_group, self.use_dynamic_batch = args, None, False
        self.ds_device_mesh = {"dp": SimpleNamespace(get_group=lambda: dist.group.WORLD)}

    def backward(self, loss, actor, optimizer, **kwargs) -> None:
        loss.backward()

    def optimizer_step(self, optimizer, actor, scheduler, **kwargs) -> None:
        actor.model.step()

    def get_grad_norm(self, actor) -> float:
        return 1.0

    def is_rank_0(self) -> bool:
        return True


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
