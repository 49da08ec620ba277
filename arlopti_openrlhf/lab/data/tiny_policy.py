"""Make a policy small enough to learn Knights and Knaves on two CPU cores: 1.0M parameters, Qwen2 architecture.

`make_policy` makes tokenizer and model from nothing, and warm-starts the model by supervised fine-tuning on worked
solutions. What it saves loads like any published model, in transformers and in vLLM.
"""

import random
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.optim import _muon
from tqdm import tqdm
from transformers import DataCollatorForSeq2Seq, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from arlopti_openrlhf.lab.data import knights_knaves
from arlopti_openrlhf.lab.scoring.inputs import encode
from arlopti_openrlhf.patching import replaced_attribute

# A dozen names take half the steps that all 51 take. Puzzles for this policy use the same ones.
NAMES = knights_knaves.NAMES[:12]
MAX_LENGTH = 1024  # positions; a prompt with 8 people takes about 150, the longest solution for 3 about 100

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Texts that every prompt repeats to the letter are one token each. So the prompt has the whole published instruction,
# at no cost in time.
_BOILERPLATE = (knights_knaves.INSTRUCTION, knights_knaves.ISLAND, knights_knaves.QUESTION)
_VOCAB_SIZE = 512  # of the BPE, with its 256 bytes, without the texts above and the names
_TOKENIZER_TEXTS = 4000
_BATCH_SIZE = 24
_HASTY_PART = 0.15  # share of the steps, at the end, in which answers may be hasty
_HASTY_SHARE = 0.8  # of the answers there
_SOLUTION_FIRST = 0.7  # how often a worked solution tries the right assignment first by choice, not by chance
_LEARNING_RATE = 3e-3  # AdamW's peak; Muon's is twice that


def make_policy(out_dir: str | Path, *, people: Sequence[int] = (2, 3), seed: int = 0, steps: int = 1200) -> None:
    """Make the small policy, warm-start it on worked solutions of training puzzles, and save it to `out_dir`.

    Something is left for reinforcement to learn. The policy mostly answers hastily, and is right by chance. Where it
    thinks, it is right far more often.

    Args:
        out_dir: folder for config, float32 safetensors, tokenizer with chat template, and generation config.
        people: numbers of people, equally often in the training puzzles.
        seed: of the puzzles, the initial weights and the order of training.
        steps: optimizer steps, of 24 puzzles each.
    """
    # Puzzles and the answers that the policy learns from. The last part of them may be hasty.
    rng = random.Random(seed)
    count = steps * _BATCH_SIZE
    sources = [knights_knaves.generate(n, rng, held_out=False, names=NAMES) for n in people]
    puzzles = [next(sources[i % len(sources)]) for i in range(max(count, _TOKENIZER_TEXTS))]
    careful = round(steps * (1 - _HASTY_PART)) * _BATCH_SIZE
    answers = []
    for i, puzzle in enumerate(puzzles):
        if rng.random() < _HASTY_SHARE and i >= careful:
            answers.append(knights_knaves.hasty_answer(puzzle, rng))
        else:
            answers.append(knights_knaves.worked_solution(puzzle, rng, solution_first=_SOLUTION_FIRST))
    tokenizer = make_tokenizer(
        [knights_knaves.chatml(p.quiz) + a for p, a in zip(puzzles, answers, strict=True)][:_TOKENIZER_TEXTS]
    )
    rows = rows_of(tokenizer, [puzzle.quiz for puzzle in puzzles[:count]], answers[:count])
    # Hasty answers are short. In batches of like length, the last batch of them would decide how often they come.
    rows = in_batches_of_like_length(rows[:careful], rng) + rng.sample(rows[careful:], len(rows) - careful)
    # Fine-tune from random weights.
    torch.manual_seed(seed)
    model = make_model(tokenizer)
    fine_tune(model, tokenizer, rows)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    transformers.logging.disable_progress_bar()  # of one file
    model.save_pretrained(out_dir)
    transformers.logging.enable_progress_bar()
    tokenizer.save_pretrained(out_dir)


