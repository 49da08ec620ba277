"""Responses by vLLM offline, on a GPU or a CPU, to prompts as OpenRLHF hands them to it."""

from collections.abc import Sequence

from arlopti_openrlhf import cpu


def load_engine(model: str, seed: int):
    """vLLM's `LLM`. It does not give back all that it holds: several models take a process each."""
    cpu.enable()
    from vllm import LLM

    # Few CPUs have bf16 instructions: float32 is the fast type there.
    dtype = "float32" if cpu.uses_cpu() else "auto"
    return LLM(model, seed=seed, enforce_eager=cpu.uses_cpu(), dtype=dtype, max_num_seqs=1024)


def generate(engine, prompts: Sequence[str | list[dict]], parameters) -> list[tuple[str, object]]:
    """Of each prompt, text or chat messages, its final text and vLLM's `RequestOutput`.

    Args:
        engine: of `load_engine`.
        prompts: text is final; messages get the tokenizer's chat template.
        parameters: vLLM's `SamplingParams`, one for all or one for each.
    """
    tokenizer = engine.get_tokenizer()
    texts = [
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    # Tokenized here, as OpenRLHF does it: the text already holds every special token.
    inputs = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
    return list(zip(texts, engine.generate(inputs, parameters), strict=True))
