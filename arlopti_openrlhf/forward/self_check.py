"""Asks a model once whether the selective forward pass computes what the model means.

The selective pass leaves tokens out and moves them, which is exact for the architectures it was written for. Another
one may mix tokens in an unforeseen way. So before its first pass each model computes some log-probs both
ways.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Positions compared per sequence. They bound the logits that the plain layout computes. The first ones stand right
# behind a shared beginning, where most mistakes would show.
POSITIONS, FIRST_POSITIONS = 128, 16
_FEWEST = 16  # positions that show how log-probs spread
# Root mean square of the differences, in units of the log-probs' standard deviation. Correct layouts reached 0.014 in
# bf16 and 1.4e-6 in float32 (random weights in the shape of Qwen2.5-0.5B, and smaller models), and 0.024 in bf16 with
# those of SmolLM2-135M-Instruct. Tokens that see too little, too much, or the embedding of their neighbour in the row
# reached 0.07 and more in any type.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}


def probe(length: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch that has every feature of the selective layout.

    Its sequences are one of random tokens, a shorter one that shares its first half, and one that shares nothing. Real
    tokens may say nothing: in an answer that repeats one of them until it is cut off, all are certain.

    Args:
        length: T. No longer than what the model computes next: the frequencies of a dynamic RoPE follow the longest
            sequence that it has seen.
        vocabulary: the token ids are below it.

    Returns:
        (3, T) token ids, padded on the right; the (3, T - 1) action mask of the positions to compare; and the (3, T)
        attention mask.
    """
    tokens = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(0))
    prompt = length // 2
    other_response = tokens[prompt:].flip(0)[: -(-prompt // 2)]
    rows = [tokens, torch.cat([tokens[:prompt], other_response]), tokens.roll(1)]
    action_mask = torch.zeros(3, length - 1, dtype=torch.long)
    for i, row in enumerate(rows):
        # Column t stands for token t + 1. The first token behind the shared beginning is predicted in it.
        columns = torch.arange(max(prompt, 1) - 1, len(row) - 1)
        action_mask[i, columns[:FIRST_POSITIONS]] = 1
        action_mask[i, columns[:: 1 + len(columns) // POSITIONS]] = 1
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return pad_sequence(rows, batch_first=True), action_mask, attention_mask


def disagreement(selective: Tensor, plain: Tensor, dtype: torch.dtype) -> str | None:
    """Return by how much log-probs (N,) that were computed both ways differ, or None where rounding explains it.

    Args:
        selective: log-probs of the selective forward pass.
        plain: those of the model in OpenRLHF's layout. Where they are few or not finite there is nothing to compare.
        dtype: the type that the model computes in.
    """
    if len(plain) < _FEWEST or not plain.isfinite().all():
        return None
    difference, tolerance = (selective - plain).square().mean().sqrt(), TOLERANCE[dtype]
    if difference <= tolerance * plain.std():
        return None
    return f"{difference / plain.std():.2g} of the log-probs' standard deviation, where rounding explains {tolerance}"
