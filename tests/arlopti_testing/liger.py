"""Liger's kernels: which of them run, and transformers without them afterwards."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from triton.runtime.interpreter import InterpretedFunction


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
