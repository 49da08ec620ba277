"""Describe the study as data: what is trained, on what, with which flags. Nothing here runs anything."""

from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

PEOPLE = (2, 3)
HELD_OUT_BY = "structure"  # what tells held-out puzzles from training puzzles; by what is told, in earlier results
STEPS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, MAX_NEW_TOKENS = 30, 32, 8, 112
TEMPERATURE = 1.0  # of rollouts and evaluations
HELD_OUT, EVAL_SAMPLES = 160, 8  # puzzles per number of people, and answers to each of them
HELD_OUT_GREEDY = 256  # further puzzles per number of people, answered once at temperature 0
# Four answers out of five are hasty, and right by chance. Answers that try assignments first are right far more often.
# So training can raise accuracy, also greedy accuracy, by thinking at all, by thinking better, and with less noise.
# Muon and no label smoothing are what `make_policy` has. They stand here for the results, which name them.
WARM_START: dict[str, Any] = {
    "steps": 1200,
    "muon": True,
    "label_smoothing": 0.0,
    "hasty_share": 0.8,
    "solution_first": 0.7,
}
FIXED = ("muon", "label_smoothing")
# The second condition of the family's study: what a policy thinks has one of several wordings, chosen at random. Rare
# tokens are then mostly words that do not matter. The longest solution has 228 tokens with them, and 96 without.
DECISIONS, NOISE = "decisions", "noise"


class Condition(NamedTuple):
    """Describes how a policy is warm-started, and how long its answers may get."""

    warm_start: dict[str, Any]  # arguments of `tiny_policy.make_policy`, and `FIXED`
    max_new_tokens: int


CONDITIONS = {
    DECISIONS: Condition(WARM_START, MAX_NEW_TOKENS),
    NOISE: Condition(WARM_START | {"varied_wording": True}, 256),
}
LEARNING_RATE = 3e-4  # the best for GRPO alone among `TUNING`'s, see docs/results.md


class Run(NamedTuple):
    """Describes one training run. Runs of one seed share puzzles, warm start, and the seeds of sampling and order."""

    family: str  # which baseline it is compared with: "GRPO", "REINFORCE++", "tuning", or GRPO in one of `CONDITIONS`
    variant: str
    seed: int
    flags: str  # the estimator's and the methods'
    learning_rate: float = LEARNING_RATE
    mini_batches: int = 2  # per step; each takes one optimizer step, or two with Lopti

    @property
    def name(self) -> str:
        """Return the run's name, which is also its result's."""
        return f"{self.variant}-{self.seed}"

    @property
    def condition(self) -> str:
        """Return which of `CONDITIONS` the run has. Those of the first study have the first."""
        return self.family if self.family in CONDITIONS else DECISIONS

    @property
    def is_in_process(self) -> bool:
        """Return whether one process trains it (`study.in_process`), and not the whole stack."""
        return self.family in CONDITIONS


_STACK = """ --train.colocate_all
        --vllm.num_engines 1 --vllm.enforce_eager --vllm.sync_backend gloo --vllm.gpu_memory_utilization 0.5"""
_GRPO = "--algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3"
_REINFORCE = "--algo.advantage.estimator reinforce --algo.kl.estimator k1"
_AR, _LOPTI = "--algo.ar.alpha 0.3", "--algo.lopti.eta 0.5"  # Table 3, K&K
_AR_REINFORCE = "--algo.ar.alpha 0.1"  # Appendix D.2

GRPO = {"grpo": "", "ar": _AR, "lopti": _LOPTI, "both": f"{_AR} {_LOPTI}"}
REINFORCE = {"rpp": "", "rpp-ar": _AR_REINFORCE, "rpp-lopti": _LOPTI, "rpp-both": f"{_AR_REINFORCE} {_LOPTI}"}
# Section 5.3: Fig. 6b's reversed order, Fig. 6a's groups alone, Fig. 6c's α and η.
ABLATIONS = {
    "high-first": f"{_LOPTI} --algo.lopti.order high_first",
    "only-low": f"{_LOPTI} --algo.lopti.groups low",
    "only-high": f"{_LOPTI} --algo.lopti.groups high",
    "alpha-0.1": "--algo.ar.alpha 0.1",
    "alpha-1": "--algo.ar.alpha 1",
    "eta-0.3": "--algo.lopti.eta 0.3",
    "eta-0.7": "--algo.lopti.eta 0.7",
}
# Lopti takes twice as many optimizer steps, at equal data and learning rate. So does this, without it.
CONTROL = "double-steps"
# The family of token methods, with their papers' constants. Each is also run with a mean weight of one, where that is
# not what it has: Lopti's masks add up to one, and the loss of 80/20 and STAPO divides by the tokens that they keep.
_MEAN_ONE = "--algo.token_method_normalize"
_METHODS = {
    "ar": "--algo.token_method ar --algo.token_method_args ar.alpha=0.3",
    "direction": "--algo.token_method ar --algo.token_method_args ar.alpha=-0.2",
    "a3po": "--algo.token_method a3po",
    "stare": "--algo.token_method stare",
    "steer": "--algo.token_method steer",
}
FAMILY_VARIANTS = {
    "grpo": "",
    "lopti": _LOPTI,
    CONTROL: "",
    "eighty-twenty": "--algo.token_method eighty_twenty",
    "stapo": "--algo.token_method stapo",
    **_METHODS,
    **{f"{name}-mean-one": f"{given} {_MEAN_ONE}" for name, given in _METHODS.items()},
}
# Methods that came later, and GRPO from the same warm starts. CW-GRPO has a mean weight of one by definition, and the
# loss of GMTS divides by the tokens that it keeps.
NEXT_VARIANTS = {
    "grpo": "",
    "cw-grpo": "--algo.token_method cw_grpo",
    "gmts": "--algo.token_method gmts",
}
LEARNING_RATES = (1e-4, 3e-4, 1e-3)


