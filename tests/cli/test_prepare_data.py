"""The command makes, converts and drops rows as it says, and refuses the rest in one line."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import datasets
import huggingface_hub
import pandas as pd
import pytest
from arlopti_testing.changed_inputs import VALUES, changed, with_other_values
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arlopti_openrlhf.cli.prepare_data import main
from arlopti_openrlhf.grading.kk_reward import grade
from arlopti_openrlhf.lab.data import knights_knaves
from arlopti_openrlhf.lab.data import published as published_sets
from arlopti_openrlhf.lab.data.preparation import generate_rows, write_rows
from arlopti_openrlhf.lab.data.published import MATH_INSTRUCTION, read_file
from arlopti_openrlhf.lab.scoring.inputs import read_rows

QUIZ = (
    "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and knaves always "
    'lie. You meet 2 inhabitants: Zoey, and Liam. Zoey said that Liam is a knave. "Zoey is not a knight" - Liam. '
    "So who is a knight and who is a knave?"
)
SOLUTION = "(1) Zoey is a knight\n(2) Liam is a knave"
TEXT = (
    f"<|im_start|>system\n{knights_knaves.INSTRUCTION}\n<|im_end|>\n<|im_start|>user\n{QUIZ}\n<|im_end|>\n"
    "<|im_start|>assistant\n<think>"
)
ROW = {"prompt": TEXT, "label": SOLUTION, "datasource": "kk_2ppl"}


def published(path, drop=(), label=SOLUTION, text=TEXT, truth=None):
    """Write a parquet file with the columns of the published ones that matter, and some that do not."""
    row = {
        "quiz": QUIZ,
        "names": ["Zoey", "Liam"],
        "index": 0,
        "data_source": "kk_logic",
        "prompt": [{"content": text, "role": "user"}],
        "reward_model": {
            "ground_truth": truth or {"solution_text_format": label, "statements": "()"},
            "style": "rule",
        },
    }
    pd.DataFrame([{name: value for name, value in row.items() if name not in drop}]).to_parquet(path)
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_generated_files(tmp_path, capsys):
    main(["--generate", "--people", "2", "3", "--train", "30", "--test", "10", "--out", str(tmp_path)])
    train, test = read(tmp_path / "train.jsonl"), read(tmp_path / "test.jsonl")
    assert [row["datasource"] for row in train] == ["kk_2ppl", "kk_3ppl"] * 30
    assert [row["datasource"] for row in test] == ["kk_2ppl", "kk_3ppl"] * 10
    assert "train.jsonl: kk_2ppl 30, kk_3ppl 30" in capsys.readouterr().out
    for row in train + test:
        assert set(row) == {"prompt", "label", "datasource"}
        assert row["prompt"][0] == {"role": "system", "content": knights_knaves.INSTRUCTION}
        assert row["prompt"][1]["content"].endswith("So who is a knight and who is a knave?")
        assert grade(f"<think></think><answer>{row['label']}</answer>", row["label"]).reward == 3.0


def test_fewer_structures_than_puzzles_are_said(tmp_path, capsys):
    """Two people have 249 structures, and what is more than that is told again."""
    main(["--generate", "--people", "2", "3", "--train", "300", "--test", "10", "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert re.search(r"^train: kk_2ppl: 300 puzzles of \d+ structures, with other names", said.out, re.M)
    assert said.err == "" and "test: " not in said.out


def test_same_bytes_in_every_process(tmp_path):
    for seed in ("1", "2"):
        options = ["--generate", "--people", "3", "--train", "20", "--test", "5"]
        options += ["--out", str(tmp_path / seed)]
        subprocess.run(
            [sys.executable, "-m", "arlopti_openrlhf", "data", *options],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
        )
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_published_file_as_messages_and_as_text(tmp_path):
    file = published(tmp_path / "2ppl.parquet")
    assert [one.row for one in read_file(file, "text")] == [ROW]
    assert [one.row for one in read_file(file, "messages")] == [ROW | {"prompt": knights_knaves.messages(QUIZ)}]


def verl_line(**changes) -> str:
    """Return a row with verl's columns as JSON."""
    row = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}, "data_source": "a"}
    return json.dumps(row | changes) + "\n"


