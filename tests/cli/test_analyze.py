"""The paper's figures: gradients against autograd and each other, updates that are undone, the page in a browser."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from browser import CHROMIUM, chromium
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from transformers import AutoTokenizer

from arlopti_openrlhf.analysis import curves, figures, plots, report, rollouts, suggest, updates
from arlopti_openrlhf.cli import analyze
from arlopti_openrlhf.token_update import HIGH, LOW, group_mask

RIGHT = " Since Zoey's statement is so, check it.</think><answer>(1) Zoey is a knight\n(2) Oliver is a knave</answer>"
WRONG = " Thus so.</think><answer>(1) Zoey is a knave\n(2) Oliver is a knave</answer>"
FIGURES = ["fig1", "fig2", "fig3", "fig5", "fig6", "fig7", "fig8"]


def fake_sample(texts):
    """In place of vLLM: each prompt is answered with the same texts."""

    def sample(model, rows, n, temperature, max_new_tokens, seed):
        tokenizer = AutoTokenizer.from_pretrained(model)
        sampled = []
        for row in rows:
            prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, *texts)]
            sampled.append(rollouts.Sampled(prompt, ids[0], list(zip(texts, ids[1:], strict=True))))
        return sampled

    return sample


@pytest.fixture(scope="module")
def batch(tiny_model, tiny_data):
    """8 prompts with 3 responses each, one of them right."""
    rows = rollouts.read_rows([tiny_data], 8, seed=0)
    sampled = fake_sample([RIGHT, WRONG, "no"])(tiny_model, rows, 3, 1.0, 100, 0)
    return rollouts.make_batch(rollouts.grade(rows, sampled))


@pytest.fixture(scope="module")
def policy(tiny_model):
    return updates.Policy(tiny_model, temperature=0.7, micro_batch_tokens=600, optimizer="adamw")


@pytest.fixture(scope="module")
def tokens(policy, batch):
    return policy.tokens(batch)


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


# --- rollouts ------------------------------------------------------------------------------------------------


def test_batch_holds_each_response_behind_its_prompt(tiny_model, tiny_data, batch):
    rows = rollouts.read_rows([tiny_data], 8, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    responses = [tokenizer.decode(batch.sequences[i, 1:][batch.action_mask[i]]) for i in range(3)]
    assert responses == [RIGHT, WRONG, "no"]
    # Rewards 3, -0.5, -3: mean -1/6, standard deviation (n - 1) 3.0139; the advantages are 1.0507, -0.1106, -0.9401.
    assert [batch.advantages[i].unique().tolist()[-1 if i == 0 else 0] for i in range(3)] == pytest.approx(
        [1.0507, -0.1106, -0.9401], abs=1e-4
    )
    assert rows == rollouts.read_rows([tiny_data], 8, seed=0) != rollouts.read_rows([tiny_data], 8, seed=1)


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


def test_vllm_samples_the_prompts_own_tokens(tiny_model, tiny_data):
    rows = rollouts.read_rows([tiny_data], 2, seed=0)
    sampled = rollouts.sample(tiny_model, rows, 3, 1.0, 5, 0)
    expected = fake_sample([])(tiny_model, rows, 3, 1.0, 5, 0)
    assert [s.prompt_ids for s in sampled] == [s.prompt_ids for s in expected]
    assert [len(s.responses) for s in sampled] == [3, 3]
    assert all(0 < len(ids) <= 5 for s in sampled for _, ids in s.responses)


# --- gradients and updates -----------------------------------------------------------------------------------


def test_statistics_of_the_tokens(policy, batch, tokens):
    logits = policy.model(batch.sequences, attention_mask=batch.attention_mask).logits[:, :-1].detach() / 0.7
    log_probs, mask = logits.log_softmax(dim=-1), batch.action_mask
    sampled = log_probs.gather(-1, batch.sequences[:, 1:, None])[..., 0]
    assert torch.allclose(tokens.log_probs, sampled * mask, atol=2e-5)
    assert torch.allclose(policy.log_probs(batch), tokens.log_probs, atol=2e-5)  # by the training's actor
    rest = log_probs.exp().square().sum(dim=-1) - sampled.exp().square()
    assert torch.allclose(tokens.squared_rest, rest * mask, atol=1e-5)
    assert torch.allclose(tokens.entropy, torch.distributions.Categorical(logits=logits).entropy() * mask, atol=1e-4)


def test_gradients_of_groups_add_up_to_the_whole(policy, batch, tokens):
    quarters = figures._bins(tokens.log_probs.exp(), batch.action_mask, figures.EDGES)
    assert torch.equal(torch.stack(quarters).sum(dim=0), batch.action_mask.long())
    whole = flat(policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask))
    parts = sum(flat(policy.gradient(batch, tokens.log_probs, batch.advantages, q)) for q in quarters)
    assert whole.norm() > 0.01 and torch.allclose(parts, whole, atol=1e-6)
    # By hand: on-policy, the gradient is that of -Σ A log π / number of response tokens.
    loss = -(batch.advantages * policy.actor(batch.sequences, batch.action_mask, batch.attention_mask)).sum()
    direct = torch.autograd.grad(loss / batch.action_mask.sum(), policy.parameters)
    assert torch.allclose(whole, flat(direct), atol=1e-6)


def test_second_moments_are_those_of_mini_batches(policy, batch, tokens):
    moments = policy.zeros()
    policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask, moments)
    squares = 0
    for prompts in batch.prompts.unique().chunk(updates.MINI_BATCHES):
        rows = torch.isin(batch.prompts, prompts)
        part = updates.Batch(**{name: value[rows] for name, value in vars(batch).items()})
        own = flat(policy.gradient(part, tokens.log_probs[rows], part.advantages, part.action_mask))
        squares = squares + own.square() / updates.MINI_BATCHES  # divided by its own tokens: they are equally many
    assert torch.allclose(flat(moments), squares, rtol=1e-3, atol=1e-9)


def test_step_is_adamws_in_a_running_training_without_momentum(policy):
    generator = torch.Generator().manual_seed(0)
    gradient = [1e-2 * torch.randn(p.shape, generator=generator) for p in policy.parameters]
    moments = [1e-4 * (0.1 + torch.rand(p.shape, generator=generator)) for p in policy.parameters]
    copies = [copy.deepcopy(p) for p in policy.parameters]
    optimizer = torch.optim.AdamW(copies, lr=1e-3, betas=(0.0, 1 - 1e-9), weight_decay=0)
    for p, g, v in zip(copies, gradient, moments, strict=True):
        p.grad = g
        # After so many steps that the bias correction is over.
        optimizer.state[p] = {"step": torch.tensor(1e12), "exp_avg": torch.zeros_like(p), "exp_avg_sq": v.clone()}
    optimizer.step()
    policy.step(gradient, moments, 1e-3)
    stepped = flat(policy.parameters).detach()
    policy.restore()
    assert torch.allclose(stepped, flat(copies).detach(), atol=1e-6)
    assert torch.equal(flat(policy.parameters), flat(policy.start)) and not torch.equal(stepped, flat(policy.start))


def test_an_update_is_undone_and_lopti_takes_two_steps(policy, batch, tokens):
    stages = [group_mask(group, tokens.log_probs, batch.action_mask, 0.1) for group in (LOW, HIGH)]
    both = policy.updated(batch, tokens.log_probs, batch.advantages, stages, 1e-3)
    assert torch.equal(flat(policy.parameters), flat(policy.start))
    moments = [policy.zeros(), policy.zeros()]
    low, high = (
        policy.gradient(batch, tokens.log_probs, batch.advantages, *pair) for pair in zip(stages, moments, strict=True)
    )
    shared = [(a + b) / 2 for a, b in zip(*moments, strict=True)]
    policy.step(low, shared, 1e-3)
    second = policy.gradient(batch, tokens.log_probs, batch.advantages, stages[1])
    policy.step(second, shared, 1e-3)
    expected = policy.log_probs(batch)
    policy.restore()
    assert torch.allclose(both, expected, atol=1e-4)
    assert not torch.allclose(flat(second), flat(high), atol=1e-6)  # the second stage sees the moved weights


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_learning_rate_gives_the_change_that_is_asked_for(policy, batch, tokens, monkeypatch, optimizer):
    monkeypatch.setattr(policy, "optimizer", optimizer)
    moments = policy.zeros()
    gradient = policy.gradient(batch, tokens.log_probs, batch.advantages, batch.action_mask, moments)
    rate = policy.learning_rate_of(batch, tokens.log_probs, gradient, moments, 0.01)
    after = policy.updated(batch, tokens.log_probs, batch.advantages, [batch.action_mask], rate, moments)
    change = (after - tokens.log_probs)[batch.action_mask]
    assert change.square().mean().sqrt().item() == pytest.approx(0.01, rel=0.1)
    # The objective rises.
    assert (change * batch.advantages[batch.action_mask]).sum() > 0


def test_figure_2_is_autograds_gradient_of_single_tokens_within_the_cone(policy, batch, tokens):
    data = figures.figure_2(policy, batch, tokens, count=40, layers=[2])
    assert [panel["layer"] for panel in data["layers"]] == ["embedding", "layer 2 of 2", "logits"]
    assert data["inside_bounds"] == 1 and data["largest_gap_to_eq_15"] < 1e-5
    # One of them again, alone and without padding, from its number in the list.
    row, column = (batch.action_mask & (tokens.log_probs.exp() < 0.1)).nonzero()[0].tolist()
    chosen = torch.tensor([[row, column], [row + 1, column]])
    modules = {"embedding": policy.model.get_input_embeddings()}
    norms = figures._activation_gradient_norms(policy, batch, chosen, modules)
    embedded = modules["embedding"](batch.sequences[row : row + 1, : column + 1]).detach().requires_grad_()
    logits = policy.model(inputs_embeds=embedded).logits[0, -1] / policy.temperature
    logits.log_softmax(dim=-1)[batch.sequences[row, column + 1]].backward()
    assert norms["embedding"][0].item() == pytest.approx(embedded.grad.norm().item(), rel=1e-4)


def test_share_in_the_right_direction_and_its_interval():
    # Prompt 0: 2 of 2 right, prompt 1: 1 of 3. Share 3/5; residuals 2 - 0.6·2 = 0.8 and 1 - 0.6·3 = -0.8, so that the
    # standard error is √(0.8² + 0.8²) / 5 = 0.2263.
    right = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    selected = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    share = figures._share(right, selected, torch.tensor([0, 1]))
    assert share == {"share": pytest.approx(0.6), "ci95": pytest.approx(1.959964 * math.sqrt(2 * 0.8**2) / 5)}
    assert figures._share(right, selected & False, torch.tensor([0, 1])) is None


def test_suggestions_by_hand():
    # Two tokens per prompt, A = 1, each the norm √2 (1 - π): π = 0.25 has 0.75/0.85 = 88% of the gradient.
    log_probs = torch.tensor([[0.25, 0.9]] * 6).log()
    rest = 1 - log_probs.exp()
    mask = torch.ones(6, 2, dtype=torch.bool)
    found = suggest.suggest(
        updates.Batch(mask, mask, mask, torch.ones(6, 2), torch.arange(6)),
        updates.Tokens(log_probs, rest.square(), torch.zeros(6, 2)),
    )
    assert found["low_tokens"] == 0.5 and found["low_gradient"] == pytest.approx(0.75 / 0.85)
    assert found["eta"] == {"value": 0.255, "low": 0.255, "high": 0.255}  # the upper end of 0.25's bin
    # [(1 - α) + 0.9 α] / [(1 - α) + 0.25 α] = 1.29  →  α = 0.29 / (1.29 · 0.75 - 0.1) = 0.3343
    assert found["alpha"]["value"] == pytest.approx(0.29 / (1.29 * 0.75 - 0.1), rel=1e-4)
    # α = 1: 0.75 · 0.25 = 0.1875 against 0.1 · 0.9 = 0.09.
    assert found["low_gradient_by_alpha"]["1"] == pytest.approx(0.1875 / 0.2775, rel=1e-4)


def test_an_interval_of_eta_needs_a_gradient():
    """Resamples without a prompt that has an advantage have no η, instead of the smallest."""
    log_probs = torch.tensor([[0.25, 0.9]] * 8).log()
    mask = torch.ones(8, 2, dtype=torch.bool)
    advantages = torch.zeros(8, 2)
    advantages[0] = 1
    found = suggest.suggest(
        updates.Batch(mask, mask, mask, advantages, torch.arange(8)),
        updates.Tokens(log_probs, (1 - log_probs.exp()).square(), torch.zeros(8, 2)),
    )
    assert found["eta"] == {"value": 0.255, "low": 0.255, "high": 0.255}


def test_figure_2_of_a_policy_that_is_sure(policy, batch, tokens):
    sure = tokens._replace(log_probs=torch.zeros_like(tokens.log_probs))
    data = figures.figure_2(policy, batch, sure, count=40, layers=[1])
    assert all(panel["slope"] is None and panel["correlation"] is None for panel in data["layers"])
    assert plots.png("fig2", data).startswith(b"\x89PNG")


# --- curves --------------------------------------------------------------------------------------------------


def write_log(folder, scalars) -> str:
    writer = EventFileWriter(str(folder / "run"))
    for name, series in scalars.items():
        for step, value in series.items():
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=step, summary=summary))
    writer.close()
    return str(folder)


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> list[str]:
    """Two seeds of GRPO and one run of Lopti."""
    seeds = [
        {
            "train/rollout/reward_mean": {1: -1.0, 2: value},
            "eval/kk_2ppl/accuracy": {2: 0.2},
            "eval/kk_3ppl/accuracy": {2: 0.1 * value},
            "train/actor_grad_norm": {1: 0.5, 2: 0.5},
            "train/tokens/p0.00-0.25/entropy": {1: 3.0, 2: 3.0},
            "train/tokens/p0.00-0.25/share": {1: 0.25, 2: 0.25},
            "train/tokens/p0.75-1.00/entropy": {1: 0.2},
            "train/tokens/p0.75-1.00/share": {1: 0.75},
        }
        for value in (1.0, 2.0)
    ]
    stages = {f"train/lopti/{group}/actor_grad_norm": {1: 0.3} for group in ("low", "high")}
    runs = [*seeds, {"train/rollout/reward_mean": {1: -1.0}} | stages]
    return [write_log(tmp_path_factory.mktemp("run"), scalars) for scalars in runs]


def test_curves_have_a_band_over_seeds_and_say_what_is_missing(logs):
    grpo, lopti = [[curves.read_scalars(curves.find_log(log)) for log in group] for group in (logs[:2], logs[2:])]
    found = curves.curves({"GRPO": grpo, "Lopti": lopti})
    reward, accuracy = found["fig6"]
    line = reward["lines"]["GRPO"]
    assert line == {"seeds": 2, "steps": [1, 2], "mean": [-1.0, 1.5], "low": [-1.0, 1.0], "high": [-1.0, 2.0]}
    assert accuracy["lines"]["GRPO"]["mean"] == [pytest.approx((0.15 + 0.2) / 2)] and accuracy["missing"] == ["Lopti"]
    # 0.25 · 3 + 0.75 · 0.2 = 0.9; at step 2 one bin has all the tokens that have an entropy.
    assert found["fig7"][1]["lines"]["GRPO"]["mean"] == [pytest.approx(0.9), pytest.approx(3.0)]
    assert [panel["missing"] for panel in found["fig8"]] == [["Lopti"], ["GRPO"], ["GRPO"]]


def test_curves_of_a_run_that_diverged(tmp_path, capsys):
    norms = {1: 0.5, 2: -1.0, 3: math.nan}  # -1 is what DeepSpeed says of a norm that is not finite
    log = write_log(tmp_path, {"train/actor_grad_norm": norms, "train/rollout/reward_mean": {1: -1.0, 3: math.inf}})
    scalars = curves.read_scalars(curves.find_log(log))
    assert scalars["train/actor_grad_norm"] == {1: 0.5} and scalars["train/rollout/reward_mean"] == {1: -1.0}
    said = capsys.readouterr().out
    assert "train/actor_grad_norm is not finite at 2 steps, first at step 2: left out" in said


# --- the command ---------------------------------------------------------------------------------------------


def run(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["analyze", *map(str, arguments)])
    analyze.main()


@pytest.fixture(scope="module")
def analysis(tiny_model, tiny_data, logs, tmp_path_factory) -> Path:
    """The folder that the command leaves for one model and runs of two labels."""
    out = tmp_path_factory.mktemp("analysis")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rollouts, "sample", fake_sample([RIGHT, WRONG, "no"]))
        run(
            monkeypatch,
            *("--model", tiny_model, "--data", tiny_data, "--out", out, "--prompts", 8, "--samples", 3, "--report"),
            *("--alpha", 0.3, "--eta", 0.1, "--runs", f"GRPO={logs[0]},{logs[1]}", f"<Lopti>={logs[2]}"),
        )
    return out


def test_every_figure_is_a_picture_and_its_data(analysis):
    assert sorted(path.stem for path in analysis.glob("fig*.png")) == FIGURES
    for name in FIGURES:
        png = (analysis / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG\r\n\x1a\n") and len(png) > 5000, name
        assert json.loads((analysis / f"{name}.json").read_text(encoding="utf-8")), name
    directions = json.loads((analysis / "fig3.json").read_text(encoding="utf-8"))
    assert list(directions["right_direction"]) == ["GRPO", "AR α=0.3", "Lopti η=0.1"]
    groups = json.loads((analysis / "fig1.json").read_text(encoding="utf-8"))["groups"]
    assert sum(group["logit_gradient_share"] for group in groups) == pytest.approx(1)
    (words,) = json.loads((analysis / "fig5.json").read_text(encoding="utf-8")).values()
    assert words["Causal indicator"]["correlation"] > 0.9  # only the right responses say "since"
    (summary,) = json.loads((analysis / "summary.json").read_text(encoding="utf-8")).values()
    assert summary["accuracy"] == pytest.approx(1 / 3) and summary["responses"] == 24


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, False), (390, True)])
def test_report_in_a_browser(analysis, tmp_path, width, dark):
    with chromium(tmp_path / "profile") as page:
        page.open(analysis / "report.html", width, dark)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = "[...document.querySelectorAll('main > *')].filter(e => e.getBoundingClientRect().right > innerWidth)"
        assert page.evaluate(f"{wide}.length") == 0
        assert all(url.startswith(("file:", "data:")) for url in page.requests)
        pictures = page.evaluate("[...document.images].map(i => [i.naturalWidth, i.alt.length, i.currentSrc.length])")
        assert len(pictures) == len(FIGURES) and all(w > 500 and alt > 20 for w, alt, _ in pictures)
        # The dark picture is shown in dark mode, and it is another one.
        shown = page.evaluate("[...document.images].map(i => i.currentSrc != i.src)")
        assert set(shown) == {dark}
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
        assert page.evaluate("document.scripts.length") == 0
        assert "<Lopti>" in page.evaluate("document.body.innerText")  # escaped, not a tag
        assert page.screenshot().startswith(b"\x89PNG\r\n\x1a\n")


def test_models_side_by_side_and_responses_of_equal_reward(tiny_model, tiny_data, tmp_path, monkeypatch, capsys):
    for name in ("global_step10", "global_step9"):
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        (tmp_path / "checkpoints" / name).symlink_to(tiny_model)
    monkeypatch.setattr(rollouts, "sample", fake_sample([WRONG, WRONG]))
    out = tmp_path / "out"
    run(monkeypatch, "--model", tmp_path / "checkpoints", "--data", tiny_data, "--out", out, "--prompts", 2)
    assert list(json.loads((out / "summary.json").read_text(encoding="utf-8"))) == ["global_step9", "global_step10"]
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*.png"))
    assert files == ["fig5.png", "global_step10/fig2.png", "global_step9/fig2.png"]
    assert capsys.readouterr().out.count("earned the same reward") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--out O", "give --model, or --runs"),
        ("--out O --model M", "--model and --data go together"),
        ("--out O --model nowhere/x/y --data D", "nowhere/x/y"),
        ("--out O --model EMPTY --data D", "no config.json"),
        ("--out O --model M M --data D", "two models have one name"),
        ("--out O --model M --data D --layers 3", "--layers 3: M has the layers 1 to 2"),
        ("--out O --model M --data missing.jsonl", "missing.jsonl"),
        ("--out O --model M --data UNLABELLED", "a row has no label"),
        ("--out O --model M --data D --alpha 1.5", "argument --alpha: 1.5 is not a number in (0, 1]"),
        ("--out O --model M --data D --eta 1", "argument --eta: 1 is not a number in (0, 1)"),
        ("--out O --model M --data D --samples 1", "argument --samples: 1 is not an integer of at least 2"),
        ("--out O --model M --data D --temperature 0", "argument --temperature"),
        ("--out O --runs GRPO", "argument --runs: 'GRPO' is not of the form"),
        ("--out O --runs GRPO=EMPTY", "no TensorBoard log"),
        ("--out O --runs A=EMPTY A=EMPTY", "a label twice"),
    ],
)
def test_mistakes_are_one_line_and_come_first(
    arguments, message, tiny_model, tiny_data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(rollouts, "sample", lambda *args: pytest.fail("sampling began"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "unlabelled.jsonl").write_text('{"prompt": "Hi", "datasource": "kk_2ppl"}\n', encoding="utf-8")
    (tmp_path / "empty").mkdir()
    places = {"O": tmp_path / "out", "M": tiny_model, "D": tiny_data, "EMPTY": tmp_path / "empty"}
    places["UNLABELLED"] = tmp_path / "unlabelled.jsonl"
    for name, place in places.items():
        arguments = " ".join(str(place) if word == name else word for word in arguments.split())
        arguments = arguments.replace(f"={name}", f"={place}")
        message = message.replace(": M ", f": {place} ") if name == "M" else message
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *arguments.split())
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and message in last_line
    assert not (tmp_path / "out").exists()


def test_report_without_models():
    page = report.page({}, {"": {}}, {"--out": "x"})
    assert "training runs" in page and page.endswith("</html>\n")
