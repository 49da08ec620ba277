"""Liger's kernels without a GPU: in Triton's interpreter (TRITON_INTERPRET=1), or as stand-ins in plain torch.

The interpreter computes no bf16. There the stand-ins have the results, for what only counts launches.
"""

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import rms_norm
from torch import Tensor
from triton.runtime import interpreter


def complete_interpreter() -> None:
    """Add what Liger's kernels need: numbers as tensors, as on a GPU, and Triton's rsqrt for that of CUDA's library.

    Every call of a function inside a kernel would also replace Triton's language anew, which takes most of the time.
    """
    convert, replace, replaced = interpreter._implicit_cvt, interpreter._patch_lang, set()

    def with_floats(argument):
        if not isinstance(argument, float):
            return convert(argument)
        number = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(number, tl.float32)

    def replace_once(function):
        if function.__globals__["__name__"] not in replaced:
            replaced.add(function.__globals__["__name__"])
            replace(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._implicit_cvt, interpreter._patch_lang = with_floats, replace_once
    rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)  # which the interpreter replaces at the first launch


def _norm(y: Tensor, _y, x: Tensor, _x, weight: Tensor, _w, rstd: Tensor, _r, columns, eps, *rest, **sizes) -> None:
    rstd.copy_((x.float().square().mean(-1) + eps).rsqrt())
    y.copy_((x * rstd[:, None]).to(x.dtype) * weight)


def _norm_backward(
    grad: Tensor,
    _g,
    to: Tensor,
    _t,
    x: Tensor,
    _x,
    dtype,
    weight: Tensor,
    _w,
    rstd: Tensor,
    _r,
    of_weight,
    *rest,
    **sizes,
) -> None:
    normalized, grads = x * rstd[:, None], grad.float()
    if of_weight is not None:
        of_weight.copy_((grads * normalized).sum(0, keepdim=True))
    grads = grads * weight
    to.copy_(rstd[:, None] * (grads - normalized * (grads * normalized).mean(-1, keepdim=True)))


def _rotate(
    query: Tensor, _q, key: Tensor, _k, cos: Tensor, _c, sin: Tensor, *rest, BACKWARD_PASS: bool, **sizes
) -> None:
    half = cos.shape[-1] // 2
    cos, sin = (x[..., None, :half] for x in (cos, -sin if BACKWARD_PASS else sin))
    for x in (query, key):
        first, second = x.chunk(2, dim=-1)
        x.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def _swiglu(gate: Tensor, up: Tensor, result: Tensor, *rest, **sizes) -> None:
    result.copy_(torch.nn.functional.silu(gate) * up)


def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor, *rest, **sizes) -> None:
    share = gate.float().sigmoid()
    of_gate = grad * up * share * (1 + gate * (1 - share))
    up.copy_(grad * gate * share)
    gate.copy_(of_gate)


STAND_INS = {
    "_rms_norm_forward_kernel": _norm,
    "_rms_norm_backward_kernel": _norm_backward,
    "_triton_rope": _rotate,
    "_swiglu_forward_kernel": _swiglu,
    "_swiglu_backward_kernel": _swiglu_backward,
}
