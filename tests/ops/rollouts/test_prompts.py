"""The prompts come in the order of the seed, and their place survives a checkpoint."""

import itertools
import json
import logging
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from openrlhf.utils.config import hierarchize
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from arlopti_openrlhf.cli.train_ppo_ray import parse
from arlopti_openrlhf.ops.rollouts.prompts import OtherPrompts, Prompts, digest_of, prepare_datasets, seed_of


def arguments(*flags: object) -> SimpleNamespace:
    return hierarchize(parse(["--actor.model_name_or_path", "m", *map(str, flags)]))


def prompts(seed: int = 1, count: int = 40, digest: str = "", more: tuple = ()) -> Prompts:
    loader = DataLoader(list(range(count)), batch_size=1, collate_fn=list)
    return Prompts(loader, digest or f"of {count}", arguments("--train.seed", seed, *more))


def of_episode(found: Prompts) -> list[int]:
    return [item for _, batch in found for item in batch]


def test_the_order_follows_from_the_seed_and_the_episode():
    one = prompts()
    first = of_episode(one)
    torch.rand(1)  # what else the process draws does not matter
    state = torch.get_rng_state()
    assert of_episode(prompts()) == first
    assert sorted(first) == list(range(40)) != first
    assert of_episode(prompts(seed=2)) != first
    assert torch.equal(torch.get_rng_state(), state)
    assert one.drawn_in_all == 40
    places = [place for place, _ in one]
    assert places == [("train", 1, number) for number in range(40)] and one.drawn_in_all == 80
    assert sorted(second := of_episode(one)) == sorted(first) and second != first


def test_a_resumed_run_draws_first_what_was_drawn_and_not_trained():
    whole = prompts()
    of_episode(whole)
    drawn = dict(itertools.islice(rest := iter(whole), 17))
    whole.untrained = [15, 9, 16]
    state = json.loads(json.dumps(whole.state_dict()))
    assert state == {"episode": 1, "drawn": 17, "untrained": [15, 9, 16], "of": 40, "digest": "of 40"}
    resumed = prompts()
    resumed.load_state_dict(state)
    again = dict(itertools.islice(iter(resumed), 2))
    assert again == {("train", 1, number): drawn["train", 1, number] for number in (9, 15)}
    assert resumed.drawn_in_all == whole.drawn_in_all == 57
    # Stopped anew before the rest of these was drawn. None of the two has been trained.
    resumed.untrained = [9, 15]
    third = prompts()
    third.load_state_dict(resumed.state_dict())
    assert dict(third) == {("train", 1, number): drawn["train", 1, number] for number in (9, 15, 16)} | dict(rest)
    assert third.drawn_in_all == 80


def test_a_run_that_is_resumed_at_the_end_of_an_episode_has_no_prompts_until_the_next_one():
    whole = prompts()
    first = of_episode(whole)
    resumed = prompts()
    resumed.load_state_dict(whole.state_dict())
    assert of_episode(resumed) == [] and of_episode(resumed) == of_episode(whole) != first


@pytest.fixture
def warnings(caplog):
    logging.getLogger("arlopti_openrlhf.ops.rollouts.prompts").addHandler(caplog.handler)
    return caplog


@pytest.mark.parametrize("other", [{"count": 48}, {"digest": "of another 40"}])
def test_a_place_among_other_prompts_is_refused_unless_it_is_asked_for(other, warnings):
    state = prompts().state_dict()
    with pytest.raises(OtherPrompts, match="had other prompts or labels .40 then, .* --ckpt.load_changed") as refused:
        prompts(**other).load_state_dict(state)
    assert refused.value.exit_code == 2 and not warnings.text
    prompts(**other, more=("--ckpt.load_changed",)).load_state_dict(state)
    assert "had other prompts or labels (40 then, " in warnings.text


def test_of_fewer_prompts_those_that_are_there_are_drawn():
    whole = prompts()
    of_episode(whole)
    whole.untrained = [7, 39]
    fewer = prompts(count=20, more=("--ckpt.load_changed",))
    fewer.load_state_dict(whole.state_dict())
    assert [place for place, _ in fewer] == [("train", 0, 7)] and fewer.drawn_in_all == 20


