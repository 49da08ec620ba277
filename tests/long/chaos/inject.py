"""The training command with a fault inside its processes, which no signal from outside could bring about.

    CHAOS_FAULT=nan-weights CHAOS_STEP=2 python -m chaos.inject FLAGS     # as the command's own flags

Here it comes into the third update of this start. The policy's Ray actor gets another `fit`, so the product has no
code for it.
"""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf import cpu
from arlopti_openrlhf.cli import train_ppo_ray
from arlopti_openrlhf.ops.lifecycle.parent import Child
from arlopti_openrlhf.patching import plain_class


def main() -> None:
    """Put the fault of CHAOS_FAULT into the policy's actor once the command trains, in its child."""
    train = train_ppo_ray.train

    def train_with_fault(args: SimpleNamespace, child: Child) -> None:
        put_the_fault()
        train(args, child)

    train_ppo_ray.train = train_with_fault
    train_ppo_ray.main()


def put_the_fault() -> None:
    cpu.enable(driver=True)
    import torch
    from openrlhf.trainer.ray import ppo_actor

    # Ray pickles the actor's class by value, with the methods that it has on the driver.
    actor = plain_class(ppo_actor.PolicyModelActor)
    fit, fault, step = actor.fit, os.environ["CHAOS_FAULT"], int(os.environ["CHAOS_STEP"])

    def fit_with_fault(self, kl_ctl: float = 0):
        self.updates = getattr(self, "updates", 0) + 1
        if self.updates == step + 1:
            (Path(os.environ["CHAOS_FOLDER"]) / "faulted").touch()
            if fault == "nan-weights":
                list(self.actor.model.module.parameters())[-1].data.view(-1)[0] = float("nan")
            elif fault == "hang":
                threading.Event().wait()
            else:
                first = self.trainer.replay_buffer.items[0]
                first.advantages = torch.full_like(first.advantages, float("nan"))
        return fit(self, kl_ctl)

    actor.fit = fit_with_fault


if __name__ == "__main__":
    main()
