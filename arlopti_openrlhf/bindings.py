"""How the package hooks into OpenRLHF: each upstream name that it rebinds, by what, in which room, and what for.

`bind` does so on the driver, before `openrlhf.cli.train_ppo_ray` is imported, which binds most of these names. Ray
pickles upstream's actor classes by value, with the globals of their modules as they are on the driver. So what is
rebound here reaches every worker. The base classes of the actors it pickles by name: what those read of their modules
is upstream's, and our classes replace that for the time of a call (`update.whole_prompts`, `ops.controller`).

A row replaces a name and is its only row, or extends what the rows above have left there. What extends a class is a
subclass of upstream's, or a class that is put before it. What extends a function gets that function, and returns the
one that takes its place.
"""

import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Collection, Iterable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

from arlopti_openrlhf.patching import plain_class

_CLI = "openrlhf.cli.train_ppo_ray"
_ACTOR, _LAUNCHER, _ENGINE = (f"openrlhf.trainer.ray.{module}" for module in ("ppo_actor", "launcher", "vllm_engine"))
_SYNC, _ASYNC = "openrlhf.trainer.ppo_trainer", "openrlhf.trainer.ppo_trainer_async"

REPLACES, EXTENDS = "replaces", "extends"
# What only some runs have. Care is what `--ops off` leaves out.
SELECTIVE, REFERENCE, WITHOUT_CUDA = "selective", "methods on the stock update", "a driver without CUDA"
CARE, LORA, POLICY_IS_REFERENCE = "care", "LoRA, with care", "LoRA's reference, with care"


class Row(NamedTuple):
    """A replacement of an upstream name."""

    module: str  # upstream's
    name: str
    how: str
    ours: str  # "module:name" in this package
    needs: str  # what a run must have for it; "" where it is always made
    what_for: str
    flags: tuple[str, ...] = ()  # whose values `ours` takes as keyword arguments, by the last part of their names

    @property
    def room(self) -> str:
        return self.ours.partition(":")[0].partition(".")[0]


# fmt: off
TABLE = (
    # LoRA, before the method: its reference is computed by upstream's `forward`
    Row(_ACTOR, "PolicyModelActor", EXTENDS, "ops.lora:BaseModel", LORA,
        "gives the base model's log-probs"),
    # The methods, on OpenRLHF's loop or by the selective update
    Row(_ACTOR, "ActorPPOTrainer", EXTENDS, "reference:ReferenceTrainer", REFERENCE,
        "trains in the passes of the token methods"),
    Row(_ACTOR, "ActorPPOTrainer", EXTENDS, "update.trainer:TokenUpdateTrainer", SELECTIVE,
        "trains in these passes with less work"),
    Row(_ACTOR, "PolicyModelActor", EXTENDS, "update.policy_actor:PolicyActor", SELECTIVE,
        "leaves log π_old to the update's first pass"),
    *(Row(module, "Actor", EXTENDS, "forward.selective_actor:SelectiveActor", SELECTIVE,
        "computes the tokens that the update needs, each prompt once") for module in (_ACTOR, _LAUNCHER)),
    *(Row(module, name, EXTENDS, "update.whole_prompts:WholePrompts", SELECTIVE,
        "gives each rank whole prompts, with dynamic batches")
      for module, name in ((_SYNC, "PPOTrainer"), (_ASYNC, "TrainingActor"))),
    Row(_ACTOR, "ActorPPOTrainer", EXTENDS, "ops.lora:MergedSync", LORA,
        "sends merged weights to vLLM"),
    # A machine without CUDA
    Row(_ACTOR, "PolicyModelActor", EXTENDS, "cpu.refusals:CpuPolicyActor", WITHOUT_CUDA,
        "refuses what such a machine cannot do"),
    # Care for a run
    Row("openrlhf.utils.deepspeed", "DeepspeedStrategy", EXTENDS, "ops.checkpoints.saving:CheckpointStrategy", CARE,
        "refuses steps that are not finite; writes and loads whole checkpoints"),
    Row(_ACTOR, "ActorPPOTrainer", EXTENDS, "ops.health.update_health:ActorPPOTrainer", CARE,
        "counts refused steps, and compares vLLM's log-probs with the actor's"),
    Row(_ACTOR, "PolicyModelActor", EXTENDS, "ops.health.guard:GuardedPolicyActor", CARE,
        "names the first parameter that is not finite"),
    Row(_ENGINE, "SingleTurnAgentExecutor", REPLACES, "ops.rollouts.reward_client:RewardExecutor", CARE,
        "waits for rewards, bounds their time, and ends the run where there is none",
        ("reward.retry_minutes", "reward.timeout_seconds")),
    Row(_ENGINE, "RolloutRayActor", EXTENDS, "ops.rollouts.engine:RolloutRayActor", CARE,
        "makes each result once; takes requests in order"),
    *(row for module in (_SYNC, _ASYNC) for row in (
        Row(module, "prepare_datasets", REPLACES, "ops.rollouts.prompts:prepare_datasets", CARE,
            "draws prompts in the order of the seed, and resumes there"),
        Row(module, "SamplesGenerator", REPLACES, "ops.rollouts.samples:SamplesGenerator", CARE,
            "knows whose samples are left over, stops when asked, and samples each source as told",
            ("eval.sampling",)),
        Row(module, "compute_eval_metrics", REPLACES, "ops.rollouts.samples:compute_eval_metrics", CARE,
            "measures accuracy with intervals", ("eval.sampling",)),
    )),
    Row(_SYNC, "PPOTrainer", EXTENDS, "ops.controller:PPOTrainer", CARE,
        "leads the run: alarms, checkpoints, evaluations, signals"),
    Row(_ASYNC, "PPOTrainerAsync", EXTENDS, "ops.controller:PPOTrainerAsync", CARE, "leads an asynchronous run"),
    Row(_ASYNC, "GenerateSamplesActor", EXTENDS, "ops.controller:GenerateSamplesActor", CARE, "leads its rollouts"),
    Row(_ASYNC, "TrainingActor", EXTENDS, "ops.controller:TrainingActor", CARE,
        "leads its training, and evaluates between two steps"),
    # Its module binds the names above when it is imported.
    Row(_CLI, "RayActorGroup", EXTENDS, "ops.rollouts.experience_maker:without_reference", POLICY_IS_REFERENCE,
        "starts no reference: it is the policy without its adapter"),
)
# fmt: on


