"""Finds a model's folder, and reads its tokenizer, without PyTorch, whose import takes longer than all checks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def local_folder(model: str) -> Path | None:
    """Return the folder of a model: its own, or where the hub's cache keeps it. None where neither is there."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or {} where there is no such file. ValueError, with the name, for anything else."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no object with keys")
    return value


class Tokenizer:
    """Reads `tokenizer.json` and the chat template of a folder.

    Transformers may build its tokenizer by rules of the model's type, which can split a text a little otherwise.

    Args:
        folder: the model's.

    Raises:
        FileNotFoundError: it has no `tokenizer.json`, though a tokenizer may be there in an older form.
        ValueError: a file of the tokenizer is broken.
    """

    def __init__(self, folder: Path) -> None:
        import tokenizers

        self.config = read_json(folder / "tokenizer_config.json")
        path = folder / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(path)
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the bindings raise the bare class
            raise ValueError(f"tokenizer.json cannot be read: {error}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        tokens = read_json(folder / "special_tokens_map.json") | self.config
        self.special_tokens = {name: _token(tokens[name]) for name in tokens if name.endswith("_token")}
        self.special_tokens = {name: token for name, token in self.special_tokens.items() if token}
        self.chat_template = _chat_template(folder, self.config)

    def __len__(self) -> int:
        """Return one more than the highest token id."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def base_size(self) -> int:
        """How many tokens there are without those that were added."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token, such as `pad_token`. None where there is none."""
        return self._backend.token_to_id(self.special_tokens[name]) if name in self.special_tokens else None

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return a prompt as upstream's `preprocess_data` renders it. Errors are the template's own."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self.chat_template,
            add_generation_prompt=True,
            **self.special_tokens,
        )
        return rendered[0]

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, without special tokens of the tokenizer's own."""
        return [len(encoding.ids) for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]


def _token(value: Any) -> str:
    return value.get("content", "") if isinstance(value, dict) else value if isinstance(value, str) else ""


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the template that Transformers would take where none is named."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    # That of a processor, as vision-language models have it.
    if "vision_config" in read_json(folder / "config.json"):
        template = read_json(folder / "chat_template.json").get("chat_template")
        if isinstance(template, str):
            return template
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        return named.get("default")
    return template if isinstance(template, str) else None