def test_other_converters_columns_as_json_and_blank_lines(tmp_path):
    file, expected = tmp_path / "rows.jsonl", {"prompt": "1+1?", "label": "2", "datasource": "a"}
    as_text = {"prompt": json.dumps([{"role": "user", "content": "1+1?"}]), "reward_model": '{"ground_truth": "2"}'}
    file.write_text(verl_line() + "\n" + verl_line(**as_text) + verl_line(prompt="1+1?") + " \n")
    assert [one.row for one in read_file(file, "text")] == [expected] * 3


def test_logic_rls_prompt_for_base_models_is_text_alone(tmp_path):
    file = published(tmp_path / "2ppl.parquet", text=f"The user asks a question. User:{QUIZ}\nAssistant: <think>")
    assert [one.row["prompt"][:8] for one in read_file(file, "text")] == ["The user"]
    assert [one.row for one in read_file(file, "messages")] == [None]


@pytest.mark.parametrize("truth", [None, "", ["2", None]])
def test_a_test_set_without_labels_is_excluded_too(tmp_path, truth, capsys):
    train, test, out = (tmp_path / f"{name}.jsonl" for name in ("train", "test", "out"))
    train.write_text(verl_line() + verl_line(prompt="1+2?"))
    test.write_text(verl_line(reward_model={"ground_truth": truth}))
    main(["--from", str(train), "--exclude", str(test), "--out", str(out)])
    assert len(read(out)) == 1 and "dropped: excluded 1" in capsys.readouterr().out
    test.write_text(verl_line(prompt=7))
    with pytest.raises(SystemExit):
        main(["--from", str(train), "--exclude", str(test), "--out", str(out)])
    assert "argument --exclude: 1 rows cannot be read, so they would not be excluded" in capsys.readouterr().err


def test_a_byte_order_mark_is_read_and_one_array_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\ufeff" + json.dumps(ROW) + "\n", "utf-8")
    assert [one.row for one in read_file(file, "text")] == [ROW]
    file.write_text(json.dumps([ROW]), "utf-8")
    with pytest.raises(ValueError, match="it has no JSON objects, one a line"):
        list(read_file(file, "text"))


def test_several_files_into_one_which_the_other_commands_read(tmp_path, capsys):
    files = [str(published(tmp_path / name)) for name in ("a.parquet", "b.parquet")]
    for suffix in ("jsonl", "parquet"):
        out = tmp_path / f"all.{suffix}"
        main(["--from", *files, "--out", str(out), "--prompt-format", "text"])
        assert "kk_2ppl 2" in capsys.readouterr().out
        assert read_rows([str(out)]) == [one.row for one in read_file(out, "messages")] == [ROW, ROW]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"drop": ["reward_model", "names"]}, "no column reward_model"),
        ({"label": "Zoey is right"}, "row 1: .*Zoey is right"),
        ({"text": "Who is who?"}, "row 1: .*not ChatML text: 'Who is who[?]'"),
        # TinyZero's Countdown
        ({"truth": {"target": 6, "nums": [1, 2]}}, "row 1: .*no solution of Knights and Knaves: it has target, nums"),
    ],
)
def test_bad_published_file_is_one_clear_line(tmp_path, capsys, change, message):
    file = published(tmp_path / "bad.parquet", **change)
    with pytest.raises(SystemExit) as stop:
        main(["--from", str(file), "--out", str(tmp_path / "out.jsonl")])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert str(file) in error and re.search(message, error) and error.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


# There is nothing to exclude from new puzzles, for example, so that is refused and not ignored.
@pytest.mark.parametrize(
    "options", ["--people 9", "--people 1", "--train -1", "--test many", "--exclude x.jsonl", "--strict"]
)
def test_options_that_generated_puzzles_cannot_have(tmp_path, capsys, options):
    with pytest.raises(SystemExit):
        main(["--generate", "--out", str(tmp_path), *options.split()])
    assert options.split()[0] in capsys.readouterr().err


