"""Estimates the peak memory of the actor's GPU from the model's config.json and the flags."""

import shutil
import subprocess
from types import SimpleNamespace
from typing import NamedTuple

from arlopti_openrlhf.ops.preflight.clusters import starts_cluster
from arlopti_openrlhf.ops.preflight.combinations import loads_reference
from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.local_model import ModelSize, local_folder, read_size
from arlopti_openrlhf.ops.preflight.update import STOCK, Update

_GIB = 1 << 30


class Estimate(NamedTuple):
    """Holds the parts of the memory in bytes. It leaves out fragmentation and what CUDA itself takes.

    Attributes:
        weights, gradients, optimizer: the actor's share on one rank.
        others: reference, critic and reward models on the same GPU.
        activations: of one micro-batch, with its logits.
        vllm: what vLLM takes on the same GPU while it is awake. 0 where it has GPUs of its own.
        peak: the largest sum at a time.
    """

    weights: float
    gradients: float
    optimizer: float
    others: float
    activations: float
    vllm: float
    peak: float

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / _GIB:.1f}" for name, value in self._asdict().items() if name != "peak")
        return f"{self.peak / _GIB:.1f} GiB ({parts})"


def check(args: SimpleNamespace, update: Update = STOCK) -> list[Finding]:
    """Return a warning where the estimate exceeds this machine's GPUs. It stops nothing, since it is an estimate."""
    total = gpu_memory() if starts_cluster() else None
    guess = estimate(args, total, update) if total else None
    if not guess or not total or guess.peak <= total:
        return []
    problem = f"the peak memory per GPU is estimated at {guess}, and the smallest GPU has {total / _GIB:.1f} GiB"
    remedy = "more ranks, --ds.zero_stage 3, --train.micro_batch_size and --vllm.gpu_memory_utilization lower it"
    return [Finding("--actor.num_gpus_per_node", args.actor.num_gpus_per_node, problem, remedy, is_fatal=False)]


def describe(args: SimpleNamespace, update: Update = STOCK) -> str | None:
    """Return the estimate in words, or None where the model's size is not known."""
    total = gpu_memory()
    guess = estimate(args, total or 0, update)
    if guess is None:
        return None
    there = (
        f" of {total / _GIB:.1f} GiB" if total else ", without vLLM, since this machine has no GPU to take a share of"
    )
    return f"estimated peak memory per GPU of the actor: {guess}{there}"


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


def estimate(args: SimpleNamespace, total: int, update: Update = STOCK) -> Estimate | None:
    """Return the estimate for a GPU of the actor, or None where the model's size is not known.

    Args:
        args: upstream's nested arguments.
        total: the GPU's memory in bytes, of which vLLM takes a share.
        update: how the update is computed.
    """
    folder = local_folder(args.actor.model_name_or_path) if args.actor.model_name_or_path else None
    size = read_size(folder) if folder else None
    if size is None:
        return None
    weights, gradients, optimizer = _states(args, size.parameters)
    others = _frozen(args, "ref", size) + _beside(args, size)
    activations = _activations(args, size, update)
    colocated = args.train.colocate_all and not args.train.async_enable
    vllm = args.vllm.gpu_memory_utilization * total if colocated else 0
    resident = weights + gradients + optimizer + others
    # One of the two may sleep while the other works.
    training = resident + activations + (0 if args.vllm.enable_sleep else vllm)
    generating = vllm + (others if args.ds.enable_sleep else resident)
    return Estimate(weights, gradients, optimizer, others, activations, vllm, max(training, generating))


def _states(args: SimpleNamespace, parameters: int) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer on one rank, by the stage of ZeRO (arXiv 1910.02054).

    DeepSpeed's `estimate_zero3_model_states_mem_needs` gives their sum alone, without LoRA, and its import takes 4 s.
    """
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    stage, split = args.ds.zero_stage, args.ds.tensor_parallel_size
    shards = max(1, ranks // split)
    trained = 0 if args.ds.lora.rank else parameters / split  # an adapter is small
    weights = 2 * parameters / split / (shards if stage == 3 else 1)
    gradients = 2 * trained / (shards if stage >= 2 else 1)
    optimizer = 0 if args.ds.adam_offload else 12 * trained / (shards if stage >= 1 else 1)
    return weights, gradients, optimizer


def _frozen(args: SimpleNamespace, name: str, size: ModelSize) -> float:
    """Return the bytes of a reference or reward model on the actor's GPU."""
    group = vars(args)[name]
    shares = args.train.colocate_all or (name == "ref" and args.train.colocate_actor_ref)
    if not shares or group.offload or (name == "ref" and not loads_reference(args)):
        return 0
    return 2 * size.parameters / (group.num_nodes * group.num_gpus_per_node if args.ds.zero_stage == 3 else 1)


def _beside(args: SimpleNamespace, size: ModelSize) -> float:
    """Return the bytes of critic and reward model on the actor's GPU, as if they were of the actor's size."""
    if not args.train.colocate_all:
        return 0
    critic = sum(_states(args, size.parameters)) if args.critic.model_name_or_path else 0
    return critic + (0 if args.reward.remote_url else _frozen(args, "reward", size))


def _activations(args: SimpleNamespace, size: ModelSize, update: Update) -> float:
    """Return the bytes of one micro-batch's activations and logits."""
    if update.bytes_per_token is None:
        return 0
    layers, logits = update.bytes_per_token(
        size.hidden, size.layers, size.vocabulary, args.actor.gradient_checkpointing_enable
    )
    is_dynamic = args.train.dynamic_batch_enable
    samples = args.train.micro_batch_size
    tokens = (args.train.max_tokens_per_gpu if is_dynamic else samples * args.data.max_len) / args.ds.ring_attn_size
    if update.keeps_logits:
        return tokens * (layers + logits)
    # In place of logits more samples are taken, as far as a prompt has them.
    per_prompt = args.rollout.n_samples_per_prompt * args.data.max_len
    return (
        tokens * layers if is_dynamic else max(tokens * layers, min(per_prompt * layers, tokens * (layers + logits)))
    )
