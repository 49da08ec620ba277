"""The quickstart's flags parse, and its results are shown. CI runs it at a reduced size."""

import json
import subprocess
import sys

import pytest

from arlopti_openrlhf.cli import quickstart, train_ppo_ray
from arlopti_openrlhf.cli.quickstart_tasks import TASKS, Plan
from arlopti_openrlhf.lab.quickstart_results import accuracies, plot, read_records, report, sample_answers

pytestmark = pytest.mark.whole_stack


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("kind", ["full", "reduced"])
def test_the_real_command_parses_its_flags(tmp_path, name, kind):
    size = getattr(TASKS[name], kind)
    plan = Plan(tmp_path, TASKS[name], size, seed=3)
    flags = vars(train_ppo_ray.parse(quickstart.training_flags(plan)))
    assert (flags["algo.ar.alpha"], flags["algo.lopti.eta"], flags["train.seed"]) == (0.3, 0.5, 4)
    assert flags["eval.dataset"] == str(plan.files.during) and size.steps % flags["eval.steps"] == 0


def test_weights_reach_vllm_on_a_gpu_without_a_second_rank_of_nccl(tmp_path, monkeypatch):
    plan = Plan(tmp_path, TASKS["sums"], TASKS["sums"].full, seed=0)
    for device, backend in (("cpu", "gloo"), ("cuda", "nccl")):
        monkeypatch.setenv("ARLOPTI_DEVICE", device)
        assert vars(train_ppo_ray.parse(quickstart.training_flags(plan)))["vllm.sync_backend"] == backend


def write_responses(path, right: int):
    """Write 2 puzzles of 2 people and 1 of 3, each with `right` of 8 samples right, and a wrong greedy answer."""
    response = {"text": "One\u2028line", "well_formed": True, "tokens": 9, "truncated": False}
    records = [
        {"prompt": prompt, "datasource": source, "temperature": t}
        | {"responses": [response | {"score": float(i < r)} for i in range(n)]}
        for prompt, source in (("a", "kk_2ppl"), ("b", "kk_2ppl"), ("c", "kk_3ppl"))
        for t, n, r in ((1.0, 8, right), (0.0, 1, 0))
    ]
    records.append(records[0])  # of an evaluation that was repeated
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def test_results_as_numbers_text_and_picture(tmp_path):
    before = accuracies(read_records(write_responses(tmp_path / "before.jsonl", right=2)))
    after = accuracies(read_records(write_responses(tmp_path / "after.jsonl", right=4)))
    assert {source: found["n"] for source, found in before.items()} == {"all": 3, "kk_2ppl": 2, "kk_3ppl": 1}
    assert before["all"]["accuracy"] == 0.25 and after["all"]["accuracy"] == 0.5 and after["all"]["greedy"] == 0
    assert before["all"]["ci95"] == 0  # every puzzle has the same share of right answers
    summary = {"seed": 4, "minutes": 1.0, "resumed": False, "peak_rss_gib": 2.0, "before": before, "after": after}
    whole = summary | {"overall": {"before": before["all"], "after": after["all"]}}
    text = report(whole, tmp_path, "pass@8", "tiny")
    assert "Sampled accuracy changed by +0.250" in text and "kk_3ppl          1" in text
    assert "arlopti quickstart --task tiny --seed 5 " in text and "--task sums" in text
    reduced = report(whole, tmp_path, "pass@8", "sums", is_reduced=True)
    assert "The set-up works. So few steps teach nothing" in reduced and "standard errors" not in reduced
    curves = {"train/rollout/reward_mean": {1: -1.0, 2: 1.0}, "train/lopti/low_share": {1: 0.1, 2: 0.1}}
    plot(curves, tmp_path / "curves.png")  # a short run may have no other curve
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_answers_are_shown_of_a_puzzle_solved_since_and_of_one_that_is_not():
    before, after = (
        [
            {
                "prompt": f"<|im_start|>user\nPuzzle {i}?<|im_end|>\n<|im_start|>assistant\n<think>",
                "temperature": temperature,
                "responses": [{"text": f"{name}\x1b[2J {i}</think>", "score": float(i in solved and not temperature)}],
            }
            for i in range(4)
            for temperature in (1.0, 0.0)
        ]
        for name, solved in (("before", {0}), ("after", {0, 2}))
    )
    shown = ["A problem that it has learned to solve:", "Puzzle 2?", r"before: <think>before\x1b[2J 2</think>"]
    shown += [r"after: <think>after\x1b[2J 2</think>", "One that it does not solve:", "Puzzle 1?"]
    shown += [rf"{when}: <think>{when}\x1b[2J 1</think>" for when in ("before", "after")]
    assert [line.strip() for line in sample_answers(before, after).splitlines() if line] == shown


