"""The update of a vision-language model, whose samples have images: equal to upstream's, and in two stages its sum."""

import pytest
import torch
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from update_workers import OFF, SAMPLES, Group, cluster, experiences, flags, relative_distance

NO_METHOD = OFF | {"algo.ar.alpha": 0.0, "logger.probability_stats": "off"}
IMAGE, START, END = 300, 302, 303  # token ids
PATCH, PATCHES = 16, 4  # pixels, and patches of an image, which are one token


@pytest.fixture(scope="module", autouse=True)
def ray_cluster():
    with cluster():
        yield


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


@pytest.fixture(scope="module", params=[False, True], ids=["stock", "selective"])
def group(request, model):
    """Two optimizer steps of two micro-batches each, with upstream's actor and with ours."""
    args = flags(model, "--data.max_images_per_prompt", "1", "--train.batch_size", str(SAMPLES // 2))
    args.actor.max_norm = 0
    return Group(args, selective=request.param)


def test_equals_upstreams(group):
    batch = seen(seed=1)
    stock = group.run(batch, NO_METHOD, stock=True)
    ours = group.run(batch, NO_METHOD, restated=True)
    assert ours.steps == stock.steps == 2 and len(ours.gradients) == 2
    for a, b in zip(ours.gradients, stock.gradients, strict=True):
        assert relative_distance(a, b) < 1e-6
    other = group.run(seen(seed=1, look=1), NO_METHOD, restated=True)
    assert relative_distance(other.gradients[0], ours.gradients[0]) > 1e-2, "the images make no difference"


def test_lopti_divides_the_gradient(group):
    batch = seen(seed=2)
    whole = group.run(batch, NO_METHOD | {"algo.ar.alpha": 0.3}, restated=False)
    parts = group.run(batch, OFF | {"algo.lopti.eta": 0.5, "logger.probability_stats": "bins"})
    assert parts.steps == 4 and [group for group, *_ in parts.seen].count("low") == len(parts.seen) / 2
    total = [sum(gradients) for gradients in zip(*parts.gradients, strict=True)]
    expected = [sum(gradients) for gradients in zip(*whole.gradients, strict=True)]
    assert relative_distance(total, expected) < 1e-5
    assert 0 < parts.status["lopti/low_share"] < 1 and any(name.startswith("tokens/") for name in parts.status)
