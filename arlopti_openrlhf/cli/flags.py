"""The flags that this package adds to OpenRLHF's training command, and what it knows of OpenRLHF's own."""

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from arlopti_openrlhf import methods
from arlopti_openrlhf.cli.arguments import TEMPLATE, integer, number
from arlopti_openrlhf.cli.method_checks import LOPTI_DEFAULTS, SELECTIVE, STOCK
from arlopti_openrlhf.evaluation.sampling import parse_sampling
from arlopti_openrlhf.grading import REWARDS
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.preflight.finding import Finding

CONFIG = "--config"


class Change(Enum):
    """What another value of a flag means for a run that is resumed, if it cannot simply go on with that value."""

    PLACE = auto()  # the place in the prompts, or in the learning rate's schedule, counts in it
    PASSES = auto()  # so it does if a mini-batch then takes another number of optimizer steps
    LAYOUT = auto()  # DeepSpeed loads no checkpoint of another
    RANKS = auto()  # nor one of another number of ranks
    STORED = auto()  # the optimizer's own state has it, and the run goes on with the earlier value


class Flag(NamedTuple):
    """A flag: how argparse reads it, and what a resumed run and the kept configuration make of its value."""

    name: str  # of OpenRLHF's own, without dashes, and of several that are alike
    settings: dict[str, Any] = {}
    help: str = ""
    change: Change | None = None
    path: Callable[[str], str] | None = None  # makes a relative path absolute. None for what is no path

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags to OpenRLHF's parser, and say what more some of OpenRLHF's own take."""
    for action in parser._actions:
        row = of(action.dest)
        vars(action).update(row.settings | ({"help": row.help} if row.help else {}))
    for title, table in TABLES.items():
        group = parser.add_argument_group(title)
        for row in table:
            group.add_argument(row.name, help=row.help, **row.settings)


def of(name: str) -> Flag:
    """Return the row of the flag "algo.ar.alpha", or one that says nothing of a flag without a row."""
    return ROWS.get(name, Flag(name))


def absolute(name: str, value: Any) -> Any:
    """Return the value of the flag "ckpt.path" with its relative paths made absolute."""
    path = of(name).path
    if not path or not value:
        return value
    return [path(part) for part in value] if isinstance(value, list) else path(value)


def program(name: str) -> str:
    """Return the absolute path of a Python file. Rewards, methods and servers with other names keep them."""
    return os.path.abspath(name) if name.endswith(".py") and "://" not in name else name


def _from_hub(names: str) -> str:
    """Return models or data sets, those that are here by absolute path. OpenRLHF takes several, and `name@subset`."""
    parts = [part.strip().partition("@") for part in names.split(",")]
    return ",".join((os.path.abspath(name) if os.path.exists(name) else name) + at + rest for name, at, rest in parts)


def ours() -> list[Flag]:
    """Return the rows of the flags that are not OpenRLHF's."""
    return [row for table in TABLES.values() for row in table]


def refuse_care(flat: argparse.Namespace) -> list[Finding]:
    """Return a finding for each flag of what `--ops off` leaves out that has another value than its default."""
    value, findings = vars(flat), []
    for row in (row for title, table in TABLES.items() if title != METHOD for row in table):
        given = value[row.dest]
        if row.name not in ("--ops", "--dry-run", CONFIG) and given != row.settings.get("default", False):
            problem = "is for what --ops off leaves out"
            findings.append(Finding(row.name, given, problem, "leave out one of the two"))
    return findings


def without_ours(flat: argparse.Namespace) -> argparse.Namespace:
    """Return the flags that OpenRLHF's own parser knows."""
    names = {row.dest for row in ours()}
    return argparse.Namespace(**{name: value for name, value in vars(flat).items() if name not in names})


def _number(range_: str, default: float | None = None) -> dict[str, Any]:
    return {"type": number(range_), "default": default, "metavar": "FLOAT"}


def _count(default: int) -> dict[str, Any]:
    return {"type": integer(1), "default": default, "metavar": "INT"}


def _choice(choices: Sequence[str], default: str | None) -> dict[str, Any]:
    return {"choices": choices, "default": default}


def _method(text: str) -> str:
    """Refuse a name that no token method has. A file is looked at later, with what is in it."""
    names = methods.built_in()
    if text in names or text.endswith(".py"):
        return text
    near = difflib.get_close_matches(text, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}, and Python files (FILE.py)"
    raise argparse.ArgumentTypeError(f"there is no token method {text}; {hint}")


