"""What the update is measured against: OpenRLHF as it would be with flash-attn, on the same engine."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from arlopti_openrlhf.patching import replaced_attribute


def packed_actor(engine) -> torch.nn.Module:
    """Return OpenRLHF's actor with packed rows, whose sequences attend to themselves alone, as by flash-attn.

    Without flash-attn, transformers' SDPA takes a packed row under a boolean matrix of what each token sees, which no
    user of OpenRLHF with a GPU would pay for.

    Args:
        engine: DeepSpeed's.
    """
    from openrlhf.models import Actor

    from arlopti_openrlhf.forward import packed_attention
    from arlopti_openrlhf.forward.shared_prompt import pack

    class PackedActor(Actor):
        def forward(self, sequences, action_mask=None, attention_mask=None, *args, **kwargs):
            batch = pack(sequences, attention_mask, attention_mask[:, 1:], share=False).to(sequences.device)
            return super().forward(sequences, action_mask, attention_mask, *args, packed_batch=batch, **kwargs)

    packed_attention.install(engine.module.config._attn_implementation)
    actor = PackedActor(engine)
    actor.packing_samples, actor.is_vlm = True, False
    return actor


@contextmanager
def one_pass_log_probs() -> Iterator[None]:
    """Let OpenRLHF's actor take log-probs in one pass over the logits, as it does by flash-attn's cross-entropy.

    Without flash-attn it sums the exponentials of float32 logits by chunks, whose backward pass takes memory and time
    that grow with the square of the chunks.
    """
    from openrlhf.models import actor

    def log_probs(logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        logits = logits if temperature == 1.0 else logits / temperature
        return -torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view_as(
            labels
        )

    with replaced_attribute(actor, "log_probs_from_logits", log_probs):
        yield
