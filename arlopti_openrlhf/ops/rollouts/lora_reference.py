"""Lets a LoRA run's policy be its own reference, with the adapter left out. No second model is loaded.

LoRA trains nothing of the base model, and the base model is the reference. OpenRLHF loads it once more, in processes
of its own.
"""

from types import ModuleType
from typing import Any

from openrlhf.trainer.ray import launcher


class ReferenceInPolicy:
    """Stands for the group of reference actors. It has the two methods that OpenRLHF's experience maker calls.

    Args:
        policy: OpenRLHF's group of policy actors.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def async_run_method_batch(self, method_name: str, **kwargs) -> list:
        """Return what the policy's actors do in a reference's place. `forward` is the one method that they have so."""
        return self._policy.async_run_method_batch(method_name=f"{method_name}_reference", **kwargs)

    def async_run_method(self, method_name: str) -> list:
        """Return what the policy's actors do. `empty_cache` is the one method that OpenRLHF calls so."""
        return self._policy.async_run_method(method_name=method_name)


def install(cli: ModuleType) -> None:
    """Make `train` of `openrlhf.cli.train_ppo_ray` start no reference actors, as `Controller` then sees.

    The name in that module alone is rebound, because Ray pickles groups by the name in `launcher`.
    """

    def make_group(num_nodes: int, num_gpus_per_node: int, ray_actor_type: Any, **kwargs) -> Any:
        if ray_actor_type is cli.ReferenceModelActor:
            return None
        return launcher.RayActorGroup(num_nodes, num_gpus_per_node, ray_actor_type, **kwargs)

    vars(cli)["RayActorGroup"] = make_group
