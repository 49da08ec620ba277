"""The actor that computes no more than its action mask asks for: log-probs of the selected tokens, prompts once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from openrlhf.models.actor import Actor
from openrlhf.models.utils import compute_entropy, log_probs_from_logits
from openrlhf.utils.logging_utils import init_logger
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from arlopti_openrlhf.forward.lm_head import distribution_statistics, selected_log_probs, statistics_of_logits
from arlopti_openrlhf.forward.shared_prompt import PackedBatch, flash_segment_attention, pack, segment_attention

logger = init_logger(__name__)

# A mask that transformers takes as prepared and leaves alone, and that no attention function but ours accepts.
_NO_MASK = torch.empty(1, 1, 0, 0)
# Handed out by the head behind its results: a model that changes what its head returns changes this too.
_WITNESS = -12.25


class SelectiveActor(Actor):
    """`Actor` with the same log-probs, entropies and gradients, for the positions that the action mask selects.

    The only changes to upstream's `forward`, where an action mask is given:
    1. The LM head and all that follows it run on the positions that predict a selected token.
    2. The sequences of a batch become one row of tokens without padding, each cut after its last selected token, with
       the beginnings that they share, their prompts, computed once (`shared_prompt`). Models for which that does
       not hold (sliding windows, a balancing loss over all tokens) get upstream's layout.
    Vision models are upstream's as they are. Not for ring attention and tensor parallelism.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # DeepSpeed's engine, which takes the model's place, has a `config` of its own.
        self.hf_config = self.model.config
        self.reason_not_to_share = _reason_not_to_share(self.model)
        if self.reason_not_to_share is None:
            _wrap_attention(self.hf_config._attn_implementation)
        else:
            logger.info(f"prompts are not shared: {self.reason_not_to_share}")
        # Whether the head's logits are the model's; Granite scales them, Gemma 2 caps them. Seen at the first forward.
        self.head_is_last = True

    def forward(
        self,
        sequences: torch.LongTensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group=None,
        packed_seq_lens: list[int] | None = None,
        return_entropy: bool = False,
        return_statistics: bool = False,
        **mm_inputs,
    ):
        """Take upstream's arguments and return upstream's results, for the selected tokens.

        Args:
            return_statistics: Whether to describe the distributions that predict the selected tokens. Log-probs and
                gradients stay the same to the last bit. The other arguments are upstream's.

        Returns:
            (B, A) log-probs of the selected tokens, 0 elsewhere. With `return_output` also the model's output, whose
            logits are of no use. It carries, where asked for, `entropy`, (B, A), and `statistics`: the pair of (B, A)
            entropies in nats and (B, A) Σ_{j≠o} P_j², float32 and without a gradient.
        """
        if action_mask is None or ring_attn_group is not None or self.is_vlm:
            result = super().forward(
                sequences,
                action_mask,
                attention_mask,
                return_output,
                allgather_logits,
                return_logprobs,
                ring_attn_group,
                packed_seq_lens,
                return_entropy,
                **mm_inputs,
            )
            if return_statistics and return_output and action_mask is not None and ring_attn_group is None:
                output = result[1]
                output.statistics = statistics_of_logits(
                    output["logits"], sequences, action_mask, attention_mask, packed=self.packing_samples
                )
            return result
        log_probs, entropy, squares, output = self._forward_selected(
            sequences, action_mask, attention_mask, return_entropy, return_statistics
        )
        if return_statistics:
            output.statistics = (entropy.detach(), squares.detach())
        if return_entropy:
            output.entropy = entropy
        return (log_probs, output) if return_output else log_probs

    def _forward_selected(self, sequences, action_mask, attention_mask, return_entropy, with_statistics):
        share = self.reason_not_to_share is None
        packed = pack(sequences, attention_mask, action_mask, share=share)
        inputs = {"attention_mask": None, "position_ids": packed.positions}
        tokens, rows = packed.tokens, packed.rows
        if share:
            inputs |= {"attention_mask": _NO_MASK.to(tokens.device), "packed_batch": packed}
        elif not self.packing_samples:
            tokens, position_ids = sequences, attention_mask.long().cumsum(-1) - 1
            inputs = {
                "attention_mask": attention_mask,
                "position_ids": position_ids.masked_fill(attention_mask == 0, 1),
            }
            row, column = action_mask.bool().nonzero(as_tuple=True)
            length = sequences.shape[1]
            rows = row * length + length - action_mask.shape[1] + column - 1

        causal_lm = getattr(self.model, "module", self.model)
        head = causal_lm.get_output_embeddings()
        fused = self.head_is_last and type(head) is nn.Linear

        def forward_head(hidden: Tensor) -> Tensor:
            hidden = hidden.flatten(0, 1).index_select(0, rows)
            if not fused:
                return type(head).forward(head, hidden[None])
            columns = selected_log_probs(
                hidden, head.weight, packed.targets, head.bias, self.temperature, return_entropy, with_statistics
            )
            columns = torch.stack([column for column in columns if column is not None], dim=-1)
            return torch.cat([columns, columns.new_full((1, columns.shape[1]), _WITNESS)])[None]

        # The head's hooks, by which ZeRO-3 gathers its weight, stay.
        with replaced_attribute(head, "forward", forward_head):
            output = self.model(tokens, **inputs)
        if share and not packed.was_attended:
            raise RuntimeError(f"{type(causal_lm).__name__} does not hand its attention what prompt sharing needs")
        result = output["logits"]
        if fused and not (result[0, -1] == _WITNESS).all():
            logger.info(f"{type(causal_lm).__name__} changes the LM head's logits: they are computed all at once")
            self.head_is_last = False
            return self._forward_selected(sequences, action_mask, attention_mask, return_entropy, with_statistics)
        if not fused:
            logits = result.float() / self.temperature
            columns = [log_probs_from_logits(logits, packed.targets[None])[0]]
            if with_statistics:
                columns += distribution_statistics(logits, torch.arange(len(rows), device=rows.device), packed.targets)
            if return_entropy:
                columns[1:2] = [compute_entropy(logits)[0]]
            result = torch.stack(columns, dim=-1)[None]

        padded = torch.zeros(action_mask.numel(), result.shape[-1], device=result.device)
        padded = padded.index_copy(0, packed.places, result[0, : len(packed.places)]).view(*action_mask.shape, -1)
        log_probs, entropy, squares = (*padded.unbind(dim=-1), None, None)[:3]
        return log_probs, entropy, squares, output


