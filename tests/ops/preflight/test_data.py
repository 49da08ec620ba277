"""Each mistake with data is found before anything starts, with its place and what to do."""

import datetime
import json
import shutil
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import datasets
import pandas
import pytest
from arlopti_testing.preflight_command import changed

from arlopti_openrlhf.evaluation.sampling import Sampling
from arlopti_openrlhf.lab.data.knights_knaves import CHAT_TEMPLATE
from arlopti_openrlhf.ops.preflight import data, rows
from arlopti_openrlhf.ops.preflight.model import load_tokenizer

SOLUTION = "(1) Zoey is a knight\n(2) Oliver is a knave"


def row(i: int, **changes) -> dict:
    prompt = [{"role": "user", "content": f"puzzle {i}"}]
    return {"prompt": prompt, "label": SOLUTION, "datasource": "kk_2ppl"} | changes


def write(path, rows) -> str:
    """Write rows, or lines as they are, and return the path."""
    lines = (line if isinstance(line, str) else json.dumps(line) for line in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def check(tmp_path, tiny_model, monkeypatch):
    """check(rows, FLAG=VALUE...) returns the findings as text, those that are fatal after "!"."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # as in the rehearsal's process

    def run(given=None, **flags):
        load_tokenizer.cache_clear()  # a test may change the model
        path = write(tmp_path / "d.jsonl", [row(i) for i in range(8)] if given is None else given)
        args = changed(**{"actor__model_name_or_path": tiny_model, "data__prompt_dataset": path} | flags)
        return ["!" * finding.is_fatal + str(finding) for finding in data.check(args)]

    return run


def test_good_data_has_no_finding(check, tmp_path):
    rows = [row(i) for i in range(8)]
    pandas.DataFrame(rows).to_parquet(tmp_path / "d.parquet")
    (tmp_path / "list.json").write_text(json.dumps(rows))
    held_out = write(tmp_path / "held_out.jsonl", [row(i) for i in range(8, 16)])
    for name in ("d.parquet", "list.json", "d.jsonl"):
        assert check(data__prompt_dataset=str(tmp_path / name), eval__dataset=held_out) == []
    assert check(data__label_key=None) == []


MINE, TEXT = {"reward__remote_url": ["mine.py"]}, {"data__apply_chat_template": False}
EMPTY = [{"role": "system", "content": "Think."}, {"role": "user", "content": ""}]
KEY, SET = "--data.label_key label: ", "!--data.prompt_dataset "


@pytest.mark.parametrize(
    ("change", "flags", "start", "problem"),
    [
        # Prompts.
        ({"prompt": ""}, {}, "!--data.input_key prompt: 1 of 3 rows have no value there", "d.jsonl, row 2;"),
        ({"prompt": None}, {}, "!--data.input_key prompt: 1 of 3 rows have no value there", "d.jsonl, row 2;"),
        ({"prompt": " \n"}, {}, "!--data.input_key prompt: 1 of 3 rows have no value there", "d.jsonl, row 2;"),
        ({"prompt": EMPTY}, {}, "!--data.input_key prompt: 1 of 3 rows have no value there", "d.jsonl, row 2;"),
        ({"prompt": [{"role": "user"}]}, {}, SET, "d.jsonl: row 2, prompt: it is not text, or messages with role"),
        ({"prompt": [{"content": "x"}]}, {}, SET, "row 2, prompt: it is not text, or messages with role"),
        ({"prompt": [{"role": "assistant", "content": None}]}, {}, SET, "row 2, prompt: it is not text, or messages"),
        ({"prompt": ["x"]}, {}, SET, "row 2, prompt: it is not text, or messages with role and content: ['x']"),
        ({"prompt": 7}, {}, SET, "row 2, prompt: it is not text, or messages with role and content: 7"),
        (
            {},
            TEXT,
            SET,
            "'puzzle 0'}] (and 2 more rows); add --data.apply_chat_template",
        ),
        # Labels.
        ({"label": None}, {}, f"!{KEY}1 of 3 rows have no value there", "d.jsonl, row 2;"),
        ({"label": None}, MINE, f"{KEY}1 of 3 rows have no value there", "d.jsonl, row 2;"),
        (
            {},
            {"data__label_key": None},
            "!--data.label_key None: --reward.remote_url kk compares",
            "datasource, label",
        ),
        (
            {"label": "(1) Zoey is a spy"},
            {},
            f"!{KEY}",
            "row 2: kk cannot read the label: a solution is numbered lines",
        ),
        # Numbers.
        ({}, {"train__batch_size": 16}, "!--train.batch_size 16: 3 prompts x ", "give 12 at most"),
        (
            {},
            {"data__max_samples": 1, "train__batch_size": 8},
            "!--train.batch_size 8: --data.max_samples 1 ",
            "give 4 at most",
        ),
        ({}, {"rollout__batch_size": 16}, "--rollout.batch_size 16: there are 3 prompts", "give 3 at most"),
        (
            {},
            {"rollout__batch_size": 16, "actor__num_gpus_per_node": 16},
            "!--rollout.batch_size 16: there are 3 prompts",
            "so no rollout has more",
        ),
        ({}, {"data__prompt_split": "test"}, SET, "it has no split test;"),
    ],
)
def test_a_mistake_is_one_finding(check, change, flags, start, problem):
    [found] = check([row(0), row(1, **change), row(2)], **{"reward__remote_url": ["kk"]} | flags)
    assert found.startswith(start) and problem in found


def test_labels_of_several_types_are_read_as_other_ones(check):
    """`datasets` reads "[1,2]" as a list then (its pull request 8027), and a list has alternatives."""
    mixed = [row(0, label=3), row(1, label="[1,2]"), row(2, label="x+1"), row(3, label=2)]
    [found] = check(mixed, reward__remote_url=["math"], rollout__batch_size=4, train__batch_size=4)
    assert found.startswith("!--data.label_key label: the labels have several types") and "as .parquet" in found


def test_the_files_of_a_folder_and_of_a_pattern(check, tmp_path, monkeypatch):
    """As OpenRLHF's scripts name them: json@FOLDER."""
    for folder, given in (("good", [row(i) for i in range(8)]), ("bad", [row(i, label="?") for i in range(8)])):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "train.jsonl", given)
    for name in (f"json@{tmp_path}/good", f"{tmp_path}/good/tr*.jsonl"):
        assert check(data__prompt_dataset=name, reward__remote_url=["kk"]) == []
    [found] = check(data__prompt_dataset=f"json@{tmp_path}/bad", reward__remote_url=["kk"])
    assert "kk cannot read the label" in found
    [found] = check(data__prompt_dataset=f"{tmp_path}/good/x*.jsonl")
    assert "there is no such file" in found
    write(tmp_path / "good" / "x@y.jsonl", [row(0)])
    monkeypatch.chdir(tmp_path)
    [found] = check(data__prompt_dataset="good/x@y.jsonl")
    assert "!" in found and "what follows an @ for a folder inside a data set" in found
    [found] = check(data__prompt_dataset="https://example.org/a.json")
    assert "not checked: it is not on this machine" in found


