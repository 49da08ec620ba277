"""Prompts that occur again and again, or in both sets, are a warning."""

import json

import pytest
from arlopti_testing.preflight_command import changed

from arlopti_openrlhf.ops.preflight import data, repeats


def prompts(*numbers: int) -> list:
    return [[{"role": "user", "content": f"puzzle {number}"}] for number in numbers]


@pytest.mark.parametrize(
    ("training", "evaluation", "flag", "said"),
    [
        (prompts(*[1] * 128), [], "--data.prompt_dataset", "its 128 rows have 1 different prompt;"),
        (["a", "b"] * 64, [], "--data.prompt_dataset", "its 128 rows have 2 different prompts;"),
        (prompts(*range(64)), prompts(*range(64)), "--eval.dataset", "64 of its 64 prompts are trained on"),
        (["a", "b", "c"], ["d", "b"], "--eval.dataset", "1 of its 2 prompts are trained on"),
    ],
)
def test_what_is_repeated(training, evaluation, flag, said):
    args = changed(data__prompt_dataset="train.jsonl", eval__dataset="test.jsonl")
    (found,) = repeats.check(args, training, evaluation)
    assert found.flag == flag and said in str(found) and not found.is_fatal


@pytest.mark.parametrize("training", [[], ["a"], ["a", "a", "b"], prompts(*range(64))])
def test_what_is_not(training):
    assert not list(repeats.check(changed(), training, ["c", "c"]))


def test_the_files_are_compared(tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + {i}"}) + "\n" for i in range(8)))
    path = str(tmp_path / "d.jsonl")
    args = changed(data__prompt_dataset=path, eval__dataset=path, data__apply_chat_template=False)
    args.data.label_key = None
    args.reward.remote_url = ["mine.py"]
    (found,) = data.check(args)
    assert str(found).startswith(f"--eval.dataset {path}: 8 of its 8 prompts are trained on")
    args.data.max_images_per_prompt = 1  # the images may differ
    assert not [each for each in data.check(args) if "are trained on" in str(each)]
