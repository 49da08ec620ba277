"""The update's two pieces of arithmetic on this device, forward and gradients, beside float64 on the CPU.

They are attention over a packed row and the LM head. The reference is written out here, over dense matrices, in
float64 on the CPU. It runs first, since whatever is wrong here would be wrong in every other part.
"""

import torch
from torch import Tensor

from arlopti_openrlhf.forward.lm_head import selected_log_probs
from arlopti_openrlhf.forward.segment_attention import segment_attention
from arlopti_openrlhf.forward.shared_prompt import PackedBatch, pack

# How far a result may be from the reference, the norm of the difference by the norm, in units of the last place.
UNITS = {torch.bfloat16: 2, torch.float32: 100}
HEADS, KEY_HEADS, WIDTH, HIDDEN, VOCABULARY = 8, 2, 64, 256, 50_000


def compare() -> list[dict]:
    """Return a row for attention and for the head, in each type, with the distances of results and gradients."""
    rows = []
    for dtype, units in UNITS.items():
        for name, distances in (("attention", attention(dtype)), ("LM head", head(dtype))):
            bound = units * torch.finfo(dtype).eps
            failures = [
                f"{what} {value:.2g}, at most {bound:.2g}" for what, value in distances.items() if not value <= bound
            ]
            rows.append(
                dict(name=name, dtype=str(dtype).removeprefix("torch."), distances=distances, failures=failures)
            )
    return rows


def attention(dtype: torch.dtype) -> dict[str, float]:
    """Return the distances of a packed row's attention: three prompts, of which two have several responses."""
    packed = _packed()
    length, generator = packed.tokens.shape[1], torch.Generator().manual_seed(0)
    shapes = dict(
        query=(1, HEADS, length, WIDTH), key=(1, KEY_HEADS, length, WIDTH), value=(1, KEY_HEADS, length, WIDTH)
    )
    given = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    slope = torch.randn(1, length, HEADS, WIDTH, generator=generator)

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
        scores = (query @ key.mT * WIDTH**-0.5).masked_fill(~visible(packed), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return segment_attention(query, key, value, packed, WIDTH**-0.5)

    return _distances(given, slope, ours, dense)


def head(dtype: torch.dtype) -> dict[str, float]:
    """Return the distances of the log-probs of 300 tokens."""
    generator, count = torch.Generator().manual_seed(1), 300
    given = dict(
        hidden=torch.randn(count, HIDDEN, generator=generator).to(dtype),
        weight=(0.2 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).to(dtype),
    )
    targets = torch.randint(0, VOCABULARY, (count,), generator=generator)

    def dense(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return selected_log_probs(hidden, weight, targets.to(hidden.device))[0]

    return _distances(given, torch.randn(count, generator=generator), ours, dense)


def _distances(given: dict[str, Tensor], slope: Tensor, ours, dense) -> dict[str, float]:
    """Return how far the result and each gradient of `ours` on the device are from those of `dense` in float64."""
    found = []
    for function, device, dtype in ((ours, torch.cuda.current_device(), None), (dense, "cpu", torch.float64)):
        inputs = {
            name: x.detach().to(device, dtype or x.dtype, copy=True).requires_grad_() for name, x in given.items()
        }
        result = function(**inputs)
        (result * slope.to(device, result.dtype)).sum().backward()
        found.append({"result": result} | {f"gradient of {name}": x.grad for name, x in inputs.items()})
    pairs = ((name, found[0][name].detach().double().cpu(), exact.detach()) for name, exact in found[1].items())
    return {name: float((ours - exact).norm() / exact.norm()) for name, ours, exact in pairs}


def _packed() -> PackedBatch:
    rows = [
        [i, *range(10, 90), *range(100 * j, 100 * j + 30 + j)] for i, n in ((1, 1), (2, 3), (3, 4)) for j in range(n)
    ]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return pack(ids, mask, mask[:, 1:]).to(torch.cuda.current_device())


def visible(packed: PackedBatch) -> Tensor:
    """Return the (L, L) matrix of what each token sees: its segment as far as itself, and its prefix."""
    spans = [slice(stop - s.length, stop) for s, stop in zip(packed.segments, packed.stops, strict=True)]
    sees = torch.zeros(packed.stops[-1], packed.stops[-1], dtype=torch.bool)
    for segment, span in zip(packed.segments, spans, strict=True):
        sees[span, span] = torch.ones(segment.length, segment.length, dtype=torch.bool).tril()
        if segment.prefix is not None:
            sees[span, spans[segment.prefix]] = True
    return sees