def test_tool_calls_need_no_content(check):
    """As in OpenAI's histories. Templates such as Qwen3's render them."""
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert check([row(i, prompt=[calls, {"role": "user", "content": f"puzzle {i}"}]) for i in range(8)]) == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([row(0), '{"prompt": "a", "label": '], "Expected object or value at position 24"),
        ([row(0), "", "[1]"], "JSON parse error: Column() changed from object to array in row 1"),
        ([], "there is no such file, or it has no rows"),
        (["", ""], 'Instruction "train" corresponds to no data!'),
    ],
)
def test_a_file_that_does_not_parse(check, lines, problem):
    """What `datasets` says of it stands in the list."""
    [found] = check(lines)
    assert found.startswith(SET) and f"d.jsonl: {problem}" in found


@pytest.mark.parametrize(
    ("labels", "fatal", "problem"),
    [
        (["42", " $$ "], True, "a label is empty"),
        (["42", "\\"], False, "is compared letter by letter"),
        (["\\", " $$ "], True, "a label is empty"),
        (["42", " $$ ", *["7"] * 400], True, "a label is empty"),  # among more than are compared
    ],
)
def test_a_label_that_the_math_grader_cannot_read(check, labels, fatal, problem):
    """The grader reads the labels in a process of its own. Where it would raise, the run cannot start."""
    [found] = check([row(i, label=label) for i, label in enumerate(labels)], reward__remote_url=["math"])
    assert found.startswith("!" * fatal + KEY) and "d.jsonl, row 2" in found
    assert "math cannot read the label: " in found and problem in found


