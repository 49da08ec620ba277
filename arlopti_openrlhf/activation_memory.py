"""Estimates what training keeps in memory for its backward pass."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Bytes of a logit where most are in memory, in a block of ours, too: float32, its gradient, and that in 16 bits.
LOGIT = 10
# Types of models whose layers keep what `layer_bytes` counts. Their whole LM head runs in blocks, too.
_KNOWN = ("llama", "mistral", "qwen2", "qwen3")


def is_known(config: "PreTrainedConfig") -> bool:
    """Return whether `layer_bytes` was held against the tensors that models of this type save."""
    return config.model_type in _KNOWN


def layer_bytes(config: "PreTrainedConfig", keys_per_token: float = 1.0, liger: bool = False) -> float:
    """Return the bytes per token that a decoder layer keeps for its backward pass, in 16 bits with flash-attn.

    The MLP keeps its gate, the gate's activation, the other branch and their product; Liger's no activation. A norm
    keeps a float32 copy of its input, the normalised one and its result; Liger's the input and the result. Attention
    keeps queries, keys, values and its result. Other models than those of `is_known` are taken for one of them, with
    the experts that a token goes to in place of the MLP.

    Args:
        config: of the language model.
        keys_per_token: keys and values that attention keeps per token, more than one where responses share a prompt.
        liger: whether Liger's kernels compute norms and MLP (`--ds.use_liger_kernel`).
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * width, (getattr(config, "num_key_value_heads", None) or heads) * width
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    if experts := getattr(config, "num_experts_per_tok", None):
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
    mlp, norm = (6, 2) if liger else (8, 6)  # for each number, a norm's result not counted
    norms = norm * (queries + keys) if config.model_type == "qwen3" else 0  # of queries and keys
    return mlp * inner + 2 * (norm + 2) * hidden + 4 * queries + 4 * keys * keys_per_token + norms


def peak_bytes(config: "PreTrainedConfig", is_checkpointed: bool, keeps_logits: bool, liger: bool = False) -> float:
    """Return the bytes per token of a micro-batch when its backward pass has most in memory.

    That is at the last layer, or where it begins: at the logits, or in the selective update at one block of them
    (`most_tokens`).

    Args:
        config, liger: as in `layer_bytes`.
        is_checkpointed: whether only the layers' inputs are kept, and the inside of one layer at a time.
        keeps_logits: as OpenRLHF's update does.
    """
    kept, at_work = _kept_and_at_work(config, is_checkpointed, liger=liger)
    return kept + max(at_work, LOGIT * config.vocab_size if keeps_logits else 0)


def most_tokens(
    config: "PreTrainedConfig", room: float, is_checkpointed: bool, keys_per_token: float, block: int, liger: bool
) -> int:
    """Return how many tokens a micro-batch of the selective update can have in so much memory.

    Args:
        config, is_checkpointed, keys_per_token, liger: as in `layer_bytes` and `peak_bytes`.
        room: bytes.
        block: how many logits the head has at a time, at most, unless 1,024 columns hold more.
    """
    kept, at_work = _kept_and_at_work(config, is_checkpointed, keys_per_token, liger)
    # The head copies the states that it selects, and sums their gradient in float32, beside one block of logits.
    states = kept + 6 * config.hidden_size
    at_head = max(
        min((room - LOGIT * block) / states, room / (states + LOGIT * 1024)),
        room / (states + LOGIT * config.vocab_size),  # where one block holds them all
    )
    return int(min(room / (kept + at_work), at_head))


def _kept_and_at_work(
    config: "PreTrainedConfig", is_checkpointed: bool, keys_per_token: float = 1.0, liger: bool = False
) -> tuple[float, float]:
    """Return the bytes per token that all layers and the last norm keep, and those of the layer at work.

    A layer at work holds about as much in gradients as it has kept. If it is checkpointed, it has been computed again.
    """
    layer = layer_bytes(config, keys_per_token, liger)
    of_each, at_work = (2 * config.hidden_size, 2 * layer) if is_checkpointed else (layer, layer)
    return config.num_hidden_layers * of_each + 8 * config.hidden_size, at_work
