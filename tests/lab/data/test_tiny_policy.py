import random
from collections import Counter

import pytest
import torch
from arlopti_testing.published_wording import read_puzzle
from torch.optim import _muon
from transformers import AutoModelForCausalLM, AutoTokenizer

from arlopti_openrlhf.grading.kk_reward import grade
from arlopti_openrlhf.lab.data import knights_knaves, tiny_policy


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    tiny_policy.make_policy(path, steps=4, seed=3)
    return path


@pytest.fixture(scope="module")
def tokenizer(policy_dir):
    return AutoTokenizer.from_pretrained(policy_dir)


def one_puzzle(num_people=3, seed=0):
    return next(knights_knaves.generate(num_people, random.Random(seed)))


def test_directory_loads_as_a_qwen2_model(policy_dir, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.bfloat16)
    assert model.config.model_type == "qwen2"
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.2e6
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert model.config.num_key_value_heads == 4
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id
    inputs = tokenizer(knights_knaves.chatml(one_puzzle().quiz), return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=5)
    assert output.shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.parametrize(
    "text",
    [
        knights_knaves.chatml(one_puzzle(8).quiz),
        "<think> Try Emma knave: Emma false ok.</think><answer>(1) Emma is a knave\n(2) Zoey is a knight</answer>",
        "Anything at all:  two  spaces,\n\n\ttabs, Jackpots, naïve 漢字 🎲 and <|im_start|>assistant",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_names_and_tags_are_single_tokens(tokenizer):
    names = [space + name for name in knights_knaves.NAMES for space in ("", " ")]
    for text in (*names, "<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text


def test_tags_are_kept_when_special_tokens_are_skipped(tokenizer):
    text = "</think><answer>(1) Emma is a knave</answer>"
    assert tokenizer.decode(tokenizer.encode(text + "<|im_end|>"), skip_special_tokens=True) == text


def test_chat_template_is_chatml_and_prefills_think(tokenizer):
    turns = knights_knaves.messages(one_puzzle().quiz)
    chat = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    assert tokenizer.apply_chat_template(turns, tokenize=False) == chat
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == f"{chat}<|im_start|>assistant\n<think>"


def test_prompts_are_short(tokenizer):
    """The instruction and the island are one token each, and the longest prompts leave room for a response."""
    turns = knights_knaves.messages(one_puzzle(8).quiz)
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert len(tokenizer.encode(prompt, add_special_tokens=False)) < tiny_policy.MAX_LENGTH / 2


def test_only_the_response_is_learned(tokenizer):
    puzzle = one_puzzle()
    answer = knights_knaves.worked_solution(puzzle, random.Random(0))
    (row,) = tiny_policy.rows_of(tokenizer, [puzzle.quiz], [answer])
    learned = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(learned) == f"{answer}<|im_end|>"
    assert row["input_ids"][-len(learned) :] == learned
    assert len(row["labels"]) == len(row["input_ids"])
    text = tokenizer.decode(row["input_ids"])
    assert grade(text[text.index("assistant\n") :].removesuffix("<|im_end|>"), puzzle.solution_text).reward == 3.0


def test_batches_of_like_length_lose_nothing():
    rows = [{"input_ids": [0] * random.Random(i).randint(1, 99), "i": i} for i in range(240)]
    batched = tiny_policy.in_batches_of_like_length(rows, random.Random(0))
    assert sorted(row["i"] for row in batched) == list(range(240))
    lengths = [[len(row["input_ids"]) for row in batched[start : start + 24]] for start in range(0, 240, 24)]
    assert all(max(batch) - min(batch) < 30 for batch in lengths)
    assert lengths != sorted(lengths)


def test_same_seed_same_policy(policy_dir, tmp_path):
    tiny_policy.make_policy(tmp_path, steps=4, seed=3)
    first, second = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (policy_dir, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (policy_dir / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Return the tokenizer of a policy, and in their order the rows that it would learn from."""
    folder, rows = tmp_path_factory.mktemp("learned"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_policy, "fine_tune", lambda model, tokenizer, of_policy: rows.extend(of_policy))
        tiny_policy.make_policy(folder, steps=40)
    return AutoTokenizer.from_pretrained(folder), rows


def test_puzzles_are_training_puzzles(learned):
    tokenizer, rows = learned
    people = Counter()
    for row in rows[::20]:
        text = tokenizer.decode(row["input_ids"])
        names, statements, _ = read_puzzle(
            text[text.index(knights_knaves.ISLAND) : text.index("<|im_end|>\n<|im_start|>a")]
        )
        assert not knights_knaves.is_held_out(statements)
        people[len(names)] += 1
    assert set(people) == {2, 3} and min(people.values()) > 12


def test_hasty_answers_come_last(learned):
    tokenizer, rows = learned
    texts = [tokenizer.decode([token for token in row["labels"] if token != -100]) for row in rows]
    hasty = [text.startswith("</think>") for text in texts]
    assert len(hasty) == 40 * 24 and not any(hasty[: 34 * 24])  # 85% of the steps
    assert abs(sum(hasty[34 * 24 :]) / (6 * 24) - 0.8) < 0.1
    # In batches of their own, the last one would decide how often the policy is hasty.
    assert all(0 < sum(hasty[start : start + 24]) < 24 for start in range(34 * 24, 40 * 24, 24))


def test_warm_start_shows_one_progress_bar_and_nothing_else(tmp_path, capfd):
    tiny_policy.make_policy(tmp_path, steps=2)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert {line.split(":")[0] for line in shown.err.replace("\r", "\n").splitlines() if line} == {"warm start"}


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_orthogonalized_as_torchs_muon_does_in_bf16(shape):
    """In bf16 the iteration is off by some hundredths, so the two agree to that."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    arguments = (gradient, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    ours, torchs = tiny_policy.orthogonalize(*arguments), _muon._zeropower_via_newtonschulz(*arguments).float()
    assert ours.dtype == torch.float32 and (ours - torchs).abs().max() < 0.03 < torchs.abs().max()
    # Singular values all become 0.7 to 1.2, as Muon wants them.
    assert 0.6 < torch.linalg.svdvals(ours).min() < torch.linalg.svdvals(ours).max() < 1.3


@pytest.mark.parametrize("has_avx512", [True, pytest.param(False, marks=pytest.mark.long)])
def test_one_step_by_muon_and_adamw_without_slow_bf16_products(tokenizer, has_avx512, monkeypatch):
    """Muon has the layers' matrices, and AdamW all other parameters. Each step has the loss of the answers alone."""
    orthogonalized = []
    upstream, ours = _muon._zeropower_via_newtonschulz, tiny_policy.orthogonalize
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: has_avx512)
    monkeypatch.setattr(tiny_policy, "orthogonalize", lambda *args: orthogonalized.append(1) or ours(*args))
    puzzle = one_puzzle()
    rows = tiny_policy.rows_of(
        tokenizer, [puzzle.quiz] * 24, [knights_knaves.worked_solution(puzzle, random.Random(0))] * 24
    )
    torch.manual_seed(0)
    model, twin = (tiny_policy.make_model(tokenizer) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    tiny_policy.fine_tune(model, tokenizer, rows + rows)  # the first step of a warm-up has a rate of 0
    assert len(orthogonalized) == (0 if has_avx512 else 2 * 28)
    assert _muon._zeropower_via_newtonschulz is upstream
    layers = {name for name, p in twin.named_parameters() if ".layers." in name and p.ndim == 2}
    assert len(layers) == 4 * 7
    batch = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", upstream if has_avx512 else ours)
    muon = torch.optim.Muon(
        [p for name, p in twin.named_parameters() if name in layers], weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [p for name, p in twin.named_parameters() if name not in layers], betas=(0.9, 0.95), weight_decay=0.0
    )
    for step in range(2):
        twin(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        for optimizer, rate in ((muon, 6e-3), (adamw, 3e-3)):
            optimizer.param_groups[0]["lr"] = rate * step / 30
            optimizer.step()
        twin.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
