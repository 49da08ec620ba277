"""The training command with a fault inside its processes, which no signal from outside could bring about.

    CHAOS_FAULT=nan-weights@3 python -m chaos.inject FLAGS     # as the command's own flags

Here it comes into the third update of this start. It is put into a subclass of the policy's Ray actor, so the product
has no code for it.
"""

import os
from pathlib import Path

import ray
import torch

from arlopti_openrlhf import cpu
from arlopti_openrlhf.cli import train_ppo_ray


def main() -> None:
    cpu.enable(driver=True)
    from arlopti_openrlhf.update import policy_actor

    fault, _, moment = os.environ["CHAOS_FAULT"].partition("@")
    base = policy_actor.PolicyActor.__ray_metadata__.modified_class.__ray_actor_class__

    class FaultyPolicyActor(base):
        updates = 0

        def fit(self, *args, **kwargs):
            self.updates += 1
            if self.updates == int(moment):
                (Path(os.environ["CHAOS_FOLDER"]) / "faulted").touch()
                if fault == "nan-weights":
                    self._poison(list(self.actor.model.module.parameters())[-1].data)
                elif fault == "nan-advantages":
                    for sample in self.trainer.replay_buffer.items[:1]:
                        sample.advantages = torch.full_like(sample.advantages, float("nan"))
            return super().fit(*args, **kwargs)

        @staticmethod
        def _poison(weight: torch.Tensor) -> None:
            weight.view(-1)[0] = float("nan")

    FaultyPolicyActor.__name__ = base.__name__
    policy_actor.PolicyActor = ray.remote(num_gpus=1)(FaultyPolicyActor)
    train_ppo_ray.main()


if __name__ == "__main__":
    main()
