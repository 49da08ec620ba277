"""Estimates what training keeps in memory for its backward pass."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Bytes of one logit where most are in memory: float32, its gradient, and that gradient in 16 bits. A block of the
# selective update's takes as much.
LOGIT = 10
# Types of models whose layers keep what `layer_bytes` counts. Their whole LM head runs in blocks, too.
_KNOWN = ("llama", "mistral", "qwen2", "qwen3")


def is_known(config: "PreTrainedConfig") -> bool:
    """Return whether `layer_bytes` was held against the tensors that models of this type save."""
    return config.model_type in _KNOWN


def layer_bytes(config: "PreTrainedConfig", keys_per_token: float = 1.0) -> float:
    """Return the bytes per token that a decoder layer keeps for its backward pass, in 16 bits with flash-attn.

    The MLP keeps its gate, the gate's activation, the other branch and their product. A norm keeps a float32 copy of
    its input, the normalised one and its result. Attention keeps queries, keys, values and its result. Other models
    than those of `is_known` are taken for one of them, with the experts that a token goes to in place of the MLP.

    Args:
        config: of the language model.
        keys_per_token: keys and values that attention keeps for each token. They are more than one where packed
            responses see a shared prompt.
    """
    hidden, (queries, keys) = config.hidden_size, _widths(config)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    if experts := getattr(config, "num_experts_per_tok", None):
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
    norms = 6 * (queries + keys) if config.model_type == "qwen3" else 0  # of queries and keys
    return 8 * inner + 16 * hidden + 4 * queries + 4 * keys * keys_per_token + norms


def checkpointed_bytes(config: "PreTrainedConfig") -> float:
    """Return the bytes per token that a layer keeps where all of it is computed again: its input."""
    return 2 * config.hidden_size


def products_bytes(config: "PreTrainedConfig") -> float:
    """Return them where all but products is computed again: its input, its products and attention's result."""
    queries, keys = _widths(config)
    of_attention = 4 * queries + 4 * keys + 4 * config.num_attention_heads
    return 6 * config.hidden_size + 4 * config.intermediate_size + of_attention


def peak_bytes(config: "PreTrainedConfig", is_checkpointed: bool, keeps_logits: bool) -> float:
    """Return the bytes per token of a micro-batch where its backward pass has most in memory.

    That is at the last layer, or where it begins: at the logits, or in the selective update at one block of them
    (`most_tokens`). A layer at work holds about as much in gradients as it has kept.

    Args:
        config: of the language model.
        is_checkpointed: whether only the layers' inputs are kept, and the inside of one layer at a time.
        keeps_logits: as OpenRLHF's update does.
    """
    layer = layer_bytes(config)
    kept, at_work = (checkpointed_bytes(config), 2 * layer) if is_checkpointed else (layer, layer)
    return _kept(config, kept) + max(at_work, LOGIT * config.vocab_size if keeps_logits else 0)


def most_tokens(config: "PreTrainedConfig", room: float, of_layer: float, keys_per_token: float, block: int) -> int:
    """Return how many tokens a micro-batch of the selective update can have in so much memory.

    Args:
        config: of the language model.
        room: bytes.
        of_layer: bytes per token that each layer keeps. Where they are fewer than `layer_bytes`, the backward pass
            computes the rest again, one layer at a time.
        keys_per_token: as in `layer_bytes`.
        block: how many logits the head has at a time, at most, unless 1,024 columns hold more.
    """
    layer, kept = layer_bytes(config, keys_per_token), _kept(config, of_layer)
    at_layers = room / (kept + (layer if of_layer == layer else 2 * layer))
    # The head copies the states that it selects, and sums their gradient in float32, beside one block of logits.
    states = kept + 6 * config.hidden_size
    at_head = max(
        min((room - LOGIT * block) / states, room / (states + LOGIT * 1024)),
        room / (states + LOGIT * config.vocab_size),  # where one block holds them all
    )
    return int(min(at_layers, at_head))


def _kept(config: "PreTrainedConfig", of_layer: float) -> float:
    """Return the bytes per token that all layers and the last norm keep."""
    return config.num_hidden_layers * of_layer + 8 * config.hidden_size


def _widths(config: "PreTrainedConfig") -> tuple[int, int]:
    """Return the widths of the queries and of the keys."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads * width, (getattr(config, "num_key_value_heads", None) or heads) * width
