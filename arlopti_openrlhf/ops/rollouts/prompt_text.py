"""A prompt as text, for the run and for its checks. It imports nothing heavy."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 80  # characters of a prompt's beginning, and of its end


def shown(prompt: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a prompt's tokens as text: how many there are, the first and the last characters, escaped."""
    ids = tokenizer(text=prompt, add_special_tokens=False, verbose=False)["input_ids"]
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if len(text) <= 2 * _SHOWN:
        return f"{len(ids)} tokens\n  {text!r}"
    return f"{len(ids)} tokens\n  begins {text[:_SHOWN]!r}\n  ends   {text[-_SHOWN:]!r}"
