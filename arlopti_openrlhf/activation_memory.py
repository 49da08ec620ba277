"""Estimates what a micro-batch keeps in memory for its backward pass."""

# Bytes of activations per token and hidden unit of one layer in 16 bits with flash attention (Korthikanti et al. 2022,
# arXiv 2205.05198, Eq. 2 without its quadratic term).
_LAYER = 34
# Bytes of one logit: bf16 from the head, fp32 for log-probs, and their gradient.
_LOGIT = 10


def bytes_per_token(hidden: int, layers: int, vocabulary: int, is_checkpointed: bool) -> tuple[int, int]:
    """Return the bytes that training keeps per token: the layers' activations, and the logits.

    Args:
        hidden: size of the hidden states.
        layers: number of layers.
        vocabulary: number of logits.
        is_checkpointed: whether only the layers' inputs are kept, and the inside of one layer at a time.
    """
    return hidden * (2 * layers + _LAYER if is_checkpointed else _LAYER * layers), _LOGIT * vocabulary
