"""Makes transformers' attention functions take packed rows, and finds the models for which that is not exact."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from arlopti_openrlhf.forward.segment_attention import segment_attention
from arlopti_openrlhf.forward.shared_prompt import PackedBatch

# transformers takes a 4-D mask as prepared and leaves it alone. Of its attention functions, only ours accept this one.
NO_MASK = torch.empty(1, 1, 0, 0)
# transformers has one function for flash_attention_2 and _3 and for each kernel of a hub with variable lengths.
_SERVED = (sdpa_attention_forward, flash_attention_forward, flex_attention_forward)


class LateObstacle(RuntimeError):
    """An attention layer cannot compute a packed row, although the check before the first pass found no reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}, which the check before the first pass did not show. Give --actor.update stock.")


class PackedAttention:
    """Adds packed rows to what one of transformers' attention functions takes.

    transformers looks attention up by name in one registry per process, also when gradient checkpointing computes a
    layer again. So a wrapped function has to stay there, and serves every model of the process.
    """

    def __init__(self, upstream: Callable) -> None:
        self.upstream = upstream

    def refuse(self, reason: str) -> None:
        """Raise the reason why a layer cannot compute a packed row. The check before the first pass collects it."""
        raise LateObstacle(reason)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_batch: PackedBatch | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Take upstream's arguments and give its results, with a packed batch those of `segment_attention`."""
        if packed_batch is not None:
            packed_batch.was_attended = True
            reason = _obstacle(module, kwargs)
            if reason is None:
                return self._attend(module, query, key, value, packed_batch, **kwargs)
        elif attention_mask is not None and attention_mask.shape[-2:] == NO_MASK.shape[-2:]:
            reason = f"the layers around {type(module).__name__} swallow keyword arguments"
        else:
            return self.upstream(module, query, key, value, attention_mask, **kwargs)
        self.refuse(reason)
        # Only the check gets here. It finishes the pass, whose result is thrown away.
        return self.upstream(module, query, key, value, None, **kwargs)

    def _attend(self, module, query, key, value, packed: PackedBatch, **kwargs) -> tuple[Tensor, Tensor | None]:
        """Attend to the segments of a packed row.

        flash-attn and FlexAttention take the layout as arguments. Upstream's functions also decide what a kernel can
        take of `softcap`, `s_aux` (attention sinks) and the like, and get them as the layer gave them.
        """
        if self.upstream is flash_attention_forward:
            # One call for all segments. The kernel aligns its causal mask to the last key, so that each segment sees
            # the whole of its prefix. Positions would be read for a layout that is given here.
            kwargs.pop("position_ids", None)
            # In the order of the projections, so that gradients need no copy on their way back.
            key, value = (x.transpose(1, 2).index_select(1, packed.keys).transpose(1, 2) for x in (key, value))
            layout = dict(
                cu_seq_lens_q=packed.query_starts,
                cu_seq_lens_k=packed.key_starts,
                max_length_q=packed.longest[0],
                max_length_k=packed.longest[1],
            )
            return self.upstream(module, query, key, value, None, **layout, **kwargs)
        if self.upstream is flex_attention_forward:
            return self.upstream(module, query, key, value, packed.block_mask, **kwargs)
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return segment_attention(query, key, value, packed, scale, kwargs.get("dropout", 0.0)), None


def install(implementation: str) -> PackedAttention:
    """Make transformers' attention of that name take packed rows, and return it. It must be one of `_SERVED`."""
    attention = ALL_ATTENTION_FUNCTIONS[implementation]
    if not isinstance(attention, PackedAttention):
        attention = PackedAttention(attention)
        ALL_ATTENTION_FUNCTIONS.register(implementation, attention)
    return attention


def reason_not_to_share(model: nn.Module) -> str | None:
    """Return why `model` cannot compute a packed row with shared prefixes exactly, or None where nothing is known.

    What its layers give to their attention shows only when it runs: `PackedAttention.refuse`.
    """
    config = model.config
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(base, "_supports_attention_backend", False):
        return "the model has an attention of its own"
    attention = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    if not isinstance(attention, PackedAttention) and attention not in _SERVED:
        return f"attention is {config._attn_implementation}"
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"} or (
        getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None
    ):
        return "not every layer attends to the whole sequence"
    # Their frequencies follow the greatest position, which the cut after the last selected token lowers.
    if by_length := _rope_types(config) & {"dynamic", "longrope"}:
        return f"{min(by_length)} RoPE depends on the length of the sequences"
    if hasattr(config, "kv_lora_rank") or hasattr(config, "quantization_config"):
        return "multi-head latent attention, or quantized weights"
    return None


def _rope_types(config: PretrainedConfig) -> set[str]:
    """Return the types of RoPE in a model, whose parameters stand in one dictionary or in one per type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_layers = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(p.get("rope_type", p.get("type"))) for p in of_layers or [parameters]}


def _obstacle(module: nn.Module, kwargs: dict) -> str | None:
    """Return why an attention layer with these keyword arguments cannot work on a packed row, or None where it can."""
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return f"{type(module).__name__} is not causal"
    given = [name for name in ("position_bias", "sliding_window") if kwargs.get(name) is not None]
    return f"{type(module).__name__} has a {given[0].replace('_', ' ')}" if given else None
