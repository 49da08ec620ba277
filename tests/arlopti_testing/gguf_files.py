"""Writes small GGUF files: a Llama of random weights with a byte-level BPE vocabulary, as llama.cpp writes them."""

import json
from pathlib import Path

import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from arlopti_testing.forward_models import SHAPE

NORMAL, CONTROL = 1, 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = ["Zoey is a knight, and Oliver is a knave.", "What is 17 + 25? The answer is 42.", "the sun rises in the east"]


def vocabulary() -> tuple[list[str], list[str]]:
    """Return the tokens, special ones first, and the merges of a small BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    written = json.loads(tokenizer.to_str())["model"]
    return sorted(written["vocab"], key=written["vocab"].get), [" ".join(merge) for merge in written["merges"]]


def model(vocab_size: int = 300, tied: bool = True) -> LlamaForCausalLM:
    """Return a Llama of random weights in bf16."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE | {"vocab_size": vocab_size, "rms_norm_eps": 1e-5}, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).bfloat16()


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tensors(llama: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Return the weights by llama.cpp's names. It has the halves of each head's queries and keys interleaved."""
    config, found = llama.config, {}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    found["token_embd.weight"] = llama.model.embed_tokens.weight
    found["output_norm.weight"] = llama.model.norm.weight
    if not config.tie_word_embeddings:
        found["output.weight"] = llama.lm_head.weight
    for i, layer in enumerate(llama.model.layers):
        for theirs, ours in NAMES.items():
            weight = layer.get_submodule(theirs).weight
            if ours in heads:
                weight = weight.unflatten(0, (heads[ours], 2, -1)).transpose(1, 2).flatten(0, 2)
            found[f"blk.{i}.{ours}.weight"] = weight
    return found


def write(
    path: Path,
    llama: LlamaForCausalLM | None = None,
    *,
    tokens: list[str] | None = None,
    merges: list[str] | None = None,
    architecture: str = "llama",
    pre: str = "gpt-2",
    eos: int | None = 2,
    template: str | None = TEMPLATE,
    left_out: str = "-",
) -> Path:
    """Write a model. What is not given is right; `left_out` is in the names of tensors that the file lacks."""
    llama = llama or model()
    right_tokens, right_merges = vocabulary()
    tokens = right_tokens if tokens is None else tokens
    writer, config = GGUFWriter(path, architecture), llama.config
    writer.add_name("Tiny")
    writer.add_license("mit")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIAL else NORMAL for token in tokens])
    writer.add_token_merges(right_merges if merges is None else merges)
    writer.add_bos_token_id(1)
    if eos is not None:
        writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    if template:
        writer.add_chat_template(template)
    for name, weight in tensors(llama).items():
        if left_out not in name:
            writer.add_tensor(name, weight.detach().float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