@pytest.mark.parametrize(
    "label, problem",
    [
        (Decimal("42.50"), None),
        (datetime.date(2020, 1, 2), "got '2020-01-02' (date)"),
        (b"42", "got \"b'42'\" (bytes)"),
    ],
)
def test_labels_that_are_no_json(check, tmp_path, label, problem):
    """Nothing else of the data set goes unchecked with them."""
    datasets.Dataset.from_list([row(i, label=label, prompt=i) for i in range(4)]).to_parquet(tmp_path / "d.parquet")
    found = check(data__prompt_dataset=str(tmp_path / "d.parquet"), reward__remote_url=["math"])
    assert any("it is not text" in line for line in found)
    assert [problem in line for line in found if line.startswith(f"!{KEY}")] == ([True] if problem else [])


def test_a_folder_that_datasets_wrote(check, tmp_path):
    datasets.Dataset.from_list([row(i, label=None) for i in range(8)]).save_to_disk(str(tmp_path / "saved"))
    [found] = check(data__prompt_dataset=str(tmp_path / "saved"))
    assert found.startswith("!--data.label_key label: 8 of 8 rows have no value there")


def differing(numbers=range(4), **columns) -> tuple[list[dict], list[dict]]:
    """Return rows of two data sets. Each column has one value in the first, and another one in the second."""
    return tuple([row(i, **{name: each[j] for name, each in columns.items()}) for i in numbers] for j in (0, 1))


PARTS = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]


@pytest.mark.parametrize(
    ("columns", "column"),
    [
        ({}, None),
        ({"more": (1, 2)}, None),
        ({"more": (None, "x")}, None),
        ({"more": (1, 1.5)}, "more"),
        ({"more": ("2020-01-01", "x")}, "more"),
        ({"prompt": ("text", [{"role": "user", "content": "x"}])}, "prompt"),
        ({"prompt": (PARTS, [{"role": "user", "content": "x"}])}, "prompt"),
        ({"prompt": ([{"role": "user", "content": "x", "name": "y"}], [{"role": "user", "content": "x"}])}, "prompt"),
    ],
)
def test_data_sets_are_joined_as_the_run_joins_them(check, tmp_path, columns, column):
    from openrlhf.datasets.utils import blending_datasets

    first, second = differing(**columns)
    names = f"{write(tmp_path / 'a.jsonl', first)},{write(tmp_path / 'b.jsonl', second)}"
    others = differing(range(4, 8), **columns)
    to_evaluate = f"{write(tmp_path / 'c.jsonl', others[0])},{write(tmp_path / 'e.jsonl', others[1])}"
    flags = {"data__prompt_dataset": names, "rollout__batch_size": 1}
    strategy = SimpleNamespace(print=print, is_rank_0=lambda: False)
    if column is None:
        assert check(**flags, eval__dataset=to_evaluate) == []
        assert len(blending_datasets(names, None, strategy)) == 8
        assert "there are 8 prompts" in check(**flags | {"rollout__batch_size": 9})[0]
        return
    for flag in ("data__prompt_dataset", "eval__dataset"):  # data to train on and to evaluate on are not joined
        all_found = check(**flags | {"data__prompt_dataset": str(tmp_path / "a.jsonl"), flag: names})
        [found] = [each for each in all_found if "cannot be joined" in each]  # the template prints a list of parts
        assert found.startswith(f"!--{flag.replace('__', '.')} {names}: the data sets cannot be joined: ")
        assert "The features can't be aligned" in found and f"the key {column} of" in found
    with pytest.raises(ValueError, match="features can't be aligned"):
        blending_datasets(names, None, strategy)


