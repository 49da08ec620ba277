"""What keeps a run from training with images is found before anything starts, in one line."""

import base64
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from arlopti_testing.preflight_command import arguments, changed
from transformers import AutoConfig, AutoModelForImageTextToText

from arlopti_openrlhf.cli import method_checks
from arlopti_openrlhf.ops.preflight import data, images, model, prompt, rows
from arlopti_openrlhf.ops.preflight.model import load_tokenizer

# As a vision-language model's: contents are a text, or a list of parts.
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ '<|image_pad|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}"
)
FLAG = "--data.max_images_per_prompt"


@pytest.fixture
def vision_language(tmp_path, tiny_model) -> Path:
    """Return a folder with the configuration, the tokenizer and the template of a vision-language model."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "vision_language"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen2_vl_text", "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
    architecture = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
    architecture["tie_word_embeddings"] = True
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    (folder / "config.json").write_text(json.dumps(architecture | {"vision_config": vision, "text_config": config}))
    built = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    built.save_pretrained(tmp_path / "built")
    shutil.copy(tmp_path / "built/model.safetensors", folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def with_torchvision(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "torchvision" else find_spec(name))


@pytest.fixture
def check(tmp_path, vision_language, with_torchvision):
    """check(rows, FLAG=VALUE...) returns what is found in data and model as text, what is fatal after "!"."""
    (tmp_path / "a.png").write_bytes(b"")

    def run(*rows, **changes):
        rows = [
            {"prompt": "<image>What is it?", "label": "x", "images": [str(tmp_path / "a.png")]} | row for row in rows
        ]
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names = {"actor__model_name_or_path": str(vision_language), "data__prompt_dataset": str(tmp_path / "d.jsonl")}
        args = changed(**names | {"data__max_images_per_prompt": 1} | changes)
        found = [*model.check(args), *images.check(args), *data.check(args)]
        return ["!" * finding.is_fatal + str(finding) for finding in found]

    return run


def test_nothing_is_wrong(check):
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert check({}, {"images": None, "prompt": "no image"}, {"prompt": [{"role": "user", "content": parts}]}) == []
    inside = base64.b64encode(b"x" * 300).decode()
    assert check({"images": "https://a.b/c.png"}, {"images": [inside]}, {"images": ["data:image/png;base64,AA"]}) == []
    assert check({"prompt": "text <|image_pad|>"}, data__apply_chat_template=False) == []
    assert check({"images": None, "prompt": "text"}, data__max_images_per_prompt=0) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"images": ["a.png", "b.png"]}, f"row 2, images: 2 images, and {FLAG} is 1"),
        ({"images": ["nowhere/b.png"]}, "row 2, images: there is no file nowhere/b.png"),
        ({"prompt": "What is it?"}, "row 2, images: 1 images, and the prompt has 0 places (<image>)"),
        ({"prompt": "<image> or <image>?"}, "row 2, images: 1 images, and the prompt has 2 places (<image>)"),
    ],
)
def test_a_row_whose_images_do_not_fit(check, row, said):
    [found] = check({}, row)
    assert found.startswith("!--data.prompt_dataset ") and said in found and "\n" not in found


def test_images_inside_a_data_set_are_not_decoded(tmp_path):
    """Decoding takes most of the time, and a broken image is none of the pre-flight's."""
    import datasets

    types = datasets.Features({"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    given = {"prompt": ["a"], "images": [[{"bytes": b"no image", "path": None}]]}
    datasets.Dataset.from_dict(given, features=types).to_parquet(str(tmp_path / "d.parquet"))
    data, _ = rows.FirstRows("train").blend(str(tmp_path / "d.parquet"), 10)
    [found] = rows.as_objects(data, "d.parquet")
    assert found == {"prompt": "a", "images": [{"bytes": b"no image", "path": None}]}


def test_images_under_another_key(check):
    [found] = check({}, data__image_key="pictures")
    assert found.startswith("!--data.image_key pictures: no row of ") and found.endswith("images, label, prompt")


def test_images_that_are_not_asked_for(check, tiny_model):
    [found] = check({}, data__max_images_per_prompt=0)
    assert found.startswith(f"!{FLAG} 0: 1 of 1 rows") and found.endswith("give 1")
    [found] = check({"prompt": "text"}, data__max_images_per_prompt=0, actor__model_name_or_path=tiny_model)
    assert found.startswith(f"{FLAG} 0: 1 of 1 rows") and "is no vision-language model" in found


def test_a_model_that_takes_no_images(check, tiny_model):
    [found, *_] = check({"prompt": "text"}, actor__model_name_or_path=tiny_model)
    assert found.startswith(f"!{FLAG} 1: {tiny_model} takes no images: its config.json has no vision_config")


def test_torchvision_is_missing(vision_language, tiny_model, monkeypatch):
    of_images, of_text = (changed(actor__model_name_or_path=str(name)) for name in (vision_language, tiny_model))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [found] = images.check(of_images)
    assert found.is_fatal and "need torchvision" in str(found)
    assert list(images.check(of_text)) == []


def test_methods_that_read_entropies(vision_language):
    policy = f"--actor.model_name_or_path {vision_language} --algo.token_method"
    [found] = method_checks.check_methods(arguments(f"{policy} stapo"))
    assert "stapo needs entropies, which the update of a vision-language model does not give" in str(found)
    assert list(method_checks.check_methods(arguments(f"{policy} ar"))) == []


def test_prompts_are_rendered_as_upstream_does(vision_language, tiny_model):
    """`<image>` stands for an image where the model takes some, and for itself where it does not."""
    from openrlhf.datasets.prompts_dataset import preprocess_data

    tokenizer = load_tokenizer(vision_language)
    assert tokenizer.chat_template == TEMPLATE
    of_images, of_text = (changed(actor__model_name_or_path=str(name)) for name in (vision_language, tiny_model))
    template = tokenizer.apply_chat_template
    for text in ("<image>a", "a <image> b<image>", "<image><image>", " <image> ", "a", "a <image>\n<image> b "):
        for row in ({"prompt": text}, {"prompt": [{"role": "user", "content": text}]}):
            rendered = prompt.renderer(of_images, template)(row)
            assert rendered == preprocess_data(row, None, "prompt", None, template)[0]
            assert rendered.count("<|image_pad|>") == text.count("<image>")
            assert prompt.renderer(of_text, template)(row) == text


def test_weights_of_the_language_only(check, vision_language, tiny_model):
    """A run whose prompts have no images may be meant."""
    shutil.copy(Path(tiny_model, "model.safetensors"), vision_language)
    found = [each for each in check({}) if "would be random" in each]
    assert (
        len(found) == 1 and found[0].startswith("--actor.model_name_or_path ") and "random: model.visual" in found[0]
    )
