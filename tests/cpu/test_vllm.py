"""Seeds on the CPU, of requests whose prompts vLLM computes in parts."""

import types

import pytest
import torch

from arlopti_openrlhf.cpu import vllm as cpu_vllm


def test_a_generator_is_not_turned_back():
    """As vLLM does after a part of a prompt, which PyTorch refuses for the CPU."""

    class CPUModelRunner:
        def __init__(self, generators):
            self.input_batch = types.SimpleNamespace(generators=generators)

        def _bookkeeping_sync(self, tokens, fails=False):
            for generator in self.input_batch.generators.values():
                generator.set_offset(generator.get_offset() - 4)
            if fails:
                raise ValueError
            return tokens

    generators = {0: torch.Generator()}
    with pytest.raises(RuntimeError, match="CPU Generator"):
        CPUModelRunner(generators)._bookkeeping_sync([1])
    cpu_vllm._patch_cpu_model_runner(types.SimpleNamespace(CPUModelRunner=CPUModelRunner))
    runner = CPUModelRunner(generators)
    assert runner._bookkeeping_sync([1]) == [1] and runner.input_batch.generators is generators
    with pytest.raises(ValueError):
        runner._bookkeeping_sync([1], fails=True)
    assert runner.input_batch.generators is generators
