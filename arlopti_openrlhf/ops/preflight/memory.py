"""Estimates the peak memory of the actor's GPU from the model's config.json and the flags."""

import shutil
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

from arlopti_openrlhf.ops.preflight.finding import Finding, Update, in_words
from arlopti_openrlhf.ops.preflight.model import ModelSize, model_size
from arlopti_openrlhf.ops.preflight.values import loads_reference
from arlopti_openrlhf.ray_address import starts_cluster


class Estimate(NamedTuple):
    """Parts of the memory of one of the actor's GPUs in bytes, without fragmentation and what CUDA itself takes."""

    weights: float  # of the actor, as are gradients and optimizer
    gradients: float
    optimizer: float
    others: float  # reference, critic and reward models
    activations: float  # of one micro-batch, with its logits
    vllm: float  # while it is awake. 0 where it has GPUs of its own
    peak: float  # the largest sum at a time

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {in_words(value)}" for name, value in self._asdict().items() if name != "peak")
        return f"{in_words(self.peak)} ({parts})"


def check(args: SimpleNamespace, update: Update) -> Iterator[Finding]:
    """Warn where the estimate exceeds this machine's GPUs. It stops nothing, since it is an estimate."""
    total = gpu_memory() if starts_cluster() else None
    guess = estimate(args, total, update) if total else None
    if guess and total and guess.peak > total:
        problem = f"the peak memory per GPU is estimated at {guess}, and the smallest GPU has {in_words(total)}"
        remedy = "more ranks, --ds.zero_stage 3, --train.micro_batch_size and --vllm.gpu_memory_utilization lower it"
        yield Finding.of(args, "actor.num_gpus_per_node", problem, remedy, is_fatal=False)


def describe(args: SimpleNamespace, update: Update) -> str | None:
    """Return the estimate in words, or None where the model's size is not known."""
    total = gpu_memory()
    guess = estimate(args, total or 0, update)
    there = f" of {in_words(total)}" if total else ", without vLLM, as this machine has no GPU to take a share of"
    return guess and f"estimated peak memory per GPU of the actor: {guess}{there}"


def gpu_memory() -> int | None:
    """Return the memory in bytes of the smallest GPU that NVIDIA's driver shows. None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return min(int(line) for line in done.stdout.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def estimate(args: SimpleNamespace, total: int, update: Update) -> Estimate | None:
    """Return the estimate, or None where the model's size is not known. `total` is the GPU's memory in bytes."""
    size = model_size(args.actor.model_name_or_path)
    if size is None:
        return None
    states = _states(args, size.parameters)
    others = _others(args, size.parameters, sum(states))
    activations = _activations(args, size, update)
    colocated = args.train.colocate_all and not args.train.async_enable
    vllm = args.vllm.gpu_memory_utilization * total if colocated else 0
    resident = sum(states) + others
    # One of the two may sleep while the other works.
    training = resident + activations + (0 if args.vllm.enable_sleep else vllm)
    generating = vllm + (others if args.ds.enable_sleep else resident)
    return Estimate(*states, others, activations, vllm, max(training, generating))


def _states(args: SimpleNamespace, parameters: int) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer on one rank, by the stage of ZeRO (arXiv 1910.02054).

    DeepSpeed's `estimate_zero3_model_states_mem_needs` gives their sum alone, without LoRA, and its import takes 4 s.
    """
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    stage, split = args.ds.zero_stage, args.ds.tensor_parallel_size
    shards = max(1, ranks // split)
    trained = 0 if args.ds.lora.rank else parameters / split  # an adapter is small
    weights = (0.55 if args.ds.load_in_4bit else 2) * parameters / split / (shards if stage == 3 else 1)
    gradients = 2 * trained / (shards if stage >= 2 else 1)
    optimizer = 0 if args.ds.adam_offload else 12 * trained / (shards if stage >= 1 else 1)
    return weights, gradients, optimizer


def _others(args: SimpleNamespace, parameters: int, critic: float) -> float:
    """Return the bytes of reference, critic and reward model on the actor's GPU, as if all had the actor's size."""
    is_there = {
        "ref": loads_reference(args) and (args.train.colocate_all or args.train.colocate_actor_ref),
        "reward": not args.reward.remote_url and args.train.colocate_all,
    }
    # DeepSpeed offloads parameters at ZeRO-3 alone. OpenRLHF's moving average asks for it too.
    is_offloaded = args.ds.zero_stage == 3
    frozen = [
        vars(args)[name] for name in is_there if is_there[name] and not (is_offloaded and vars(args)[name].offload)
    ]
    average = 2 * parameters if args.train.enable_ema and not is_offloaded else 0
    shards = [each.num_nodes * each.num_gpus_per_node if args.ds.zero_stage == 3 else 1 for each in frozen]
    has_critic = args.critic.model_name_or_path and args.train.colocate_all
    return average + sum(2 * parameters / number for number in shards) + (critic if has_critic else 0)


def _activations(args: SimpleNamespace, size: ModelSize, update: Update) -> float:
    """Return the bytes of one micro-batch's activations and logits."""
    is_checkpointed, liger = args.actor.gradient_checkpointing_enable, args.ds.use_liger_kernel
    stock, selective = (update.bytes_per_token(size.config, is_checkpointed, kept, liger) for kept in (True, False))
    is_dynamic = args.train.dynamic_batch_enable
    most = args.train.max_tokens_per_gpu if is_dynamic else args.train.micro_batch_size * args.data.max_len
    tokens = most / args.ds.ring_attn_size
    if update.keeps_logits:
        return tokens * stock
    if is_dynamic:
        return tokens * selective
    # In place of logits more samples are taken, as far as a prompt has them.
    per_prompt = args.rollout.n_samples_per_prompt * args.data.max_len
    return max(tokens * selective, min(per_prompt * selective, tokens * stock))
