"""Reinforcement learning in one process, without Ray and vLLM. Read it from top to bottom.

    python examples/in_one_process.py                          # Knights and Knaves, 1.0M parameters, two minutes
    python examples/in_one_process.py --algo.lopti.eta 0.3     # with flags of the training command

A step draws puzzles, samples answers, grades them, turns rewards into advantages, and updates the policy in the passes
of its token methods. Models, advantages, reward and update are those of a run of the whole stack, on one rank. The
update is `arlopti_openrlhf/reference.py`, or with `--actor.update selective` the engine. On a CPU all is computed in
float32.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from arlopti_openrlhf import cpu, user_files

cpu.enable()

from openrlhf.models import Actor  # noqa: E402
from openrlhf.models.utils import masked_mean  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController  # noqa: E402
from openrlhf.utils import deepspeed, get_strategy, get_tokenizer  # noqa: E402
from openrlhf.utils.config import hierarchize  # noqa: E402
from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: E402

from arlopti_openrlhf.cli import train_ppo_ray  # noqa: E402
from arlopti_openrlhf.forward.selective_actor import SelectiveActor  # noqa: E402
from arlopti_openrlhf.grading import REWARDS, reward_answers  # noqa: E402
from arlopti_openrlhf.lab.scoring.inputs import encode  # noqa: E402
from arlopti_openrlhf.ops.health import guard  # noqa: E402
from arlopti_openrlhf.ops.rollouts.experience_maker import ExperienceMaker  # noqa: E402
from arlopti_openrlhf.reference import ReferenceTrainer  # noqa: E402
from arlopti_openrlhf.update.old_log_probs import unknown  # noqa: E402
from arlopti_openrlhf.update.trainer import TokenUpdateTrainer  # noqa: E402

Row = dict[str, Any]  # a puzzle: prompt, label and datasource
Answers = list[list[list[int]]]  # token ids of the S answers to each prompt, with the end token if they have ended

FLAGS = """
    --algo.ar.alpha 0.3 --algo.lopti.eta 0.5
    --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.001
    --actor.eps_clip_low_high 0.2 0.24 --actor.lr_scheduler constant --actor.lr_warmup_ratio 0 --actor.adam.lr 3e-4
    --reward.remote_url kk --rollout.batch_size 16 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 112
    --train.batch_size 64 --train.micro_batch_size 32 --rollout.micro_batch_size 64 --ds.attn_implementation sdpa
    --data.max_samples 128
