"""Replaces what vLLM's own processes do on the CPU. `arlopti_openrlhf.cpu.patches` makes the replacements.

vLLM imports the modules before it loads plugins, so these patches also work on a module that is there already.
"""

import functools
from typing import Any


def _patch_cpu_model_runner(module: Any) -> None:
    """Let the prompt of a request with a seed be computed in parts, as it is where many are sent at once.

    vLLM throws away the token that it samples after such a part, and turns the request's generator back. PyTorch
    cannot do that on the CPU. Here a generator stays where it is. A seed still gives the same tokens where vLLM
    computes the same requests together, and `--train.deterministic` needs no more.
    """
    bookkeeping = module.CPUModelRunner._bookkeeping_sync

    @functools.wraps(bookkeeping)
    def without_generators(self, *args, **kwargs):
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    module.CPUModelRunner._bookkeeping_sync = without_generators


PATCHES = {
    "vllm.v1.worker.cpu_model_runner": _patch_cpu_model_runner,
}
