"""The study's sampler draws from the distributions that transformers computes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from study import sampler

STOP, VOCABULARY, LONGEST = 0, 13, 40
PROMPTS = [[5, 6, 7, 8, 9, 10], [3], [1, 2, 3, 4], [12, 11]]


KINDS = {"qwen2": (Qwen2Config, Qwen2ForCausalLM, 4), "llama with grouped queries": (LlamaConfig, LlamaForCausalLM, 2)}


@pytest.fixture(params=KINDS)
def model(request) -> Qwen2ForCausalLM | LlamaForCausalLM:
    config, kind, heads = KINDS[request.param]
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": heads,
        "initializer_range": 0.4,
    }
    model = kind(config(**shape)).eval()
    for layer in model.model.layers:  # biases start at 0, and Llama has none
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            if projection.bias is not None:
                torch.nn.init.normal_(projection.bias)
    return model


def answers(model, samples=6, seed=1, **more):
    uniform = torch.rand(len(PROMPTS), samples, LONGEST, generator=torch.Generator().manual_seed(seed))
    return uniform, sampler.sample(model, PROMPTS, uniform, stop=STOP, **more)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_each_token_is_where_the_cumulative_distribution_passes_the_given_number(model, temperature):
    """Each answer is looked at alone: neither the others of its batch, nor those that ended, change it."""
    uniform, drawn = answers(model, temperature=temperature)
    lengths = [len(answer) for of_prompt in drawn for answer in of_prompt]
    assert len(lengths) == 24 and min(lengths) < 9 < 20 < max(lengths)  # the batch was tidied on the way
    for prompt, of_prompt, numbers in zip(PROMPTS, drawn, uniform, strict=True):
        for answer, given in zip(of_prompt, numbers, strict=True):
            assert STOP not in answer[:-1] and (answer[-1] == STOP or len(answer) == LONGEST)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            upper = (logits / temperature).softmax(dim=-1).cumsum(dim=-1)
            lower = torch.nn.functional.pad(upper, (1, 0))[:, :-1]
            token, u = torch.tensor(answer)[:, None], given[: len(answer), None]
            assert (lower.gather(1, token) - 1e-5 <= u).all() and (u <= upper.gather(1, token) + 1e-5).all()


def test_temperature_0_is_greedy_generation(model):
    _, drawn = answers(model, samples=1, temperature=0)
    for prompt, (answer,) in zip(PROMPTS, drawn, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=LONGEST, eos_token_id=STOP, pad_token_id=STOP
        )
        assert expected[0, len(prompt) :].tolist() == answer


def test_a_cumulative_distribution_that_ends_below_1_still_has_a_token_for_each_number():
    logits = torch.tensor([[[0.0] * 9 + [-80.0]]])
    highest = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    assert sampler._choose(logits, torch.full((1, 1), highest), 1.0).item() == 8
    assert sampler._choose(logits, torch.zeros(1, 1), 1.0).item() == 0
