"""Compares the installed OpenRLHF with the one that this package was tested with, without importing it.

`tests/contract` lists everything that we depend on, for one version of it. A start compares that version, and the
functions that we restate, because a run with another one of those would not fail, but train something else.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from arlopti_openrlhf.ops.preflight.finding import Finding

TESTED = "0.11.2"

Function = ast.FunctionDef | ast.AsyncFunctionDef

_ACTOR, _SAMPLES = "openrlhf.trainer.ray.ppo_actor", "openrlhf.trainer.ppo_utils.samples_generator"
_STRATEGY = "openrlhf.utils.deepspeed.deepspeed"
# What we restate: module, function, digest of its statements, and what of ours restates it. Tests compare the two.
# fmt: off
RESTATED = (
    (_ACTOR, "ActorPPOTrainer.ppo_train", "318e39fde0e3c042",
     "update.trainer.TokenUpdateTrainer._train"),
    (_ACTOR, "ActorPPOTrainer.training_step", "8f2c662e0539abbf",
     "update.step.micro_batch_loss"),
    (_SAMPLES, "SamplesGenerator.generate_samples", "331f36c2a75a56d2",
     "ops.rollouts.samples.SamplesGenerator.generate_samples"),
    (_SAMPLES, "SamplesGenerator._generate_vllm", "504b87e90b4bd9ee",
     "ops.rollouts.samples.SamplesGenerator._generate_vllm"),
    (_SAMPLES, "SamplesGenerator._dispatch_prompts_to_vllm", "8aae7435f629c5d6",
     "ops.rollouts.samples.SamplesGenerator._sampling_params"),
    (_STRATEGY, "DeepspeedStrategy.save_ckpt", "87c7d1703228886e",
     "ops.checkpoints.saving.CheckpointStrategy.save_ckpt"),
)
# fmt: on


def check() -> Iterator[Finding]:
    """Yield a finding where OpenRLHF is missing, has another version, or differs in a function that we restate."""
    install = f"pip install openrlhf=={TESTED}"
    try:
        installed = importlib.metadata.version("openrlhf")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("", "", "OpenRLHF is not installed", install)
        return
    problem = f"openrlhf {installed} is installed, and this package was tested with {TESTED}"
    if installed not in (TESTED, os.environ.get("ARLOPTI_OPENRLHF")):
        yield Finding("", "", problem, f"{install}, or set ARLOPTI_OPENRLHF={installed} to try it all the same")
        return
    if installed != TESTED:
        yield Finding("", "", problem, "ARLOPTI_OPENRLHF lets it run", is_fatal=False)
    for module, name, expected, who in RESTATED:
        path = find_source(module)
        node = find(ast.parse(path.read_text("utf-8")), name) if path.is_file() else None
        if not isinstance(node, Function) or digest(node) != expected:
            problem = f"{module}.{name} is not that of openrlhf {TESTED}, which our {who} restates"
            yield Finding("", "", problem, f"pip install --force-reinstall --no-deps openrlhf=={TESTED}")


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


def digest(function: Function) -> str:
    """Return a digest of a function's statements, which its comments, its docstring and its layout do not change."""
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    return hashlib.sha256("\n".join(map(ast.unparse, statements)).encode()).hexdigest()[:16]
