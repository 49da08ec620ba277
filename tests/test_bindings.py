"""The table of bindings: every replacement of an upstream name, in an order that follows from it."""

import ast
import importlib.util
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer import ppo_trainer

from arlopti_openrlhf import bindings
from arlopti_openrlhf.bindings import CARE, LORA, POLICY_IS_REFERENCE, REFERENCE, REPLACES, SELECTIVE, TABLE, Row
from arlopti_openrlhf.ops import lora
from arlopti_openrlhf.update import whole_prompts

PACKAGE = Path(bindings.__file__).parent
EVERYTHING = {CARE, SELECTIVE, LORA, POLICY_IS_REFERENCE}


def defined(module: str) -> set[str]:
    """Return the names at the top of a module's source."""
    path = importlib.util.find_spec(module.partition(".")[0]).submodule_search_locations[0]
    file = Path(path, *module.split(".")[1:])
    body = ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text("utf-8")).body
    names = {node.name for node in body if hasattr(node, "name")}
    imported = (node for node in body if isinstance(node, ast.Import | ast.ImportFrom))
    return names | {alias.asname or alias.name for node in imported for alias in node.names}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.module}.{row.name} <- {row.ours}")
def test_both_sides_of_a_row_exist(row):
    module, _, name = row.ours.partition(":")
    assert row.name in defined(row.module) and name in defined(f"arlopti_openrlhf.{module}")


def test_two_rows_that_replace_one_name_are_refused(monkeypatch):
    other = Row("openrlhf.trainer.ppo_trainer", "prepare_datasets", REPLACES, "ops.other:prepare", SELECTIVE, "")
    monkeypatch.setattr(bindings, "TABLE", (*TABLE, other))
    bindings.rows({SELECTIVE})  # the other is not made
    with pytest.raises(ValueError, match="prompts:prepare_datasets replaces .*, and so does another row"):
        bindings.rows(EVERYTHING)


class FakePolicy:
    def forward(self, *args):
        return "upstream's"


def test_a_lora_reference_is_computed_by_upstreams_forward(monkeypatch):
    """And not by the method's, which leaves log π_old to the update's first pass."""
    actor: Any = FakePolicy
    for row in bindings.rows({SELECTIVE, LORA}):
        if row.name == "PolicyModelActor":
            actor = type("Policy", (bindings.resolve(row.ours), actor), {})
    monkeypatch.setattr(lora, "without_adapters", lambda model: nullcontext())
    policy = actor()
    policy.trainer = SimpleNamespace(defers_old_log_probs=True)
    policy.actor = SimpleNamespace(model=SimpleNamespace(module=None))
    assert policy.forward_reference() == "upstream's"
    assert policy.forward(None, torch.ones(1, 2)).isnan().all()


def test_ranks_get_whole_prompts_while_a_step_is_trained():
    class Upstream:
        def train_step(self):
            return ppo_trainer.balance_experiences

    class Trainer(whole_prompts.WholePrompts, Upstream):
        pass

    assert Trainer().train_step() is whole_prompts.balance_experiences is not ppo_trainer.balance_experiences


def test_nothing_else_rebinds_a_name_of_openrlhf():
    """Outside of the table, `cpu` patches modules on import, and contexts replace attributes for a while."""
    assignments = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        imported = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (node.module if isinstance(node, ast.ImportFrom) else alias.name or "").startswith("openrlhf")
        }
        assignments += [
            f"{path.relative_to(PACKAGE)}: {ast.unparse(target)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in imported
        ]
    assert not assignments


def test_the_method_alone_binds_nothing_of_ops():
    for has, rooms in (({SELECTIVE}, {"update", "forward"}), ({REFERENCE}, {"reference"}), (set(), set())):
        assert {row.room for row in bindings.rows(has)} == rooms


def test_the_package_and_its_table_are_light():
    """Neither imports PyTorch, Ray or OpenRLHF."""
    code = "import arlopti_openrlhf.bindings, sys; print(sorted({'torch', 'ray', 'openrlhf'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


LAUNCHER = """
import sys
sys.argv[1:] = []
from arlopti_openrlhf.launcher import install

def refused(*methods, **settings):
    try:
        install(*methods, **settings)
    except (ValueError, RuntimeError) as error:
        print(type(error).__name__, error)

refused("ra")
refused("ar", arguments=["ar.alpha=2"])
refused()
refused("ar", scope="minibatch")
refused("lopti", scope="epoch")
refused("lopti", scope="minibatch", update="stock")
refused("eighty_twenty", update="stock")
install("ar", "lopti", arguments=["ar.alpha=0.3", "lopti.eta=0.5"])
from openrlhf.trainer.ray import ppo_actor
from openrlhf.utils import deepspeed
print(ppo_actor.ActorPPOTrainer.settings.methods, ppo_actor.Actor.__name__, deepspeed.DeepspeedStrategy.__module__)
refused("ar")
"""


def test_install_binds_the_method_with_its_settings_and_refuses_what_cannot_be():
    done = subprocess.run([sys.executable, "-c", LAUNCHER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = [
        "ValueError ra: there is no such token method",
        r"ValueError ar: alpha must lie in \[-1, 1\], got 2",
        "ValueError install.* needs a token method",
        "ValueError scope='minibatch': Lopti is off",
        "ValueError scope='epoch': must be batch or minibatch",
        "ValueError --algo.lopti.scope minibatch needs the selective update",
        r"ValueError token methods that .* \(eighty_twenty\) need the selective update",
        r"\('ar', 'lopti'\) SelectiveActor openrlhf.utils.deepspeed.deepspeed",
        "RuntimeError .* before OpenRLHF is imported",
    ]
    assert re.search(".*\n(?:.*\n)*?".join(expected), done.stdout), done.stdout
