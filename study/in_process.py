"""Train one run of the study in one process, with the flags of `train_ppo_ray`.

    python -m study.in_process FLAGS

The models, the update on a DeepSpeed engine, the advantages, the reward and the measures are the classes and functions
of a run of the whole stack, on one rank. What samples is another (`study.sampler`), so there is no vLLM, no Ray and no
sending of weights, and a run of the study's policy of 1.0M parameters takes a third of the time. On a CPU all is
computed in float32. There a run is the same one, bit for bit, whenever it is made on one kind of CPU with as many
threads, also where it was ended and goes on from its newest checkpoint (`--ckpt.load_enable`).
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from arlopti_openrlhf import cpu, user_files

cpu.enable()

from openrlhf.models.utils import masked_mean  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController  # noqa: E402
from openrlhf.utils import (  # noqa: E402
    deepspeed,  # noqa: E402
    get_strategy,
    get_tokenizer,
)
from openrlhf.utils.logging_utils import TensorboardLogger  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from arlopti_openrlhf.cli import train_ppo_ray  # noqa: E402
from arlopti_openrlhf.evaluation.measures import Response, estimate_source  # noqa: E402
from arlopti_openrlhf.evaluation.sampling import Sampling, sampling_of  # noqa: E402
from arlopti_openrlhf.forward.selective_actor import SelectiveActor  # noqa: E402
from arlopti_openrlhf.grading import REWARDS  # noqa: E402
from arlopti_openrlhf.lab.scoring.inputs import encode  # noqa: E402
from arlopti_openrlhf.ops.checkpoints.state import random_state, set_random_state  # noqa: E402
from arlopti_openrlhf.ops.health import guard  # noqa: E402
from arlopti_openrlhf.ops.rollouts.experience_maker import ExperienceMaker  # noqa: E402
from arlopti_openrlhf.update.old_log_probs import unknown  # noqa: E402
from arlopti_openrlhf.update.trainer import TokenUpdateTrainer  # noqa: E402
from study.sampler import sample  # noqa: E402

Row = dict[str, Any]  # a puzzle: prompt, label and datasource
_PROMPTS_AT_A_TIME = 16  # in an evaluation. Eight answers of 256 tokens each hold 1.5 GB at 135M parameters.


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
        self.reward = _reward(args.reward.remote_url)
        actor = args.actor
        optimization = {
            "optim": actor.optim,
            "muon": vars(actor.muon),
            "adam": vars(actor.adam),
            "lr_scheduler": actor.lr_scheduler,
            "lr_warmup_ratio": actor.lr_warmup_ratio,
            "min_lr_ratio": actor.min_lr_ratio,
            "max_norm": actor.max_norm,
            "scheduler_steps": args.data.max_samples,  # more than there are
        }
        self.policy, optimizer, scheduler = strategy.prepare((self._load(), optimization))
        self.device = self.policy.model.device
        self.reference = self._load().to(self.device).eval() if args.algo.kl.init_coef > 0 else None
        self.trainer = TokenUpdateTrainer(
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

    def _load(self) -> SelectiveActor:
        args = self.args
        model = AutoModelForCausalLM.from_pretrained(
            args.actor.model_name_or_path,
            dtype=torch.float32 if args.ds.param_dtype == "fp32" else torch.bfloat16,
            attn_implementation=args.ds.attn_implementation,
        )
        actor = SelectiveActor(model, temperature=args.rollout.temperature)
        actor.packing_samples, actor.is_vlm = False, False  # upstream's, where it loads the model itself
        return actor

    def train(self, puzzles: Sequence[Row], held_out: Sequence[Row], before: Path) -> None:
        """Train in epochs, with evaluations, and save the model; log all of it as a run of the whole stack does.

        Args:
            puzzles: to train on.
            held_out: to evaluate on.
            before: file of the measures of the untrained policy, which all runs from one warm start share. Made where
                it is missing.
        """
        args, log = self.args, TensorboardLogger(self.args)
        steps = _steps(puzzles, args)
        start = self._resumed_step() if args.ckpt.load_enable else 0
        if not start:
            log.log_eval(0, self._evaluate_once(held_out, before))
        for step, batch in enumerate(steps[start:], start=start + 1):
            logs = self.step(batch, step)
            log.log_train(step, logs)
            print(f"Global step {step}: {logs}", flush=True)
            is_last = step == len(steps)
            if is_last or (args.eval.steps > 0 and step % args.eval.steps == 0):
                log.log_eval(step, self.evaluate(held_out))
            if not is_last and args.ckpt.save_steps > 0 and step % args.ckpt.save_steps == 0:
                self._save(step)
        log.close()
        self.strategy.save_model(self.policy, self.tokenizer, args.ckpt.output_dir)

    def _evaluate_once(self, held_out: Sequence[Row], before: Path) -> dict[str, float]:
        """Return the measures of the untrained policy from their file, which is made where it is missing."""
        if not before.exists():
            partial = before.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(self.evaluate(held_out)), "utf-8")
            partial.replace(before)
        return json.loads(before.read_text("utf-8"))

    def _save(self, step: int) -> None:
        """Save a checkpoint, and keep the one before, in case this process is killed meanwhile."""
        state = {"step": step, "random": random_state()}
        path = self.args.ckpt.path
        self.strategy.save_ckpt(self.policy.model, path, f"step{step}", max_num=2, client_state=state)

    def _resumed_step(self) -> int:
        """Load the newest checkpoint, and return its step; 0 without one."""
        if not (Path(self.args.ckpt.path) / "latest").exists():
            return 0
        _, state = self.strategy.load_ckpt(self.policy.model, self.args.ckpt.path)
        set_random_state(state["random"])
        print(f"goes on after step {state['step']}", flush=True)
        return state["step"]

    def step(self, puzzles: Sequence[Row], step: int) -> dict[str, float]:
        """Sample answers to the puzzles, train on them, and return the metrics."""
        start = time.perf_counter()
        n, longest = self.args.rollout.n_samples_per_prompt, self.args.rollout.max_new_tokens
        uniform = torch.rand(len(puzzles), n, longest, generator=_generator(self.args.train.seed, "step", step))
        samples = self.answer(puzzles, uniform, self.args.rollout.temperature)
        generated = time.perf_counter()
        for experience in self.experience(samples):
            self.trainer.replay_buffer.append(experience)
        made = time.perf_counter()
        self.policy.train()
        status = self.trainer.ppo_train(self.kl.value)
        self.trainer.replay_buffer.clear()
        logs = {name: value for name, value in status.items() if isinstance(value, float | int)}
        end = time.perf_counter()
        rewards, lengths, truncated = (
            torch.cat([getattr(s, name) for s in samples]).float().mean().item()
            for name in ("rewards", "response_length", "truncated")
        )
        return logs | {
            "rollout/reward_mean": rewards,
            "rollout/response_length_mean": lengths,
            "rollout/truncated_rate": truncated,
            "timing/generation": generated - start,
            "timing/make_experience": made - generated,
            "timing/ppo_train": end - made,
            "timing/step_total": end - start,
        }

    def answer(self, puzzles: Sequence[Row], uniform: Tensor, temperature: float) -> list[Experience]:
        """Return graded samples, those of a puzzle next to each other.

        Args:
            puzzles: P of them.
            uniform: (P, S, T) random numbers, for S answers of at most T tokens.
            temperature: of sampling.
        """
        model, tokenizer = self.policy.model.module.eval(), self.tokenizer
        texts, prompts = encode(tokenizer, [row["prompt"] for row in puzzles])
        stop = tokenizer.eos_token_id
        answers = sample(model, prompts, uniform, stop=stop, temperature=temperature)
        samples = [
            as_experience(prompt, answer, is_truncated=answer[-1] != stop)
            for prompt, of_prompt in zip(prompts, answers, strict=True)
            for answer in of_prompt
        ]
        n = uniform.shape[1]
        queries = tokenizer.batch_decode([s.sequences[0] for s in samples])
        labels = [puzzle["label"] for puzzle in puzzles for _ in range(n)]
        graded = self.reward(queries, [text for text in texts for _ in range(n)], labels)
        for i, one in enumerate(samples):
            one.rewards, one.scores = graded["rewards"][i : i + 1], graded["scores"][i : i + 1]
            one.info = {name: values[i : i + 1] for name, values in graded["extra_logs"].items()}
            one.info |= {"reward": one.rewards, "score": one.scores}
        return samples

    @torch.no_grad()
    def experience(self, samples: list[Experience]) -> list[Experience]:
        """Give samples log-probs and advantages, as OpenRLHF's experience maker does with a KL loss."""
        batches = self.maker.split_rollout_samples(samples)
        for batch in batches:
            inputs = [part.to(self.device) for part in (batch.sequences, batch.action_mask, batch.attention_mask)]
            is_deferred = self.trainer.defers_old_log_probs
            batch.action_log_probs = unknown(batch.action_mask) if is_deferred else self.policy(*inputs).cpu()
            batch.base_action_log_probs = self.reference(*inputs).cpu() if self.reference else None
            if self.args.algo.advantage.is_correction_level != "off":
                batch.rollout_log_probs = self.policy(*inputs).cpu()  # it has drawn the tokens itself
            batch.kl = torch.zeros_like(batch.action_mask, dtype=torch.float32)  # it is a part of the loss
            batch.info["kl"] = masked_mean(batch.kl, batch.action_mask, dim=-1)
        return self.maker.compute_advantages_and_returns(batches)

    def evaluate(self, held_out: Sequence[Row]) -> dict[str, float]:
        """Return each source's measures with their intervals, by the names of `ops.rollouts.samples`."""
        measures = {}
        for source, rows in groupby(sorted(held_out, key=_source), key=_source):
            responses = list(self._responses(list(rows), sampling_of(source, self.args.eval.sampling), source))
            for name, estimate in estimate_source(responses).items():
                measures[f"{source}/{name}"] = estimate.value
                measures[f"{source}/{name}/low"], measures[f"{source}/{name}/high"] = estimate.low, estimate.high
        return measures

    def _responses(self, puzzles: list[Row], sampling: Sampling, source: str) -> Iterator[list[Response]]:
        """Yield the graded answers to each puzzle."""
        n, longest = sampling.n, self.args.rollout.max_new_tokens
        generator = _generator(self.args.train.seed, "evaluation", source)
        for some in _chunks(puzzles, _PROMPTS_AT_A_TIME):
            uniform = torch.rand(len(some), n, longest, generator=generator)
            samples = self.answer(some, uniform, sampling.temperature)
            responses = [
                Response(s.scores.item(), bool(s.info["well_formed"]), s.response_length.item(), bool(s.truncated))
                for s in samples
            ]
            yield from (list(of_puzzle) for of_puzzle in _chunks(responses, n))


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


