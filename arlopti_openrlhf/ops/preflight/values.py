"""Values that no run can use or that would train something else, and flags that cannot go together."""

import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.preflight.finding import Finding

NO_SOURCE = "is no source of rewards"
SOURCES = f"give {', '.join(REWARDS)}, one Python file, or URLs with commas between them"

# Flags by their range of numbers, which has a bracket where its end belongs to it. What is not given is not looked at.
_RANGES = {
    "[1, inf)": """
        actor.num_nodes actor.num_gpus_per_node vllm.tensor_parallel_size ds.tensor_parallel_size ds.ring_attn_size
        rollout.batch_size rollout.n_samples_per_prompt rollout.micro_batch_size rollout.max_new_tokens
        rollout.max_tokens_per_gpu train.batch_size train.micro_batch_size train.max_epochs train.num_episodes
        train.async_queue_size data.max_samples logger.logging_steps ckpt.max_num eval.n_samples_per_prompt
    """,
    "[2, inf)": "data.max_len",
    "(0, inf)": "rollout.temperature",
    "(0, 1]": "rollout.top_p vllm.gpu_memory_utilization",
    "(-inf, inf)": "actor.entropy_coef",
    "(0, inf]": "ckpt.max_mem",
    "[0, inf)": "eval.temperature actor.eps_clip actor.eps_clip_low_high algo.kl.init_coef data.max_images_per_prompt",
    "(-inf, 1]": "reward.stop_properly_penalty_coef",
    "[0, 1]": "train.ema_beta algo.advantage.gamma algo.advantage.lambd",
}
_RANGES_OF_AN_OPTIMIZER = {
    "(0, inf)": "adam.eps",
    "[0, inf)": "adam.weight_decay max_norm",
    "[0, 1]": "lr_warmup_ratio min_lr_ratio",
    "[0, 1)": "adam.betas",
}
# Adam moves a weight by about the learning rate in each step, and weights are mostly below 0.1.
_ABSURD_RATE, _HIGH_RATE = 1.0, 1e-2
_IMAGES, _DETERMINISTIC = "data.max_images_per_prompt", "train.deterministic"
# A flag, another that it cannot go with, the value at which that one is off, and why. OpenRLHF itself refuses packing
# and a critic for images, but not what switches packing on.
_EXCLUSIVE = (
    (_DETERMINISTIC, "train.async_enable", False, "how long steps take decides which weights generate a sample"),
    (_DETERMINISTIC, "train.agent_func_path", None, "the requests of an agent's later turns reach vLLM as they come"),
    (_IMAGES, "train.dynamic_batch_enable", False, "it packs the samples"),
    (_IMAGES, "ds.ring_attn_size", 1, "it packs the samples"),
)


def contains(range_: str, value: float) -> bool:
    """Return whether the value is in a range such as "(0, 1]". NaN is in none."""
    low, high = (float(end) for end in range_[1:-1].split(","))
    is_above = value >= low if range_[0] == "[" else value > low
    is_below = value <= high if range_[-1] == "]" else value < high
    return is_above and is_below


