"""Flags that cannot go together. The parser refuses them too."""

from collections.abc import Iterator
from operator import attrgetter
from types import SimpleNamespace

from arlopti_openrlhf.grading import REWARD_FILES
from arlopti_openrlhf.ops.preflight.finding import Finding

_IMAGES, _DETERMINISTIC = "data.max_images_per_prompt", "train.deterministic"
# A flag, another that it cannot go with, the value at which that one is off, and why. OpenRLHF itself refuses packing
# and a critic for images, but not what switches packing on.
_EXCLUSIVE = (
    (_DETERMINISTIC, "train.async_enable", False, "how long steps take decides which weights generate a sample"),
    (_DETERMINISTIC, "train.agent_func_path", None, "the requests of an agent's later turns reach vLLM as they come"),
    (_IMAGES, "train.dynamic_batch_enable", False, "it packs the samples"),
    (_IMAGES, "ds.ring_attn_size", 1, "it packs the samples"),
    (_IMAGES, "ds.use_liger_kernel", False, "it knows text models alone"),
)


def check(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what cannot go together in the nested arguments as the user gave them."""
    for flag, other, off, why in _EXCLUSIVE:
        value = attrgetter(other)(args)
        if attrgetter(flag)(args) and value != off:
            yield Finding.of(args, flag, f"cannot go with --{other} {value}: {why}", "leave one of the two out")
    # OpenRLHF would leave this template out. `values` looks at the others.
    template = args.data.input_template
    if template and "{}" not in template and not args.data.apply_chat_template:
        problem = "it has no {}, so OpenRLHF would leave it out"
        remedy = "put {} where the prompt belongs, or leave the flag out"
        yield Finding("--data.input_template", repr(template), problem, remedy)
    yield from _check_reward_source(args)
    yield from _check_evaluation(args)


def loads_reference(args: SimpleNamespace) -> bool:
    """Return whether a reference model is loaded. With LoRA the policy without its adapter is the reference.

    In 4 bits OpenRLHF computes the norms of a LoRA policy in float32 and those of a reference in bf16, so they differ.
    """
    return args.algo.kl.init_coef > 0 and (not args.ds.lora.rank or args.ds.load_in_4bit)


def rollout_samples(args: SimpleNamespace) -> int:
    """Return how many samples lie between two weight syncs."""
    return args.rollout.batch_size * args.rollout.n_samples_per_prompt


def _check_reward_source(args: SimpleNamespace) -> Iterator[Finding]:
    """Refuse what could give no reward. OpenRLHF would find that out only after the first rollout."""
    if not args.reward.remote_url or args.train.agent_func_path:
        return
    sources = args.reward.remote_url.split(",")
    is_file = sources[0] in REWARD_FILES or sources[0].endswith(".py")
    if len(sources) > 1 if is_file else not all("://" in source for source in sources):
        allowed = f"{', '.join(REWARD_FILES)}, one Python file, or URLs with commas between them"
        yield Finding.of(args, "reward.remote_url", "is no source of rewards", f"give {allowed}")


def _check_evaluation(args: SimpleNamespace) -> Iterator[Finding]:
    evaluates = args.eval.dataset and args.eval.steps != -1
    if args.eval.sampling and not evaluates:
        patterns = " ".join(sampling.pattern for sampling in args.eval.sampling)
        remedy = "give --eval.dataset and --eval.steps"
        yield Finding("--eval.sampling", patterns, "nothing is evaluated", remedy)
    if evaluates and not args.reward.remote_url and not args.train.agent_func_path:
        remedy = "give --reward.remote_url or --train.agent_func_path"
        yield Finding.of(args, "eval.dataset", "OpenRLHF's evaluation asks no reward model", remedy)