def published_math(path, labels, source="HuggingFaceH4/MATH-500", prompts=None):
    """Write a math file in the published form."""
    prompts = prompts or [f"What is {i}? {MATH_INSTRUCTION}" for i in range(len(labels))]
    rows = [
        {
            "data_source": source,
            "prompt": [{"content": prompt, "role": "user"}],
            "reward_model": {"ground_truth": label, "style": "rule"},
        }
        for prompt, label in zip(prompts, labels, strict=True)
    ]
    pd.DataFrame(rows).to_parquet(path)
    return path


def test_math_files(tmp_path, capsys):
    """Convert labels as the public sets have them: text, numbers, lists of alternatives."""
    files = [
        published_math(tmp_path / "math.parquet", ["\\frac{1}{2}", "$\\boxed{7}$"]),
        published_math(tmp_path / "amc.parquet", [142.0, 0.5], "amc_dsr"),
        published_math(tmp_path / "minerva.parquet", [["9.6\n"], ["0.01\n", "0.02"]], "minerva_dsr"),
    ]
    out = tmp_path / "all.jsonl"
    main(["--from", *map(str, files), "--out", str(out)])
    rows = read(out)
    assert [row["label"] for row in rows] == ["\\frac{1}{2}", "7", "142", "0.5", "9.6", '["0.01", "0.02"]']
    assert [row["datasource"] for row in rows] == ["math500"] * 2 + ["amc"] * 2 + ["minerva"] * 2
    assert rows[0]["prompt"] == [{"role": "user", "content": f"What is 0? {MATH_INSTRUCTION}"}]
    printed = capsys.readouterr().out
    assert "amc 2, math500 2, minerva 2" in printed
    first = out.read_bytes()
    main(["--from", *map(str, files), "--out", str(out), "--strict"])
    assert out.read_bytes() == first
    main(["--from", str(files[0]), "--out", str(out), "--prompt-format", "text"])
    assert read(out)[0]["prompt"] == f"What is 0? {MATH_INSTRUCTION}"


SYSTEM, ANSWER = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "1"}


def asked(*contents):
    """Return user turns with these texts, with an answer after each but the last."""
    turns = [{"role": "user", "content": content} for content in contents]
    return [one for turn in turns for one in (turn, ANSWER)][:-1]


def verl(path, prompts, **columns):
    """Write a parquet file as verl's own scripts do, with a prompt of any turns in each row."""
    truth = {"reward_model": {"style": "rule", "ground_truth": "2"}}
    pd.DataFrame([{"data_source": "gsm8k", "prompt": p} | truth | columns for p in prompts]).to_parquet(path)
    return str(path)


def test_all_turns_of_a_verl_prompt_are_kept(tmp_path, capsys):
    prompts = [[SYSTEM, *asked("One?")], [SYSTEM, *asked("Two?")], asked("What is 0?", "Three?"), asked("Four?")]
    file, out = verl(tmp_path / "train.parquet", prompts), tmp_path / "out.jsonl"
    main(["--from", file, "--out", str(out)])
    assert [row["prompt"] for row in read(out)] == prompts
    main(["--from", file, "--out", str(out), "--prompt-format", "text"])
    begin, end = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>assistant\n"
    assert [row["prompt"] for row in read(out)] == [
        f"{begin}<|im_start|>user\nOne?<|im_end|>\n{end}",
        f"{begin}<|im_start|>user\nTwo?<|im_end|>\n{end}",
        f"<|im_start|>user\nWhat is 0?<|im_end|>\n{end}1<|im_end|>\n<|im_start|>user\nThree?<|im_end|>\n{end}",
        "Four?",
    ]
    # A test set has the same question, if its system text differs or it has none, too.
    test = verl(tmp_path / "test.parquet", [[SYSTEM | {"content": "Other."}, *asked("One?")], asked("Two?")])
    for prompt_format in ("text", "messages"):
        main(["--from", file, "--out", str(out), "--exclude", test, "--prompt-format", prompt_format])
        assert len(read(out)) == 2 and "dropped: excluded 2" in capsys.readouterr().out


