"""The actor that computes what its action mask asks for: log-probs of the selected tokens, each prompt once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch
from openrlhf.models.actor import Actor
from openrlhf.models.utils import compute_entropy, log_probs_from_logits
from openrlhf.utils.logging_utils import init_logger
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from arlopti_openrlhf.forward import self_check
from arlopti_openrlhf.forward.lm_head import distribution_statistics, selected_log_probs, statistics_of_logits
from arlopti_openrlhf.forward.segment_attention import (
    flash_segment_attention,
    flex_segment_attention,
    segment_attention,
)
from arlopti_openrlhf.forward.shared_prompt import PackedBatch, pack
from arlopti_openrlhf.patching import replaced_attribute

logger = init_logger(__name__)

# transformers takes a 4-D mask as prepared and leaves it alone. Of its attention functions, only ours accept this one.
_NO_MASK = torch.empty(1, 1, 0, 0)
# The head appends this value to its results. Where a model goes on to change its logits, this value changes with them.
_WITNESS = -12.25
# transformers' attention functions that take the layout of a packed row themselves. SDPA does not.
_BY_SEGMENTS: dict[Callable, Callable] = {
    flash_attention_forward: flash_segment_attention,
    flex_attention_forward: flex_segment_attention,
}
# Why an attention layer cannot work on a packed row, as its first forward pass showed.
_obstacles: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
# Our attention functions, by the names of those of transformers that they wrap.
_attention_functions: dict[str, Callable] = {}


class SelectiveActor(Actor):
    """`Actor` with the same log-probs, entropies and gradients, for the positions that the action mask selects.

    The only changes to upstream's `forward`, where an action mask is given:
    1. The LM head and all that follows it run on the positions that predict a selected token.
    2. The sequences of a batch become one row of tokens without padding. Each is cut after its last selected token,
       and the beginnings that they share, their prompts, are computed once (`shared_prompt`). Models for which that
       is not exact (sliding windows, RoPE that depends on the length) keep
       upstream's layout. A model that turns out at its first forward pass to be one of them computes that pass again.
    Before its first pass a model computes some log-probs both ways (`self_check`). Where they differ by more than
    rounding, it gives up both shortcuts, and says so: then it is slow, and not wrong.
    Vision models are upstream's as they are. Ring attention and tensor parallelism are not supported.
    """

    compares = True  # its log-probs with the model's, before the first pass

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # DeepSpeed's engine, which takes the model's place, has a `config` of its own.
        self.hf_config = self.model.config
        self.is_checked = False
        # The first forward pass may correct both. What it looks at is the model, not the data, so all ranks agree.
        self.reason_not_to_share = _reason_not_to_share(self.model)
        self.head_is_last = True  # whether the head's logits are the model's: Granite scales them, Gemma 2 caps them
        if self.reason_not_to_share is None:
            _wrap_attention(self.hf_config._attn_implementation)
        else:
            logger.info(f"prompts are not shared: {self.reason_not_to_share}")

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
        return_aux_loss: bool = False,
        **mm_inputs,
    ):
        """Take upstream's arguments and return upstream's results, for the selected tokens.

        Args:
            return_statistics: Whether to describe the distributions that predict the selected tokens. Log-probs and
                gradients stay the same to the last bit.
            return_aux_loss: Whether the output must carry the experts' balancing loss. It counts every token, so that
                prompts are not shared then. The other arguments are upstream's.

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
        self.check(sequences, attention_mask)
        log_probs, entropy, squares, output = self._forward_selected(
            sequences, action_mask, attention_mask, return_entropy, return_statistics, return_aux_loss
        )
        if return_entropy:
            output.entropy = entropy
        if return_statistics:
            output.statistics = (entropy.detach(), squares.detach())
        return (log_probs, output) if return_output else log_probs

    @torch.no_grad()
    def check(self, sequences: Tensor, attention_mask: Tensor | None = None) -> None:
        """Compute a probe's log-probs both ways, once, and give up the shortcuts where they differ.

        Every rank does so at its first pass, as ZeRO-3 needs. Each decides for itself, since the layout of one rank is
        no other's business.

        Args:
            sequences: (B, T) token ids to make the probe of.
            attention_mask: (B, T), 1 on tokens; all of them if not given.
        """
        if self.is_checked:
            return
        self.is_checked, was_training = True, self.model.training
        self.model.eval()  # dropout would differ from pass to pass, and move the state of the random numbers
        attention_mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
        probe = self_check.probe(sequences, attention_mask)
        selected = probe[1].bool()
        selective = plain = self._forward_selected(*probe, False, False, False)[0][selected]
        if self.compares:
            plain = self._forward_selected(*probe, False, False, False, is_plain=True)[0][selected]
        self.model.train(was_training)
        if difference := self_check.disagreement(selective, plain, next(self.model.parameters()).dtype):
            logger.warning(
                f"{self.hf_config.model_type}: prompts are not shared and logits are computed all at once, because "
                f"the selective update's log-probs differ from the model's by {difference}. The update stays exact, "
                "and takes longer."
            )
            self.reason_not_to_share, self.head_is_last = "its log-probs would differ", False

    def _forward_selected(
        self, sequences, action_mask, attention_mask, with_entropy, with_statistics, with_aux_loss, is_plain=False
    ):
        """Return (B, A) log-probs, entropies and Σ_{j≠o} P_j², the last two if asked for, and the model's output.

        With `is_plain` the model gets its inputs in upstream's layout, and its own head computes the logits.
        """
        arguments = (sequences, action_mask, attention_mask, with_entropy, with_statistics, with_aux_loss, is_plain)
        share = self.reason_not_to_share is None and not (is_plain or with_aux_loss)
        packed, rows, inputs = self._model_inputs(sequences, action_mask, attention_mask, share)
        causal_lm: nn.Module = getattr(self.model, "module", self.model)
        head = causal_lm.get_output_embeddings()
        fused = self.head_is_last and type(head) is nn.Linear and not is_plain

        def forward_head(hidden: Tensor) -> Tensor:
            hidden = hidden.flatten(0, 1).index_select(0, rows)
            if not fused:
                return type(head).forward(head, hidden[None])
            columns = selected_log_probs(
                hidden, head.weight, packed.targets, head.bias, self.temperature, with_entropy, with_statistics
            )
            columns = torch.stack([column for column in columns if column is not None], dim=-1)
            return torch.cat([columns, columns.new_full((1, columns.shape[1]), _WITNESS)])[None]

        # The head's own hooks still run: ZeRO-3 gathers its weight by them.
        with replaced_attribute(head, "forward", forward_head), _router_logits(self.hf_config, with_aux_loss):
            output = self.model(**inputs)
        result = output["logits"]

        # If a shortcut proves wrong for this model, compute again without it; the first attempt's graph goes first.
        if self._drops_a_shortcut(causal_lm, packed, result, share, fused):
            del output, result
            return self._forward_selected(*arguments)

        if not fused:
            result = self._columns(result, packed.targets, with_entropy, with_statistics)
        padded = torch.zeros(action_mask.numel(), result.shape[-1], device=result.device)
        padded = padded.index_copy(0, packed.places, result[0, : len(packed.places)]).view(*action_mask.shape, -1)
        log_probs, entropy, squares = (*padded.unbind(dim=-1), None, None)[:3]
        return log_probs, entropy, squares, output

    def _model_inputs(
        self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor, share: bool
    ) -> tuple[PackedBatch, Tensor, dict]:
        """Return the packed batch, the (N,) flat positions that predict a selected token, and the model's inputs."""
        packed = pack(sequences, attention_mask, action_mask, share=share)
        if share or self.packing_samples:
            inputs = {"input_ids": packed.tokens, "attention_mask": None, "position_ids": packed.positions}
            if share:
                inputs |= {"attention_mask": _NO_MASK.to(sequences.device), "packed_batch": packed}
            return packed, packed.rows, inputs

        # As upstream numbers the positions of a padded batch.
        positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        inputs = {"input_ids": sequences, "attention_mask": attention_mask, "position_ids": positions}
        row, column = action_mask.bool().nonzero(as_tuple=True)
        length = sequences.shape[1]
        return packed, row * length + length - action_mask.shape[1] + column - 1, inputs

    def _drops_a_shortcut(
        self, causal_lm: nn.Module, packed: PackedBatch, result: Tensor, share: bool, fused: bool
    ) -> bool:
        """Check a forward pass, and give up prompt sharing or the fused head where the pass shows that it must be."""
        if share and (reason := _obstacle_met(causal_lm, packed)):
            logger.info(f"prompts are not shared: {reason}")
            self.reason_not_to_share = reason
            return True
        if fused and not (result[0, -1] == _WITNESS).all():
            logger.info(f"{type(causal_lm).__name__} changes the LM head's logits: they are computed all at once")
            self.head_is_last = False
            return True
        return False

    def _columns(self, logits: Tensor, targets: Tensor, with_entropy: bool, with_statistics: bool) -> Tensor:
        """Return what `selected_log_probs` does, stacked to (1, N, 1 to 3), from the model's (1, N, V) logits."""
        logits = logits.float() / self.temperature
        columns = [log_probs_from_logits(logits, targets[None])[0]]
        if with_statistics:
            columns += distribution_statistics(logits, torch.arange(len(targets), device=targets.device), targets)
        if with_entropy:  # in place of the statistics' entropy, which has no gradient
            columns[1:2] = [compute_entropy(logits)[0]]
        return torch.stack(columns, dim=-1)[None]