def check_ranges(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield the numbers that are out of range. Other checks would find their consequences."""
    yield from _check_ranges(args, _RANGES)
    for flag in ("ckpt.save_steps", "eval.steps"):
        if attrgetter(flag)(args) != -1:  # which is never
            yield from _check_ranges(args, {"[1, inf)": flag})
    for model in ("actor", "critic") if args.critic.model_name_or_path else ("actor",):
        yield from _check_ranges(args, _RANGES_OF_AN_OPTIMIZER, f"{model}.")
        for optimizer in dict.fromkeys(("adam", vars(args)[model].optim)):
            yield from _check_rate(args, f"{model}.{optimizer}.lr")


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield values that go wrong late or in silence."""
    if not args.actor.model_name_or_path:
        remedy = "name a folder, or a model on the hub"
        yield Finding.of(args, "actor.model_name_or_path", "there is no model", remedy)
    if not args.data.prompt_dataset:
        yield Finding.of(args, "data.prompt_dataset", "there is no data", "name a file with prompts")
    if bool(args.eval.dataset) != (args.eval.steps != -1):
        flag, other = ("steps", "dataset") if args.eval.dataset else ("dataset", "steps")
        problem = f"nothing is evaluated during training without --eval.{flag}"
        yield Finding.of(args, f"eval.{other}", problem, f"give --eval.{flag} too", is_fatal=False)
    if (args.ds.zero_stage, args.ds.grad_accum_dtype, args.ds.adam_offload) == (1, "fp32", False):
        problem = "DeepSpeed has another optimizer for ZeRO-1 then, which cannot refuse a gradient that is not finite"
        yield Finding.of(args, "ds.grad_accum_dtype", problem, "take --ds.zero_stage 2, or leave it out")
    if args.train.enable_ema:
        # Half of the distance between two numbers next to each other, as a share of a weight.
        least = {"bf16": 2**-9, "fp16": 2**-12}[args.ds.param_dtype] / max(1 - args.train.ema_beta, 1e-12)
        problem = f"it is kept in {args.ds.param_dtype}, and moves only where weights have moved by {least:.0%}"
        remedy = "leave it out, unless the model is to stay close to the first one"
        yield Finding.of(args, "train.enable_ema", problem, remedy, is_fatal=False)
    if (args.vllm.num_engines or 0) < 1:
        problem = "OpenRLHF generates with vLLM alone, and no engine is asked for"
        yield Finding.of(args, "vllm.num_engines", problem, "give at least 1")
    if args.data.input_template and args.data.apply_chat_template:
        problem, remedy = "unused with --data.apply_chat_template", "leave one of the two flags out"
        yield Finding("--data.input_template", repr(args.data.input_template), problem, remedy, is_fatal=False)
    if args.logger.wandb.key == credentials.WANDB and not os.environ.get(credentials.WANDB):
        problem = "the variable is not set, so wandb has no key"
        yield Finding.of(args, "logger.wandb.key", problem, "set it, or leave the flag out", is_fatal=False)
    reward, agent = (args.reward.remote_url or [""])[0], args.train.agent_func_path
    files = {"reward.remote_url": reward if reward.endswith(".py") else None, "train.agent_func_path": agent}
    for name, path in files.items():
        if path and not Path(path).is_file():
            yield Finding(f"--{name}", path, "there is no such file", "correct the path")
    yield from _check_late(args)


def _check_late(args: SimpleNamespace) -> Iterator[Finding]:
    """Refuse ranges without a value, which train on nothing, and what ends a run after its first rollout."""
    threshold, clip_range = args.algo.advantage.is_correction_threshold, args.reward.clip_range
    longest = args.rollout.max_new_tokens or args.data.max_len
    is_corrected = args.algo.advantage.is_correction_level != "off"
    is_reversed = "the second number is no greater than the first, so there is nothing between them"
    if is_corrected and len(threshold) > 1 and threshold[0] >= threshold[-1]:
        yield Finding.of(args, "algo.advantage.is_correction_threshold", is_reversed, "give LOW HIGH")
    if clip_range[0] >= clip_range[1]:
        yield Finding.of(args, "reward.clip_range", is_reversed, "give LOW HIGH")
    if (args.reward.overlong_buffer_len or 0) > longest:
        problem = f"a response has {longest} tokens at most, and OpenRLHF stops at the first one"
        yield Finding.of(args, "reward.overlong_buffer_len", problem, f"give {longest} at most")
    if args.train.enable_ema and args.ds.lora.rank:
        problem = "OpenRLHF averages a model without an adapter, which has other parameters than this one"
        yield Finding.of(args, "train.enable_ema", problem, "leave it out, or train without LoRA")


def _check_ranges(args: SimpleNamespace, ranges: dict[str, str], prefix: str = "") -> Iterator[Finding]:
    for range_, flags in ranges.items():
        for flag in flags.split():
            value = attrgetter(prefix + flag)(args)
            for number in value if isinstance(value, list | tuple) else [value]:
                if number is not None and not contains(range_, number):
                    yield Finding(f"--{prefix}{flag}", number, f"is not in {range_}", "give a value there")


def _check_rate(args: SimpleNamespace, flag: str) -> Iterator[Finding]:
    rate, remedy = attrgetter(flag)(args), "RL takes 1e-7 to 1e-3"
    if not 0 <= rate <= _ABSURD_RATE:  # NaN too
        span = f"(0, {_ABSURD_RATE:g}]"
        problem = f"is no learning rate: each step moves a weight by about that, and it has to be in {span}"
        yield Finding.of(args, flag, problem, remedy)
    elif rate == 0:
        yield Finding.of(args, flag, "nothing is learned", "give a rate above 0", is_fatal=False)
    elif rate > _HIGH_RATE and ".adam." in flag:
        problem = "is very high for Adam, and training is likely to diverge"
        yield Finding.of(args, flag, problem, remedy, is_fatal=False)


def check_combinations(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what cannot go together in the nested arguments as the user gave them. The parser refuses it too."""
    for flag, other, off, why in _EXCLUSIVE:
        value = attrgetter(other)(args)
        if attrgetter(flag)(args) and value != off:
            yield Finding.of(args, flag, f"cannot go with --{other} {value}: {why}", "leave one of the two out")
    template = args.data.input_template
    if template and not args.data.apply_chat_template:
        yield from _check_template(template)
    yield from _check_reward_source(args)
    yield from _check_evaluation(args)


def _check_template(template: str) -> Iterator[Finding]:
    """Refuse a template that OpenRLHF leaves out, and one in which `str.format` finds other braces than {}."""
    if "{}" not in template:
        remedy = "put {} where the prompt belongs, or leave the flag out"
        yield Finding("--data.input_template", repr(template), "it has no {}, so OpenRLHF would leave it out", remedy)
        return
    try:
        template.format("")
    except (ValueError, LookupError, AttributeError) as error:
        problem = f"it has other braces than one {{}} for the prompt ({type(error).__name__}: {error})"
        yield Finding("--data.input_template", repr(template), problem, "write {{ and }} for braces that stay")


def loads_reference(args: SimpleNamespace) -> bool:
    """Return whether a reference model is loaded. With LoRA the policy without its adapter is the reference.

    In 4 bits OpenRLHF computes the norms of a LoRA policy in float32 and those of a reference in bf16, so they differ.
    """
    repaired = args.ds.lora.rank and args.ops == "on"
    return args.algo.kl.init_coef > 0 and (not repaired or args.ds.load_in_4bit)


def rollout_samples(args: SimpleNamespace) -> int:
    """Return how many samples lie between two weight syncs."""
    return args.rollout.batch_size * args.rollout.n_samples_per_prompt


def _check_reward_source(args: SimpleNamespace) -> Iterator[Finding]:
    """Refuse what could give no reward. OpenRLHF would find that out only after the first rollout."""
    if not args.reward.remote_url or args.train.agent_func_path:
        return
    if not is_reward_source(args.reward.remote_url):
        yield Finding.of(args, "reward.remote_url", NO_SOURCE, SOURCES)


def is_reward_source(text: str) -> bool:
    """Return whether a text has the form of a source of rewards."""
    sources = text.split(",")
    is_file = sources[0] in REWARDS or sources[0].endswith(".py")
    return len(sources) == 1 if is_file else all("://" in source for source in sources)


def _check_evaluation(args: SimpleNamespace) -> Iterator[Finding]:
    evaluates = args.eval.dataset and args.eval.steps != -1
    if args.eval.sampling and not evaluates:
        patterns = " ".join(sampling.pattern for sampling in args.eval.sampling)
        remedy = "give --eval.dataset and --eval.steps"
        yield Finding("--eval.sampling", patterns, "nothing is evaluated", remedy)
    if evaluates and not args.reward.remote_url and not args.train.agent_func_path:
        remedy = "give --reward.remote_url or --train.agent_func_path"
        yield Finding.of(args, "eval.dataset", "OpenRLHF's evaluation asks no reward model", remedy)
