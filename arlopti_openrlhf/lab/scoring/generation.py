"""Generates responses with vLLM offline, on a GPU or a CPU, to prompts as OpenRLHF hands them to vLLM."""

from collections.abc import Sequence
from typing import Any

from arlopti_openrlhf import cpu


def load_engine(model: str, seed: int):
    """Return vLLM's `LLM` of `model`, a Hugging Face directory or name.

    An engine does not give back all the memory that it holds, so several models take a process each.
    """
    cpu.enable()
    from vllm import LLM

    # Few CPUs have bf16 instructions, so float32 is the fast type there.
    dtype = "float32" if cpu.uses_cpu() else "auto"
    return LLM(model, seed=seed, enforce_eager=cpu.uses_cpu(), dtype=dtype, max_num_seqs=1024)


def generate(engine, prompts: Sequence[str | list[dict]], parameters) -> list[tuple[str, Any]]:
    """Return the final text of each prompt and vLLM's `RequestOutput`, in the order of the prompts.

    Args:
        engine: what `load_engine` returns.
        prompts: texts, which are taken as they are, or chat messages, which get the tokenizer's chat template.
        parameters: vLLM's `SamplingParams`, one for all prompts or a list with one for each.
    """
    tokenizer = engine.get_tokenizer()
    texts = [
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    # Tokenized here, as OpenRLHF does it, because the text already holds every special token.
    inputs = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts]
    return list(zip(texts, engine.generate(inputs, parameters), strict=True))
