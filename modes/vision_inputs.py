"""Make what a training with images needs: a tiny untrained vision-language model, and a picture for each prompt."""

from pathlib import Path

import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

_IMAGE = "<image>"
_SIDE, _PATCH = 32, 16  # pixels; a picture is (32 / 16)² = 4 tokens
# OpenRLHF turns `<image>` in a message into a part of its content, so that contents are text or a list of parts.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def save_model(policy: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Save a LLaVA with an untrained CLIP in front of `policy`, and its processor. Both read a text as it does.

    Args:
        policy: the language model. It gets one embedding more, for the token that stands for images.
        tokenizer: the language model's. It gets that token.
        folder: the new model's.
    """
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", _IMAGE]})
    policy.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_SIDE,
        patch_size=_PATCH,
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=policy.config,
            image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
            image_seq_length=(_SIDE // _PATCH) ** 2,
            vision_feature_layer=-1,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.model.language_model.load_state_dict(policy.model.state_dict())
    model.lm_head.load_state_dict(policy.lm_head.state_dict())
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    size = {"height": _SIDE, "width": _SIDE}
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": _SIDE}, crop_size=size),
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        num_additional_image_tokens=1,  # CLIP's class token, which the strategy drops
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(folder)


def add_pictures(rows: list[dict], folder: Path) -> list[dict]:
    """Return rows whose last message begins with a picture of its own, of noise.

    Args:
        rows: with `prompt`, a list of messages.
        folder: for the pictures. The rows have their paths under `images`.
    """
    folder.mkdir(parents=True)
    result = []
    for number, row in enumerate(rows):
        path = folder / f"{number}.png"
        noise = torch.randint(256, (_SIDE, _SIDE, 3), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(path)
        *before, last = row["prompt"]
        prompt = [*before, last | {"content": f"{_IMAGE}{last['content']}"}]
        result.append(row | {"prompt": prompt, "images": [str(path)]})
    return result
