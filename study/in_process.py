"""Train one run of the study in one process, with the flags of `train_ppo_ray`.

    python -m study.in_process FLAGS

It is `examples/in_one_process.py` with another sampler (`study.sampler`), evaluations and checkpoints. There is no
vLLM, no Ray and no sending of weights, so a run of the study's policy of 1.0M parameters takes a third of the time. On
a CPU a run is the same one, bit for bit, whenever it is made on one kind of CPU with as many threads, also where it
was ended and goes on from its newest checkpoint (`--ckpt.load_enable`).
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from examples import in_one_process
from examples.in_one_process import Answers, Row, arguments, chunks, generator, sampled, steps_of

from openrlhf.trainer.ppo_utils.experience import Experience  # isort: skip
from openrlhf.utils.logging_utils import TensorboardLogger  # isort: skip

from arlopti_openrlhf.evaluation.measures import Response, estimate_source
from arlopti_openrlhf.evaluation.sampling import Sampling, sampling_of
from arlopti_openrlhf.ops.checkpoints.state import random_state, set_random_state
from study.sampler import sample

_PROMPTS_AT_A_TIME = 16  # in an evaluation. Eight answers of 256 tokens each hold 1.5 GB at 135M parameters.


class Training(in_one_process.Training):
    """The study's training: its own sampler, evaluations, and checkpoints that it goes on from."""

    def train(self, puzzles: Sequence[Row], held_out: Sequence[Row], before: Path) -> None:
        """Train in epochs, with evaluations, and save the model; log all of it as a run of the whole stack does.

        Args:
            puzzles: to train on.
            held_out: to evaluate on.
            before: file of the measures of the untrained policy, which all runs from one warm start share. Made where
                it is missing.
        """
        args, log = self.args, TensorboardLogger(self.args)
        steps = steps_of(puzzles, args)
        start = self._resumed_step() if args.ckpt.load_enable else 0
        if not start:
            log.log_eval(0, self._evaluate_once(held_out, before))
        for step, batch in enumerate(steps[start:], start=start + 1):
            logs = self.step_numbered(batch, step)
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

    def step_numbered(self, puzzles: Sequence[Row], step: int) -> dict[str, float]:
        """Sample answers to the puzzles, train on them, and return the metrics with the times of the phases."""
        start = time.perf_counter()
        n, longest = self.args.rollout.n_samples_per_prompt, self.args.rollout.max_new_tokens
        uniform = torch.rand(len(puzzles), n, longest, generator=generator(self.args.train.seed, "step", step))
        samples = self.sample(puzzles, uniform, self.args.rollout.temperature)
        generated = time.perf_counter()
        experiences = self.experience(samples)
        made = time.perf_counter()
        logs = self.update(experiences)
        end = time.perf_counter()
        return (
            logs
            | sampled(samples)
            | {
                "timing/generation": generated - start,
                "timing/make_experience": made - generated,
                "timing/ppo_train": end - made,
                "timing/step_total": end - start,
            }
        )

    def sample(self, puzzles: Sequence[Row], uniform: Tensor, temperature: float) -> list[Experience]:
        """Return graded samples, those of a puzzle next to each other.

        Args:
            puzzles: P of them.
            uniform: (P, S, T) random numbers, for S answers of at most T tokens.
            temperature: of sampling.
        """

        def answers_to(prompts: Sequence[list[int]]) -> Answers:
            model, stop = self.policy.model.module.eval(), self.tokenizer.eos_token_id
            return sample(model, prompts, uniform, stop=stop, temperature=temperature)

        return self.answer(puzzles, answers_to)

    def evaluate(self, held_out: Sequence[Row]) -> dict[str, float]:
        """Return each source's measures with their intervals, by the names of `ops.rollouts.samples`."""
        measures = {}
        for source, rows in groupby(sorted(held_out, key=_source), key=_source):
            responses = self._responses(list(rows), sampling_of(source, self.args.eval.sampling), source)
            for name, estimate in estimate_source({i: [row] for i, row in enumerate(responses)}).items():
                measures[f"{source}/{name}"] = estimate.value
                measures[f"{source}/{name}/low"], measures[f"{source}/{name}/high"] = estimate.low, estimate.high
        return measures

    def _responses(self, puzzles: list[Row], sampling: Sampling, source: str) -> Iterator[list[Response]]:
        """Yield the graded answers to each puzzle."""
        n, longest = sampling.n, self.args.rollout.max_new_tokens
        numbers = generator(self.args.train.seed, "evaluation", source)
        for some in chunks(puzzles, _PROMPTS_AT_A_TIME):
            uniform = torch.rand(len(some), n, longest, generator=numbers)
            samples = self.sample(some, uniform, sampling.temperature)
            responses = [
                Response(s.scores.item(), bool(s.info["well_formed"]), s.response_length.item(), bool(s.truncated))
                for s in samples
            ]
            yield from (list(of_puzzle) for of_puzzle in chunks(responses, n))


def _source(row: Row) -> str:
    return row["datasource"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Its flags are those of `train_ppo_ray`. What has to do with placement has no effect.

    Args:
        argv: the flags, if not those of the command line.

    Raises:
        SystemExit: with a line on standard error, where the flags ask for another estimator than those of the family.
    """
    args = arguments(["--actor.update=selective", *(sys.argv[1:] if argv is None else argv)])
    if not args.algo.kl.use_loss or args.algo.advantage.estimator == "gae":
        raise SystemExit("study.in_process: error: needs --algo.kl.use_loss, and has no critic")
    if args.ds.zero_stage == 3:
        raise SystemExit("study.in_process: error: samples from whole weights, so --ds.zero_stage is 0, 1 or 2")
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
