"""Estimates a model's number of parameters from its config.json."""

import json
from pathlib import Path
from typing import NamedTuple


class ModelSize(NamedTuple):
    """Says what the estimates of memory and disk need to know of a transformer.

    Attributes:
        parameters: all of them.
        hidden: size of the hidden states.
        layers: number of layers.
        vocabulary: number of tokens.
    """

    parameters: int
    hidden: int
    layers: int
    vocabulary: int


def read(folder: Path) -> ModelSize | None:
    """Return the size of the model in a folder, or None where config.json is not one of a gated transformer.

    Llama, Qwen, Mistral, Gemma and their mixtures of experts have gated MLPs (three matrices). Biases and norms are
    left out: they are less than 0.1% of a model of a billion parameters. Of what sees, the layers count.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        seeing = _vision_layers(config.get("vision_config") or {})
        config = config.get("text_config") or config
        hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        heads = config["num_attention_heads"]
        intermediate = config["intermediate_size"]
        head = config.get("head_dim") or hidden // heads
        key_values = config.get("num_key_value_heads") or heads
        attention = 2 * hidden * head * (heads + key_values)
        experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 1
        if experts > 1:
            intermediate = config.get("moe_intermediate_size") or intermediate
        mlp = 3 * hidden * intermediate * experts
        embeddings = hidden * vocabulary * (1 if config.get("tie_word_embeddings") else 2)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return ModelSize(layers * (attention + mlp) + embeddings + seeing, hidden, layers, vocabulary)


def _vision_layers(config: dict) -> int:
    """Return the parameters of a vision encoder's layers, whose MLPs have two matrices. 0 where no sizes are given."""
    layers = config.get("num_hidden_layers") or config.get("depth") or 0
    hidden, intermediate = config.get("hidden_size") or 0, config.get("intermediate_size") or 0
    return layers * (4 * hidden**2 + 2 * hidden * intermediate)