def test_the_run_mixes_by_probability(check, tmp_path):
    """The smaller set comes again until the larger has come once, so there are more prompts than rows."""
    names = f"{write(tmp_path / 'a.jsonl', [row(0)] * 2)},{write(tmp_path / 'b.jsonl', [row(1)] * 6)}"
    flags = {"data__prompt_dataset": names, "data__prompt_probs": "0.5,0.5", "train__seed": 1}
    assert "there are 11 prompts" in check(**flags, rollout__batch_size=100)[0]


def test_values_that_json_cannot_hold_are_as_the_run_has_them(check, tmp_path):
    values = [Decimal("1.50"), datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), b"x"]
    for value in values:
        pandas.DataFrame([row(i, label=value) for i in range(4)]).to_parquet(tmp_path / "d.parquet")
        flags = {"data__prompt_dataset": str(tmp_path / "d.parquet"), "rollout__batch_size": 1}
        assert check(**flags) == []
        args = changed(**flags | {"data__apply_chat_template": False, "data__input_key": "datasource"})
        assert data.first_prompts(args, 1)[0] == [("kk_2ppl", value)]


def test_splits_on_disk(check, tmp_path):
    import datasets

    rows_of = {"train": [row(i) for i in range(8)], "test": [row(1, label=None)]}
    sets = datasets.DatasetDict({name: datasets.Dataset.from_list(each) for name, each in rows_of.items()})
    sets.save_to_disk(str(tmp_path / "saved"))
    assert check(data__prompt_dataset=str(tmp_path / "saved")) == []
    [found] = check(data__prompt_dataset=str(tmp_path / "saved"), data__prompt_split="other")
    assert found.startswith(SET) and "it has no split other" in found


def test_a_folder_with_several_configurations(check, tmp_path):
    """As GSM8K's is on the hub. OpenRLHF names no configuration, but takes a subfolder."""
    (tmp_path / "sets" / "main").mkdir(parents=True)
    write(tmp_path / "sets" / "main" / "train.jsonl", [row(i) for i in range(8)])
    configurations = [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("main", "socratic")]
    (tmp_path / "sets" / "README.md").write_text(f"---\nconfigs: {json.dumps(configurations)}\n---\n")
    [found] = check(data__prompt_dataset=str(tmp_path / "sets"))
    assert "Config name is missing" in found
    assert check(data__prompt_dataset=f"{tmp_path / 'sets'}@main") == []


@pytest.mark.parametrize("flag", ["data__prompt_dataset", "eval__dataset"])
@pytest.mark.parametrize(
    "name, fatal, problem",
    [
        ("nowhere.jsonl", True, "Unable to find "),
        ("DATA.JSONL", True, "there is no such file or folder; OpenRLHF reads .jsonl, in small letters"),
        ("user@example.org/train.jsonl", False, "not checked: it is not on this machine"),
        (
            "/home/user@example.org/train.jsonl",
            True,
            "OpenRLHF takes what follows an @ for a folder inside a data set",
        ),
        ("./here@there/train.jsonl", True, "OpenRLHF takes what follows an @ for a folder inside a data set"),
        ("other.jsonlines", True, "there is no such file or folder"),
        ("org/name", False, "not checked: it is not on this machine"),
        ("README.md", False, "not checked: it is not on this machine"),
        ("", True, "an empty name"),
    ],
)
def test_a_data_set_that_is_not_there(check, tmp_path, monkeypatch, flag, name, fatal, problem):
    monkeypatch.chdir(tmp_path)
    other = write(tmp_path / "other.jsonl", [row(i) for i in range(8, 16)])
    [found] = check(**{flag: f"{other},{name}"})
    assert found.startswith("!" * fatal + f"--{flag.replace('__', '.')} {name}".strip()) and problem in found


def test_a_wrong_key(check):
    found = check(data__input_key="question", data__label_key="answer")
    assert [line.split(":")[0] for line in found] == ["!--data.label_key answer", "!--data.input_key question"]
    remedy = "give the right key: the keys are datasource, label, prompt"
    assert all("8 of 8 rows" in line and line.endswith(remedy) for line in found)


