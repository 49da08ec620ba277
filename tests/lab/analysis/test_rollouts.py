"""A batch holds each response behind its prompt, with OpenRLHF's advantages."""

from types import SimpleNamespace

import pytest
import torch
from arlopti_testing.analysis_fakes import RIGHT, WRONG, fake_answers, fake_sample
from transformers import AutoTokenizer

from arlopti_openrlhf.lab.analysis import rollouts
from arlopti_openrlhf.lab.scoring.inputs import read_rows


def test_batch_holds_each_response_behind_its_prompt(tiny_model, tiny_data, batch):
    rows = rollouts.draw(read_rows([tiny_data]), 8, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    responses = [tokenizer.decode(batch.sequences[i, 1:][batch.action_mask[i]]) for i in range(3)]
    assert responses == [RIGHT, WRONG, "no"]
    # Rewards 3, -0.5, -3: mean -1/6, standard deviation (n - 1) 3.0139; the advantages are 1.0507, -0.1106, -0.9401.
    assert [batch.advantages[i].unique().tolist()[-1 if i == 0 else 0] for i in range(3)] == pytest.approx(
        [1.0507, -0.1106, -0.9401], abs=1e-4
    )
    assert rows == rollouts.draw(read_rows([tiny_data]), 8, seed=0) != rollouts.draw(read_rows([tiny_data]), 8, seed=1)


def test_the_first_of_a_draw_are_of_all_sources():
    assert {*rollouts.draw(["math500"] * 500 + ["aime"] * 500, 900, seed=0)[:20]} == {"math500", "aime"}


def test_equal_rewards_have_no_advantage():
    """Eight times 0.1 has a mean that is not 0.1 in float32."""
    rewards = torch.tensor([0.1] * 8 + [1.0, 0.0])
    prompts = torch.tensor([0] * 8 + [1] * 2)
    advantages = rollouts.group_normalized(rewards, prompts)
    assert torch.equal(advantages[:8], torch.zeros(8)) and advantages[8] == -advantages[9] > 0.7


def test_advantages_are_openrlhfs_group_norm():
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker as Maker

    rewards = torch.tensor([3.0, -0.5, -1.0, -3.0, -1.0, -1.0, -1.0, -1.0])
    experiences = [
        Experience(index=[i], rewards=reward[None], action_mask=torch.ones(1, 2), kl=torch.zeros(1, 2), info={})
        for i, reward in enumerate(rewards)
    ]
    flags = SimpleNamespace(
        reward=SimpleNamespace(clip_range=None),
        rollout=SimpleNamespace(n_samples_per_prompt=4),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm", gamma=1.0)),
    )
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=flags),
        kl_ctl=SimpleNamespace(value=0.0),
        advantage_estimator="group_norm",
        get_cumulative_returns=lambda *args: Maker.get_cumulative_returns(None, *args),
    )
    upstream = [e.advantages[0, 0] for e in Maker.compute_advantages_and_returns(maker, experiences)]
    assert torch.equal(rollouts.group_normalized(rewards, torch.arange(8) // 4), torch.stack(upstream))


def rows_of(tiny_data, count):
    return rollouts.draw(read_rows([tiny_data]), count, seed=0)


def test_responses_are_kept_and_others_are_sampled(tiny_model, tiny_data, tmp_path, monkeypatch):
    asked, sampled = rollouts.Asked(2, 1.0, 100, 0, False), []

    def sample(path, model, rows, asked, room):
        sampled.append(len(rows))
        return fake_sample([RIGHT, WRONG])(path, model, rows, asked, room)

    monkeypatch.setattr(rollouts, "sample", sample)
    path = tmp_path / "responses.jsonl"
    first = rollouts.answer(path, tiny_model, rows_of(tiny_data, 3), asked)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"key": "cut off')
    again = rollouts.answer(path, tiny_model, rows_of(tiny_data, 3), asked)
    assert sampled == [3] and [list(one.responses[0]) for one in again] == [list(one.responses[0]) for one in first]
    rollouts.answer(path, tiny_model, [*rows_of(tiny_data, 3), *read_rows([tiny_data])[-2:]], asked)
    for other in ({"seed": 1}, {"template": {"enable_thinking": False}}):
        rollouts.answer(path, tiny_model, rows_of(tiny_data, 3), asked._replace(**other))
    assert sampled == [3, 2, 3, 3]


def test_responses_fill_the_tokens(tiny_model, tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "sample", fake_sample([RIGHT, WRONG]))
    asked, rows = rollouts.Asked(2, 1.0, 100, 0, False), rows_of(tiny_data, 4)
    everything = rollouts.answer(tmp_path / "a", tiny_model, rows, asked)
    sizes = [rollouts._tokens(one) for one in everything]
    assert len(rollouts.answer(tmp_path / "a", tiny_model, rows, asked, sum(sizes[:2]))) == 2
    assert len(rollouts.answer(tmp_path / "a", tiny_model, rows, asked, sum(sizes[:2]) - 1)) == 1
    assert len(rollouts.answer(tmp_path / "a", tiny_model, rows, asked, 1)) == 1  # the first in any case


@pytest.mark.long
def test_vllm_samples_the_prompts_own_tokens(tiny_model, tiny_data, tmp_path):
    rows, asked = rows_of(tiny_data, 40), rollouts.Asked(3, 1.0, 5, 0, False)
    sampled = rollouts.answer(tmp_path / "responses.jsonl", tiny_model, rows, asked)
    expected = fake_answers(tiny_model, rows, [])
    assert [s.prompt_ids for s in sampled] == [s.prompt_ids for s in expected]
    assert [len(s.responses) for s in sampled] == [3] * 40
    assert all(0 < len(ids) <= 5 for s in sampled for _, ids in s.responses)
    # With room for some, the first are sampled, in chunks.
    few = rollouts.sample(tmp_path / "few", tiny_model, [(str(i), row) for i, row in enumerate(rows)], asked, 100)
    assert list(few) == [str(i) for i in range(len(few))] and 0 < len(few) < 40
