"""Random weights in a published model's shape, and rollouts in the lengths of Knights and Knaves."""

import argparse
import math
import statistics
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Shape:
    """A published model's configuration, as transformers names its parts. Embeddings are tied in all of them."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    model_type: str = "qwen2"
    vocab_size: int = 151_936
    more: dict = field(default_factory=dict)  # what else this type of model needs to know

    @property
    def layer_weights(self) -> int:
        """How many weights the matrices of all layers have."""
        width, key_width = self.hidden_size, self.hidden_size * self.num_key_value_heads // self.num_attention_heads
        return self.num_hidden_layers * (2 * width * (width + key_width) + 3 * width * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """How many weights the LM head has."""
        return self.hidden_size * self.vocab_size


_LLAMA_ROPE = dict(
    rope_type="llama3",
    rope_theta=500_000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_LLAMA = dict(model_type="llama", vocab_size=128_256, more=dict(rope_parameters=_LLAMA_ROPE, head_dim=64))
SHAPES = {
    # The first three try the benchmarks themselves.
    "tiny": Shape("tiny Qwen2.5", 64, 128, 2, 4, 2),
    "toy": Shape("toy Qwen2.5", 64, 128, 2, 4, 2, vocab_size=512),
    "toy-llama": Shape("toy Llama-3.2", 128, 128, 2, 2, 1, **_LLAMA | {"vocab_size": 512}),
    # The proportions of Qwen2.5-0.5B as far as long responses on a CPU allow.
    "small": Shape("small Qwen2.5 (10M weights)", 192, 1024, 8, 3, 1, vocab_size=24_576),
    # A vocabulary as large as Qwen2.5's under as few layers.
    "small-151936": Shape("small Qwen2.5 with 151,936 tokens", 192, 1024, 8, 3, 1),
    "0.5b": Shape("Qwen2.5-0.5B", 896, 4864, 24, 14, 2),
    "1.5b": Shape("Qwen2.5-1.5B", 1536, 8960, 28, 12, 2),
    "3b": Shape("Qwen2.5-3B", 2048, 11008, 36, 16, 2),
    "llama-1b": Shape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, **_LLAMA),
}
SAMPLES_PER_PROMPT = 8


def make_model(
    shape: str, attention: str, dtype: torch.dtype = torch.bfloat16, sharpness: float = 1.0, liger: bool = False
) -> torch.nn.Module:
    """Return a model of this shape on the device, with random weights that bf16 can hold, the same in each type.

    Args:
        attention: transformers' name of the implementation.
        sharpness: factor of the logits. With random weights all tokens are about equally likely otherwise.
        liger: whether with the kernels of `--ds.use_liger_kernel`. They stay in transformers' classes.
    """
    from transformers import AutoConfig

    if liger:
        from liger_kernel.transformers import AutoLigerKernelForCausalLM as AutoModel
    else:
        from transformers import AutoModelForCausalLM as AutoModel

    known = vars(SHAPES[shape])
    sizes = {name: value for name, value in known.items() if name not in ("name", "model_type", "more")}
    config = AutoConfig.for_model(
        known["model_type"],
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        use_cache=False,
        **sizes,
        **known["more"],
    )
    torch.manual_seed(0)
    with torch.device(torch.cuda.current_device()):
        model = AutoModel.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        model.model.norm.weight *= sharpness
    # DeepSpeed rounds the frequencies of RoPE to bf16 as well, so those of a float32 model are rounded here.
    return model.bfloat16().to(dtype)


def unpadded(samples: list) -> list:
    """The samples of a rollout in the form in which OpenRLHF's replay buffer holds them."""
    from openrlhf.trainer.ppo_utils.experience import remove_padding_in_sequences, split_experience_batch

    return [item for sample in samples for item in remove_padding_in_sequences(split_experience_batch(sample))]


def rollout(args: argparse.Namespace, scale: float) -> list:
    """Single samples in rollout order, in K&K's lengths: prompts of 250-400, responses log-normal around 600.

    A prompt's responses have the lengths at the distribution's eighths (σ = 0.5, cut to 100-1,500): the few that fit a
    benchmark then stand for all, padding included. With `args.prompt_length` every prompt has that many tokens, and
    with `args.response_length` every response, times `scale`.
    """
    from openrlhf.trainer.ppo_utils.experience import Experience

    vocabulary = SHAPES[args.shape].vocab_size
    lengths, generator = torch.Generator().manual_seed(1), torch.Generator().manual_seed(0)
    samples = []
    for _ in range(args.prompts * args.mini_batches):
        length = int(torch.randint(250, 401, (1,), generator=lengths))
        length = max(1, int(scale * (args.prompt_length or length)))
        prompt = torch.randint(0, vocabulary, (1, length), generator=generator)
        for i in range(SAMPLES_PER_PROMPT):
            tokens = 600 * math.exp(0.5 * statistics.NormalDist().inv_cdf((i + 0.5) / SAMPLES_PER_PROMPT))
            tokens = max(2, int(scale * min(1500, max(100, tokens))))
            if args.response_length:
                tokens = max(2, int(scale * args.response_length))
            sequence = torch.cat([prompt, torch.randint(0, vocabulary, (1, tokens), generator=generator)], dim=1)
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