"""


class Training:
    """Trains a policy as `train_ppo_ray` does with the same flags, on one rank, in this process.

    Args:
        args: OpenRLHF's nested arguments.
    """

    def __init__(self, args: SimpleNamespace) -> None:
        self.args = args
        self.strategy = strategy = get_strategy(args)
        strategy.setup_distributed()
        self.tokenizer = get_tokenizer(args.actor.model_name_or_path, None, "left", strategy)
        source, actor = args.reward.remote_url, args.actor
        own = REWARDS[source].module if source in REWARDS else user_files.load(source, "reward_func")
        self.reward = own.reward_func
        kept = ("optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
        optimization = {name: getattr(actor, name) for name in kept}
        optimization |= {"muon": vars(actor.muon), "adam": vars(actor.adam)}
        optimization |= {"scheduler_steps": args.data.max_samples}  # more than there are
        self.policy, optimizer, scheduler = strategy.prepare((self._load(), optimization))
        self.device = self.policy.model.device
        self.reference = self._load().to(self.device).eval() if args.algo.kl.init_coef > 0 else None
        trainer = TokenUpdateTrainer if actor.update == "selective" else ReferenceTrainer
        self.trainer = trainer(
            strategy,
            self.policy,
            ema_model=None,
            actor_optim=optimizer,
            actor_scheduler=scheduler,
            micro_train_batch_size=args.train.micro_batch_size,
            tokenizer=self.tokenizer,
            eps_clip=actor.eps_clip,
        )
        self.kl = FixedKLController(args.algo.kl.init_coef)
        self.maker = ExperienceMaker(None, None, None, None, self.kl, strategy, self.tokenizer)

    def _load(self) -> Actor:
        args = self.args
        model = AutoModelForCausalLM.from_pretrained(
            args.actor.model_name_or_path,
            dtype=torch.float32 if args.ds.param_dtype == "fp32" else torch.bfloat16,
            attn_implementation=args.ds.attn_implementation,
        )
        model.generation_config = GenerationConfig()  # a model's own may penalize repetitions, say
        kind = SelectiveActor if args.actor.update == "selective" else Actor
        actor = kind(model, temperature=args.rollout.temperature)
        actor.packing_samples, actor.is_vlm = False, False  # upstream's, where it loads the model itself
        return actor

    def step(self, puzzles: Sequence[Row]) -> dict[str, float]:
        """Sample answers to the puzzles, train on them, and return the metrics."""
        samples = self.answer(puzzles, self.generate)
        return self.update(self.experience(samples)) | sampled(samples)

    def generate(self, prompts: Sequence[list[int]]) -> Answers:
        """Sample answers to prompts of token ids."""
        batch = self.tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(self.device)
        count, stop = self.args.rollout.n_samples_per_prompt, self.tokenizer.eos_token_id
        with torch.no_grad():
            rows = self.policy.model.module.eval().generate(
                **batch,
                do_sample=True,
                temperature=self.args.rollout.temperature,
                top_k=0,
                top_p=self.args.rollout.top_p,
                num_return_sequences=count,
                max_new_tokens=self.args.rollout.max_new_tokens,
                pad_token_id=stop,
                eos_token_id=stop,
            )
        rows = rows[:, batch["input_ids"].shape[1] :].tolist()
        ended = [row[: row.index(stop) + 1] if stop in row else row for row in rows]
        return [ended[i : i + count] for i in range(0, len(ended), count)]

    def answer(self, puzzles: Sequence[Row], generate: Callable[[Sequence[list[int]]], Answers]) -> list[Experience]:
        """Return graded samples, those of a puzzle next to each other."""
        texts, prompts = encode(self.tokenizer, [row["prompt"] for row in puzzles])
        answers, stop = generate(prompts), self.tokenizer.eos_token_id
        samples = [
            as_experience(prompt, answer, is_truncated=answer[-1] != stop)
            for prompt, of_prompt in zip(prompts, answers, strict=True)
            for answer in of_prompt
        ]
        count = len(answers[0])
        queries = self.tokenizer.batch_decode([one.sequences[0] for one in samples])
        labels = [puzzle["label"] for puzzle in puzzles for _ in range(count)]
        answer = self.reward(queries, [text for text in texts for _ in range(count)], labels)
        graded = reward_answers.normalise(answer, len(samples))
        scores = graded["scores"] or graded["rewards"]
        for i, one in enumerate(samples):
            one.rewards, one.scores = torch.tensor([graded["rewards"][i]]), torch.tensor([scores[i]])
            one.info = {name: torch.tensor([values[i]]) for name, values in graded["extra_logs"].items()}
            one.info |= {"reward": one.rewards, "score": one.scores}
        return samples

    @torch.no_grad()
    def experience(self, samples: list[Experience]) -> list[Experience]:
        """Give samples log-probs and advantages, as OpenRLHF's experience maker does with a KL loss."""
        self.policy.eval()
        batches = self.maker.split_rollout_samples(samples)
        for batch in batches:
            inputs = [part.to(self.device) for part in (batch.sequences, batch.action_mask, batch.attention_mask)]
            is_deferred = getattr(self.trainer, "defers_old_log_probs", False)  # the engine's first forward gives them
            batch.action_log_probs = unknown(batch.action_mask) if is_deferred else self.policy(*inputs).cpu()
            batch.base_action_log_probs = self.reference(*inputs).cpu() if self.reference else None
            if self.args.algo.advantage.is_correction_level != "off":
                batch.rollout_log_probs = self.policy(*inputs).cpu()  # it has drawn the tokens itself
            batch.kl = torch.zeros_like(batch.action_mask, dtype=torch.float32)  # it is a part of the loss
            batch.info["kl"] = masked_mean(batch.kl, batch.action_mask, dim=-1)
        return self.maker.compute_advantages_and_returns(batches)

    def update(self, experiences: list[Experience]) -> dict[str, float]:
        """Train on samples: weights, passes and optimizer steps. Return the update's metrics."""
        for experience in experiences:
            self.trainer.replay_buffer.append(experience)
        self.policy.train()
        status = self.trainer.ppo_train(self.kl.value)
        self.trainer.replay_buffer.clear()
        return {name: value for name, value in status.items() if isinstance(value, float | int)}


