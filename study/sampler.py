"""Sample many answers of the study's policy, in the process that trains it.

vLLM takes 20 ms or more for each token of a batch, whatever the policy's size. At 1.0M parameters that is most of a
step. Here the samples of a prompt share its keys and values, and those that have ended leave the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import rotate_half

_TIDY_EVERY = 8  # tokens between two looks at which answers have ended


@torch.no_grad()
def sample(
    model: Qwen2ForCausalLM | LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    uniform: Tensor,
    *,
    stop: int,
    temperature: float = 1.0,
) -> list[list[list[int]]]:
    """Answer each prompt S times.

    A token is the one at which the cumulative distribution passes a given number. So two policies that hardly differ
    give hardly different answers, where they are given the same numbers.

    Args:
        model: the policy, on any device.
        prompts: P prompts of token ids.
        uniform: (P, S, T) numbers in [0, 1), one for each token. An answer has T tokens at most.
        stop: the token that ends an answer.
        temperature: of sampling; 0 takes the most likely token.

    Returns:
        The S answers of each prompt: their token ids, with `stop` where they have ended.
    """
    longest = uniform.shape[-1]
    uniform = uniform.to(model.device)
    answers = torch.full(uniform.shape, stop, device=model.device)
    logits, batch = _begin(model, prompts, *uniform.shape[1:])
    for t in range(longest):
        place = (batch.prompt, batch.sample, t)
        token = _choose(logits, uniform[place], temperature)
        answers[place] = torch.where(batch.goes_on, token, answers[place])
        batch.goes_on &= token != stop
        if t == longest - 1 or not batch.goes_on.any():
            break
        if t % _TIDY_EVERY == _TIDY_EVERY - 1:
            token = batch.drop_ended(token, t)
        logits = _next(model, token, batch, t)
    return [[_until(stop, answer) for answer in of_prompt] for of_prompt in answers.tolist()]


@dataclass
class _Batch:
    """Holds the answers that go on, as G prompts with S answers each. Some of them may have ended.

    Attributes:
        prompt, sample: (G, S), which answer each of them is.
        goes_on: (G, S).
        lengths: (G,), of the prompts.
        prompt_keys, prompt_values: for each layer (G, K, L, D), with K heads of keys and values.
        padding: (G, 1, 1, 1, L), -inf after each prompt's end, and 0 elsewhere.
        keys, values: for each layer (G, S, K, T, D), of the answers, as far as they have got.
    """

    prompt: Tensor
    sample: Tensor
    goes_on: Tensor
    lengths: Tensor
    prompt_keys: list[Tensor]
    prompt_values: list[Tensor]
    padding: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def drop_ended(self, token: Tensor, done: int) -> Tensor:
        """Leave out prompts whose answers have all ended, and as many answers of each as have ended in all of them.

        Args:
            token: (G, S), the last token of each.
            done: how many tokens have keys and values.

        Returns:
            The tokens (G', S') of those that are left.
        """
        prompts = self.goes_on.any(dim=1).nonzero()[:, 0]
        width = int(self.goes_on.sum(dim=1).max())
        if (len(prompts), width) == self.goes_on.shape:
            return token
        order = self.goes_on[prompts].int().argsort(dim=1, descending=True, stable=True)[:, :width]
        kept = (prompts[:, None], order)
        self.prompt, self.sample, self.goes_on = self.prompt[kept], self.sample[kept], self.goes_on[kept]
        self.lengths, self.padding = self.lengths[prompts], self.padding[prompts]
        self.prompt_keys = [keys[prompts] for keys in self.prompt_keys]
        self.prompt_values = [values[prompts] for values in self.prompt_values]
        for layers in (self.keys, self.values):
            for i, layer in enumerate(layers):
                layers[i] = layer.new_empty(*order.shape, *layer.shape[2:])
                layers[i][..., :done, :] = layer[..., :done, :][kept]
        return token[kept]


def _begin(
    model: Qwen2ForCausalLM | LlamaForCausalLM, prompts: Sequence[Sequence[int]], samples: int, longest: int
) -> tuple[Tensor, _Batch]:
    """Return the logits (P, S, V) of the first tokens, and the batch. The model itself reads the prompts."""
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(model.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    output = model.model(ids, use_cache=True)  # what follows a prompt does not change it
    first = model.lm_head(output.last_hidden_state[torch.arange(len(prompts), device=model.device), lengths - 1])
    cache = output.past_key_values.layers
    heads, size = cache[0].keys.shape[1], cache[0].keys.shape[3]
    is_padding = torch.arange(ids.shape[1], device=model.device) >= lengths[:, None]
    grid = (len(prompts), samples)
    return first[:, None].expand(-1, samples, -1), _Batch(
        prompt=torch.arange(grid[0], device=model.device)[:, None].expand(grid),
        sample=torch.arange(grid[1], device=model.device).expand(grid),
        goes_on=torch.ones(grid, dtype=torch.bool, device=model.device),
        lengths=lengths,
        prompt_keys=[layer.keys for layer in cache],
        prompt_values=[layer.values for layer in cache],
        padding=first.new_zeros(is_padding.shape).masked_fill(is_padding, -torch.inf)[:, None, None, None],
        keys=[first.new_empty(*grid, heads, longest, size) for _ in cache],
        values=[first.new_empty(*grid, heads, longest, size) for _ in cache],
    )


def _choose(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Return the token (G, S) for each number (G, S)."""
    if not temperature:
        return logits.argmax(dim=-1)
    cumulative = (logits.float() / temperature).softmax(dim=-1).cumsum(dim=-1)
    # Rounding leaves the last of them a little beside 1.
    passed = torch.searchsorted(cumulative, uniform[..., None] * cumulative[..., -1:], right=True)
    return passed[..., 0].clamp(max=logits.shape[-1] - 1)


