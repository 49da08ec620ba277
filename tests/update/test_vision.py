"""The update of a vision-language model, whose samples have images: equal to upstream's, and in two passes its sum.

The reference trains it. The selective update refuses it.
"""

import pytest
import torch
from arlopti_testing.update_workers import OFF, RANKS, SAMPLES, Group, experiences, flags, relative_distance
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]
NO_METHOD = OFF | {"algo.ar.alpha": None}
ONES = NO_METHOD | {"algo.token_method": ["ar"], "algo.token_method_args": ["ar.alpha=0"]}
IMAGE, START, END = 300, 302, 303  # token ids
PATCH, PATCHES = 16, 4  # pixels, and patches of an image, which are one token


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("vision"))
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    torch.manual_seed(0)
    text = dict(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2], mrope_interleaved=True),
    )
    vision = dict(hidden_size=32, intermediate_size=64, depth=2, num_heads=2, patch_size=PATCH, out_hidden_size=32)
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]),
        image_token_id=IMAGE,
        video_token_id=301,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


def seen(seed: int, look: int = 0) -> list:
    """Samples with an image in each prompt. Other values of `look` are other images."""
    generator = torch.Generator().manual_seed(look)
    batch = experiences(seed)
    for sample in batch:
        sample.sequences[0, 1:4] = torch.tensor([START, IMAGE, END])
        pixels = torch.randn(PATCHES, 3 * 2 * PATCH**2, generator=generator)
        sample.mm_train_inputs = [{"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]])}]
    return batch


def policy(model: str, *more: str, selective: bool = False) -> Group:
    args = flags(model, "--data.max_images_per_prompt", "1", *more)
    args.actor.max_norm = 0
    return Group(args, selective=selective)


def test_equals_upstreams(model):
    """In two optimizer steps of two micro-batches each, with weights of one."""
    group, batch = policy(model, "--train.batch_size", str(SAMPLES // 2)), seen(seed=1)
    stock = group.run(batch, NO_METHOD, stock=True)
    ours = group.run(batch, ONES)
    assert ours.steps == stock.steps == 2
    for a, b in zip(ours.gradients, stock.gradients, strict=True):
        assert all(map(torch.equal, a, b))
    other = group.run(seen(seed=1, look=1), ONES)
    assert relative_distance(other.gradients[0], ours.gradients[0]) > 1e-2, "the images make no difference"


def test_lopti_divides_the_gradient(model):
    """With AR."""
    # One micro-batch, so that the order of the samples does not matter.
    group = policy(model, "--train.micro_batch_size", str(SAMPLES // RANKS))
    batch = seen(seed=2)
    whole = group.run(batch, OFF)
    parts = group.run(batch, OFF | {"algo.lopti.eta": 0.5})
    low, high = parts.gradients
    assert relative_distance([a + b for a, b in zip(low, high, strict=True)], whole.gradients[0]) < 1e-5
    assert 0 < parts.status["lopti/low_share"] < 1


def test_the_selective_update_refuses_it(model):
    with pytest.raises(Exception, match="vision models need OpenRLHF's own update"):
        policy(model, selective=True).run(seen(seed=3), OFF)
