"""Make what the tests of the evaluation share: problems, and an engine that answers them without vLLM."""

from types import SimpleNamespace


def problems() -> list[dict]:
    sums = [{"prompt": f"{i} + {i} = ", "label": str(2 * i), "datasource": "sums"} for i in range(6)]
    label = "(1) Zoey is a knight\n(2) Liam is a knave"
    puzzle = [{"role": "user", "content": "puzzle"}]
    return sums + [{"prompt": puzzle, "label": label, "datasource": "kk_2ppl"} for _ in range(4)]


def generate_right_sums(asked):
    """Return a stand-in for `offline.generate` that answers every sum rightly and lists what it was asked."""

    def generate(engine, prompts, sampling, max_new_tokens):
        asked.extend(sampling)
        for prompt, (n, _) in zip(prompts, sampling, strict=True):
            number = prompt.split()[0] if isinstance(prompt, str) else 0
            output = SimpleNamespace(text=f"\\boxed{{{2 * int(number)}}}", token_ids=[1, 2, 3], finish_reason="stop")
            yield "prompt", SimpleNamespace(outputs=[output] * n)

    return generate
