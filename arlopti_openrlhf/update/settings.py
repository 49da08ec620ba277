"""The settings of an update that are ours."""

from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING

from arlopti_openrlhf import methods

if TYPE_CHECKING:
    from arlopti_openrlhf import token_method

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
    scope: str = "batch"  # the order of the passes (`plan.in_order`): "batch" or "minibatch"
    statistics: str = "bins"  # by probability: in "bins", or "off"
    checkpointing: str = "auto"  # of gradients, where OpenRLHF's flag enables it: "auto", or "whole" as OpenRLHF
    masks_truncated: bool = False  # whether answers that generation truncated are left out
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
            masks_truncated=args.algo.mask_truncated,
            fills_memory=args.actor.fill_memory,
        )

    def load_for(self, is_selective: bool) -> "list[token_method.Method]":
        """Load the token methods. ValueError as in `load_methods`, but for what depends on OpenRLHF's flags."""
        from arlopti_openrlhf import token_method  # imports PyTorch, which the command parses without

        loaded = token_method.load(self.methods, self.arguments)
        if is_selective:
            return loaded
        if readers := [m.name for m in loaded if m.needs_entropies or m.divides_by_kept]:
            what = "read entropies or divide by the tokens that they keep"
            raise ValueError(f"token methods that {what} ({', '.join(readers)}) need the selective update")
        if self.masks_truncated:
            raise ValueError("--algo.mask_truncated needs the selective update")
        if self.scope != "batch":
            raise ValueError(f"--algo.lopti.scope {self.scope} needs the selective update")
        return loaded

    def load_methods(self, args: SimpleNamespace, is_selective: bool) -> "list[token_method.Method]":
        """Load the token methods.

        Args:
            args: OpenRLHF's nested arguments.
            is_selective: whether the selective update trains, and not the reference.

        Raises:
            ValueError: a method is wrong, or cannot go with another setting. The command has refused most of these.
        """
        loaded = self.load_for(is_selective)
        if is_selective and (flag := needs_stock_update(args)):
            raise ValueError(f"--{flag} needs OpenRLHF's own update: --actor.update stock, or install(update='stock')")
        batch, rollout = args.train.batch_size, args.rollout.batch_size * args.rollout.n_samples_per_prompt
        if loaded and batch > rollout:
            raise ValueError(f"--train.batch_size {batch}: a rollout batch has {rollout} samples, so no step is taken")
        readers = [m.name for m in loaded if m.needs_rollout_log_probs]
        if readers and args.algo.advantage.is_correction_level == "off":
            raise ValueError(f"token methods {', '.join(readers)} need --algo.advantage.is_correction_level token")
        others = [m.name for m in loaded if m.name not in ("ar", "lopti")]
        if others and args.actor.policy_loss_type == "gspo":
            raise ValueError(f"token methods {', '.join(others)}: GSPO has one ratio for a sequence")
        return loaded