def rows(has: Collection[str]) -> list[Row]:
    """Return the rows of a run that has these things.

    Raises:
        ValueError: a row replaces a name of another row.
    """
    found = [row for row in TABLE if not row.needs or row.needs in has]
    counts = Counter((row.module, row.name) for row in found)
    for row in found:
        if row.how == REPLACES and counts[row.module, row.name] > 1:
            raise ValueError(f"{row.ours} replaces {row.module}.{row.name}, and so does another row")
    return found


def of_update(is_selective: bool, has_methods: bool) -> set[str]:
    """Return what a run has by its update: the selective one, token methods on the stock one, or neither."""
    return {SELECTIVE} if is_selective else {REFERENCE} if has_methods else set()


def bind(has: Collection[str], args: SimpleNamespace | None = None, settings: Any = None) -> None:
    """Put ours in the place of upstream's names, in the order of the table. Call it once, on the driver.

    Args:
        has: what the run has, of `CARE` and the others.
        args: the nested arguments, for the flags that rows name.
        settings: what the trainer gets (`update.settings`), if not the nested arguments' flags.
    """
    put(rows(has), args)
    if settings is not None:
        trainer: Any = importlib.import_module(_ACTOR)
        trainer.ActorPPOTrainer = type("ActorPPOTrainer", (trainer.ActorPPOTrainer,), {"settings": settings})


def put(some: Iterable[Row], args: SimpleNamespace | None = None) -> None:
    """Put ours in the place of what some rows name."""
    for row in some:
        module: Any = importlib.import_module(row.module)
        ours = resolve(row.ours)
        if row.flags:
            given = {flag.rpartition(".")[2]: attrgetter(flag)(args) for flag in row.flags}
            ours = functools.partial(ours, **given)
        elif row.how == EXTENDS:
            ours = _extended(getattr(module, row.name), ours)
        setattr(module, row.name, ours)


def resolve(ours: str) -> Any:
    """Return what a row names."""
    module, _, name = ours.partition(":")
    return attrgetter(name)(importlib.import_module(f"arlopti_openrlhf.{module}"))


def _extended(theirs: Any, ours: Any) -> Any:
    """Return what takes the place of `theirs`, a Ray actor class, a class or a function."""
    import ray  # which nothing that only reads the table needs

    if inspect.isfunction(ours):
        return ours(theirs)
    is_actor = not isinstance(theirs, type)
    base = plain_class(theirs) if is_actor else theirs
    if issubclass(ours, base):
        return ours
    # Ray's messages show upstream's name.
    derived = type(base.__name__, (ours, base), {"__module__": base.__module__})
    return ray.remote(derived) if is_actor else derived
