"""The selective update with Liger's kernels, against OpenRLHF's actor without them.

`tests/long/test_triton.py` runs it in Triton's interpreter: Triton is not in the environment of the other tests.
"""

import argparse
import runpy
import sys
from pathlib import Path

import pytest
import torch
from arlopti_testing import liger, saved_bytes
from arlopti_testing.forward_models import SHAPE, actor, assert_equal, run, save
from arlopti_testing.processes import errors_on_two_ranks
from transformers import AutoConfig

from arlopti_openrlhf.activation_memory import layer_bytes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

liger.complete_interpreter()

KERNELS = {
    "_rms_norm_forward_kernel",
    "_rms_norm_backward_kernel",
    "_triton_rope",
    "_swiglu_forward_kernel",
    "_swiglu_backward_kernel",
}
MODELS = ["llama", "qwen2", "qwen3"]


@pytest.fixture(params=MODELS)
def model(request, tmp_path):
    """Return the folder of a random model. Stock's results have to be there before Liger's classes are."""
    with liger.undone_afterwards(request.param):
        yield save(AutoConfig.for_model(request.param, **SHAPE, tie_word_embeddings=True), tmp_path)


def ours_and_stocks(folder, batch, change=lambda model: None, **kwargs):
    """Return our actor with Liger's kernels, its results, and those of OpenRLHF's actor without."""
    from openrlhf.models import Actor

    from arlopti_openrlhf.forward.selective_actor import SelectiveActor

    results = []
    for kind, uses_liger in ((Actor, False), (SelectiveActor, True)):
        made = actor(kind, folder, use_liger_kernel=uses_liger, **kwargs)
        change(made)
        with liger.launches() as seen:
            results.append(run(made, batch))
        assert seen == (KERNELS if uses_liger else set())
    return made, *results[::-1]


def recompute(made):
    made.gradient_checkpointing_enable({"use_reentrant": False})
    made.model.enable_input_require_grads()
    made.train()


@pytest.mark.parametrize("change", [lambda made: None, recompute], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kwargs", [{}, {"lora_rank": 4, "target_modules": "all-linear"}], ids=["full", "lora"])
def test_log_probs_entropies_and_gradients(model, batch, kwargs, change):
    """Prompts are shared, the head computes the selected tokens, and each of Liger's kernels runs."""
    ours, found, expected = ours_and_stocks(model, batch, change, **kwargs)
    assert_equal(found, expected)
    assert ours.shortcuts.reason_not_to_share is None and ours.shortcuts.fuses_head


@pytest.mark.parametrize("model", MODELS[:1], indirect=True)
def test_a_kernel_that_is_wrong_shows(model, batch, monkeypatch):
    """A rotation by other angles, in our model only."""
    from liger_kernel.transformers import monkey_patch

    right = monkey_patch.liger_rotary_pos_emb
    monkeypatch.setattr(monkey_patch, "liger_rotary_pos_emb", lambda q, k, cos, sin: right(q, k, cos, 1.001 * sin))
    _, found, expected = ours_and_stocks(model, batch)
    with pytest.raises(AssertionError):
        assert_equal(found, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_a_layer_keeps_what_is_counted(kind):
    config = AutoConfig.for_model(kind, **SHAPE)
    with liger.undone_afterwards(kind):
        saved = saved_bytes.of_a_layer(config, liger=True)
    assert layer_bytes(config, liger=True) == pytest.approx(saved, rel=0.05)
    assert layer_bytes(config) > 1.2 * saved


def test_two_ranks_under_zero3(tmp_path):
    folder = save(AutoConfig.for_model("llama", **SHAPE, tie_word_embeddings=True), tmp_path)
    assert not errors_on_two_ranks(__file__, "train_on", folder)


def train_on(folder: str) -> None:
    """Run one of the two ranks, as test_zero3 does."""
    ours = runpy.run_path(str(Path(__file__).with_name("test_zero3.py")))["train_on"](folder, use_liger_kernel=True)
    assert ours.shortcuts.reason_not_to_share is None


def test_updates_of_grpo_ar_and_lopti():
    """Ours with Liger, against stock without, through DeepSpeed. It comes last, because its process group stays.

    The interpreter computes no bf16. On a GPU `gpu_check` compares both types.
    """
    from gpu_check import TOY
    from gpu_exactness import PLAIN, errors, exact_bench, sharing

    sizes = dict(mini_batches=1, prompt_length=None, response_length=None, gradient_checkpointing=False)
    args = argparse.Namespace(**sizes | TOY | dict(shape="toy-llama", scale=0.01))
    with liger.undone_afterwards("llama"):
        with exact_bench(args, "sdpa", torch.float32) as bench:
            batch, stock = bench.batch, bench.outcome(list(PLAIN.values()))
        with exact_bench(args, "sdpa", torch.float32, batch, liger=True) as bench:
            distances = errors(bench.outcome(list(PLAIN), stock), stock)
            assert sharing(bench) == "shared"
    assert len(distances) == 6 and all(0 <= distance < 1e-5 for distance in distances.values()), distances