def test_the_rows_that_are_evaluated(check, tmp_path):
    """OpenRLHF joins the data sets, and takes the first --data.max_samples of the whole, of evaluation too."""
    for name, numbers in (("a", range(100, 132)), ("b", range(200, 216))):
        write(tmp_path / f"{name}.jsonl", [row(i, datasource=name) for i in numbers])
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    flags = {"eval__dataset": f"{a},{b}", "eval__sampling": [Sampling("a", 1, 0.0), Sampling("b", 8, 1.0)]}
    assert check(**flags) == check(**flags, data__max_samples=48) == []
    first, second = check(**flags, data__max_samples=16)
    assert first.startswith("!--data.max_samples 16: of the 48 rows of --eval.dataset OpenRLHF takes the first 16, ")
    assert f"and none of {b}; give at least 48" in first
    assert second.startswith("!--eval.sampling b: it matches no source of the evaluation; the sources are a")
    [found] = check(**flags, data__max_samples=40)
    assert found.startswith("--data.max_samples 40: of the 48 rows of --eval.dataset OpenRLHF takes the first 40;")
    [found] = check(**flags | {"eval__dataset": f"{a},org/b"})  # whose sources are not known
    assert "not checked: it is not on this machine" in found
    [found] = check(data__prompt_dataset=f"{a},{b}", data__max_samples=16)
    assert found.startswith("!--data.max_samples 16: of the 48 rows of --data.prompt_dataset OpenRLHF takes the first")


def test_the_rows_are_those_of_the_run(tmp_path, tiny_model):
    """Upstream's `prepare_datasets` has the same prompts and labels, for training and for evaluation."""
    from openrlhf.trainer.ppo_trainer import prepare_datasets
    from transformers import AutoTokenizer

    names = [write(tmp_path / f"{i}.jsonl", [row(10 * i + j) for j in range(5)]) for i in range(3)]
    args = changed(
        actor__model_name_or_path=tiny_model, data__prompt_dataset=names[0], eval__dataset=",".join(names[1:])
    )
    args.data.max_samples = 7
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    strategy = SimpleNamespace(
        print=print, is_rank_0=lambda: False, args=args, setup_dataloader=lambda data, *_, **__: data
    )
    training, evaluation, _ = prepare_datasets(strategy, tokenizer)
    theirs = [pair for each in (training, evaluation) for pair in zip(each.prompts, each.labels, strict=True)]
    assert data.first_prompts(args, 100)[0] == theirs and len(theirs) == 5 + 7


def test_a_template_that_refuses_the_messages(check, tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "model")
    refuses = "{{ raise_exception('roles must alternate') if messages | length > 2 }}"
    (tmp_path / "model/chat_template.jinja").write_text(f"{refuses}{CHAT_TEMPLATE}")
    given = [row(i, prompt=row(i)["prompt"] * 3) if i else row(i) for i in range(8)]
    [found] = check(given, actor__model_name_or_path=str(tmp_path / "model"))
    assert "row 2, prompt: TemplateError: roles must alternate (and 6 more rows)" in found


@pytest.mark.parametrize(
    "max_len, new, fatal, problem",
    [
        (40, 16, True, "it leaves 24 tokens beside --rollout.max_new_tokens 16, and 8 of 8 prompts of"),
        (42, None, True, "it leaves 41 tokens, and 5 of 8 prompts"),
        (128, 16, False, "it leaves 112 tokens beside --rollout.max_new_tokens 16, and 1 of 8 prompts"),
        (16, 16, True, "it leaves 0 tokens"),
    ],
)
def test_prompts_that_do_not_fit(check, max_len, new, fatal, problem):
    """The tiny model's tokens are bytes, and its template adds 26."""
    lengths = [10, 10, 12, 16, 16, 16, 17, 100]
    rows = [row(i, prompt=[{"role": "user", "content": "x" * n}]) for i, n in enumerate(lengths)]
    [found] = check(rows, data__max_len=max_len, rollout__max_new_tokens=new)
    assert found.startswith("!" * fatal + f"--data.max_len {max_len}: {problem}")
    assert "(median 42, longest 126)" in found and f"give at least {126 + (new or 1)}" in found
    assert check(rows, data__max_len=126 + (new or 1), rollout__max_new_tokens=new) == []


