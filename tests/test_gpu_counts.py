"""What a micro-batch takes on a GPU, counted without one (`benchmarks/gpu_counts.py`)."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import claimed_gpu  # noqa: E402
import gpu_counts  # noqa: E402

from arlopti_openrlhf import methods  # noqa: E402
from arlopti_openrlhf.forward import lm_head  # noqa: E402

# Of one micro-batch at 24 layers: kernels, DeepSpeed's not among them, and waits. A change that needs more says why.
MOST = {"GRPO": (3570, 1), "AR + Lopti": (7130, 1)}
MORE = {
    "quantile": ["--algo.lopti.quantile", "0.3"],
    "high group first": ["--algo.lopti.eta", "0.5", "--algo.lopti.order", "high_first"],
    "one group": ["--algo.lopti.eta", "0.5", "--algo.lopti.groups", "low"],
    "normalized": ["--algo.ar.alpha", "0.3", "--algo.token_method_normalize"],
    "gspo": ["--actor.policy_loss_type", "gspo", "--algo.lopti.eta", "0.5"],
    "means over responses": ["--actor.loss_agg_mode", "seq-mean-token-mean", "--algo.lopti.eta", "0.5"],
    "entropy bonus": ["--actor.entropy_coef", "0.01", "--algo.lopti.eta", "0.5"],
    "packed": ["--ds.packing_samples", "--algo.lopti.eta", "0.5"],
    "importance sampling": ["--algo.advantage.is_correction_level", "token", "--algo.lopti.eta", "0.5"],
    "no statistics": ["--logger.probability_stats", "off", "--algo.lopti.eta", "0.5"],
    "two epochs": ["--train.max_epochs", "2", "--algo.lopti.eta", "0.5"],
}

ARGUMENTS = {"surprisal_band": ["--algo.token_method_args", "surprisal_band.lo=1", "surprisal_band.hi=2"]}


@pytest.mark.parametrize("name", [pytest.param("GRPO", marks=pytest.mark.long), "AR + Lopti"])
def test_kernels_and_waits_of_a_micro_batch(name):
    found = gpu_counts.of_a_micro_batch(gpu_counts.SETTINGS[name], layers=24)
    most_kernels, most_waits = MOST[name]
    assert not found.mixtures
    assert 0.9 * most_kernels < found.kernels.total() <= most_kernels
    assert found.waits.total() == most_waits, found.waits


@pytest.mark.long
@pytest.mark.parametrize("name", [*methods.built_in(), *MORE])
def test_nothing_mixes_devices(name):
    flags = MORE.get(name) or ["--algo.token_method", name, *ARGUMENTS.get(name, [])]
    counts = gpu_counts.update(flags, layers=1, prompts=1)
    assert counts.kernels["_flash_attention_forward"] and not counts.mixtures


def test_triton_without_its_interpreter_is_not_asked(monkeypatch):
    """PyTorch's builds for CUDA bring it to machines without a GPU, where it computes nothing."""
    monkeypatch.setattr(lm_head, "find_spec", lambda name: pytest.fail("asked for"))
    for cached in (lm_head._is_fused, lm_head._arithmetic):
        cached.cache_clear()
    assert gpu_counts.update([], layers=1, prompts=1).kernels


def test_what_is_counted():
    """By hand: a copy that waits, one that does not, a kernel, a view, a mixture, and a question that waits."""
    with claimed_gpu.claimed_gpu() as counts:
        there, here = torch.ones(3).to(torch.cuda.current_device()), torch.ones(3)
        also = here.to(0, non_blocking=True)
        assert there.is_cuda and also.device.type == "cuda" and not here.is_cuda
        total = (there + also).view(3, 1).sum()
        assert not counts.mixtures
        there + here
        assert total.item() == 6
    assert counts.waits == {"copy to the GPU": 1, "_local_scalar_dense": 1}
    assert counts.kernels == {"copy": 2, "add": 2, "sum": 1, "_local_scalar_dense": 1}
    assert list(counts.mixtures) == ["add: (3,) GPU, (3,) CPU"]