@contextmanager
def replaced_attribute(instance: object, name: str, value: object) -> Iterator[None]:
    """`value` in place of an instance's attribute or method, for a while."""
    own = {name: vars(instance)[name]} if name in vars(instance) else {}
    setattr(instance, name, value)
    try:
        yield
    finally:
        vars(instance).pop(name)
        vars(instance).update(own)


def _reason_not_to_share(model: nn.Module) -> str | None:
    """Why `model` cannot compute a packed row with shared prefixes exactly; None where it can."""
    config = model.config
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(base, "_supports_attention_backend", False):
        return "the model has an attention of its own"
    if config._attn_implementation not in ("sdpa", "flash_attention_2"):
        return f"attention is {config._attn_implementation}"
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"} or (
        getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None
    ):
        return "not every layer attends to the whole sequence"
    if getattr(config, "output_router_logits", False):
        return "the experts' balancing loss counts every token"
    if hasattr(config, "kv_lora_rank") or hasattr(config, "quantization_config"):
        return "multi-head latent attention, or quantized weights"
    return None


def _wrap_attention(implementation: str) -> None:
    """Has transformers' attention function of that name leave packed rows to `shared_prompt`."""
    upstream = ALL_ATTENTION_FUNCTIONS[implementation]
    if getattr(upstream, "takes_packed_batches", False):
        return

    attend = flash_segment_attention if implementation == "flash_attention_2" else segment_attention

    def attention(
        module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_batch: PackedBatch | None = None,
        **kwargs,
    ):
        if packed_batch is None:
            return upstream(module, query, key, value, attention_mask, **kwargs)
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return attend(query, key, value, packed_batch, scale, kwargs.get("dropout", 0.0)), None

    attention.takes_packed_batches = True
    ALL_ATTENTION_FUNCTIONS.register(implementation, attention)