def _next(model: Qwen2ForCausalLM | LlamaForCausalLM, token: Tensor, batch: _Batch, t: int) -> Tensor:
    """Compute one more token of each answer: transformers' Qwen2 or Llama, with attention in two parts.

    One part is to the prompt, the other to the answer. R = H / K heads share the keys and values of one.

    Args:
        model: the policy.
        token: (G, S), the t-th of each answer, whose keys and values this adds to the batch.
        batch: what goes on.
        t: counts from 0.

    Returns:
        (G, S, V), the logits of the next token.
    """
    hidden = model.model.embed_tokens(token)
    cos, sin = (part[:, :, None] for part in model.model.rotary_emb(hidden, (batch.lengths + t)[:, None]))
    for i, layer in enumerate(model.model.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        shape = (*token.shape, -1, attention.head_dim)
        query = attention.q_proj(normed).view(shape)
        key = attention.k_proj(normed).view(shape)
        keys, values = batch.keys[i][..., : t + 1, :], batch.values[i][..., : t + 1, :]
        keys[..., t, :] = key * cos + rotate_half(key) * sin
        values[..., t, :] = attention.v_proj(normed).view(shape)
        query = (query * cos + rotate_half(query) * sin) * attention.scaling
        query = query.unflatten(2, (key.shape[2], -1))  # (G, S, K, R, D)
        by_head = query.permute(0, 2, 1, 3, 4)  # (G, K, S, R, D)
        to_prompt = by_head @ batch.prompt_keys[i].transpose(2, 3)[:, :, None] + batch.padding  # (G, K, S, R, L)
        to_answer = (query @ keys.transpose(3, 4)).transpose(1, 2)  # (G, K, S, R, t + 1)
        weights = torch.cat([to_prompt, to_answer], dim=-1).softmax(dim=-1)
        in_prompt, in_answer = weights.split([to_prompt.shape[-1], t + 1], dim=-1)
        mixed = (in_prompt @ batch.prompt_values[i][:, :, None]).transpose(1, 2)  # (G, S, K, R, D)
        mixed = mixed + in_answer.transpose(1, 2) @ values
        hidden = hidden + attention.o_proj(mixed.flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))


def _until(stop: int, answer: list[int]) -> list[int]:
    return answer[: answer.index(stop) + 1] if stop in answer else answer
