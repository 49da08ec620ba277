"""Checks that the models can be trained as they are: none is quantized, LoRA finds its modules, packages are there."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from arlopti_openrlhf.ops.preflight.finding import Finding
from arlopti_openrlhf.ops.preflight.model import build, loaded, local_folder, read_json

_LORA = "ds.lora.target_modules"


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield why a model of the run could not be trained, or its weights not be sent to vLLM."""
    needed = {
        "ds.load_in_4bit": ("bitsandbytes", args.ds.load_in_4bit),
        "ds.use_liger_kernel": ("liger-kernel", args.ds.use_liger_kernel),
        "ds.ring_attn_size": ("ring-flash-attn", args.ds.ring_attn_size > 1),
    }
    for flag, (package, is_used) in needed.items():
        if is_used and importlib.util.find_spec(package.replace("-", "_")) is None:
            missing = f"it needs {package}, which is not installed"
            yield Finding.of(args, flag, missing, "install it, or leave the flag out")
    yield from _check_schedules(args)
    for flag, model in loaded(args):
        folder = local_folder(model)
        if folder is None:
            continue
        problem = _quantized(folder)
        if problem:
            remedy = (
                "give the model that it was quantized from, or save what from_pretrained(...).dequantize() returns"
            )
            yield Finding(flag, model, problem, remedy)
        elif flag.startswith("--actor") and (heads := _heads(folder)) % args.vllm.tensor_parallel_size:
            problem = f"vLLM divides the attention heads of {model}, and it has {heads}"
            yield Finding.of(args, "vllm.tensor_parallel_size", problem, f"give a divisor of {heads}")
        if args.ds.lora.rank and not problem and not flag.startswith("--reward"):
            yield from _check_lora(folder, model, args)


def _check_schedules(args: SimpleNamespace) -> Iterator[Finding]:
    """Make each learning-rate schedule for one weight, as OpenRLHF does for a model."""
    from torch import nn, optim
    from transformers import get_scheduler

    for model in ("actor", "critic") if args.critic.model_name_or_path else ("actor",):
        own = vars(args)[model]
        optimizer = optim.SGD([nn.Parameter()], lr=vars(own)[own.optim].lr)
        options = {"min_lr_rate": own.min_lr_ratio} if own.lr_scheduler.endswith("_with_min_lr") else {}
        try:
            get_scheduler(own.lr_scheduler, optimizer, 1, 2, options)
        except Exception as error:  # which schedules raise as they like
            problem = f"transformers makes no such schedule: {str(error).splitlines()[0]}"
            yield Finding.of(args, f"{model}.lr_scheduler", problem, "give another, such as cosine_with_min_lr")


def _heads(folder: Path) -> int:
    """Return how many attention heads a model has, or 0 where its config does not say."""
    try:
        config = read_json(folder / "config.json")
    except ValueError:  # `model` says so
        return 0
    return (config.get("text_config") or config).get("num_attention_heads") or 0


def _quantized(folder: Path) -> str | None:
    """Return how a model is quantized, or None.

    Weights of every such form are frozen in transformers, or need a library of their own. DeepSpeed casts all models,
    and vLLM takes no bf16 weights in place of quantized ones.
    """
    try:
        config = read_json(folder / "config.json")
    except ValueError:  # `model` says so
        return None
    for each in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            found: Any = each.get(key)
            if isinstance(found, dict):
                method = found.get("quant_method") or key
                return f"its weights are quantized ({method}), and a run needs them in 16 or 32 bits"
    if (folder / "hf_quant_config.json").exists():
        return "its weights are quantized (hf_quant_config.json), and a run needs them in 16 or 32 bits"
    return None


def _check_lora(folder: Path, model: str, args: SimpleNamespace) -> Iterator[Finding]:
    """Give the model without its weights to PEFT, as the run does."""
    from peft import LoraConfig, get_peft_model
    from torch.nn import Linear

    targets = args.ds.lora.target_modules
    try:
        bare = build(folder)
    except Exception:  # `model` says what is wrong with it
        return
    names = [name for name, _ in bare.named_modules()]
    linear = {name.rpartition(".")[2] for name, module in bare.named_modules() if isinstance(module, Linear)}
    remedy = f"its linear modules are {', '.join(sorted(linear - {'lm_head'}))}, which all get one without the flag"
    try:
        get_peft_model(bare, LoraConfig(r=1, target_modules=targets), low_cpu_mem_usage=True)
    except Exception as error:  # PEFT raises anything
        problem = f"PEFT cannot put an adapter on {model}: {str(error).splitlines()[0].rstrip('.')}"
        yield Finding.of(args, _LORA, problem, remedy)
        return
    if isinstance(targets, list):
        missing = [each for each in targets if not any(f".{name}".endswith(f".{each}") for name in names)]
        if missing:
            problem = f"{model} has no module {', '.join(missing)}, which gets no adapter"
            yield Finding.of(args, _LORA, problem, remedy, is_fatal=False)
