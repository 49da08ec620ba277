"""Counts what transformers' layers save for their backward pass."""

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

TOKENS = 256


class _Attention(torch.autograd.Function):
    """Saves what flash-attn does: queries, keys, values, the result, and a float32 normaliser for each query.

    No test goes backward through it.
    """

    @staticmethod
    def forward(ctx, query, key, value):
        result = query.new_zeros(query.transpose(1, 2).shape)
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:3], dtype=torch.float32))
        return result


def attend(module, query, key, value, *args, **kwargs):
    return _Attention.apply(query, key, value), None


ALL_ATTENTION_FUNCTIONS.register("counted", attend)  # for good: transformers' registry takes no name out again


def of_a_layer(config: PretrainedConfig, **kwargs) -> float:
    """Return the bytes per token that one more layer saves."""
    return (of_a_model(config, 3, **kwargs) - of_a_model(config, 2, **kwargs)) / TOKENS


def of_a_model(config: PretrainedConfig, layers: int, is_checkpointed: bool = False, liger: bool = False) -> float:
    """Return the bytes of all tensors that a forward pass of so many layers saves in 16 bits, without the weights.

    Triton's interpreter runs Liger's kernels in float32 alone. They keep everything in the type of the model.
    """
    config = type(config)(**config.to_dict() | {"num_hidden_layers": layers, "layer_types": None})
    device, dtype = ("cpu", torch.float32) if liger else ("meta", torch.bfloat16)
    with torch.device(device):
        policy = AutoModelForCausalLM.from_config(config, attn_implementation="counted").to(dtype)
    if liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(policy)
    if is_checkpointed:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    weights = {tensor.untyped_storage()._cdata for tensor in (*policy.parameters(), *policy.buffers())}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = policy.train()(torch.zeros(1, TOKENS, dtype=torch.long, device=device), logits_to_keep=1)
    assert output.logits.requires_grad
    saved = sum(storage.nbytes() for address, storage in storages.items() if address not in weights)
    return saved * 2 / dtype.itemsize
