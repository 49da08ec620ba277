"""Defects of OpenRLHF that a run with care repairs. Each repair can be left out (`--without_repair`)."""

from types import SimpleNamespace

REPAIRS = {
    "ema_zero3": "EMA under ZeRO-3 averages. OpenRLHF loses the average and saves the initial model.",
    "equal_rewards": "Equal rewards of a prompt give no advantage under group_norm. OpenRLHF divides a rounding error "
    "by a standard deviation near zero.",
    "learning_rate": "The learning rate stays at its minimum past the end of its schedule. OpenRLHF's cosine rises.",
    "lora": "vLLM gets merged weights of a LoRA model, and the policy without its adapter is the reference.",
}


def is_made(repair: str, args: SimpleNamespace) -> bool:
    """Return whether a run makes a repair.

    Args:
        repair: one of `REPAIRS`.
        args: upstream's nested arguments with our flags.
    """
    return args.ops == "on" and repair not in args.without_repair
