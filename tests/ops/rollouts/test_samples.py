"""No prompt is lost or comes twice, whatever step a run is stopped after."""

import copy
import inspect
import itertools
import pickle
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.config import hierarchize
from torch.utils.data import DataLoader

from arlopti_openrlhf.cli.train_ppo_ray import parse
from arlopti_openrlhf.evaluation.sampling import Sampling
from arlopti_openrlhf.ops.lifecycle import stopping
from arlopti_openrlhf.ops.rollouts import samples
from arlopti_openrlhf.ops.rollouts import samples as samples_module
from arlopti_openrlhf.ops.rollouts.prompts import Prompts
from arlopti_openrlhf.ops.rollouts.samples import SamplesGenerator, compute_eval_metrics
from arlopti_openrlhf.patching import plain_class

N = 2  # samples per prompt


class Ref(tuple):
    """A call's answer, which stands for its ref. No two are equal."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class Engine:
    """Answers a prompt, which is a number, with its rest by 3 as the score."""

    def __init__(self) -> None:
        self.generate_responses = SimpleNamespace(remote=self._responses)
        self.generate_in_order = SimpleNamespace(remote=self._in_order)
        self.get_num_unfinished_requests = SimpleNamespace(remote=lambda: 0)
        self.asked: list[dict] = []

    def _responses(self, prompt, label, num_samples, **kwargs) -> tuple:
        answer = {"prompt": prompt, "label": label, "observation_tokens": [1, 2, 3], "action_ranges": [(1, 3)]}
        answer |= {"reward": float(prompt), "scores": float(prompt) % 3 / 2, "rollout_log_probs": None}
        return Ref(answer for _ in range(num_samples))

    def _in_order(self, requests) -> Ref:
        self.asked += requests
        return Ref(self._responses(request["prompt"], request["label"], len(request["seeds"])) for request in requests)


class FakeRay:
    """Finishes calls in a random order of its own."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def wait(self, refs, num_returns, timeout):
        refs = list(refs)
        return [refs.pop(self.random.randrange(len(refs))) for _ in range(num_returns)], refs

    def get(self, refs):
        return refs

    def put(self, value):
        return value


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch):
    fake = FakeRay()
    for module in (samples, samples_generator, ppo_trainer, ppo_trainer_async):
        monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(stopping, "stop_requested", lambda: None)
    return fake


def arguments(*more: str) -> SimpleNamespace:
    """Return the arguments of a run over 2 episodes, with 4 prompts in each step."""
    flags = f"--actor.model_name_or_path m --rollout.batch_size 4 --rollout.n_samples_per_prompt {N} --train.seed 7"
    args = hierarchize(parse([*flags.split(), "--train.num_episodes", "2", *more]))
    args.eval.steps, args.rollout.least_shared = float("inf"), N
    return args


FILTERING = "--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.1 0.9".split()
DETERMINISTIC = "--train.deterministic"


def loader(count: int) -> DataLoader:
    return DataLoader(range(count), batch_size=1, collate_fn=lambda items: (["x"], [*items], [*items], [None]))


def generator(args, count: int, upstream: bool = False):
    strategy = SimpleNamespace(args=args)
    if upstream:
        return samples_generator.SamplesGenerator(strategy, loader(count), None, None, [Engine(), Engine()])
    prompts = Prompts(loader(count), "digest of these", args)
    return SamplesGenerator(strategy, prompts, None, None, [Engine(), Engine()], sampling=[Sampling("*", 3, 1.0)])


