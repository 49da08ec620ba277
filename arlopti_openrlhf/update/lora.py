"""LoRA's weights on their way to vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
from torch import nn


@contextmanager
def merged_parameters(model: nn.Module, gathered: bool) -> Iterator[None]:
    """Makes `model.named_parameters()` of a PEFT LoRA model those of its merged base model, for upstream's sync loop.

    Args:
        model: PEFT model with LoRA layers.
        gathered: under ZeRO-3, gather each partitioned weight first (a collective call on every rank).
    """
    prefix, merged = "base_model.model.", []
    lora_layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in type(model).named_parameters(model):
        layer_name, is_base, suffix = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        layer = lora_layers.get(layer_name) if is_base and suffix == "weight" else None
        with deepspeed.zero.GatheredParameters(
            [parameter, *(layer.parameters() if layer is not None else ())], enabled=gathered
        ):
            weight = parameter.data.clone() if layer is not None or gathered else parameter.data
            for adapter in layer.active_adapters if layer is not None else ():
                weight += layer.get_delta_weight(adapter).to(weight)
        merged_parameter = nn.Parameter(weight, requires_grad=False)
        merged_parameter.ds_shape = weight.shape  # what upstream reads under ZeRO-3
        merged.append((name.removeprefix(prefix).replace(".base_layer.", "."), merged_parameter))
    model.named_parameters = lambda: iter(merged)
    try:
        yield
    finally:
        del model.named_parameters
