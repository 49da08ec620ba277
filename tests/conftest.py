"""Gives the tests OpenRLHF on the CPU, a tiny model and tiny data, all made here, and one pretrained model."""

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from arlopti_openrlhf import cpu

cpu.enable()  # before any test imports openrlhf
os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"  # `datasets` would tell a server of each load, and wait for its name

# A shell lets the jobs in its background ignore SIGINT, and nohup lets a command ignore SIGHUP. They hand that on to
# what they start. `make test` has such a job.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples in each run, on a machine of any speed. `make fuzz` looks for new ones. Each may take 30 s.
settings.register_profile("tests", derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", max_examples=int(os.environ.get("EXAMPLES", "2000")), deadline=30_000)
settings.load_profile("tests")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from arlopti_openrlhf.lab.data.knights_knaves import CHAT_TEMPLATE  # noqa: E402


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """Return make_model(tied), which writes a Qwen2 model of 0.1M random parameters with a byte tokenizer."""

    def make(tied: bool = True) -> str:
        import torch

        folder = str(tmp_path_factory.mktemp("model"))
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
        fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
        fast.chat_template = CHAT_TEMPLATE
        fast.save_pretrained(folder)
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=tied,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model) -> str:
    return make_model()


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> str:
    """Write a JSONL file of 256 prompts, each labelled with a K&K solution that the tiny model will never find."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = (
        {
            "prompt": [{"role": "user", "content": f"puzzle {i}"}],
            "label": "(1) Zoey is a knight\n(2) Oliver is a knave",
            "datasource": "kk_2ppl",
        }
        for i in range(256)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def smollm2(request) -> Path:
    """Return a folder with SmolLM2-135M-Instruct, which pytest's cache keeps. Skip the test without a network."""
    from arlopti_openrlhf.lab import pretrained

    place = request.config.cache.mkdir("smollm2")
    with open(place / "lock", "w") as lock:  # `make test` runs two processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            pretrained.make_smollm2(place / "model")
        except pretrained.DownloadError as error:
            pytest.skip(str(error))
    return place / "model"