def _method_argument(text: str) -> str:
    """Refuse an argument of a token method that has not the form NAME.KEY=VALUE."""
    try:
        methods.parse_argument(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


_SWITCH = {"action": "store_true"}
_METHODS = {"nargs": "+", "default": [], "metavar": "NAME|FILE.py", "type": _method}
_METHOD_ARGUMENTS = {"nargs": "+", "default": [], "metavar": "NAME.KEY=VALUE", "type": _method_argument}
_SAMPLING = {"action": "append", "default": [], "metavar": "PATTERN:n=N,t=T", "type": parse_sampling}

# The title of their group -> our flags.
# fmt: off
TABLES: dict[str, tuple[Flag, ...]] = {"token-level update (arXiv 2505.12929)": (
    Flag("--algo.ar.alpha", _number("[0, 1]"),
     "α of Advantage Reweighting (Eq. 4), in [0, 1]. Off by default, and at 0. The paper takes 0.3 for K&K and 0.1 "
     "for math. Short for --algo.token_method ar with ar.alpha."),
    Flag("--algo.lopti.eta", _number("(0, 1)"),
     "η of Lopti, in (0, 1): tokens of a lower probability are updated apart from the rest. Off by default. The "
     "paper takes 0.5. Short for --algo.token_method lopti with lopti.eta, as are quantile, order and groups.",
     Change.PASSES),
    Flag("--algo.lopti.quantile", _number("(0, 1)"),
     "Share of the tokens in the low group, in (0, 1). η follows from each rollout batch, over all ranks.",
     Change.PASSES),
    Flag("--algo.lopti.scope", _choice(["batch", "minibatch"], LOPTI_DEFAULTS["scope"]),
     "batch (default) updates all mini-batches of an epoch with the first group and then all with the second. "
     "minibatch updates both groups within each mini-batch."),
    Flag("--algo.lopti.order", _choice(["low_first", "high_first"], LOPTI_DEFAULTS["order"]),
     "Which group is updated first (default: low_first). high_first is the ablation of Fig. 6b."),
    Flag("--algo.lopti.groups", _choice(["both", "low", "high"], LOPTI_DEFAULTS["groups"]),
     "Update both groups (default), or only one, which is the ablation of Fig. 6a.", Change.PASSES),
    Flag("--algo.token_method", _METHODS,
     f"Token methods, whose weights multiply: {', '.join(methods.built_in())}, or a Python file with "
     'weigh(tokens), as examples/token_method.py. ar takes α in [-1, 1]: below 0 it raises rare tokens, as in "On '
     'the Direction of RLVR Updates". docs/token_methods.md has the papers.', Change.PASSES, program),
    Flag("--algo.token_method_args", _METHOD_ARGUMENTS,
     "Constants of token methods in place of the published ones, as in ar.alpha=-0.2 stapo.tau=0.01.", Change.PASSES),
    Flag("--algo.token_method_normalize", _SWITCH,
     "Divide the product of the token methods' weights by its mean over each rollout batch, so that its mean is 1. "
     "That takes away what a method does by the mere size of its weights."),
    Flag("--algo.mask_truncated", _SWITCH,
     "Leave answers that were cut off at the token limit out of the policy's loss and its denominators, KL and "
     "entropy included. The selective update, which this needs, does not compute them. Their rewards still count in "
     "the advantages of the other answers, and a critic learns from them."),
    Flag("--actor.update", _choice([STOCK, SELECTIVE], None),
     "stock computes the update as OpenRLHF does, with logits of every position, each prompt once per response, and "
     "old log-probs in a pass of their own. selective computes only what the update needs, with equal gradients. "
     "Before its first pass each model computes some log-probs both ways. Where they differ by more than rounding, "
     "it says so and keeps stock's layout. Default: selective with AR, Lopti, a token method or "
     "--algo.mask_truncated, else stock."),
    Flag("--actor.gradient_checkpointing_level", _choice(["auto", "whole"], "auto"),
     "What the selective update computes again with --actor.gradient_checkpointing_enable. whole: each layer, as "
     "OpenRLHF. auto (default): nothing if that is faster in the larger of OpenRLHF's own peak and the memory that is "
     "free on every GPU, else each layer. The log of the first update says which."),
    Flag("--actor.fill_memory", _SWITCH,
     "Let the selective update's micro-batches take the memory that is free on every GPU, whatever "
     "--train.micro_batch_size says. The gradients are equal to rounding. The log of the first update says how many "
     "tokens a micro-batch has, or why the flag has no effect."),
), "care for the run": (
    Flag("--ops", _choice(["on", "off"], "on"),
     "off: the run is OpenRLHF's own, with the update of the given methods and nothing else of this package. Only the "
     "methods and their flags are checked beforehand (default: on)."),
), "faults": (
    Flag("--dry-run", _SWITCH,
     "Check everything that can be checked beforehand, list all findings and exit: status 0 where the run can "
     "start, 2 where it cannot. Nothing is started."),
    Flag("--train.deterministic", _SWITCH,
     "Samples enter the batch by prompt, each request to vLLM has its own seed, and each engine starts on its whole "
     "list at once. On the CPU of one machine, two runs of one seed are then equal bit for bit, and so is a run "
     "that is resumed. On GPUs the order and the seeds hold, but kernels may differ in the last bits. Not with "
     "--train.async_enable or --train.agent_func_path."),
    Flag("--train.stall_minutes", _number("(0, 10080]", 60.0),
     "The run stops (exit status 4) when for so long no phase of a step begins and no sample is finished (default: "
     "60; a week at most)."),
    Flag("--train.restarts", {"type": integer(0), "default": 0, "metavar": "INT"},
     "How often the run is started again, from its newest whole checkpoint, after an end that another start may mend: "
     "an error, a process that was killed, no progress. The pauses grow from 15 s to 10 minutes (default: 0)."),
    Flag("--train.max_bad_steps", _count(3),
     "A step whose loss or gradient is not finite is refused. After so many in a row the run stops (exit status 3), "
     "with the last good checkpoint and without a final model (default: 3)."),
    Flag("--train.no_remote_code", _SWITCH,
     "Refuse models that bring Python code, which OpenRLHF and vLLM run when they load them, and those that are not "
     "on this machine, whose code is not known. Without it such code is named before it runs."),
    Flag("--ckpt.load_changed", _SWITCH,
     "Resume although what a place in the prompts or in the learning rate's schedule counts in has changed: batch "
     "sizes, samples per prompt, epochs, the seed, Lopti's passes, or the prompts. Without it such a run is refused "
     "(exit status 2)."),
    Flag("--reward.timeout_seconds", _number("(0, 604800]", 300.0),
     "Wall-clock limit of one call of a reward function. A call that takes longer is ended, and the run stops with "
     "its query (default: 300; a week at most)."),
), "rewards, evaluation and logs": (
    Flag("--logger.probability_stats", _choice(["bins", "off"], None),
     "Log statistics of each update's tokens to wandb and TensorBoard, by probability in bins of 0.25. Default: bins "
     "with the selective update, else off."),
    Flag("--logger.console", _choice(["auto", "progress", "all"], "auto"),
     "What the run shows. progress: one line that says how far it is, with the output of Ray, vLLM and DeepSpeed in "
     "train.log in --ckpt.path. all: everything. auto (default): progress on a terminal, else all."),
    Flag("--reward.retry_minutes", _number("[0, inf]", 10.0),
     "How long a sample waits for a reward server that does not answer before the run stops (default: 10)."),
    Flag("--data.chat_template_args", TEMPLATE,
     "Arguments of the model's chat template, with --data.apply_chat_template, as in enable_thinking=false. A value "
     "is JSON, or else text."),
    Flag("--eval.sampling", _SAMPLING,
     "Samples per problem and temperature for the data sources that match, as in aime:n=16,t=1. The last match "
     "counts. Default: --eval.n_samples_per_prompt and --eval.temperature."),
    Flag(CONFIG, {"metavar": "FILE.yaml"},
     "Flags in a YAML file, by their names without the dashes, as in `algo.ar.alpha: 0.3`. The command line's flags "
     "count before the file's. A run keeps all its flags in config.yaml of --ckpt.path, which can be given here."),
)}
METHOD = next(iter(TABLES))  # the title of the method's own flags
# Of transformers' schedules, those that OpenRLHF can make and that follow from the number of steps.
SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr",
)
# OpenRLHF's own, if we have more to say of them.
_OPENRLHF = (
    Flag("ckpt.path ckpt.output_dir logger.tensorboard_dir", path=os.path.abspath),
    Flag("logger.wandb.key", {},
     "WANDB_API_KEY for the key in that environment variable, or the key. Neither is shown, except with --ops off."),
    Flag("rollout.batch_size rollout.n_samples_per_prompt train.batch_size train.max_epochs", change=Change.PLACE),
    Flag("train.seed", change=Change.PLACE),  # of the order of the prompts
    Flag("actor.num_nodes actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node", change=Change.RANKS),
    Flag("actor.lr_scheduler critic.lr_scheduler", {"choices": SCHEDULES}),
    Flag("ds.grad_accum_dtype", {"choices": ("fp32", "bf16", "fp16")}),
    Flag("ds.zero_stage ds.param_dtype ds.ring_attn_size ds.tensor_parallel_size", change=Change.LAYOUT),
    Flag("actor.adam.lr actor.adam.betas actor.adam.eps actor.adam.weight_decay", change=Change.STORED),
    Flag("critic.adam.lr critic.adam.betas critic.adam.eps critic.adam.weight_decay", change=Change.STORED),
    Flag("actor.muon.lr actor.muon.momentum critic.muon.lr critic.muon.momentum", change=Change.STORED),
    Flag("actor.model_name_or_path critic.model_name_or_path reward.model_name_or_path", path=_from_hub),
    Flag("data.prompt_dataset eval.dataset", path=_from_hub),
    Flag("reward.remote_url", {"metavar": f"{'|'.join(REWARDS)}|PATH.py|URL,...", "type": credentials.without_user},
     f"The source of rewards: {' or '.join(REWARDS)} for the package's own, a Python file with reward_func(queries, "
     "prompts, labels), or the URLs of reward servers, which take turns. They get ARLOPTI_REWARD_TOKEN as a bearer "
     "token. ${NAME} in a URL stands for an environment variable.", path=program),
    Flag("train.agent_func_path", path=program),
)
# fmt: on
ROWS = {name: row for row in _OPENRLHF for name in row.name.split()} | {row.dest: row for row in ours()}
