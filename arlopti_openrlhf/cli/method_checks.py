"""Checks the flags of the methods and of how the update is computed, and tries the token methods."""

from collections.abc import Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING

from arlopti_openrlhf import bindings, methods
from arlopti_openrlhf.ops.preflight.finding import Finding, Update
from arlopti_openrlhf.ops.preflight.prompt import is_vision_language
from arlopti_openrlhf.ops.preflight.values import rollout_samples
from arlopti_openrlhf.update.settings import STOCK_ONLY, needs_stock_update

if TYPE_CHECKING:
    from arlopti_openrlhf.token_method import Method

# How the update is computed, as --actor.update says it.
STOCK, SELECTIVE = "stock", "selective"
LOPTI_DEFAULTS = {"scope": "batch", "order": "low_first", "groups": "both"}
_FLAG = "--algo.token_method"
_SELECTIVE_NEEDS = "a text model with --actor.update selective, without ring attention, tensor ranks and DeepCompile"


def check_flags(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what cannot go together in the nested arguments as the user gave them."""
    yield from _check_lopti(args)
    yield from _check_token_methods(args)
    yield from _check_update(args)


def check_methods(args: SimpleNamespace) -> Iterator[Finding]:
    """Yield what is wrong with the token methods, which load, take their arguments and weigh made-up tokens."""
    if not args.algo.token_method and not args.algo.token_method_args:
        return  # the parser has looked at the flags of AR and Lopti
    from arlopti_openrlhf.token_method import load  # imports PyTorch

    sources, arguments = methods.requested(args.algo)
    given = " ".join(sources)
    try:
        loaded = load(sources, arguments)
        doubts = [doubt for method in loaded for doubt in _doubts(method)]
    except Exception as error:  # a user's file raises anything
        problem = f"{'' if isinstance(error, ValueError) else type(error).__name__ + ': '}{error}"
        yield Finding(_FLAG, given, problem, "correct the method or --algo.token_method_args")
        return
    for doubt in doubts:
        yield Finding(_FLAG, given, doubt, "look at the method, unless that is meant", is_fatal=False)
    names = ", ".join(method.name for method in loaded if method.needs_entropies or method.divides_by_kept)
    if names and not is_selective(args):
        problem = f"{names} needs the selective update, for entropies or for its denominator"
        yield Finding(_FLAG, given, problem, f"take another method, or {_SELECTIVE_NEEDS}")
    level = "algo.advantage.is_correction_level"
    readers = ", ".join(method.name for method in loaded if method.needs_rollout_log_probs)
    if readers and attrgetter(level)(args) == "off":
        problem = f"{readers} needs vLLM's log-probs of all samples, which OpenRLHF asks for with --{level} alone"
        yield Finding(_FLAG, given, problem, f"give --{level} token, or another method")


def _doubts(method: "Method") -> Iterator[str]:
    """Yield what looks wrong with the weights of made-up tokens, and may be meant."""
    from arlopti_openrlhf.token_method import as_one_row, made_up_tokens, responses_of

    tokens = made_up_tokens()
    statistics = [method.statistic(as_one_row(tokens)) for _ in range(2)]
    once, again = ([w for own in responses_of(tokens) for w in method.weigh(own, s)] for s in statistics)
    if not any(weights.any() for weights in once):
        yield f"{method.name} gives all made-up tokens the weight 0, and would train nothing if it did so in a run"
    if not all(first.equal(second) for first, second in zip(once, again, strict=True)):
        yield f"{method.name} gives the same tokens other weights at each call, so no run can be repeated or resumed"


def describe_update(args: SimpleNamespace) -> Update:
    """Return what the other checks have to know of the run's update."""
    return Update(takes_whole_steps=bool(of_update(args)))


def describe_methods(args: SimpleNamespace) -> str:
    """Return which token methods are on, with the constants that the command line gives them."""
    sources, arguments = methods.requested(args.algo)
    if not sources:
        return "no token method"
    normalized = ["weights divided by their mean"] if args.algo.token_method_normalize else []
    scope = [f"lopti.scope={args.algo.lopti.scope}"] if uses_lopti(args) else []
    details = ", ".join([*arguments, *scope, *normalized])
    return f"token method{'s' * (len(sources) > 1)} {' x '.join(sources)}" + (f" ({details})" if details else "")


def uses_lopti(args: SimpleNamespace) -> bool:
    """Return whether tokens are updated in groups."""
    lopti = args.algo.lopti
    return lopti.eta is not None or lopti.quantile is not None or "lopti" in args.algo.token_method


def uses_methods(args: SimpleNamespace) -> bool:
    """Return whether there is a token method."""
    return bool(methods.requested(args.algo)[0])


def is_selective(args: SimpleNamespace) -> bool:
    """Return whether the update computes only what it needs: if the user asks for it, or another flag needs it."""
    if args.actor.update is not None:
        return args.actor.update == SELECTIVE
    return (
        (uses_methods(args) or args.algo.mask_truncated)
        and needs_stock_update(args) is None
        and not is_vision_language(args)
    )


def of_update(args: SimpleNamespace) -> set[str]:
    """Return what the run has by its update (`bindings.of_update`)."""
    return bindings.of_update(is_selective(args), uses_methods(args))


def _check_lopti(args: SimpleNamespace) -> Iterator[Finding]:
    lopti = args.algo.lopti
    if lopti.eta is not None and lopti.quantile is not None:
        problem = f"given together with --algo.lopti.eta {lopti.eta}"
        yield Finding.of(args, "algo.lopti.quantile", problem, "give one of the two, in (0, 1)")
    for name, default in LOPTI_DEFAULTS.items():
        if not uses_lopti(args) and vars(lopti)[name] != default:
            remedy = "give --algo.lopti.eta or --algo.lopti.quantile, in (0, 1), or --algo.token_method lopti"
            yield Finding.of(args, f"algo.lopti.{name}", "Lopti is off", remedy)
    if lopti.groups != "both" and lopti.order != "low_first":
        problem = f"there is no order, since --algo.lopti.groups is {lopti.groups}"
        yield Finding.of(args, "algo.lopti.order", problem, "leave one of the two out")
    if lopti.scope != "batch" and uses_lopti(args) and not is_selective(args):
        yield Finding.of(args, "algo.lopti.scope", "needs the selective update", f"give batch, or {_SELECTIVE_NEEDS}")


def _check_token_methods(args: SimpleNamespace) -> Iterator[Finding]:
    """Refuse what goes against other flags. `check_methods` loads the methods."""
    names = [methods.name_of(source) for source in methods.requested(args.algo)[0]]
    others = [name for name in names if name not in ("ar", "lopti")]
    if others and args.actor.policy_loss_type == "gspo":
        problem = "cannot go with --actor.policy_loss_type gspo, which has one ratio for a sequence"
        yield Finding(_FLAG, " ".join(others), problem, "set that to ppo")
    given = {"args": " ".join(args.algo.token_method_args), "normalize": args.algo.token_method_normalize}
    for name, value in given.items():
        if value and not names:
            yield Finding(f"{_FLAG}_{name}", value, "there is no token method", f"give {_FLAG}")


def _check_update(args: SimpleNamespace) -> Iterator[Finding]:
    stock_only = needs_stock_update(args)
    if args.actor.update == SELECTIVE and stock_only:
        problem = f"cannot go with --{stock_only} {attrgetter(stock_only)(args)}"
        remedy = f"set that to {STOCK_ONLY[stock_only]}, or --actor.update to stock"
        yield Finding.of(args, "actor.update", problem, remedy)
    if args.algo.mask_truncated and not is_selective(args):
        yield Finding.of(args, "algo.mask_truncated", "needs the selective update", f"take {_SELECTIVE_NEEDS}")
    recomputes = args.actor.gradient_checkpointing_enable
    if args.actor.gradient_checkpointing_level != "auto" and not (recomputes and is_selective(args)):
        problem = "is for the selective update with --actor.gradient_checkpointing_enable"
        yield Finding.of(args, "actor.gradient_checkpointing_level", problem, "leave it out")
    if args.actor.fill_memory:
        if not is_selective(args):
            yield Finding.of(args, "actor.fill_memory", "is for the selective update", "leave it out")
        elif args.train.dynamic_batch_enable:
            problem = "micro-batches have the tokens of --train.max_tokens_per_gpu, with --train.dynamic_batch_enable"
            yield Finding.of(args, "actor.fill_memory", problem, "leave one of the two out")
    if args.actor.update == SELECTIVE and is_vision_language(args):
        yield Finding.of(args, "actor.update", "cannot go with a vision model", "leave it out: token methods train it")
    if args.logger.probability_stats == "bins" and not is_selective(args):
        problem = "comes from the selective update"
        yield Finding.of(args, "logger.probability_stats", problem, f"leave it out, or take {_SELECTIVE_NEEDS}")
    batch, rollout = args.train.batch_size, rollout_samples(args)
    if of_update(args) and (batch < 1 or rollout < batch or rollout % batch):
        problem = "does not divide the rollout batch, of which token methods and the selective update take whole steps"
        remedy = f"give a divisor of --rollout.batch_size x --rollout.n_samples_per_prompt = {rollout}"
        yield Finding.of(args, "train.batch_size", problem, remedy)