def make_tokenizer(texts: Sequence[str]) -> Qwen2Tokenizer:
    """Make a byte-level tokenizer that encodes any text. Names, tags and ChatML's marks are one token each.

    Frequent phrases are tokens too, such as " is a knight if and only if". A BPE trained on `texts` without splitting
    at spaces finds them. Texts then take little more than half the tokens that words would, and so does training.

    Transformers reads the tokenizer of every Qwen2 model as a `Qwen2Tokenizer`, which splits at spaces, then merges.
    The phrases stay whole as added tokens, which are matched before that, from the left and the longest first.
    """
    known = [*_TAGS, *_BOILERPLATE, *knights_knaves.NAMES, *(f" {name}" for name in knights_knaves.NAMES)]
    splits = re.compile("|".join(map(re.escape, sorted(known, key=len, reverse=True))))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator((piece for text in texts for piece in splits.split(text)), trainer)
    merged = [bpe.decode([i]) for i in range(bpe.get_vocab_size()) if len(bpe.id_to_token(i)) > 1]
    tokenizer = Qwen2Tokenizer(
        vocab={byte: i for i, byte in enumerate(alphabet)},
        merges=[],
        unk_token="<|im_end|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=knights_knaves.CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*known, *filter(None, merged))])
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Make the untrained policy, in float32. vLLM's CPU attention accepts its head size of 32."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        # At this width the default of 0.02 learns several times slower.
        initializer_range=0.07,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def rows_of(tokenizer: Qwen2Tokenizer, quizzes: Sequence[str], answers: Sequence[str]) -> list[dict]:
    """Return `input_ids` and `labels` of each. The loss leaves out the label -100, so only the answer is learned."""
    _, prompt_ids = encode(tokenizer, [knights_knaves.messages(quiz) for quiz in quizzes])
    answer_ids = tokenizer([a + tokenizer.eos_token for a in answers], add_special_tokens=False)["input_ids"]
    return [
        {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
        for prompt, answer in zip(prompt_ids, answer_ids, strict=True)
    ]


def in_batches_of_like_length(rows: list[dict], rng: random.Random) -> list[dict]:
    """Order rows such that those of a batch have about one length, which takes little padding, and batches mix."""
    rows = sorted(rows, key=lambda row: len(row["input_ids"]))
    batches = [rows[start : start + _BATCH_SIZE] for start in range(0, len(rows), _BATCH_SIZE)]
    rng.shuffle(batches)
    return [row for batch in batches for row in batch]


def fine_tune(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, rows: list[dict]) -> None:
    """Train the policy on rows, in their order, with one optimizer step per batch.

    Muon, scaled as in arXiv 2502.16982, trains the layers' matrices, and AdamW the rest. That takes far fewer steps to
    learn solutions than AdamW alone.
    """
    steps = len(rows) // _BATCH_SIZE
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, lr=2 * _LEARNING_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )
    schedules = [get_cosine_with_min_lr_schedule_with_warmup(o, 30, steps, min_lr_rate=0.1) for o in optimizers]
    collate = DataCollatorForSeq2Seq(tokenizer)
    # Without AVX-512, bf16 takes a CPU tens of times as long.
    in_float32 = replaced_attribute(_muon, "_zeropower_via_newtonschulz", orthogonalize)
    model.train()
    with tqdm(total=steps, desc="warm start", unit="step") as bar:
        with nullcontext() if torch.cpu._is_avx512_supported() else in_float32:
            for step in range(steps):
                loss = model(**collate(rows[step * _BATCH_SIZE : (step + 1) * _BATCH_SIZE])).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for of_some in (*optimizers, *schedules):
                    of_some.step()
                model.zero_grad()
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()


def orthogonalize(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return about U Vᵀ of the gradient's singular value decomposition U S Vᵀ, by Newton-Schulz steps (Muon).

    It is PyTorch's function in the gradient's own precision, where PyTorch's computes in bf16. The gradient is (M, N),
    and a step is X ← aX + b(XXᵀ)X + c(XXᵀ)²X. First X is divided by its norm, which counts as at least `eps`.
    """
    a, b, c = coefficients
    is_tall = gradient.shape[0] > gradient.shape[1]  # the smaller of the two products with itself is enough
    x = gradient.T if is_tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x.T if is_tall else x
