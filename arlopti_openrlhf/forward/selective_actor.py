"""The actor that computes what its action mask asks for: log-probs of the selected tokens, each prompt once."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from openrlhf.models.actor import Actor
from openrlhf.utils.logging_utils import init_logger
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.utils import ModelOutput

from arlopti_openrlhf.forward import packed_attention, self_check
from arlopti_openrlhf.forward.lm_head import selected_log_probs
from arlopti_openrlhf.forward.shared_prompt import PackedBatch, pack
from arlopti_openrlhf.patching import replaced_attribute

logger = init_logger(__name__)


class Shortcuts(NamedTuple):
    """Says which shortcuts leave a model's results as they are."""

    reason_not_to_share: str | None  # why each response has its prompt computed anew; None where they share it
    fuses_head: bool  # whether log-probs come from blocks of logits; not where a model changes its head's logits


def _whole_head(head: nn.Module, hidden: Tensor) -> Tensor:
    """Return the logits of an LM head whose own `forward` is replaced."""
    return type(head).forward(head, hidden)


class SelectiveActor(Actor):
    """`Actor` with the same log-probs, entropies and gradients, for the positions that the action mask selects.

    The only changes to upstream's `forward`, where an action mask is given:
    1. The LM head and all that follows it run on the positions that predict a selected token.
    2. The sequences of a batch become one row of tokens without padding. Each is cut after its last selected token,
       and the beginnings that they share, their prompts, are computed once (`shared_prompt`). Models for which that
       is not exact (sliding windows, RoPE that depends on the length) keep upstream's layout.
    `check` settles which of these are exact for a model, once, before its first pass.
    Vision models, ring attention and tensor parallelism are not supported.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # DeepSpeed's engine, which takes the model's place, has a `config` of its own.
        self.hf_config = self.model.config
        self.shortcuts: Shortcuts | None = None  # set once, by `check`

    def forward(
        self,
        sequences: torch.LongTensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        *,
        return_entropy: bool = False,
        return_statistics: bool = False,
        return_aux_loss: bool = False,
        layout: PackedBatch | None = None,
        **upstreams,
    ):
        """Take upstream's arguments and return upstream's results, for the selected tokens.

        Args:
            layout: What `lay_out` has made of these sequences and masks, on their device. Where it is not given, it is
                made here, and the host waits for the device.
            return_statistics: Whether to describe the distributions that predict the selected tokens. Log-probs and
                gradients stay the same to the last bit.
            return_aux_loss: Whether the output must carry the experts' balancing loss. It counts every token, so that
                prompts are not shared then. The other arguments are upstream's.

        Returns:
            (B, A) log-probs of the selected tokens, 0 elsewhere. With `return_output` also the model's output, whose
            logits are of no use. It carries, where asked for, `entropy`, (B, A), and `statistics`: the pair of (B, A)
            entropies in nats and (B, A) Σ_{j≠o} P_j², float32 and without a gradient.
        """
        if action_mask is None:
            upstreams |= {"return_entropy": return_entropy}
            return super().forward(sequences, action_mask, attention_mask, return_output, **upstreams)
        if layout is None:
            layout = self.lay_out(sequences, action_mask, attention_mask, return_aux_loss).to(sequences.device)
        columns, output = self._forward_selected(
            sequences,
            attention_mask,
            layout,
            (self.shortcuts or self.check(sequences, attention_mask)).fuses_head,
            return_entropy,
            return_statistics,
            return_aux_loss,
        )
        padded = torch.zeros(action_mask.numel(), columns.shape[-1], device=columns.device)
        padded = padded.index_copy(0, layout.places, columns).view(*action_mask.shape, -1)
        log_probs, entropy, squares = (*padded.unbind(dim=-1), None, None)[:3]
        if return_entropy:
            output.entropy = entropy
        if return_statistics:
            output.statistics = (entropy.detach(), squares.detach())
        return (log_probs, output) if return_output else log_probs

    def lay_out(
        self,
        sequences: Tensor,
        action_mask: Tensor,
        attention_mask: Tensor,
        with_aux_loss: bool = False,
        shortcuts: Shortcuts | None = None,
    ) -> PackedBatch:
        """Return how `forward` computes a batch, of its arguments. It is on the CPU.

        A batch that is there too can be laid out before it is copied, while the device works on another. The shortcuts
        are those of `check`, if not given.
        """
        shortcuts = shortcuts or self.shortcuts or self.check(sequences, attention_mask)
        # The experts' balancing loss counts every token.
        share = shortcuts.reason_not_to_share is None and not with_aux_loss
        packed = pack(sequences, attention_mask, action_mask, share=share)
        if share or self.packing_samples:
            return packed
        # The model gets the padded batch. So the rows are those of its positions.
        length, width = sequences.shape[1], action_mask.shape[1]
        row, column = packed.places // max(width, 1), packed.places % max(width, 1)
        return replace(packed, rows=row * length + length - width + column - 1)

    @torch.no_grad()
    def check(self, sequences: Tensor, attention_mask: Tensor | None = None) -> Shortcuts:
        """Return the shortcuts that are exact for the model. The first call finds them, by a probe.

        The first call is collective under ZeRO-3. Obstacles depend on the model and not on the data, so all ranks run
        the same passes. Whether the numbers agree, each decides for itself: the layout is local to a rank.

        Args:
            sequences: (B, T) token ids. The probe is as long as the longest of them.
            attention_mask: (B, T), 1 on tokens; all of them if not given.
        """
        if self.shortcuts is None:
            was_training = self.model.training
            self.model.eval()  # dropout would differ from pass to pass, and move the state of the random numbers
            length = sequences.shape[1] if attention_mask is None else int(attention_mask.sum(dim=1).max())
            probe = self_check.probe(length, self._causal_lm.config.get_text_config().vocab_size)
            self.shortcuts = self._exact_shortcuts([tensor.to(torch.cuda.current_device()) for tensor in probe])
            self.model.train(was_training)
        return self.shortcuts

    def _exact_shortcuts(self, probe: Sequence[Tensor]) -> Shortcuts:
        """Return the shortcuts that leave the log-probs of `self_check.probe` as they are."""
        sequences, action_mask, attention_mask = probe

        def computed(shortcuts: Shortcuts, **head) -> tuple[Tensor, ModelOutput]:
            layout = self.lay_out(sequences, action_mask, attention_mask, shortcuts=shortcuts).to(sequences.device)
            return self._forward_selected(sequences, attention_mask, layout, shortcuts.fuses_head, **head)

        # Upstream's layout says what is right, and whether the model changes its head's logits. Granite scales them,
        # Gemma 2 caps them.
        heads_own = []

        def whole_head(head: nn.Module, hidden: Tensor) -> Tensor:
            heads_own.append(_whole_head(head, hidden))
            return heads_own[0].clone()  # a model may change them in place

        plain, output = computed(Shortcuts("", False), whole_head=whole_head)
        logits = output["logits"]
        head_is_last = torch.equal(heads_own[0].to(logits.dtype), logits) and logits.numel() > 0
        causal_lm = self._causal_lm
        fuses_head = head_is_last and type(causal_lm.get_output_embeddings()) is nn.Linear
        shortcuts = Shortcuts(packed_attention.reason_not_to_share(causal_lm), fuses_head)
        if shortcuts.reason_not_to_share is None:
            # Collect the obstacles and finish the pass. An error would leave ZeRO-3 half way through the layers.
            obstacles: list[str] = []
            attention = packed_attention.install(self.hf_config._attn_implementation)
            with replaced_attribute(attention, "refuse", obstacles.append):
                selective, _ = computed(shortcuts)
            shortcuts = shortcuts._replace(reason_not_to_share=obstacles[0] if obstacles else None)
        if shortcuts.reason_not_to_share is not None:
            selective, _ = computed(shortcuts)
            logger.info(f"prompts are not shared: {shortcuts.reason_not_to_share}")
        if not head_is_last:
            logger.info(f"{type(causal_lm).__name__} changes the LM head's logits: they are computed all at once")

        # Mistakes for which there is no rule show in the numbers.
        dtype = next(self.model.parameters()).dtype
        if difference := self_check.disagreement(selective[:, 0], plain[:, 0], dtype):
            logger.warning(
                f"{self.hf_config.model_type}: prompts are not shared and logits are computed all at once, because "
                f"the selective update's log-probs differ from the model's by {difference}. The update stays exact, "
                "and takes longer."
            )
            return Shortcuts("its log-probs would differ", fuses_head=False)
        return shortcuts

    @property
    def _causal_lm(self) -> nn.Module:
        """Return Hugging Face's model, without DeepSpeed's engine around it."""
        return getattr(self.model, "module", self.model)

    def _forward_selected(
        self,
        sequences,
        attention_mask,
        layout,
        fuses_head,
        with_entropy=False,
        with_statistics=False,
        with_aux_loss=False,
        whole_head=_whole_head,
    ) -> tuple[Tensor, ModelOutput]:
        """Return (N, 1 to 3) log-probs, entropies and Σ_{j≠o} P_j²; and the model's output."""
        head, wanted = self._causal_lm.get_output_embeddings(), (with_entropy, with_statistics)

        def columns(states: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            found = selected_log_probs(
                states, weight, layout.targets, bias, self.temperature, *wanted, lambda: layout.trained
            )
            return torch.stack([column for column in found if column is not None], dim=-1)

        def forward_head(hidden: Tensor) -> Tensor:
            hidden = hidden.flatten(0, 1).index_select(0, layout.rows)
            # In the shape of a model's output, (1, N, ...).
            return columns(hidden, head.weight, head.bias)[None] if fuses_head else whole_head(head, hidden[None])

        # The head's own hooks still run: ZeRO-3 gathers its weight by them.
        with replaced_attribute(head, "forward", forward_head), _router_logits(self.hf_config, with_aux_loss):
            output = self.model(**_model_inputs(sequences, attention_mask, layout, self.packing_samples))
        if layout.by_segments and not layout.was_attended:
            reason = f"{type(self._causal_lm).__name__} does not call transformers' attention functions"
            packed_attention.install(self.hf_config._attn_implementation).refuse(reason)
        result = output["logits"][0]
        return result if fuses_head else columns(result, None, None), output


def _model_inputs(sequences: Tensor, attention_mask: Tensor, layout: PackedBatch, packs: bool) -> dict:
    """Return what the model is called with: the packed row, or as upstream the padded batch."""
    if layout.by_segments or packs:
        inputs = {"input_ids": layout.tokens, "attention_mask": None, "position_ids": layout.positions}
        if layout.by_segments:
            mask = torch.empty_like(packed_attention.NO_MASK, device=layout.tokens.device)
            inputs |= {"attention_mask": mask, "packed_batch": layout}
        return inputs
    # As upstream numbers the positions of a padded batch.
    positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
    return {"input_ids": sequences, "attention_mask": attention_mask, "position_ids": positions}


def _router_logits(config: PretrainedConfig, wanted: bool) -> AbstractContextManager:
    """Let a model of experts return its routers' logits, and so its balancing loss, only where they are wanted.

    Upstream's actor always asks for them.
    """
    if wanted or not hasattr(config, "output_router_logits"):
        return nullcontext()
    return replaced_attribute(config, "output_router_logits", False)
