"""Make what a training with images takes: an untrained vision-language model of 1.4M parameters, and pictures.

The processors of transformers and vLLM's models need torchvision, which the locked CPU stack does not have.
"""

import importlib.util
from pathlib import Path

import torch
from PIL import Image
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from arlopti_openrlhf.lab.data.preparation import write_rows

_IMAGE, _VIDEO, _START, _END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
_SIDE, _PATCH, _MERGED = 64, 16, 2  # pixels, pixels, patches: a picture is (64 / 16 / 2)² = 4 tokens
# OpenRLHF makes `<image>` in a message a part of its content, so that a content is a text or a list of parts.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    f"{{{{ '{_START}{_IMAGE}{_END}' if part['type'] == 'image' else part['text'] }}}}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def is_possible() -> bool:
    """Return whether this environment can make the model's processor, and train it."""
    return importlib.util.find_spec("torchvision") is not None


def make(tokenizer: Qwen2Tokenizer, rows: list[dict], folder: Path) -> None:
    """Write a Qwen3-VL as `vision_model`, and `images.jsonl` with a picture of noise for each prompt.

    Args:
        tokenizer: that of the text policy. It gets the tokens that stand for images.
        rows: with `prompt`, a list of messages. The last one will begin with the picture.
        folder: for both, and for the pictures.
    """
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", _IMAGE, _VIDEO, _START, _END]})
    _save_model(tokenizer, folder / "vision_model")
    _save_processor(tokenizer, folder / "vision_model")
    (folder / "images").mkdir()
    seeing = []
    for number, row in enumerate(rows):
        path = folder / "images" / f"{number}.png"
        Image.fromarray(torch.randint(256, (_SIDE, _SIDE, 3), dtype=torch.uint8).numpy()).save(path)
        *before, last = row["prompt"]
        prompt = [*before, last | {"content": f"<image>{last['content']}"}]
        seeing.append(row | {"prompt": prompt, "images": [str(path)]})
    write_rows(seeing, folder / "images.jsonl")


def _save_model(tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    image, video, start, end = map(tokenizer.convert_tokens_to_ids, (_IMAGE, _VIDEO, _START, _END))
    text = dict(
        architectures=["Qwen3ForCausalLM"],  # vLLM's CPU platform asks for one
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.07,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[6, 5, 5], mrope_interleaved=True),
    )
    vision = dict(
        hidden_size=64,
        intermediate_size=128,
        depth=2,
        num_heads=2,
        patch_size=_PATCH,
        spatial_merge_size=_MERGED,
        out_hidden_size=128,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.model.language_model.norm.weight.data.fill_(8.0)  # so that some tokens are likely
    # A placeholder in a response would be one without an image. A logit of 0 is far below those of likely tokens.
    model.lm_head.weight.data[[image, video]] = 0.0
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)


def _save_processor(tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    size = {"shortest_edge": _SIDE**2, "longest_edge": _SIDE**2}  # pixels of the whole picture
    pictures = Qwen2VLImageProcessor(size=size, patch_size=_PATCH, merge_size=_MERGED)
    videos = Qwen3VLVideoProcessor(size=size, patch_size=_PATCH, merge_size=_MERGED)
    Qwen3VLProcessor(pictures, tokenizer, videos, chat_template=_CHAT_TEMPLATE).save_pretrained(folder)
