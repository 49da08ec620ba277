"""What the page on migration says is so: defaults of ours, and the two rewards."""

import re
import sys
from pathlib import Path

import pytest

from arlopti_openrlhf.cli import command_line
from arlopti_openrlhf.grading.reward_answers import normalise

PAGE = (Path(__file__).parents[1] / "docs/migration.md").read_text("utf-8")


def test_our_defaults_are_those_of_the_table():
    table = PAGE.split("## Defaults that differ")[1]
    shown = dict(re.findall(r"^\| `--([\w.]+)` \| ([^|]+?) \|", table, re.M))
    args = vars(command_line.parse([]))
    switch = {"True": "on", "False": "off", "None": "off"}
    schedule = (args["actor.lr_scheduler"], args["actor.min_lr_ratio"], args["actor.lr_warmup_ratio"])
    assert schedule == ("cosine_with_min_lr", 0.1, 0.03) and "to a tenth, after 3%" in shown.pop("actor.lr_scheduler")
    assert ", ".join(map(str, args["actor.adam.betas"])) == shown.pop("actor.adam.betas")
    defaults = {name: switch.get(str(args[name]), str(args[name]).removesuffix(".0")) for name in shown}
    assert len(shown) > 6 and {name: re.split(",", cell)[0].strip("`") for name, cell in shown.items()} == defaults


@pytest.mark.parametrize(
    ("module", "theirs"),
    [
        (
            "my_trl_rewards",
            "def accuracy_reward(completions, solution, **kwargs):\n"
            "    return [float(c[0]['content'] == s) or None for c, s in zip(completions, solution)]",
        ),
        (
            "my_verl_reward",
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    return float(solution_str == ground_truth)",
        ),
    ],
)
def test_a_reward_of_theirs_is_called_as_the_page_shows(module, theirs, tmp_path, monkeypatch):
    [code] = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if module in code]
    (tmp_path / f"{module}.py").write_text(theirs + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    names: dict = {}
    exec(code, names)
    prompt = "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    for answer, reward in (("2", 1.0), ("3", 0.0)):
        returned = normalise(names["reward_func"]([f"{prompt}{answer}<|im_end|>"], [prompt], ["2"]), 1)
        assert (returned["rewards"], returned["scores"]) == ([reward], [reward])
    sys.modules.pop(module)
