"""Flags that cannot go together. The parser refuses them too."""

from operator import attrgetter
from types import SimpleNamespace

from arlopti_openrlhf.grading.reward_files import REWARD_FILES
from arlopti_openrlhf.ops.preflight.finding import Finding

# What makes a run depend on when things happen, and why.
_NOT_DETERMINISTIC = {
    "train.async_enable": "which weights generate a sample depends on how long the steps take",
    "train.agent_func_path": "the requests of an agent's later turns reach vLLM as they come",
}
# Flags that images cannot go with, with the value at which each is off, and why. OpenRLHF itself refuses packing and a
# critic, but not what switches packing on.
_NOT_WITH_IMAGES = {
    "train.dynamic_batch_enable": (False, "it packs the samples"),
    "ds.ring_attn_size": (1, "it packs the samples"),
    "ds.use_liger_kernel": (False, "it knows text models alone"),
}


def check(args: SimpleNamespace) -> list[Finding]:
    """Return what cannot go together in the nested arguments as the user gave them."""
    return [
        *_check_reward_source(args),
        *_check_evaluation(args),
        *_check_determinism(args),
        *_check_template(args),
        *_check_images(args),
    ]


def loads_reference(args: SimpleNamespace) -> bool:
    """Return whether a reference model is loaded. With LoRA the policy without its adapter is the reference.

    In 4 bits OpenRLHF computes the norms of a LoRA policy in float32 and those of a reference in bf16, so they differ.
    """
    return args.algo.kl.init_coef > 0 and (not args.ds.lora.rank or args.ds.load_in_4bit)


def rollout_samples(args: SimpleNamespace) -> int:
    """Return how many samples lie between two weight syncs."""
    return args.rollout.batch_size * args.rollout.n_samples_per_prompt


def _check_reward_source(args: SimpleNamespace) -> list[Finding]:
    """Refuse what could give no reward. OpenRLHF would find that out only after the first rollout."""
    source = args.reward.remote_url
    if not source or args.train.agent_func_path:
        return []
    first, *others = source.split(",")
    is_file = first in REWARD_FILES or first.endswith(".py")
    if not (is_file and others) and (is_file or all("://" in part for part in (first, *others))):
        return []
    allowed = f"{', '.join(REWARD_FILES)}, one Python file, or URLs with commas between them"
    return [Finding("--reward.remote_url", source, "is no source of rewards", f"give {allowed}")]


def _check_template(args: SimpleNamespace) -> list[Finding]:
    """Refuse a template that OpenRLHF would leave out. `ops.preflight.data` looks at the others."""
    template = args.data.input_template
    if not template or "{}" in template or args.data.apply_chat_template:
        return []
    problem = "it has no {}, so OpenRLHF would leave it out"
    remedy = "put {} where the prompt belongs, or leave the flag out"
    return [Finding("--data.input_template", repr(template), problem, remedy)]


def _check_images(args: SimpleNamespace) -> list[Finding]:
    wanted, flag = args.data.max_images_per_prompt, "--data.max_images_per_prompt"
    if wanted < 0:
        return [Finding(flag, wanted, "is no number of images", "give a number from 0 on")]
    return [
        Finding(flag, wanted, f"cannot go with --{other} {attrgetter(other)(args)}: {why}", "leave one of the two out")
        for other, (off, why) in _NOT_WITH_IMAGES.items()
        if wanted and attrgetter(other)(args) != off
    ]


def _check_evaluation(args: SimpleNamespace) -> list[Finding]:
    evaluates = args.eval.dataset and args.eval.steps != -1
    findings = []
    if args.eval.sampling and not evaluates:
        patterns = " ".join(sampling.pattern for sampling in args.eval.sampling)
        remedy = "give --eval.dataset and --eval.steps"
        findings.append(Finding("--eval.sampling", patterns, "nothing is evaluated", remedy))
    if evaluates and not args.reward.remote_url and not args.train.agent_func_path:
        problem = "OpenRLHF's evaluation asks no reward model"
        remedy = "give --reward.remote_url or --train.agent_func_path"
        findings.append(Finding("--eval.dataset", args.eval.dataset, problem, remedy))
    return findings


def _check_determinism(args: SimpleNamespace) -> list[Finding]:
    if not args.train.deterministic:
        return []
    return [
        Finding("--train.deterministic", True, f"cannot go with --{flag}: {why}", "leave one of the two out")
        for flag, why in _NOT_DETERMINISTIC.items()
        if attrgetter(flag)(args)
    ]