def as_experience(prompt: list[int], answer: list[int], is_truncated: bool) -> Experience:
    """Return one sample of token ids, not graded yet."""
    sequence = torch.tensor([prompt + answer])
    action_mask = torch.zeros(1, sequence.shape[1] - 1, dtype=torch.long)
    action_mask[:, len(prompt) - 1 :] = 1
    return Experience(
        sequences=sequence,
        attention_mask=torch.ones_like(sequence),
        action_mask=action_mask,
        response_length=torch.tensor([len(answer)]),
        total_length=torch.tensor([sequence.shape[1]]),
        truncated=torch.tensor([is_truncated]),
    )


def sampled(samples: Sequence[Experience]) -> dict[str, float]:
    """Return what a run logs of its samples."""
    names = {"rewards": "reward_mean", "response_length": "response_length_mean", "truncated": "truncated_rate"}
    values: dict[str, Tensor] = {name: torch.cat([getattr(one, name) for one in samples]).float() for name in names}
    return {f"rollout/{names[name]}": value.mean().item() for name, value in values.items()}


def steps_of(puzzles: Sequence[Row], args: SimpleNamespace) -> list[Sequence[Row]]:
    """Return the puzzles of each step: all of them in each epoch, in an order of its own."""
    steps: list[Sequence[Row]] = []
    for epoch in range(args.train.num_episodes):
        purpose = ("order", epoch) if epoch else ("order",)
        order = torch.randperm(len(puzzles), generator=generator(args.train.seed, *purpose)).tolist()
        steps += chunks([puzzles[place] for place in order], args.rollout.batch_size)
    return steps


def chunks(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[start : start + size] for start in range(0, len(items), size))


def generator(*what) -> torch.Generator:
    """Return a generator of random numbers, the same ones for the same purpose."""
    digest = hashlib.sha256(repr(what).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def arguments(flags: Sequence[str]) -> SimpleNamespace:
    """Return OpenRLHF's nested arguments, from flags of `train_ppo_ray`. Those of placement have no effect."""
    deepspeed.DeepspeedStrategy = guard.GuardedStrategy
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    args = hierarchize(train_ppo_ray.parse(list(flags)))
    args.actor.eps_clip_low_high = tuple(args.actor.eps_clip_low_high)
    args.local_rank = 0
    args.actor.gradient_checkpointing_enable = False  # the models are small, and the actor here does without
    if cpu.uses_cpu():
        args.ds.param_dtype = "fp32"  # which the command does not offer, and CPUs without AMX are fastest in
    return args


def main() -> None:
    """Make a small policy and puzzles, and train on them."""
    from arlopti_openrlhf.lab.data import tiny_policy
    from arlopti_openrlhf.lab.data.preparation import generate_rows

    with tempfile.TemporaryDirectory() as folder:
        tiny_policy.make_policy(folder, steps=400)
        puzzles = generate_rows((2, 3), 64, held_out=False, seed=0, names=tiny_policy.NAMES)
        args = arguments([*FLAGS.split(), "--actor.model_name_or_path", folder, "--actor.update=stock", *sys.argv[1:]])
        training = Training(args)
        for number, some in enumerate(steps_of(puzzles, args), 1):
            found = {name: round(value, 3) for name, value in training.step(some).items()}
            print(f"step {number}: reward {found['rollout/reward_mean']}, {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
