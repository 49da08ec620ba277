"""Token methods: functions that map tokens to weights of their advantages, without ray, deepspeed or openrlhf.

A token method is a Python file with

    def weigh(tokens: Tokens, *, constant=0.5) -> Tensor | Sequence[Tensor] | Mapping[str, Tensor]: ...

It returns a weight of at least 0 for each token, one tensor (B, A) for each optimizer pass over a mini-batch. A
mapping names the passes, which then divide the tokens into groups, as Lopti's do. A pass multiplies advantages by its
weights and leaves out the tokens of weight 0. In training `weigh` gets one response at a time, without padding. So
nothing can depend on what shares a micro-batch. What depends on other responses belongs in a second function, which
gets the tokens of the whole rollout batch, of all ranks, as one row (1, N). `weigh` gets its result:

    def statistic(tokens: Tokens, *, constant): ...
    def weigh(tokens: Tokens, statistic, *, constant=0.5): ...

The constants of a method are the keyword arguments of `weigh`. `statistic` gets those that it names. Where all of
those are None there is nothing to compute, and `weigh` gets None. A third function replaces what is logged of the
weights:

    def metrics(sums: Mapping[str, WeightSums], statistic, *, constant) -> dict[str, float]: ...

Three more names in the file say what the method asks for:

    NEEDS_ENTROPIES = True  # `tokens.entropies`, from the forward pass that gives π_old
    NEEDS_ROLLOUT_LOG_PROBS = True  # `tokens.rollout_log_probs`, with `--algo.advantage.is_correction_level`
    DIVIDES_BY_KEPT = True  # the loss divides by the tokens of weight above 0, not by all tokens of the responses
"""

import functools
import inspect
import itertools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arlopti_openrlhf import user_files
from arlopti_openrlhf.methods import FOLDER, built_in, name_of, parse_argument
from arlopti_openrlhf.token_update import token_probabilities

_LARGEST = 1e6  # weight of a made-up token, whose probability is at least 1e-3


class _Rows(NamedTuple):
    log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    entropies: Any = None
    rollout_log_probs: Any = None


class Tokens(_Rows):
    """What a token method sees of responses.

    Attributes:
        log_probs: (B, A) log π_old, at the sampling temperature.
        advantages: (B, A).
        mask: (B, A), nonzero on response tokens.
    """

    __slots__ = ()

    @property
    def probabilities(self) -> Tensor:
        """Return π_old, (B, A)."""
        return token_probabilities(self.log_probs)

    @property
    def entropies(self) -> Tensor:
        """Return the entropies of the tokens' distributions in nats, (B, A).

        Raises:
            ValueError: the method has not asked for them.
        """
        return self._asked_for("entropies", "NEEDS_ENTROPIES")

    @property
    def rollout_log_probs(self) -> Tensor:
        """Return log μ, what vLLM drew the tokens by, (B, A).

        Raises:
            ValueError: the method has not asked for them.
        """
        return self._asked_for("rollout_log_probs", "NEEDS_ROLLOUT_LOG_PROBS")

    def _asked_for(self, field: str, constant: str) -> Tensor:
        values = self[self._fields.index(field)]
        if values is None:
            raise ValueError(f"tokens.{field} is there if the file says {constant} = True")
        return values


class WeightSums(NamedTuple):
    """Sums over the weights that a method gives in one pass. Those of several responses or ranks add up."""

    tokens: float
    weights: float
    squares: float
    zeros: float  # tokens of weight 0

    @property
    def mean(self) -> float:
        return self.weights / self.tokens

    @property
    def zero_share(self) -> float:
        return self.zeros / self.tokens

    @property
    def effective_share(self) -> float:
        """Return (Σw)² / (NΣw²), which is 1 where all weights are equal."""
        return self.weights**2 / (self.tokens * self.squares) if self.squares else 0.0