class UncheckedSelectiveActor(SelectiveActor):
    """`SelectiveActor` that does not compare its log-probs with the model's before its first pass."""

    compares = False


def _router_logits(config: PretrainedConfig, wanted: bool) -> AbstractContextManager:
    """Let a model of experts return its routers' logits, and so its balancing loss, only where they are wanted.

    Upstream's actor always asks for them.
    """
    if wanted or not hasattr(config, "output_router_logits"):
        return nullcontext()
    return replaced_attribute(config, "output_router_logits", False)


def _reason_not_to_share(model: nn.Module) -> str | None:
    """Return why `model` cannot compute a packed row with shared prefixes exactly, or None where it can."""
    config = model.config
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not getattr(base, "_supports_attention_backend", False):
        return "the model has an attention of its own"
    if not _serves(config._attn_implementation):
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


def _obstacle_met(model: nn.Module, packed: PackedBatch) -> str | None:
    """Return why the forward pass of a packed row was not exact, or None where it was."""
    for layer, reason in _obstacles.items():  # none, for most models
        if any(layer is module for module in model.modules()):
            return reason
    return None if packed.was_attended else f"{type(model).__name__} does not call transformers' attention functions"


def _serves(implementation: str) -> bool:
    """Return whether attention of that name is SDPA, FlexAttention or a kernel of flash-attn's kind.

    transformers has one function for flash_attention_2 and _3 and for each kernel of a hub with variable lengths.
    """
    return ALL_ATTENTION_FUNCTIONS.get(implementation) in (
        sdpa_attention_forward,
        *_BY_SEGMENTS,
        *_attention_functions.values(),
    )