class Trainer(plain_class(ppo_trainer.PPOTrainer)):
    """Upstream's synchronous loop, whose steps only note their prompts and the state of a checkpoint."""

    def __init__(self, args, count: int, states: dict | None = None) -> None:
        self.args, self.generate_kwargs, self.eval_dataloader = args, {"max_len": 8}, None
        self.samples_generator = generator(args, count)
        self.prompts_dataloader = self.samples_generator.prompts_dataloader
        self.wandb_logger = self.tensorboard_logger = None
        self.states = states or super().init_checkpoint_states()
        self.steps: list[tuple[list[int], dict]] = []

    def init_checkpoint_states(self) -> dict:
        return self.states

    def broadcast_to_vllm(self) -> None:
        pass

    def train_step(self, rollout_samples, global_step: int) -> tuple[dict, int]:
        self.trained = [sample.prompts[0] for sample in rollout_samples]
        return {}, global_step + 1

    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        self.steps.append((self.trained, pickle.loads(pickle.dumps(client_states))))


class Generator(plain_class(ppo_trainer_async.GenerateSamplesActor)):
    """Upstream's asynchronous generator. What it puts into the queue are its steps."""

    def __init__(self, args, count: int, states: dict | None = None) -> None:
        self.args, self.generate_kwargs, self.eval_dataloader = args, {"max_len": 8}, None
        self.samples_generator = generator(args, count)
        self.prompts_dataloader = self.samples_generator.prompts_dataloader
        self._partial_rollout = self._eval_just_done = False
        self._last_eval_step = -1
        lock = SimpleNamespace(remote=lambda: None)
        self.vllm_lock = SimpleNamespace(acquire=lock, release=lock)
        self.rollout_slots = SimpleNamespace(get=lambda block: 1, put=lambda token, block: None)
        self.rollout_queue = SimpleNamespace(put=self._put)
        self.states = states or {"episode": 0, "total_consumed_prompts": 0}
        self.steps: list[tuple[list[int], dict]] = []
        if states:
            self.load_state_dict(states["data_loader_state_dict"])

    def fit(self) -> None:
        super().fit(self.states["episode"], self.states["total_consumed_prompts"])

    def _put(self, payload, block: bool) -> None:
        if payload != "done":
            rollout_samples, client_states, *_ = payload
            trained = [sample.prompts[0] for sample in rollout_samples]
            self.steps.append((trained, pickle.loads(pickle.dumps(client_states))))


@pytest.fixture
def checkpoint_states(monkeypatch):
    """A new run's states, without an actor to ask."""
    new = {"episode": 0, "global_step": 0, "total_consumed_prompts": 0, "data_loader_state_dict": {}}
    monkeypatch.setattr(ppo_trainer.BasePPOTrainer, "init_checkpoint_states", lambda self: copy.deepcopy(new))


