"""Flags that cannot go together. The parser refuses them too."""

from operator import attrgetter
from types import SimpleNamespace

from arlopti_openrlhf import methods
from arlopti_openrlhf.grading.reward_files import REWARD_FILES
from arlopti_openrlhf.ops.preflight.finding import Finding

# How the update is computed, as --actor.update says it.
STOCK, SELECTIVE, UNCHECKED = "stock", "selective", "selective_unchecked"
LOPTI_DEFAULTS = {"scope": "batch", "order": "low_first", "groups": "both"}
# Schedules that look at the loss.
NOT_BY_STEPS = ("greedy", "reduce_lr_on_plateau")
# What makes a run depend on when things happen, and why.
_NOT_DETERMINISTIC = {
    "train.async_enable": "which weights generate a sample depends on how long the steps take",
    "train.agent_func_path": "the requests of an agent's later turns reach vLLM as they come",
}
# Flags that the selective update and the statistics cannot serve, with the value at which each is off.
_NEEDS_STOCK_UPDATE = {"ds.tensor_parallel_size": 1, "ds.ring_attn_size": 1, "ds.deepcompile": False}
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
        *_check_lopti(args),
        *_check_token_methods(args),
        *_check_update(args),
        *_check_evaluation(args),
        *_check_determinism(args),
        *_check_template(args),
        *_check_images(args),
    ]


def uses_lopti(args: SimpleNamespace) -> bool:
    """Return whether tokens are updated in groups."""
    lopti = args.algo.lopti
    return lopti.eta is not None or lopti.quantile is not None or "lopti" in args.algo.token_method


def uses_methods(args: SimpleNamespace) -> bool:
    """Return whether there is a token method."""
    return bool(methods.requested(args.algo)[0])


def trains_in_passes(args: SimpleNamespace) -> bool:
    """Return whether our own loop trains, and not upstream's."""
    return uses_methods(args) or is_selective(args)


def takes_whole_steps(args: SimpleNamespace) -> bool:
    """Return whether a rollout batch must be a number of whole optimizer steps."""
    return bool(uses_lopti(args) or args.algo.token_method or is_selective(args))


def needs_stock_update(args: SimpleNamespace) -> str | None:
    """Return the first flag that only OpenRLHF's own update can serve."""
    return next((flag for flag, off in _NEEDS_STOCK_UPDATE.items() if attrgetter(flag)(args) != off), None)


def is_selective(args: SimpleNamespace) -> bool:
    """Return whether the update computes only what it needs: where the user says so, and else with token methods."""
    if args.actor.update is not None:
        return args.actor.update in (SELECTIVE, UNCHECKED)
    return uses_methods(args) and needs_stock_update(args) is None


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


def _check_lopti(args: SimpleNamespace) -> list[Finding]:
    lopti, findings = args.algo.lopti, []
    if lopti.eta is not None and lopti.quantile is not None:
        problem = f"given together with --algo.lopti.eta {lopti.eta}"
        findings.append(Finding("--algo.lopti.quantile", lopti.quantile, problem, "give one of the two, in (0, 1)"))
    for name, default in LOPTI_DEFAULTS.items():
        value = vars(lopti)[name]
        if not uses_lopti(args) and value != default:
            remedy = "give --algo.lopti.eta or --algo.lopti.quantile, in (0, 1), or --algo.token_method lopti"
            findings.append(Finding(f"--algo.lopti.{name}", value, "Lopti is off", remedy))
    if lopti.groups != "both" and lopti.order != "low_first":
        problem = f"there is no order, since --algo.lopti.groups is {lopti.groups}"
        findings.append(Finding("--algo.lopti.order", lopti.order, problem, "leave one of the two out"))
    if uses_lopti(args) and args.actor.lr_scheduler in NOT_BY_STEPS:
        problem = "does not follow from the number of steps, which Lopti doubles"
        remedy = "choose a schedule that does, such as constant"
        findings.append(Finding("--actor.lr_scheduler", args.actor.lr_scheduler, problem, remedy))
    return findings


def _check_token_methods(args: SimpleNamespace) -> list[Finding]:
    """Refuse what goes against other flags. `ops.preflight.token_methods` loads the methods."""
    names = [methods.name_of(source) for source in methods.requested(args.algo)[0]]
    others, findings = [name for name in names if name not in ("ar", "lopti")], []
    if others and args.actor.policy_loss_type == "gspo":
        problem = "cannot go with --actor.policy_loss_type gspo, whose ratio is the sequence's"
        findings.append(Finding("--algo.token_method", " ".join(others), problem, "set that to ppo"))
    if not names:
        given = {"args": " ".join(args.algo.token_method_args), "normalize": args.algo.token_method_normalize}
        for name, value in given.items():
            if value:
                flag = f"--algo.token_method_{name}"
                findings.append(Finding(flag, value, "there is no token method", "give --algo.token_method"))
    return findings


def _check_update(args: SimpleNamespace) -> list[Finding]:
    findings = []
    stock_only = needs_stock_update(args)
    if args.actor.update in (SELECTIVE, UNCHECKED) and stock_only:
        problem = f"cannot go with --{stock_only} {attrgetter(stock_only)(args)}"
        remedy = f"set that to {_NEEDS_STOCK_UPDATE[stock_only]}, or --actor.update to stock"
        findings.append(Finding("--actor.update", args.actor.update, problem, remedy))
    batch, rollout = args.train.batch_size, rollout_samples(args)
    is_too_large = batch < 1 or rollout < batch
    if (is_too_large and trains_in_passes(args)) or (takes_whole_steps(args) and rollout % batch):
        problem = "does not divide the rollout batch, of which token methods and the selective update take whole steps"
        remedy = f"give a divisor of --rollout.batch_size x --rollout.n_samples_per_prompt = {rollout}"
        findings.append(Finding("--train.batch_size", batch, problem, remedy))
    return findings


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