def _wrap_attention(implementation: str) -> None:
    """Make transformers' attention function of that name leave packed rows to `segment_attention`."""
    upstream = ALL_ATTENTION_FUNCTIONS[implementation]
    if upstream is _attention_functions.get(implementation):
        return

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_batch: PackedBatch | None = None,
        **kwargs,
    ):
        reason: str | None
        if packed_batch is not None:
            reason = _obstacle(module, kwargs)
            if reason is None and upstream in _BY_SEGMENTS:
                return _BY_SEGMENTS[upstream](upstream, module, query, key, value, packed_batch, **kwargs)
            if reason is None:
                scale = kwargs.get("scaling")
                scale = query.shape[-1] ** -0.5 if scale is None else scale
                return segment_attention(query, key, value, packed_batch, scale, kwargs.get("dropout", 0.0)), None
        elif attention_mask is not None and attention_mask.shape[-2:] == _NO_MASK.shape[-2:]:
            reason = f"the layers around {type(module).__name__} swallow keyword arguments"
        else:
            return upstream(module, query, key, value, attention_mask, **kwargs)
        # Finish the pass, whose result is thrown away: an error would leave ZeRO-3 half way through the layers.
        _obstacles[module] = reason
        return upstream(module, query, key, value, None, **kwargs)

    _attention_functions[implementation] = attention
    ALL_ATTENTION_FUNCTIONS.register(implementation, attention)


def _obstacle(module: nn.Module, kwargs: dict) -> str | None:
    """Return why an attention layer with these keyword arguments cannot work on a packed row, or None where it can."""
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return f"{type(module).__name__} is not causal"
    given = [name for name in ("position_bias", "sliding_window") if kwargs.get(name) is not None]
    return f"{type(module).__name__} has a {given[0].replace('_', ' ')}" if given else None
