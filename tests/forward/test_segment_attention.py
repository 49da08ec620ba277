"""Attention over a packed row is that of separate sequences, with the same gradients, and no mask in memory."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from arlopti_openrlhf.forward import packed_attention
from arlopti_openrlhf.forward.packed_attention import NO_MASK, PackedAttention
from arlopti_openrlhf.forward.segment_attention import segment_attention
from arlopti_openrlhf.forward.shared_prompt import pack

# Two prompts, of which one has a single response that shares nothing, and one has responses of several lengths.
ROWS = [[7, 8, 9, *range(20, 20 + n)] for n in (4, 1, 6)] + [[1, 2, 3, 4], [5, 6, 1], [5, 6, 2, 2]]
LENGTH = max(map(len, ROWS))


@pytest.fixture
def packed():
    sequences = torch.tensor([row + [0] * (LENGTH - len(row)) for row in ROWS])
    attention_mask = torch.tensor([[1] * len(row) + [0] * (LENGTH - len(row)) for row in ROWS])
    return pack(sequences, attention_mask, attention_mask[:, 1:])


def places(packed, row: int):
    """The places of a sequence's tokens, all but the last, in the packed row."""
    own = packed.rows[packed.places // (LENGTH - 1) == row]
    assert packed.tokens[0, own].tolist() == ROWS[row][:-1]
    return own


def separate(query, key, value, packed):
    """The same (1, L, heads, D) from each sequence on its own. A shared prompt's result is each sequence's."""
    output = torch.zeros_like(query[..., : value.shape[-1]]).transpose(1, 2)
    for row in range(len(ROWS)):
        own = places(packed, row)
        q, k, v = query[:, :, own], *(x[:, :, own].repeat_interleave(2, dim=1) for x in (key, value))
        alone = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(1, 2)
        output = output.index_copy(1, own, alone)
    return output


# Where the values have another width, the masks of other devices are taken.
@pytest.mark.parametrize("width", [8, 6], ids=["by parts", "masks"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_is_that_of_separate_sequences(packed, dtype, width):
    generator, total = torch.Generator().manual_seed(0), packed.tokens.shape[1]
    shapes = ((1, 4, total, 8), (1, 2, total, 8), (1, 2, total, width))
    inputs = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    output, exact = segment_attention(*inputs, packed, scale=0.3), separate(*exact_inputs, packed)
    assert output.shape == (1, total, 4, width) and output.dtype == dtype
    slope = torch.randn(output.shape, generator=generator)
    (output * slope).sum().backward()
    (exact * slope).sum().backward()
    # Few units of the last place of values that are about 1.
    tolerance = 8 * torch.finfo(dtype).eps
    for ours, theirs in zip(
        [output, *(x.grad for x in inputs)], [exact, *(x.grad for x in exact_inputs)], strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def test_no_mask_is_made(packed, monkeypatch):
    """At 8 responses of 17,000 tokens masks would take 2.5 GiB in each layer."""

    class Shapes(torch.overrides.TorchFunctionMode):
        greatest = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.greatest = max(self.greatest, result.numel())
            return result

    total = packed.tokens.shape[1]
    tensors = [torch.randn(1, 1, total, 2, requires_grad=True) for _ in range(3)]
    with Shapes() as shapes:
        segment_attention(*tensors, packed, scale=0.3).sum().backward()
    assert 0 < shapes.greatest <= 2 * total


def test_flex_attention_is_that_of_separate_sequences(packed, monkeypatch):
    """PyTorch's FlexAttention is not compiled here, so that it multiplies everything out, with the same mask."""
    masks = []

    def attend(module, query, key, value, mask, scaling):
        masks.append(mask)
        return flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True).transpose(1, 2), None

    monkeypatch.setattr(packed_attention, "flex_attention_forward", attend)
    attention = PackedAttention(attend)
    generator, total = torch.Generator().manual_seed(0), packed.tokens.shape[1]
    query, key, value = (torch.randn((1, heads, total, 8), generator=generator) for heads in (4, 2, 2))
    for _ in range(2):  # layers
        output, _ = attention(torch.nn.Module(), query, key, value, NO_MASK, packed_batch=packed, scaling=0.3)
    exact = separate(query.double(), key.double(), value.double(), packed)
    torch.testing.assert_close(output.double(), exact, rtol=1e-6, atol=1e-6)
    assert packed.was_attended and masks[0] is masks[1]