@pytest.mark.parametrize("runner", [Trainer, Generator])
# Prompts, in whole steps or in an episode that ends with a smaller one, and prompts of one call of vLLM.
@pytest.mark.parametrize(
    "count, together",
    [
        (16, 4),
        (18, 12),
        *(pytest.param(*both, marks=pytest.mark.long) for both in ((16, 6), (16, 12), (18, 4), (18, 6))),
    ],
)
@pytest.mark.parametrize("filtering", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_stopped_after_any_step(runner, count, together, filtering, deterministic, checkpoint_states):
    """The steps before and after the stop train each prompt as often as a run without one."""
    flags = ["--rollout.vllm_generate_batch_size", str(together), *FILTERING * filtering]
    args = arguments(*flags, *[DETERMINISTIC] * deterministic)
    whole = runner(args, count)
    whole.fit()
    good = [prompt for prompt in range(count) if not filtering or prompt % 3 == 1]
    assert Counter(prompt for step, _ in whole.steps for prompt in step) == Counter(2 * N * good)
    assert filtering or len({str(step) for step, _ in whole.steps}) == len(whole.steps)  # each episode in its order
    for done, (_, states) in enumerate(whole.steps, start=1):
        resumed = runner(args, count, states)
        resumed.fit()
        trained = [step for step, _ in whole.steps[:done] + resumed.steps]
        if deterministic:
            assert trained == [step for step, _ in whole.steps]
        assert Counter(prompt for step in trained for prompt in step) == Counter(2 * N * good)
        assert len(trained) == len(whole.steps)
        if not filtering and resumed.steps:
            assert resumed.steps[-1][1]["total_consumed_prompts"] == 2 * count  # each counts once


@pytest.mark.parametrize("runner", [Trainer, Generator])
@pytest.mark.parametrize("least, trained", [(N, 3), (4, 2), (8, 0)])
def test_a_short_rollout_batch_is_what_all_ranks_can_share_equally(runner, least, trained, checkpoint_states, caplog):
    """The last 3 of 7 prompts have 6 samples. Four ranks would get 2, 2, 1 and 1 of them, and eight too few."""
    args = arguments(DETERMINISTIC)
    args.rollout.least_shared = least
    run = runner(args, 7)
    run.fit()
    assert [len(step) for step, _ in run.steps] == 2 * list(filter(None, [4 * N, trained * N]))
    assert all(count == N for step, _ in run.steps for count in Counter(step).values())  # whole prompts
    assert run.steps[-1][1]["total_consumed_prompts"] == (14 if trained else 11)
    left_out = f"{6 - trained * N} of 6 samples are left out of a short rollout batch: ranks get equally many"
    assert caplog.text.count(left_out) == 2 * (trained < 3)


@pytest.mark.parametrize("filtering", [False, True])
def test_without_the_flag_samples_are_upstreams(filtering, fake_ray):
    """Upstream's generator, with prompts of the same order, gives the same samples at each arrival."""
    args = arguments(*FILTERING * filtering)
    ours, upstream = generator(args, 18), generator(args, 18, upstream=True)
    order = [batch for _, batch in generator(args, 18).prompts_dataloader]
    upstream.prompts_dataloader = order
    for _ in range(2 if filtering else 5):  # one episode
        found = []
        for each in (ours, upstream):
            fake_ray.random.seed(1)
            rollout, rate, drawn, _ = each.generate_samples(max_len=8)
            # Upstream's rate is of samples among prompts.
            rate = rate and rate / (1 if each is ours else args.rollout.n_samples_per_prompt)
            found.append(([(s.prompts, s.rewards, s.action_mask.tolist()) for s in rollout], rate, drawn))
        assert found[0] == found[1]


def test_what_a_reward_logs_of_some_samples_alone_is_averaged_over_these(monkeypatch, fake_ray):
    def upstreams(self, **kwargs):
        infos = [{"reward": torch.ones(1)} for _ in range(4)]
        infos[0]["parse_time"], infos[1]["parse_time"] = torch.tensor([1.0]), torch.tensor([3.0])
        infos[2]["parse_time"] = torch.tensor([torch.nan])
        return [SimpleNamespace(info=info) for info in infos], None, 2, False

    monkeypatch.setattr(samples_generator.SamplesGenerator, "generate_samples", upstreams)
    ours = generator(arguments(), 16)
    ours._sample_buffer = []
    samples, *_ = ours.generate_samples()
    assert [sample.info["parse_time"].tolist() for sample in samples] == [[1.0], [3.0], [2.0], [2.0]]


def test_deterministic_samples_are_by_prompt_with_seeds_of_their_own():
    args = arguments(DETERMINISTIC, *FILTERING)
    one = generator(args, 18)
    order = [prompts[0] for _, (_, prompts, *_) in generator(args, 18).prompts_dataloader]
    rollout, *_ = one.generate_samples(max_len=8)
    accepted = [prompt for prompt in order if prompt % 3 == 1][:4]
    assert Counter(sample.prompts[0] for sample in rollout) == Counter(N * accepted)
    seeds = {request["prompt"]: request["seeds"] for engine in one.vllm_engines for request in engine.asked}
    assert len({seed for of_prompt in seeds.values() for seed in of_prompt}) == N * len(seeds)
    # A run without filtering draws the prompts in other rounds, and each has the seeds of its place.
    other = generator(arguments(DETERMINISTIC), 18)
    for _ in range(4):
        other.generate_samples(max_len=8)
    others = {request["prompt"]: request["seeds"] for engine in other.vllm_engines for request in engine.asked}
    assert others.items() >= seeds.items()


def test_evaluation_does_not_depend_on_when_it_is():
    args = arguments(DETERMINISTIC)
    asked = []
    for _ in range(2):
        one = generator(args, 18)
        one.generate_samples(max_len=8)
        for engine in one.vllm_engines:
            engine.asked.clear()
        one.eval_dataloader = loader(6)
        found = one.generate_eval_samples(max_len=8)
        assert [sample.prompts[0] for sample in found] == [prompt for prompt in range(6) for _ in range(3)]
        asked.append([engine.asked for engine in one.vllm_engines])
    assert asked[0] == asked[1] and len(asked[0][0]) == 3  # of rounds of 4 and 2 prompts over two engines


def test_a_request_to_stop_ends_the_wait(monkeypatch, fake_ray):
    monkeypatch.setattr(fake_ray, "wait", lambda refs, num_returns, timeout: ([], refs))
    monkeypatch.setattr(stopping, "stop_requested", lambda: 15)
    with pytest.raises(stopping.Interrupted, match="SIGTERM"):
        generator(arguments(), 18).generate_samples(max_len=8)


def test_an_error_of_one_engine_does_not_wait_for_the_others(monkeypatch, fake_ray):
    def get(refs):
        raise KeyError("of the first")

    monkeypatch.setattr(fake_ray, "wait", lambda refs, num_returns, timeout: (list(refs)[:1], list(refs)[1:]))
    monkeypatch.setattr(fake_ray, "get", get)
    with pytest.raises(KeyError):
        generator(arguments(DETERMINISTIC), 18).generate_samples(max_len=8)


def test_in_order_each_request_is_upstreams():
    """Upstream sends it alone. Here an engine gets all of its own, with upstream's parameters."""
    chosen = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 5, "max_len": 8, "do_sample": True}
    sent = []
    for flags in ([], [DETERMINISTIC]):
        one = generator(arguments("--algo.advantage.is_correction_level", "token", *flags), 18)
        for engine in one.vllm_engines:
            engine.generate_responses.remote = lambda sampling_params, **_: sent.append(sampling_params) or Ref()
        one._draw(iter(one.prompts_dataloader), 3, **chosen)
    in_order = [request["sampling_params"] for engine in one.vllm_engines for request in engine.asked]
    assert [len(engine.asked) for engine in one.vllm_engines] == [2, 1]
    assert len(sent) == 3 and in_order == sent and sent[0].logprobs == 1 and sent[0].top_p == 0.9


