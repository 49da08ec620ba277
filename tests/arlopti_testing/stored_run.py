"""Make the tiny run whose checkpoint is a test file, so that later versions are held to load it.

    PYTHONPATH=OLD:tests python -m arlopti_testing.stored_run tests/ops/checkpoints/data/COMMIT.tar.gz

OLD is the tree of the commit. The archive holds the checkpoint after two of four steps, with samples that are left
over for the third, the run's flags, and all that it reads. Paths in its flags begin with `FOLDER`.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

FOLDER = Path("/tmp/stored_run")
STEP = 2
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789ĠĊ"  # of the byte-level tokenizer; Ġ is the space, Ċ the line's end
_REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    return [float(sum(map(ord, query)) % 7) - 3 for query in queries]
"""


def make_inputs(folder: Path) -> None:
    """Write a model of 9 thousand parameters, 16 prompts and a reward file."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(_ALPHABET)}, merges=[], unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=32,  # one head, and the smallest that vLLM's attention has on the CPU
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"prompt": f"puzzle {i}", "label": str(i)} for i in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(_REWARD, encoding="utf-8")


def command(folder: Path) -> list[str]:
    """Return the training's command line. Six prompts are generated at a time, and a step takes four."""
    return f"""
        {sys.executable} -m arlopti_openrlhf.cli.train_ppo_ray
        --actor.model_name_or_path {folder}/model --data.prompt_dataset {folder}/train.jsonl
        --data.input_key prompt --data.label_key label --data.max_len 32 --reward.remote_url {folder}/reward.py
        --rollout.batch_size 4 --rollout.vllm_generate_batch_size 6 --rollout.n_samples_per_prompt 2
        --rollout.max_new_tokens 8 --rollout.micro_batch_size 4 --train.batch_size 8 --train.micro_batch_size 4
        --algo.advantage.estimator group_norm --algo.kl.init_coef 0 --algo.ar.alpha 0.3
        --actor.num_gpus_per_node 1 --vllm.num_engines 1 --train.async_enable --train.enable_ema
        --vllm.enforce_eager --vllm.sync_backend gloo --vllm.gpu_memory_utilization 0.5
        --actor.adam.lr 1e-3 --ds.zero_stage 2 --ds.attn_implementation sdpa
        --ckpt.save_steps {STEP} --ckpt.load_enable --ckpt.best_metric_key none
        --ckpt.path {folder}/ckpt --ckpt.output_dir {folder}/final
    """.split()


def environment() -> dict[str, str]:
    """Return a run's environment, with vLLM's model in the engine's own process: one process less to start."""
    return {**os.environ, "PYTHONWARNINGS": "ignore", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def main() -> None:
    """Run the training of what is on PYTHONPATH, and write the archive."""
    archive = Path(sys.argv[1]).absolute()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    make_inputs(FOLDER)
    subprocess.run(command(FOLDER), env=environment(), check=True)
    pack(FOLDER, archive)


def pack(folder: Path, archive: Path) -> None:
    """Write the archive of a run that has ended."""
    with tarfile.open(archive, "w:gz") as file:
        for name in (f"ckpt/_actor/global_step{STEP}", "ckpt/config.yaml", "model", "train.jsonl", "reward.py"):
            file.add(folder / name, name, filter=_of_nobody)


def _of_nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member without its owner and time."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def unpack(archive: Path, folder: Path) -> None:
    """Put a stored run into an empty folder."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    flags = folder / "ckpt" / "config.yaml"
    flags.write_text(flags.read_text("utf-8").replace(str(FOLDER), str(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
