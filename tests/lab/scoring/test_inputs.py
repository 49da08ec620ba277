"""Models have short names, and names sort as people sort them."""

import pytest

from arlopti_openrlhf.lab.scoring.inputs import expand_models, natural_key


def test_numbers_sort_by_value():
    names = ["kk_10ppl", "kk_9ppl", "global_step10", "global_step9", "aime", "2", "10", "1²2"]
    ordered = ["1²2", "2", "10", "aime", "global_step9", "global_step10", "kk_9ppl", "kk_10ppl"]
    assert sorted(names, key=natural_key) == ordered


def test_models_by_directory_by_name_on_the_hub_and_as_a_directory_of_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.model_info", lambda name, timeout: None)
    for name in ("run/step10", "run/step9", "one"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    assert expand_models(["./one/", "org/base", "run"]) == {
        "one": "./one/",
        "base": "org/base",
        "step9": "run/step9",
        "step10": "run/step10",
    }
    with pytest.raises(ValueError, match="--model: two models have one name: base, one"):
        expand_models(["one", "base", "org/base", "other/one"])