def test_chats_and_text_are_rendered_as_in_the_run(tmp_path, tiny_model):
    from openrlhf.datasets.prompts_dataset import preprocess_data
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    given = [row(0), row(1, prompt="words"), row(2, prompt=[{"role": "system", "content": "é"}, *row(2)["prompt"]])]
    args = changed(actor__model_name_or_path=tiny_model, data__prompt_dataset=write(tmp_path / "d.jsonl", given))
    theirs = [preprocess_data(one, None, "prompt", "label", tokenizer.apply_chat_template) for one in given]
    assert data.first_prompts(args, 3)[0] == theirs
    assert load_tokenizer(Path(tiny_model)).get_vocab() == tokenizer.get_vocab()


def test_all_rows_count_and_the_first_are_looked_at(check, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_READ", 100)
    path = write(tmp_path / "large.jsonl", [row(i, **{"prompt": ""} if i == 500 else {}) for i in range(1000)])
    assert check(data__prompt_dataset=path, rollout__batch_size=1000) == []
    assert "there are 1000 prompts" in check(data__prompt_dataset=path, rollout__batch_size=1001)[0]


IMAGES = {"data__max_images_per_prompt": 1}


@pytest.mark.parametrize(
    ("images", "flags", "start", "said"),
    [
        (["a.png"], {}, "--data.max_images_per_prompt 0: 8 of 8 rows", "have images, which the model does not see"),
        (["a.png"], IMAGES, "!--data.max_images_per_prompt 1: 8 of 8 rows", "which the model does not see; give 1"),
        (None, IMAGES, "!--data.max_images_per_prompt 1: no row of", "has images under --data.image_key images"),
    ],
)
def test_images_that_a_text_model_does_not_see(check, images, flags, start, said):
    [found] = check([row(i, images=images) for i in range(8)], **flags)
    assert found.startswith(start) and said in found


def test_images_inside_a_data_set_are_not_decoded(tmp_path):
    """Decoding takes most of the time, and a broken image is none of the pre-flight's."""
    types = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    given = {"prompt": ["a"], "images": [[{"bytes": b"no image", "path": None}]]}
    datasets.Dataset.from_dict(given, features=types).to_parquet(str(tmp_path / "d.parquet"))
    assert list(rows.blend(str(tmp_path / "d.parquet"), "train", 10)) == [
        {"prompt": "a", "images": [{"bytes": b"no image", "path": None}]}
    ]


@pytest.mark.parametrize("label", ["2024-01-05", "2024-01-05T10:20:30Z"])
def test_a_text_that_the_reader_takes_for_a_date(check, label, tmp_path):
    """The grader would raise at the first of them. A user's function may want dates."""
    given = [row(i, label=label) for i in range(8)]
    for grader, start in ("math", "!--data.label_key label: "), ("mine.py", "--data.label_key label: "):
        [found] = check(given, reward__remote_url=[grader])
        assert found.startswith(start) and "row 1 (and 7 more rows): the label is read as " in found
        assert "timestamp" in found and found.endswith("write the data set as .parquet, with text in this column")
    pandas.DataFrame(given).to_parquet(tmp_path / "d.parquet")
    found = check(data__prompt_dataset=str(tmp_path / "d.parquet"), reward__remote_url=["math"])
    assert not any("is read as" in each for each in found)


def test_a_number_that_the_reader_rounds(check, tmp_path):
    given = [row(i, label=12345678901234567890123 + i) for i in range(8)]
    (found,) = check(given, reward__remote_url=["math"])
    assert found.startswith("!--data.label_key") and "a label was rounded when the file was read: 1.23" in found
    frame = pandas.DataFrame({"prompt": [f"q{i}" for i in range(3)], "label": ["9007199254740993", "", "5"]})
    frame.to_csv(tmp_path / "d.csv", index=False)
    flags = {"data__prompt_dataset": str(tmp_path / "d.csv"), "data__apply_chat_template": False}
    found = check(reward__remote_url=["math"], **flags)
    assert any(each.startswith("!") and "rounded when the file was read: 9007199254740992.0" in each for each in found)
    assert check([row(i, label=5.0 * i + 1) for i in range(8)], reward__remote_url=["math"]) == []
