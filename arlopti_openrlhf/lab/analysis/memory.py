"""Bounds the memory of an analysis: the model's weights and gradients, and the activations of one micro-batch."""

from typing import NamedTuple

import psutil

from arlopti_openrlhf import cpu
from arlopti_openrlhf.activation_memory import LOGIT, layer_bytes
from arlopti_openrlhf.forward.lm_head import BLOCK_ELEMENTS
from arlopti_openrlhf.ops.preflight.finding import in_words
from arlopti_openrlhf.ops.preflight.memory import gpu_memory
from arlopti_openrlhf.ops.preflight.model import ModelSize

# In float32: weights, second moments and two gradients. A CPU also has the copy of the first weights.
_CPU_BYTES, _GPU_BYTES = 20, 16  # per parameter
_PROCESS = 10**9  # bytes of Python and PyTorch
_SHARE_OF_FREE = 0.9  # a margin, because free memory is in pieces


class Fit(NamedTuple):
    """A size of micro-batches that fits into the free memory."""

    tokens: int  # of a micro-batch, at most
    bytes: int  # that the analysis takes then, at most


def fit(size: ModelSize, most: int, longest: int, samples: int) -> Fit | None:
    """Return the largest micro-batches, of at most `most` tokens, that fit into the free memory, or None if unknown.

    Args:
        size: of the model.
        most: tokens.
        longest: tokens of the longest prompt with the longest response, which a micro-batch always holds.
        samples: responses per prompt.

    Raises:
        ValueError: the longest response does not fit.
    """
    config, on_cpu = size.config, cpu.uses_cpu()
    free = psutil.virtual_memory().available if on_cpu else gpu_memory()
    if free is None:
        return None
    # Heads that share keys and values get copies. Float32 on a GPU also copies the prompt's for each response.
    heads = config.num_attention_heads
    keys = heads / (getattr(config, "num_key_value_heads", None) or heads) * (1 if on_cpu else samples)
    # Twice, because activations are counted in 16 bits. The layer at work holds as much again.
    per_token = 2 * (config.num_hidden_layers + 1) * layer_bytes(config, keys)
    # A block of logits, and the gradients of the head and of the embedding before they are added up.
    head = 2 * LOGIT * BLOCK_ELEMENTS + 8 * config.vocab_size * config.hidden_size
    fixed = (_CPU_BYTES if on_cpu else _GPU_BYTES) * size.parameters + head + _PROCESS
    room = _SHARE_OF_FREE * free - fixed
    if room <= 0:
        raise ValueError(
            f"argument --model: its weights and gradients take {in_words(fixed)}, of {in_words(free)} free"
        )
    if longest * per_token > room:
        needed = f"{in_words(fixed)}, and {in_words(longest * per_token)} for a response of up to {longest:,} tokens"
        raise ValueError(f"argument --max-new-tokens: this takes {needed}, of {in_words(free)} free: lower it")
    tokens = min(most, int(room / per_token))
    return Fit(tokens, int(fixed + max(tokens, longest) * per_token))