def test_each_seed_has_a_folder(tmp_path, monkeypatch):
    made = []

    def stop(path):
        made.append(path)
        raise SystemExit

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "lock", stop)
    for seed in ("0", "1"):
        monkeypatch.setattr(sys, "argv", ["quickstart", "--seed", seed])
        with pytest.raises(SystemExit):
            quickstart.main()
    assert made[0].parent != made[1].parent


def test_the_same_command_resumes_and_force_begins_anew(tmp_path):
    plan = Plan(tmp_path, TASKS["tiny"], TASKS["tiny"].full, seed=0)

    def resumes(plan, anew=False):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "trained").touch()
        answer = quickstart.begin(plan, anew)[1]
        assert (tmp_path / "data").exists() == (tmp_path / "trained").exists() == answer
        return answer

    assert not resumes(plan)  # of an earlier version, which kept no settings
    (tmp_path / "quickstart.log").write_text("why it ended")
    assert resumes(plan) and (tmp_path / "quickstart.log").read_text() == "why it ended"
    assert not resumes(plan, anew=True) and resumes(plan)
    changed = plan.task._replace(flags=plan.task.flags.replace("3e-4", "1e-4"))
    for other in (plan._replace(seed=1), plan._replace(size=plan.task.reduced), plan._replace(task=changed)):
        assert not resumes(other)
    (tmp_path / "settings.json").write_text("")  # the disk was full
    assert not resumes(plan)


def test_another_quickstart_in_the_folder_is_replaced_with_force_alone(tmp_path, monkeypatch, capsys):
    quickstart.begin(Plan(tmp_path, TASKS["tiny"], TASKS["tiny"].full, seed=0))
    monkeypatch.setattr(sys, "argv", ["quickstart", "--reduced", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        quickstart.main()
    assert end.value.code == 2 and "holds another quickstart: give --force" in capsys.readouterr().err


def test_a_policy_that_is_there_is_not_made_again_and_half_of_one_is_none(tmp_path):
    made = []

    def make(plan, folder):
        folder.mkdir()
        made.append(folder)
        if len(made) == 1:
            raise KeyboardInterrupt

    task = TASKS["tiny"]._replace(make_policy=make)
    with pytest.raises(KeyboardInterrupt):
        quickstart.make_policy(Plan(tmp_path, task, task.full, seed=0))
    assert not (tmp_path / "model").exists()
    for _ in range(2):
        quickstart.make_policy(Plan(tmp_path, task, task.full, seed=0))
    assert (tmp_path / "model").exists() and len(made) == 2


@pytest.mark.long
def test_a_pretrained_model_trains_and_what_is_done_stays(tmp_path, smollm2):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "arlopti_openrlhf", "quickstart", "--task=sums", "--reduced", f"--out={out}"]
    subprocess.run(command, check=True)
    first = json.loads((out / "summary.json").read_text("utf-8"))
    assert not first["resumed"] and first["before"]["math"]["n"] == first["after"]["math"]["n"] == 8
    assert (out / "checkpoint" / "model.safetensors").stat().st_size > 2 * 134e6  # bf16, and the head is the embedding
    # As if it had been ended in the last evaluation.
    (out / "summary.json").unlink()
    (out / "evaluation" / "checkpoint.responses.jsonl").unlink()
    log = out / "quickstart.log"
    steps = log.read_text("utf-8").count("Global step")
    subprocess.run(command, check=True)
    second = json.loads((out / "summary.json").read_text("utf-8"))
    assert second["resumed"] and second["before"] == first["before"]
    assert log.read_text("utf-8").count("Global step") == steps > 0