# Batches of sources, prompts, labels, images. One problem occurs in two sources, once with a list of labels.
DATA = [
    (["kk_2ppl"], ["p"], ["a"], [None]),
    (["aime"], ["p"], ["a"], [None]),
    (["kk_2ppl", None], ["q", "r"], [["c", "d"], "d"], [None, None]),
]
SPECS = [Sampling("*", 2, 1.0), Sampling("aime", 4, 0.6), Sampling("Non*", 1, 0.0)]


def sample(prompt: str, label, score: float, reward: float = -0.5, source: str = "", **info: float) -> Experience:
    experience = Experience(
        prompts=[prompt],
        labels=[label],
        rewards=torch.tensor([reward]),
        scores=torch.tensor([score]),
        response_length=torch.tensor([10 + reward]),
        truncated=torch.tensor([False]),
        info={name: torch.tensor([value]) for name, value in info.items()},
    )
    experience.datasource, experience.scores_are_rewards = source, False
    return experience


def test_upstreams_controller_can_call_it():
    """With the arguments of the function that it replaces. `sampling` is bound."""
    theirs, ours = (inspect.signature(f).parameters for f in (samples_module._upstream_metrics, compute_eval_metrics))
    assert [*ours] == [*theirs, "sampling"]


def test_measures_are_those_of_the_scores(monkeypatch):
    monkeypatch.setattr(samples_module, "_graded", set())
    kk, aime = {"source": "kk_2ppl"}, {"source": "aime"}
    samples = [sample("q", ["c"], 1.0, well_formed=1.0, **kk), sample("q", ["c"], 0.0, well_formed=0.0, **kk)]
    samples += [sample("p", "a", 1.0, reward=3.0, well_formed=1.0, **kk) for _ in range(2)]
    samples += [sample("p", "a", float(i == 2), **aime) for i in range(4)]
    samples += [sample("r", "d", 1.0, reward=1.0, source="None")]
    samples[-1].scores_are_rewards = True
    logs = compute_eval_metrics(DATA, samples, 2, sampling=SPECS)
    # kk_2ppl: q is right once of 2, p twice; aime: once of 4.
    assert logs["kk_2ppl/accuracy"] == pytest.approx((0.5 + 1) / 2)
    assert logs["kk_2ppl/pass@2"] == 1 and logs["kk_2ppl/well_formed"] == pytest.approx(0.75)
    assert logs["aime/accuracy"] == 0.25 and logs["aime/pass@4"] == 1
    assert logs["aime/pass@2"] == pytest.approx(1 - 3 / 6)  # of the 6 pairs, 3 lack the right one
    assert "aime/well_formed" not in logs
    assert logs["kk_2ppl/accuracy/low"] < 0.75 < logs["kk_2ppl/accuracy/high"] <= 1
    assert logs["accuracy"] == pytest.approx((0.75 + 0.25) / 2)
    # OpenRLHF's names, whose means are of scores too.
    assert logs["eval_kk_2ppl_pass1"] == pytest.approx(0.75) and logs["eval_aime_pass4"] == 1
    # Rewards in the place of scores tell nothing of accuracy.
    assert not any(name.startswith("None/") for name in logs) and logs["eval_None_pass1"] == 1
    # Scores that are more than right or wrong have a mean, and are no accuracy.
    for score in (2.0, 1.0):  # once known, it is no accuracy by chance
        judged = [sample("p", "a", score, **kk), sample("p", "a", 0.0, **kk)]
        logs = compute_eval_metrics(DATA, judged, 2, sampling=SPECS)
        assert logs["kk_2ppl/score"] == logs["eval_kk_2ppl_pass1"] == score / 2
        assert not any("accuracy" in name or "pass@" in name for name in logs)