def _of_each_seed(family: str, variants: dict[str, str], estimator: str, seeds: int) -> list[Run]:
    # Seed by seed, so that a study that is cut short is balanced.
    return [
        Run(family, name, seed, f"{estimator} {flags}".strip())
        for seed in range(seeds)
        for name, flags in variants.items()
    ]


def _of_each_condition(variants: dict[str, str]) -> list[Run]:
    return [
        Run(
            condition,
            f"{condition}-{name}",
            seed,
            f"{_GRPO} {given}".strip(),
            mini_batches=4 if name == CONTROL else 2,
        )
        for seed in range(5)
        for name, given in variants.items()
        for condition in CONDITIONS
    ]


TUNING = [Run("tuning", f"lr-{rate:g}", seed, _GRPO, rate) for seed in (100, 101) for rate in LEARNING_RATES]
STUDY = [
    *_of_each_seed("GRPO", GRPO, _GRPO, 5),
    *_of_each_seed("REINFORCE++", REINFORCE, _REINFORCE, 3),
    *(Run("GRPO", CONTROL, seed, _GRPO, mini_batches=4) for seed in range(3)),
    *_of_each_seed("GRPO", ABLATIONS, _GRPO, 3),
]
# The first study's results are not used again. They were made by earlier code, and on CPUs whose warm starts differ.
FAMILY = _of_each_condition(FAMILY_VARIANTS)
# Those that a changed split could change most. They were run again on puzzles held out by structure.
CONTROLS = ("grpo", CONTROL, "lopti")
FAMILY_CONTROLS = [run for run in FAMILY if run.variant.removeprefix(f"{run.condition}-") in CONTROLS]
NEXT = _of_each_condition(NEXT_VARIANTS)


def flags(run: Run, inputs: Path, out: Path) -> list[str]:
    """Return the run's flags for `cli.train_ppo_ray`, as a user would type them.

    Args:
        run: the run. One in process has no flags of vLLM.
        inputs: folder of the seed's model, train.jsonl and test.jsonl.
        out: folder for what the run writes.
    """
    text = f"""
        {run.flags}
        --algo.kl.init_coef 0.001
        --actor.eps_clip_low_high 0.2 0.24 --actor.dual_clip 10 --actor.loss_agg_mode token-mean
        --actor.adam.lr {run.learning_rate:g} --actor.lr_scheduler constant --actor.lr_warmup_ratio 0
        --actor.max_norm 1.0
        --actor.update selective
        --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1{"" if run.is_in_process else _STACK}
        --ds.zero_stage 2 --ds.attn_implementation sdpa
        --rollout.batch_size {PROMPTS_PER_STEP} --rollout.n_samples_per_prompt {SAMPLES_PER_PROMPT}
        --rollout.micro_batch_size 128 --rollout.temperature {TEMPERATURE}
        --rollout.max_new_tokens {CONDITIONS[run.condition].max_new_tokens}
        --train.batch_size {PROMPTS_PER_STEP * SAMPLES_PER_PROMPT // run.mini_batches} --train.micro_batch_size 64
        --train.max_epochs 1 --train.num_episodes 1
        --train.seed {run.seed + 1}
        --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 512
        --eval.steps {STEPS} --eval.sampling kk_*:n={EVAL_SAMPLES},t={TEMPERATURE} --eval.sampling *_greedy:n=1,t=0
        --ckpt.best_metric_key none
        --logger.wandb.run_name run
    """.split()
    return text + [
        f"--actor.model_name_or_path={inputs / 'model'}",
        f"--data.prompt_dataset={inputs / 'train.jsonl'}",
        f"--eval.dataset={inputs / 'test.jsonl'}",
        f"--reward.remote_url={ROOT / 'rewards' / 'kk_reward.py'}",
        f"--ckpt.output_dir={out / 'model'}",
        f"--logger.tensorboard_dir={out / 'tensorboard'}",
    ]


def inputs_configuration(condition: str, seed: int) -> dict:
    """Return what the puzzles and the warm start of a seed are made from in one condition."""
    return {
        "held_out_by": HELD_OUT_BY,
        "people": list(PEOPLE),
        "train": STEPS * PROMPTS_PER_STEP,
        "held_out": HELD_OUT,
        "held_out_greedy": HELD_OUT_GREEDY,
        "warm_start": dict(CONDITIONS[condition].warm_start),
        "seed": seed,
    }


def configuration(run: Run) -> dict:
    """Return what is trained on what, with which flags. A result with another configuration is not this run's.

    The code is no part of it. A result says at which commit it was made.
    """
    here = Path("INPUTS"), Path("OUT")
    how = {"trained": "in one process"} if run.is_in_process else {}
    return how | {
        "inputs": inputs_configuration(run.condition, run.seed),
        "flags": " ".join(flags(run, *here)).replace(f"{ROOT}/", ""),
    }
