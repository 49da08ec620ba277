"""Two ranks whose model ZeRO-3 partitions: what the check finds out, all of them find out."""

import pytest
import torch
from arlopti_testing.processes import errors_on_two_ranks
from transformers import AutoModelForCausalLM, NemotronConfig

SHAPE = dict(
    vocab_size=97,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
)


def train_on(folder: str, **kwargs):
    """Run one of two ranks: the gradients of its own two sequences and the other rank's, against upstream's actor.

    Returns:
        The selective actor. It is made with these keyword arguments, after upstream's has done its part.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_grad
    from openrlhf.models import Actor

    from arlopti_openrlhf.forward.selective_actor import SelectiveActor

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    own = slice(2 * rank, 2 * rank + 2)
    # In the first pass rank 1 has nothing selected: what a rank finds out may not depend on its data.
    sequences = torch.randint(3, 97, (4, 12), generator=torch.Generator().manual_seed(0))
    attention_mask, action_masks = torch.ones_like(sequences), torch.ones(2, 4, 11, dtype=torch.long)
    action_masks[0, 2:] = 0

    stock, exact = Actor(folder, attn_implementation="sdpa").float(), []
    for action_mask in action_masks:
        stock.zero_grad()
        log_probs = stock(sequences, action_mask, attention_mask=attention_mask)
        (log_probs.sum() / 2).backward()  # the mean over the ranks
        exact.append((log_probs[own], torch.cat([parameter.grad.flatten() for parameter in stock.parameters()])))

    ours = SelectiveActor(folder, attn_implementation="sdpa", **kwargs).float()
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours.model.enable_input_require_grads()
    ours.train()
    parameters = list(ours.model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    ours.model, *_ = deepspeed.initialize(
        model=ours.model, optimizer=torch.optim.SGD(parameters, lr=0.0), config=config
    )
    for action_mask, (expected, exact_gradient) in zip(action_masks, exact, strict=True):
        log_probs = ours(sequences[own], action_mask[own], attention_mask=attention_mask[own])
        ours.model.backward(log_probs.sum())
        gradient = torch.cat([safe_get_full_grad(parameter).flatten() for parameter in parameters])
        ours.model.step()
        torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
        assert (gradient - exact_gradient).norm() <= 1e-5 * exact_gradient.norm()
    return ours


def train_on_what_cannot_share(folder: str) -> None:
    assert "swallow keyword arguments" in train_on(folder).shortcuts.reason_not_to_share


@pytest.mark.long
def test_all_ranks_find_the_same_obstacle(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(NemotronConfig(**SHAPE)).save_pretrained(tmp_path)
    assert not errors_on_two_ranks(__file__, "train_on_what_cannot_share", str(tmp_path))