@pytest.mark.parametrize("prompt_format", ["text", "messages"])
@pytest.mark.parametrize(
    ("prompt", "columns", "reason"),
    [
        ([*asked("One?"), ANSWER], {}, "the last message is the assistant's, so nothing is left to answer"),
        (
            asked(f"{TEXT[: TEXT.index('<|im_start|>assistant')]}and more"),
            {},
            "the prompt has text outside its ChatML turns",
        ),
        (asked("<|im_start|>user"), {}, "the prompt is not ChatML text"),
        (asked("<image>One?"), {"images": ["a.png"]}, "its images would be lost"),
    ],
)
def test_a_verl_prompt_of_which_something_would_be_lost(tmp_path, capsys, prompt_format, prompt, columns, reason):
    file = verl(tmp_path / "train.parquet", [prompt], **columns)
    with pytest.raises(SystemExit):
        main(["--from", file, "--out", str(tmp_path / "out.jsonl"), "--prompt-format", prompt_format])
    assert f"row 1: unreadable: {reason}" in capsys.readouterr().err


def test_rows_that_training_could_not_use(tmp_path, capsys, tiny_model):
    test = published_math(tmp_path / "test.parquet", ["1"], prompts=[f"In the test? {MATH_INSTRUCTION}"])
    labels = ["1", "", '{"final": 1}', "2", "3", "4"]
    prompts = ["One?", "Two?", "Three?", "In the  test?", "Five? " * 400, " "]
    train = published_math(tmp_path / "train.parquet", labels, prompts=prompts)
    out = tmp_path / "out.jsonl"
    flags = ["--from", str(train), "--out", str(out), "--exclude", str(test)]
    flags += ["--tokenizer", str(tiny_model), "--max-prompt-tokens", "300", "--prompt-format", "text"]
    main(flags)
    assert [row["prompt"] for row in read(out)] == ["One?"]
    dropped = (tmp_path / "out.jsonl.dropped").read_text().splitlines()
    reasons = "a label is empty", "a label is a JSON object", "excluded", "too long", "is empty"
    for number, reason in enumerate(reasons, start=2):
        assert [line for line in dropped if f"row {number}:" in line and reason in line], (number, dropped)
    assert "dropped: excluded 1, too long 1, unreadable 3" in capsys.readouterr().out
    main(
        ["--from", str(train), "--out", str(out), "--exclude", str(published_math(tmp_path / "other.parquet", ["1"]))]
    )
    assert "other.parquet occurs among them, so --exclude has dropped none" in capsys.readouterr().out
    out.unlink()
    with pytest.raises(SystemExit):
        main([*flags, "--strict"])
    assert "(and 4 more)" in capsys.readouterr().err and not out.exists()


MESSAGE = {"role": "user", "content": "What is 1 + 1?"}
MATH_ROW = {"prompt": [MESSAGE], "label": "2", "datasource": "math"}
VERL_ROW = {
    "prompt": [{"role": "user", "content": TEXT}],
    "reward_model": {"ground_truth": {"solution_text_format": SOLUTION}, "style": "rule"},
    "names": ["Zoey", "Liam"],
    "data_source": "kk_logic",
}
LINE = (
    st.sampled_from([ROW, MATH_ROW, MATH_ROW | {"label": ["0.5", "0.6"]}, VERL_ROW]).flatmap(with_other_values)
    | with_other_values(MESSAGE).map(lambda message: MATH_ROW | {"prompt": [message]})
    | st.sampled_from(VALUES)
).map(json.dumps) | changed(json.dumps(MATH_ROW))