class Method(NamedTuple):
    """A token method with its constants."""

    name: str
    ask: Callable[[Tokens, Any], Any]  # the file's `weigh`
    find: Callable[[Tokens], Any] | None  # its `statistic`; None where there is nothing to compute
    log: Callable[[Mapping[str, WeightSums], Any], dict[str, float]] | None  # its `metrics`
    needs_entropies: bool
    needs_rollout_log_probs: bool
    divides_by_kept: bool
    passes: tuple[str, ...] = ()  # names of its optimizer passes over a mini-batch; "" where there is one
    groups: bool = False  # whether `weigh` names the passes, which divide the tokens into groups then

    @property
    def needs_rollout_batch(self) -> bool:
        """Return whether log π_old of all tokens must be known before the first pass."""
        return self.find is not None or self.divides_by_kept

    def statistic(self, tokens: Tokens) -> Any:
        """Return what the method has to know of the tokens of all ranks (1, N), or None where that is nothing."""
        return None if self.find is None else self.find(self._seen(tokens))

    def weigh(self, tokens: Tokens, statistic: Any) -> list[Tensor]:
        """Return the weights (B, A) of each pass in the dtype of `log_probs`, 0 outside the mask.

        Raises:
            ValueError: the method returns something else than finite weights of at least 0 in that shape, or other
                passes than before. Where the batch itself is not finite, weights need not be.
        """
        weights = _by_pass(self.ask(self._seen(tokens), statistic))
        if len(weights) != len(self.passes):
            raise self._error(f"returned {len(weights)} tensors, and {len(self.passes)} before")
        if tuple(weights) != self.passes:
            raise self._error(f"returned the passes {', '.join(weights)}, and {', '.join(self.passes)} before")
        return [self._checked(weight, tokens) for weight in weights.values()]

    def with_passes(self, tokens: Tokens, statistic: Any) -> "Method":
        """Return the method with the passes that `weigh` makes of some tokens."""
        result = self.ask(self._seen(tokens), statistic)
        return self._replace(passes=tuple(_by_pass(result)), groups=isinstance(result, Mapping))

    def metrics(self, sums: Mapping[str, WeightSums], statistic: Any) -> dict[str, float]:
        """Return what to log of the weights: by default mean, share of zeros and effective share of each pass.

        Args:
            sums: of each pass, by name.
            statistic: what the method has to know of the tokens of all ranks.
        """
        if self.log is not None:
            return self.log(sums, statistic)
        logged: dict[str, float] = {}
        for name, of_pass in sums.items():
            path = "/".join(filter(None, ("token_method", self.name, name)))
            logged |= {f"{path}/mean_weight": of_pass.mean, f"{path}/zero_share": of_pass.zero_share}
            logged[f"{path}/effective_share"] = of_pass.effective_share
        return logged

    def _seen(self, tokens: Tokens) -> Tokens:
        needs = {"entropies": self.needs_entropies, "rollout_log_probs": self.needs_rollout_log_probs}
        seen = tokens._replace(**{field: None for field, is_needed in needs.items() if not is_needed})
        # Copies, into which a method may write.
        return Tokens(*(values if values is None else values.clone() for values in seen))

    def _checked(self, weights: Any, tokens: Tokens) -> Tensor:
        shape, mask = tuple(tokens.mask.shape), tokens.mask.bool()
        if not isinstance(weights, Tensor):
            raise self._error(f"returned {type(weights).__name__}, where a tensor is due")
        if weights.shape != tokens.mask.shape:
            raise self._error(f"returned the shape {tuple(weights.shape)} for tokens of the shape {shape}")
        weights = weights.to(tokens.log_probs.dtype)
        # What is not finite in the batch is not the method's fault. The loss shows it, and the step is refused.
        is_given = tokens.log_probs.isfinite() & tokens.advantages.isfinite()
        is_broken = ~weights.isfinite() & is_given
        for wrong, what in ((is_broken, "not finite"), (weights < 0, "negative, which would turn signs")):
            if (wrong & mask).any():
                at = tuple((wrong & mask).nonzero()[0])
                probability, advantage = tokens.probabilities[at].item(), tokens.advantages[at].item()
                token = f"for a token of π_old {probability:g} and advantage {advantage:g}"
                raise self._error(f"returned {weights[at].item():g} {token}: {what}")
        return weights.masked_fill(~mask, 0.0)

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"token method {self.name}: weigh {problem}")


