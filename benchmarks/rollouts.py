"""Random weights in a published model's shape, and rollouts in the lengths of Knights and Knaves."""

import argparse
import math
import statistics

import torch

SHAPES = {  # published configurations of Qwen2.5, with tied embeddings; and one to try the benchmark itself
    "tiny": dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
    "0.5b": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2
    ),
    "3b": dict(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2
    ),
}
VOCABULARY, SAMPLES_PER_PROMPT = 151_936, 8


def make_model(shape: str, folder: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, tie_word_embeddings=True, max_position_embeddings=8192, **SHAPES[shape]
    )
    torch.set_default_dtype(torch.bfloat16)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


def operations(shape: str, lengths: list[int], passes: int) -> float:
    """FLOPs of the published method on real tokens: forward 2, forward and backward 6 per weight, token and pass."""
    width, layers = SHAPES[shape]["hidden_size"], SHAPES[shape]["num_hidden_layers"]
    kv = width * SHAPES[shape]["num_key_value_heads"] // SHAPES[shape]["num_attention_heads"]
    weights = layers * (2 * width * (width + kv) + 3 * width * SHAPES[shape]["intermediate_size"]) + width * VOCABULARY
    # Attention: two products of width x (half the length, on average) per token and layer.
    attention = sum(layers * 2 * width * length**2 / 2 for length in lengths)
    return (2 + 6 * passes) * (weights * sum(lengths) + attention)


def rollout(args: argparse.Namespace, scale: float) -> list:
    """Single samples in rollout order, in K&K's lengths: prompts of 250-400, responses log-normal around 600.

    A prompt's responses have the lengths at the distribution's eighths (σ = 0.5, cut to 100-1,500): the few that fit a
    benchmark then stand for all, padding included.
    """
    from openrlhf.trainer.ppo_utils.experience import Experience

    lengths, generator = torch.Generator().manual_seed(1), torch.Generator().manual_seed(0)
    samples = []
    for _ in range(args.prompts * args.mini_batches):
        length = max(1, int(scale * torch.randint(250, 401, (1,), generator=lengths)))
        prompt = torch.randint(0, VOCABULARY, (1, length), generator=generator)
        for i in range(SAMPLES_PER_PROMPT):
            tokens = 600 * math.exp(0.5 * statistics.NormalDist().inv_cdf((i + 0.5) / SAMPLES_PER_PROMPT))
            tokens = max(2, int(scale * min(1500, max(100, tokens))))
            sequence = torch.cat([prompt, torch.randint(0, VOCABULARY, (1, tokens), generator=generator)], dim=1)
            mask = torch.zeros(1, sequence.shape[1] - 1, dtype=torch.long)
            mask[:, length - 1 :] = 1
            samples.append(
                Experience(
                    sequences=sequence,
                    attention_mask=torch.ones_like(sequence),
                    action_mask=mask,
                    rollout_log_probs=torch.zeros(mask.shape),
                    advantages=torch.randn(1, 1, generator=generator).expand(mask.shape).clone(),
                    returns=torch.zeros(mask.shape),
                    total_length=torch.tensor([float(sequence.shape[1])]),
                    response_length=torch.tensor([float(tokens)]),
                    info={"reward": torch.zeros(1)},
                )
            )
    return samples