def test_a_place_that_upstreams_loader_has_kept():
    with pytest.raises(ValueError, match="OpenRLHF's own command"):
        prompts().load_state_dict({"_sampler_iter_yielded": 3})


def test_the_digest_knows_prompts_labels_and_their_order():
    def of(*pairs: tuple) -> str:
        prompts, labels = zip(*pairs, strict=True)
        return digest_of(SimpleNamespace(prompts=prompts, labels=labels, tokenizer=None))

    rows = [("a", "1"), ("b", "2")]
    others = [rows[::-1], rows[:1], [("a", "1"), ("b", "3")], [("a1", ""), ("b", "2")], [("a", 1), ("b", "2")]]
    assert of(*rows) == of(*rows) and len({of(*rows), *(of(*other) for other in others)}) == 6
    assert of(("\ud800", None)) != of(("", None))


# As Llama 3.2's and gpt-oss' chat templates write the date.
@pytest.mark.parametrize("form", ["%d %b %Y", "%Y-%m-%d"])
def test_a_run_whose_template_writes_the_date_is_resumed_on_another_day(tiny_model, monkeypatch, form):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = f"{{{{ 'Today: ' + strftime_now('{form}') + messages[0].content }}}}"

    def digest(day: int, question: str) -> str:
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 11, day)

        monkeypatch.setattr("arlopti_openrlhf.ops.rollouts.prompts.datetime", Clock)
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False)
        assert f"{day}" in text and "2026" in text
        return digest_of(SimpleNamespace(prompts=[text], labels=[""], tokenizer=tokenizer))

    assert digest(26, "1 + 1?") == digest(27, "1 + 1?") != digest(27, "1 + 2?")


@pytest.fixture
def prepare(tiny_model):
    """prepare(DATA, FLAGS) returns what `prepare_datasets` returns for chats and the tiny model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def run(data: object, flags: str) -> tuple:
        given = f"--data.prompt_dataset {data} --data.input_key prompt --data.label_key label {flags}"
        args = arguments(*given.split(), "--data.apply_chat_template")
        strategy = SimpleNamespace(args=args, print=print, is_rank_0=lambda: False)
        strategy.setup_dataloader = lambda data, *_, **__: DataLoader(data, batch_size=1)
        return prepare_datasets(strategy, tokenizer)

    return run


@pytest.mark.parametrize("samples", [63, 64])
def test_data_for_less_than_one_step(samples, tiny_data, prepare):
    """Upstream takes no optimizer step then, and saves the model as it came."""
    sizes = f"--data.max_samples {samples} --rollout.n_samples_per_prompt 2 --train.batch_size 128"
    if samples == 64:
        assert prepare(tiny_data, f"{sizes} --rollout.batch_size 64")[2] == 1
    else:
        with pytest.raises(ValueError, match="63 prompts with 2 samples each are fewer than one batch of .* 128"):
            prepare(tiny_data, f"{sizes} --rollout.batch_size 64")


def test_the_log_shows_the_first_prompt(tmp_path, prepare, caplog):
    logger = logging.getLogger("arlopti_openrlhf.ops.rollouts.prompts")
    logger.addHandler(caplog.handler)
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "Is it a tag?", "label": "1"}) + "\n")
    loader, _, _ = prepare(path, "--rollout.n_samples_per_prompt 1 --rollout.batch_size 1 --train.batch_size 1")
    logger.removeHandler(caplog.handler)
    expected = "<|im_start|>user\nIs it a tag?<|im_end|>\n<|im_start|>assistant\n<think>"
    assert loader.loader.dataset.prompts == [expected]
    assert f"the first prompt as the model gets it: 38 tokens\n  {expected!r}" in caplog.text


def test_seeds_differ_and_stay():
    seeds = {seed_of(42, "train", 0, prompt, sample) for prompt in range(100) for sample in range(100)}
    assert len(seeds) == 10_000 and all(0 <= seed < 2**56 for seed in seeds)
    assert seed_of(42, "train", 0, 0, 0) == 43614687250317358