@settings(max_examples=settings().max_examples // 5)
@given(st.lists(LINE, max_size=3))
@example([json.dumps(MATH_ROW | {"prompt": [{"role": "user", "?content": "What is 1 + 1?"}]})])
def test_rows_are_written_that_it_reads_again_or_the_file_is_refused_in_one_line(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("rows")
    source, out, again = (folder / name for name in ("in.jsonl", "out.jsonl", "again.jsonl"))
    source.write_bytes("".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass"))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(["--from", str(source), "--out", str(out)])
        except SystemExit as end:
            assert end.code == 2 and said.getvalue().count("\n") == 1
            return
        main(["--from", str(out), "--out", str(again)])
    # A label may meet the grader's time limit the second time.
    assert set(again.read_text("utf-8").splitlines()) <= set(out.read_text("utf-8").splitlines())


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_without_a_label(tmp_path, suffix):
    """A null, a missing key and the NaN in which pandas writes both are no labels. A row without a source has one."""
    rows = [
        {"prompt": "One?", "label": "1", "datasource": "math500"},
        {"prompt": "Two?", "label": None, "datasource": "math500"},
        {"prompt": "Three?", "datasource": "math500"},
        {"prompt": "Four?", "label": float("nan"), "datasource": "math500"},
        {"prompt": "Five?", "label": ["5", float("nan")], "datasource": "math500"},
        {"prompt": "Six?", "label": "6"},
    ]
    file, out = tmp_path / f"rows.{suffix}", tmp_path / "out.jsonl"
    if suffix == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        rows[4]["label"] = None  # a column of parquet has one type
        pd.DataFrame(rows).to_parquet(file)
    main(["--from", str(file), "--out", str(out)])
    assert [(row["label"], row["datasource"]) for row in read(out)] == [("1", "math500"), ("6", "default")]
    dropped = (tmp_path / "out.jsonl.dropped").read_text().splitlines()
    assert [line.split(": ")[0][-1] for line in dropped] == ["2", "3", "4", "5"]


ONE = f"One? {MATH_INSTRUCTION}"


@pytest.mark.parametrize(
    "name, record, row",
    [
        ("math500", {"problem": "One?", "answer": "1"}, (ONE, "1", "math500")),
        ("amc", {"problem": "One?", "answer": 142.0}, (ONE, "142", "amc")),
        ("olympiad_bench", {"question": "One?", "final_answer": ["$1$"]}, (ONE, "1", "olympiad_bench")),
        (
            "orz",
            {"0": {"from": "human", "value": "One?"}, "1": {"from": "assistant", "ground_truth": {"value": "1"}}},
            (ONE, "1", "orz"),
        ),
        (
            "kk_2ppl_test",
            {"quiz": QUIZ, "solution_text_format": SOLUTION, "names": ["Zoey", "Liam"]},
            (TEXT, SOLUTION, "kk_2ppl"),
        ),
    ],
)
def test_data_sets_by_name(name, record, row, monkeypatch):
    asked = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.update(kwargs, args=args) or [record])
    [got] = published_sets.read_data_set(name, "text")
    assert got.row == dict(zip(("prompt", "label", "datasource"), row, strict=True))
    source = published_sets.DATA_SETS[name]
    assert asked == {"args": (source.path, source.config), "data_files": source.files, "split": source.split}


def test_a_data_set_that_cannot_be_had(tmp_path, capsys, monkeypatch):
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "data sets")
    with pytest.raises(SystemExit):
        main(["--dataset", "math500", "--out", str(tmp_path / "out.jsonl")])
    error = capsys.readouterr().err
    assert "HuggingFaceH4/MATH-500" in error and error.count("\n") == 1


def test_more_rows_continue_fewer():
    assert generate_rows([3], 20, held_out=True, seed=5)[:8] == generate_rows([3], 8, held_out=True, seed=5)
    assert generate_rows([3], 8, held_out=True, seed=6) != generate_rows([3], 8, held_out=True, seed=5)


def test_a_line_separator_in_a_prompt_ends_no_row(tmp_path):
    row = {"prompt": "One\u2028line?", "label": "1", "datasource": "aime"}
    write_rows([row], tmp_path / "rows.jsonl")
    assert [one.row for one in read_file(tmp_path / "rows.jsonl", "text")] == [row]
