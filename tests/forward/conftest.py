"""A stand-in for flash-attn on a CPU: what its kernels document, in plain PyTorch."""

import functools

import pytest
import torch


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    s_aux=None,
):
    """Attend sequence by sequence. The causal mask is aligned to the bottom right corner; heads may be grouped.

    `softcap` bounds the scores, and `s_aux`, (heads,), adds a score without a value, as flash-attn 3 has it.
    """
    assert causal and dropout_p == 0 and not deterministic and window_size == (-1, -1)
    outputs = []
    for q0, q1, k0, k1 in zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True):
        queries, (keys, values) = q[q0:q1], (x[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        assert len(queries) <= max_seqlen_q and len(keys) <= max_seqlen_k
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        seen = torch.arange(len(keys)) <= torch.arange(len(queries))[:, None] + len(keys) - len(queries)
        scores = scores.masked_fill(~seen, -torch.inf)
        if s_aux is not None:
            scores = torch.cat((scores, s_aux[:, None, None].expand(-1, len(queries), 1)), dim=2)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[:, :, : len(keys)], values))
    return torch.cat(outputs)


@pytest.fixture
def flash_attention(monkeypatch) -> list:
    """Let transformers take the stand-in for flash-attn, so that models run under `flash_attention_2`.

    Returns:
        The keyword arguments of each call of the kernel.
    """
    from openrlhf.models import Actor
    from transformers import modeling_flash_attention_utils as flash
    from transformers import modeling_utils

    calls = []

    @functools.wraps(flash_attn_varlen_func)
    def kernel(*args, **kwargs):
        calls.append(kwargs)
        return flash_attn_varlen_func(*args, **kwargs)

    functions = (None, kernel, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *args, **kwargs: functions)
    for name in ("_loaded_implementation", "_flash_varlen_fn", "_process_flash_kwargs_fn"):
        monkeypatch.setattr(flash, name, None)
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda: False)
    monkeypatch.setattr(modeling_utils.PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
    # Without a GPU `cpu.enable` turns flash attention into SDPA.
    monkeypatch.setattr(Actor, "__init__", Actor.__init__.__wrapped__)
    return calls


@pytest.fixture(scope="module")
def batch():
    """Six sequences: two prompts with three responses each, shuffled, one of them without tokens, right-padded."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 200, (n,), generator=generator) for n in (9, 5)]
    rows, lengths = [], []
    for prompt, tokens in [(0, 6), (1, 11), (0, 0), (1, 3), (0, 14), (1, 1)]:
        rows.append(torch.cat([prompts[prompt], torch.randint(1, 200, (max(tokens, 1),), generator=generator)]))
        lengths.append((len(prompts[prompt]), tokens))
    length = max(map(len, rows))
    sequences, attention_mask = torch.zeros(2, 6, length, dtype=torch.long).unbind()
    action_mask = torch.zeros(6, length - 1, dtype=torch.long)
    for i, (row, (prompt, tokens)) in enumerate(zip(rows, lengths, strict=True)):
        sequences[i, : len(row)], attention_mask[i, : len(row)] = row, 1
        action_mask[i, prompt - 1 : prompt - 1 + tokens] = 1
    return sequences, attention_mask, action_mask
