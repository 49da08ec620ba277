"""Engines without vLLM, which answer the same words to each prompt or the right sums, with tokenizer and problems."""

from types import SimpleNamespace

import torch


class Tokenizer:
    def __call__(self, text, **kwargs):
        return {"input_ids": torch.tensor([list(text.encode())])}

    def decode(self, tokens, **kwargs):
        return bytes(tokens).decode()


class Engine:
    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        assert not sampling_params.detokenize  # nobody reads the text
        answer = SimpleNamespace(token_ids=list(b" answer"), finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[answer])


def problems() -> list[dict]:
    sums = [{"prompt": f"{i} + {i} = ", "label": str(2 * i), "datasource": "sums"} for i in range(6)]
    label = "(1) Zoey is a knight\n(2) Liam is a knave"
    puzzle = [{"role": "user", "content": "puzzle"}]
    return sums + [{"prompt": puzzle, "label": label, "datasource": "kk_2ppl"} for _ in range(4)]


def generate_right_sums(asked):
    """Return a stand-in for `offline.generate` that answers every sum rightly and lists what it was asked."""

    def generate(engine, prompts, sampling, max_new_tokens, with_end=False, template=None):
        asked.extend(sampling)
        for prompt, (n, _) in zip(prompts, sampling, strict=True):
            number = prompt.split()[0] if isinstance(prompt, str) else 0
            text = f"\\boxed{{{2 * int(number)}}}" + "<end>" * with_end
            output = SimpleNamespace(text=text, token_ids=[1, 2, 3], finish_reason="stop")
            yield "prompt", SimpleNamespace(outputs=[output] * n)

    return lambda *args, **rest: list(generate(*args, **rest))