def _reward(source: str) -> Callable[..., dict]:
    """Return the function of a reward of the package, or of a file."""
    return (REWARDS[source].module if source in REWARDS else user_files.load(source, "reward_func")).reward_func


def _steps(puzzles: Sequence[Row], args: SimpleNamespace) -> list[Sequence[Row]]:
    """Return the puzzles of each step: all of them in each epoch, in an order of its own."""
    steps: list[Sequence[Row]] = []
    for epoch in range(args.train.num_episodes):
        purpose = ("order", epoch) if epoch else ("order",)
        order = torch.randperm(len(puzzles), generator=_generator(args.train.seed, *purpose)).tolist()
        steps += _chunks([puzzles[place] for place in order], args.rollout.batch_size)
    return steps


def _chunks(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _source(row: Row) -> str:
    return row["datasource"]


def _generator(*what) -> torch.Generator:
    """Return a generator of random numbers, the same ones for the same purpose."""
    digest = hashlib.sha256(repr(what).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Its flags are those of `train_ppo_ray`. What has to do with placement has no effect.

    Args:
        argv: the flags, if not those of the command line.

    Raises:
        SystemExit: with a line on standard error, where the flags ask for another estimator than those of the family.
    """
    from openrlhf.utils.config import hierarchize

    deepspeed.DeepspeedStrategy = guard.GuardedStrategy
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    args = hierarchize(train_ppo_ray.parse(list(sys.argv[1:] if argv is None else argv)))
    if not args.algo.kl.use_loss or args.algo.advantage.estimator == "gae":
        raise SystemExit("study.in_process: error: needs --algo.kl.use_loss, and has no critic")
    if args.ds.zero_stage == 3:
        raise SystemExit("study.in_process: error: samples from whole weights, so --ds.zero_stage is 0, 1 or 2")
    args.actor.eps_clip_low_high = tuple(args.actor.eps_clip_low_high)
    args.local_rank = 0
    args.actor.gradient_checkpointing_enable = False  # the models are small, and the actor here does without
    if cpu.uses_cpu():
        args.ds.param_dtype = "fp32"  # which the command does not offer, and CPUs without AMX are fastest in
    puzzles, held_out = (
        [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
        for path in (args.data.prompt_dataset, args.eval.dataset)
    )
    # What the measures before all steps depend on, beside the file of held-out puzzles
    asked = (args.actor.model_name_or_path, args.eval.sampling, args.rollout.max_new_tokens, args.train.seed)
    name = f"before-{hashlib.sha256(repr(asked).encode()).hexdigest()[:8]}.json"
    before = Path(args.eval.dataset).parent / name
    Training(args).train(puzzles, held_out, before)


if __name__ == "__main__":
    main()