def test_samples_are_drawn_as_each_source_says(monkeypatch):
    calls = []

    def generate(self, dataloader_iter, num_prompts, dynamic_filtering, **kwargs):
        batches = [batch for _, batch in itertools.islice(dataloader_iter, num_prompts)]
        prompts, labels = ([value for batch in batches for value in batch[column]] for column in (1, 2))
        calls.append((prompts, kwargs["n_samples_per_prompt"], kwargs["temperature"], kwargs["top_p"]))
        n = kwargs["n_samples_per_prompt"]
        return (
            [sample(p, a, 0.0) for p, a in zip(prompts, labels, strict=True) for _ in range(n)],
            0,
            len(batches) < num_prompts,
        )

    monkeypatch.setattr(SamplesGenerator, "_generate_vllm", generate)
    args = SimpleNamespace(vllm=SimpleNamespace(enable_sleep=False), rollout=SimpleNamespace(batch_size=16))
    generator = SamplesGenerator(SimpleNamespace(args=args), None, DATA, None, [], sampling=SPECS)
    for _ in range(2):  # an evaluation leaves nothing behind
        calls.clear()
        samples = generator.generate_eval_samples(n_samples_per_prompt=9, temperature=0.1, top_p=0.9)
        found = [(s.datasource, s.prompts[0]) for s in samples]
        assert found == 2 * [("kk_2ppl", "p")] + 2 * [("kk_2ppl", "q")] + 4 * [("aime", "p")] + [("None", "r")]
        assert calls == [(["p", "q"], 2, 1.0, 0.9), (["p"], 4, 0.6, 0.9), (["r"], 1, 0.0, 0.9)]
