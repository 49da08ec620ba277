"""Liger's kernels in Triton's interpreter: which of them run, and transformers without them afterwards."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import triton.language as tl
from liger_kernel.ops import rms_norm
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction


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


@contextmanager
def undone_afterwards(model_type: str) -> Iterator[None]:
    """Take Liger's functions and classes out of transformers' module again when the context ends."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    names = dict(vars(module))
    heads = [value for name, value in names.items() if name.endswith("ForCausalLM")]
    forwards = [head.forward for head in heads]
    try:
        yield
    finally:
        vars(module).update(names)
        for head, forward in zip(heads, forwards, strict=True):
            head.forward = forward


@contextmanager
def launches() -> Iterator[set[str]]:
    """Yield the names of the Triton kernels that run while the context lasts."""
    run, seen = InterpretedFunction.run, set()

    def noted(self, *args, **kwargs):
        seen.add(self.__name__)
        return run(self, *args, **kwargs)

    InterpretedFunction.run = noted
    try:
        yield seen
    finally:
        InterpretedFunction.run = run
