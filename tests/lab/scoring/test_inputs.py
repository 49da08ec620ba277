"""Models have short names, and names sort as people sort them."""

from arlopti_openrlhf.lab.scoring.inputs import model_name, natural_key


def test_numbers_sort_by_value():
    names = ["kk_10ppl", "kk_9ppl", "global_step10", "global_step9", "aime", "2", "10", "1²2"]
    ordered = ["1²2", "2", "10", "aime", "global_step9", "global_step10", "kk_9ppl", "kk_10ppl"]
    assert sorted(names, key=natural_key) == ordered


def test_a_directory_or_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step9").mkdir()
    assert [model_name(model) for model in ("step9/", "./step9", "org/base", "base")] == ["step9"] * 2 + ["base"] * 2