def _by_pass(result: Any) -> dict[str, Any]:
    """Return what `weigh` has returned by the names of the passes, unchecked."""
    if isinstance(result, Mapping):
        return dict(result)
    if not isinstance(result, list | tuple):
        return {"": result}
    return {f"pass{i}": weights for i, weights in enumerate(result, 1)} if len(result) != 1 else {"": result[0]}


def combine(weights: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Multiply the weights of several methods: a tensor for each combination of their passes, the last one fastest."""
    return [functools.reduce(torch.mul, passes) for passes in itertools.product(*weights)]


def pass_labels(methods: Sequence[Method]) -> list[str]:
    """Return the names of the combinations of passes in metrics, in the order of `combine`; "" where there is one.

    A group has its method's name, as in `lopti/low`. Other passes stand under `token_method/`.
    """
    by_method = [[f"{m.name}/{name}" if m.groups else name for name in m.passes] for m in methods]
    labels = ["/".join(filter(None, names)) for names in itertools.product(*by_method)]
    prefix = "" if any(m.groups for m in methods) else "token_method/"
    return [label and prefix + label for label in labels]


def load(sources: Sequence[str], arguments: Sequence[str]) -> list[Method]:
    """Load token methods and ask each for the weights of a few made-up tokens.

    Args:
        sources: a name of `methods.built_in()`, or a Python file's path, each.
        arguments: `name.key=value` each, as in `stapo.tau=0.01`.

    Raises:
        ValueError: in one line, what is wrong with a method or an argument.
    """
    names = [name_of(source) for source in sources]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{repeated[0]}: given twice")
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for argument in arguments:
        name, key, value = parse_argument(argument)
        if name not in given:
            raise ValueError(f"{argument}: there is no token method {name} among those given ({', '.join(names)})")
        if key in given[name]:
            raise ValueError(f"{argument}: {name}.{key} is given as {given[name][key]} already")
        given[name][key] = value
    return [_load_one(source, name, given[name]) for source, name in zip(sources, names, strict=True)]


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a constant outside [low, high].

    Raises:
        ValueError: with the constant's name, the value and the range.
    """
    if not isinstance(value, int | float) or not low <= value <= high:  # NaN is in no range
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {value}")


def smallest(values: Tensor, share: float) -> float:
    """Return the k-th smallest of some values, k = max(1, ⌈share · count⌉), or −inf where there is none to take."""
    count = math.ceil(share * values.numel() - 1e-6)  # the product may lie a rounding above a whole number
    if not values.numel() or not share:
        return -math.inf
    return values.flatten().kthvalue(max(1, count)).values.item()


def _load_one(source: str, name: str, given: dict[str, Any]) -> Method:
    if not source.endswith(".py") and source not in built_in():
        raise ValueError(
            f"{source}: there is no such token method. Give a .py file, or one of {', '.join(built_in())}"
        )
    path = Path(source) if source.endswith(".py") else FOLDER / f"{source}.py"
    if not path.is_file():
        raise ValueError(f"{source}: there is no such file")
    try:
        module = user_files.load(path, f"token_method_{name}")
        return _probed(_bound(name, vars(module), _constants(vars(module), given)))
    except (Exception, SystemExit) as error:
        message = (str(error).splitlines() or [""])[0].removeprefix(f"token method {name}: ")
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        place = _place(error, path) if source.endswith(".py") else ""
        raise ValueError(f"{name}: {kind}{message}{place}") from error


def _place(error: BaseException, path: Path) -> str:
    """Return the last line of a file that an error went through, as a `SyntaxError` puts it; "" where it did not."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.absolute()]
    return f" ({path.name}, line {lines[-1]})" if lines else ""


def _bound(name: str, file: Mapping[str, Any], constants: Mapping[str, Any]) -> Method:
    """Return the method of a file's functions, each with those of the constants that it takes."""

    def bound(function: Callable) -> functools.partial:
        parameters = inspect.signature(function).parameters
        return functools.partial(function, **{key: constants[key] for key in constants if key in parameters})

    weigh = bound(file["weigh"])
    find = bound(file["statistic"]) if "statistic" in file else None
    if find and find.keywords and all(value is None for value in find.keywords.values()):
        find = None
    return Method(
        name,
        ask=weigh if "statistic" in file else lambda tokens, statistic: weigh(tokens),
        find=find,
        log=bound(file["metrics"]) if "metrics" in file else None,
        needs_entropies=file.get("NEEDS_ENTROPIES", False),
        needs_rollout_log_probs=file.get("NEEDS_ROLLOUT_LOG_PROBS", False),
        divides_by_kept=file.get("DIVIDES_BY_KEPT", False),
    )


def _constants(file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the keyword arguments of `weigh`: those given, and else the defaults.

    Raises:
        ValueError: `weigh` is not there or not called like that, or an argument is unknown or missing.
    """
    if not callable(file.get("weigh")):
        raise ValueError("it has no function `weigh`")
    parameters = inspect.signature(file["weigh"]).parameters
    keywords = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    called = ["tokens", "statistic"] if "statistic" in file else ["tokens"]
    if len(parameters) - len(keywords) != len(called):
        raise ValueError(f"weigh is called as weigh({', '.join(called)}, *, ...), and takes {tuple(parameters)}")
    if unknown := given.keys() - keywords.keys():
        takes = ", ".join(keywords) or "none"
        raise ValueError(f"weigh has no keyword argument {min(unknown)}; it takes {takes}")
    constants = {**keywords, **given}
    if missing := [name for name, value in constants.items() if value is inspect.Parameter.empty]:
        raise ValueError(f"needs {', '.join(missing)}: give --algo.token_method_args NAME.{missing[0]}=VALUE")
    return constants


def made_up_tokens() -> Tokens:
    """Return three responses of five tokens, one of each sign of the advantage."""
    log_probs = torch.tensor([[0.9, 0.5, 0.2, 0.05, 0.001]] * 3).log()
    advantages = torch.tensor([[1.0], [-1.0], [0.0]]).expand(3, 5)
    entropies = torch.tensor([[0.3, 1.0, 0.8, 2.0, 0.1]] * 3)
    return Tokens(log_probs, advantages, torch.ones(3, 5), entropies, rollout_log_probs=log_probs.roll(1, dims=1))


def as_one_row(tokens: Tokens) -> Tokens:
    """Return tokens (B, A) as one row (1, B * A), as `Method.statistic` takes them."""
    return Tokens(*(values.reshape(1, -1) for values in tokens))


def responses_of(tokens: Tokens) -> list[Tokens]:
    """Return tokens (B, A) as B responses (1, A), as `Method.weigh` gets them in training."""
    return [Tokens(*(values[i : i + 1] for values in tokens)) for i in range(len(tokens.mask))]


def _probed(method: Method) -> Method:
    """Return the method with its number of passes, after a try with tokens of each sign, and with a single one."""
    tokens = made_up_tokens()
    row = as_one_row(tokens)
    statistic = method.statistic(row)
    method = method.with_passes(row, statistic)
    if not method.passes:
        raise ValueError("weigh returned no tensor at all")
    for part in (*responses_of(tokens), Tokens(*(values[:1, :1] for values in tokens))):
        largest = max(weights.max().item() for weights in method.weigh(part, statistic))
        if largest > _LARGEST:
            raise ValueError(f"weigh returned {largest:g} for a made-up token, and at most {_LARGEST:g} can be meant")
    method.metrics(dict.fromkeys(method.passes, WeightSums(1.0, 1.0, 1.0, 0.0)), statistic)
    return method
