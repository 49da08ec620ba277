"""The settings of an update that are ours."""

from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace

from arlopti_openrlhf import methods

# Flags that the selective update and the statistics cannot serve, with the value at which each is off.
STOCK_ONLY = {"ds.tensor_parallel_size": 1, "ds.ring_attn_size": 1, "ds.deepcompile": False}


def needs_stock_update(args: SimpleNamespace) -> str | None:
    """Return the first flag in OpenRLHF's nested arguments that only its own update can serve."""
    return next((flag for flag, off in STOCK_ONLY.items() if attrgetter(flag)(args) != off), None)


@dataclass(frozen=True)
class Settings:
    """What the trainer takes from our flags. All else it takes from OpenRLHF's."""

    methods: tuple[str, ...] = ()  # names of `methods.built_in()`, or paths of Python files
    arguments: tuple[str, ...] = ()  # NAME.KEY=VALUE, the methods' constants
    normalizes: bool = False  # whether the weights are divided by their mean over the rollout batch
    scope: str = "batch"  # the order of the passes (`mini_batches.in_order`): "batch" or "minibatch"
    statistics: str = "bins"  # by probability: in "bins", or "off"
    checkpointing: str = "auto"  # of gradients, where OpenRLHF's flag enables it: "auto", or "whole" as OpenRLHF
    fills_memory: bool = False  # whether micro-batches take what is free, and not as many samples as the user says

    @classmethod
    def of(cls, args: SimpleNamespace) -> "Settings":
        """Return what the flags in OpenRLHF's nested arguments say."""
        sources, arguments = methods.requested(args.algo)
        return cls(
            methods=tuple(sources),
            arguments=tuple(arguments),
            normalizes=args.algo.token_method_normalize,
            scope=args.algo.lopti.scope,
            statistics=args.logger.probability_stats,
            checkpointing=args.actor.gradient_checkpointing_level,
            fills_memory=args.actor.fill_memory,
        )
