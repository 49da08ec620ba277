"""Each setting of the authors' four scripts equals ours, or belongs to one of at most eight exceptions with a reason.

The facts are those of github.com/zhyang2226/AR-Lopti at cbeb333 (scripts/train_kklogic_*_4x80GB.sh, and the code that
reads their settings), and of Table 2 of arXiv 2505.12929 for math. docs/reproduce.md has the table made of them.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
from test_scripts import ROOT, parse

KK, MATH = (ROOT / f"examples/scripts/train_{name}.sh" for name in ("kk", "math"))
METHODS = {"baseline": "none", "AR": "ar", "Lopti": "lopti", "AR-Lopti": "both"}  # their scripts: our METHOD

EXCEPTIONS = {
    "Table 3": "their AR script has α 0.2 and their Lopti script η 0.4, the paper's Table 3 0.3 and 0.5, as here. "
    "`METHOD=ar ALPHA=0.2` and `METHOD=lopti ETA=0.4` are their runs",
    "micro-batch": "their loss is a mean over micro-batches of 8 of token means. Here it is a mean over the tokens of "
    "the mini-batch, as in the paper's text, whatever the micro-batch",
    "mini-batch": "here a mini-batch has whole groups. Their ranks get equal lengths of samples, which splits some",
    "evaluation": "every 20 steps they evaluate K&K greedily and at temperature 1, and AMC and AIME with 16 samples. "
    "A run here has one reward, and evaluates K&K greedily. The rest is [one command](#knights-and-knaves) afterwards",
    "prompts": "they drop training prompts of more than 400 tokens, counted within a second chat template. "
    "`arlopti data --max-prompt-tokens` drops long ones, too",
    "memory": "where weights and optimizer are kept, and how many samples a forward pass without gradients takes",
    "no effect": "their code does not read it, or the others override it. `both_linear_normal` is Eq. 4",
    "yours": "paths, names and trackers",
}


class Setting(NamedTuple):
    """A setting of the authors' scripts, and the flag here that it equals."""

    theirs: str
    kk: object  # its value in all four scripts, or {script: value}
    flag: str = ""
    ours: object = None  # the flag's value, if it is written in another way here
    math: object = None  # Table 2's, if it is there
    exception: str = ""


_ALPHA = {"baseline": None, "AR": 0.2, "Lopti": None, "AR-Lopti": 0.3}
_ETA = {"baseline": None, "AR": None, "Lopti": 0.4, "AR-Lopti": 0.5}  # None: SEPERATE_UPDT is False
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SETTINGS = [
    Setting("algorithm.adv_estimator", "grpo", "algo.advantage.estimator", "group_norm"),
    Setting("data.train_batch_size", 64, "rollout.batch_size", math=128),
    Setting(f"{_ROLLOUT}n", 8, "rollout.n_samples_per_prompt", math=8),
    Setting(f"{_ROLLOUT}temperature", 0.7, "rollout.temperature", math=1.0),
    Setting("data.max_response_length", 4096, "rollout.max_new_tokens", math=4096),
    Setting(f"{_ACTOR}ppo_mini_batch_size", 256, "train.batch_size", math=512),
    Setting(f"{_ACTOR}optim.type", "adamw", "actor.optim", "adam", math="adamw"),
    Setting(f"{_ACTOR}optim.lr", 1e-6, "actor.adam.lr", math=1e-6),
    Setting(f"{_ACTOR}use_kl_loss", True, "algo.kl.use_loss"),
    Setting(f"{_ACTOR}kl_loss_coef", 0.001, "algo.kl.init_coef", math=0.001),
    Setting(f"{_ACTOR}kl_loss_type", "low_var_kl", "algo.kl.estimator", "k3"),
    Setting(f"{_ACTOR}clip_ratio_low, clip_ratio_high", [0.2, 0.24], "actor.eps_clip_low_high", math=[0.2, 0.24]),
    Setting(f"{_ACTOR}clip_ratio_c", 10.0, "actor.dual_clip"),
    Setting(f"{_ACTOR}loss_agg_mode", "token-mean", "actor.loss_agg_mode"),
    Setting(f"{_ACTOR}importance_sampling", "on", "actor.policy_loss_type", "ppo"),
    Setting("trainer.total_epochs", 5, "train.num_episodes"),
    Setting("actor_rollout_ref.model.use_remove_padding", True, "ds.packing_samples"),
    Setting("actor_rollout_ref.model.enable_gradient_checkpointing", True, "actor.gradient_checkpointing_enable"),
    Setting(f"{_ROLLOUT}tensor_model_parallel_size", 1, "vllm.tensor_parallel_size"),
    Setting(f"{_ROLLOUT}gpu_memory_utilization", 0.6, "vllm.gpu_memory_utilization"),
    Setting("trainer.n_gpus_per_node", 4, "actor.num_gpus_per_node"),
    Setting("trainer.nnodes", 1, "actor.num_nodes"),
    Setting("trainer.save_freq", 20, "ckpt.save_steps"),
    Setting("trainer.test_freq", 20, "eval.steps"),
    # What their scripts leave to verl's configuration.
    Setting("(default) actor.grad_clip", 1.0, "actor.max_norm"),
    Setting("(default) actor.ppo_epochs", 1, "train.max_epochs"),
    Setting("(default) actor.entropy_coeff", 0.0, "actor.entropy_coef", "None"),
    Setting("(default) optim.betas", [0.9, 0.999], "actor.adam.betas"),
    Setting("(default) optim.weight_decay", 0.01, "actor.adam.weight_decay"),
    Setting("(default) optim.warmup_style", "constant", "actor.lr_scheduler"),
    Setting("(default) rollout.top_p", 1.0, "rollout.top_p"),
    # The exceptions.
    Setting("algorithm.reweight_k", _ALPHA, "algo.ar.alpha", exception="Table 3"),
    Setting("algorithm.seperate_updating, seperate_prob", _ETA, "algo.lopti.eta", exception="Table 3"),
    Setting(f"{_ACTOR}ppo_micro_batch_size", 32, "train.micro_batch_size", exception="micro-batch"),
    Setting("(code) _balance_batch", "", exception="mini-batch"),
    Setting("data.val_files_testonce", "", exception="evaluation"),
    Setting("data.val_files_testN", "", exception="evaluation"),
    Setting(f"{_ROLLOUT}n_val", 16, "eval.n_samples_per_prompt", exception="evaluation"),
    Setting("data.max_prompt_length", 400, "data.max_len", exception="prompts"),
    Setting(f"{_ACTOR}fsdp_config.param_offload", True, exception="memory"),
    Setting(f"{_ACTOR}fsdp_config.grad_offload", True, exception="memory"),
    Setting(f"{_ACTOR}fsdp_config.optimizer_offload", True, "ds.adam_offload", exception="memory"),
    Setting("actor_rollout_ref.ref.fsdp_config.param_offload", True, "ref.offload", exception="memory"),
    Setting(f"{_ROLLOUT}log_prob_micro_batch_size", 8, exception="memory"),
    Setting("actor_rollout_ref.ref.log_prob_micro_batch_size", 8, exception="memory"),
    Setting("data.val_batch_size", 4, exception="no effect"),
    Setting("algorithm.kl_ctrl.kl_coef", 0.001, exception="no effect"),
    Setting("algorithm.samples_reweight", True, exception="no effect"),  # with reweight_k 0
    Setting("algorithm.reweight_method", "both_linear_normal", exception="no effect"),
    Setting("algorithm.reweight_tau", "1 - reweight_k", exception="no effect"),
    Setting("algorithm.neg_adv_weight", 1.0, exception="no effect"),
    Setting("algorithm.seperate_portion", 0.0, exception="no effect"),
    Setting("trainer.critic_warmup", 0, exception="no effect"),
    Setting("trainer.math_test_freq", 20, exception="no effect"),
    Setting(f"{_ROLLOUT}name", "vllm", exception="no effect"),
    Setting("data.train_files", "", exception="yours"),
    Setting("actor_rollout_ref.model.path", "", exception="yours"),
    Setting("trainer.logger", ["wandb"], exception="yours"),
    Setting("trainer.project_name", "", exception="yours"),
    Setting("trainer.experiment_name", "", exception="yours"),
    Setting("trainer.default_local_dir", "", exception="yours"),
    Setting("trainer.default_hdfs_dir", None, exception="yours"),
]


def table() -> str:
    """Return docs/reproduce.md's table: a row for each equal setting, and one for each exception."""
    rows = ["| setting of theirs | K&K | math | flag here |", "|---|---|---|---|"]
    for setting in SETTINGS:
        if not setting.exception:
            math = "" if setting.math is None else _text(setting.math)
            written = "" if setting.ours is None else f" {setting.ours}"
            rows.append(f"| `{_short(setting)}` | {_text(setting.kk)} | {math} | `--{setting.flag}{written}` |")
    for name, reason in EXCEPTIONS.items():
        names = ", ".join(f"`{_short(s)}`" for s in SETTINGS if s.exception == name)
        rows.append(f"| {names} | | | **{name}**: {reason} |")
    return "\n".join(rows) + "\n"


def _short(setting: Setting) -> str:
    return setting.theirs.removeprefix("actor_rollout_ref.").removeprefix("(default) ").removeprefix("(code) ")


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def value_of(setting: Setting, script: str) -> object:
    """Return what a flag here has to be in order to equal a script of theirs."""
    if setting.ours is not None:
        return setting.ours
    return setting.kk[script] if isinstance(setting.kk, dict) else setting.kk


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, dict]:
    """Return {their script: the flags of ours}."""
    folder = tmp_path_factory.mktemp("runs")
    return {script: parse(KK, folder, METHOD=method) for script, method in METHODS.items()}


def differing(args: dict, script: str, settings: list[Setting]) -> list[str]:
    """Return the settings whose flag has another value."""
    return [s.theirs for s in settings if _text(args[s.flag]) != _text(value_of(s, script))]


@pytest.mark.parametrize("script", METHODS)
def test_a_setting_equals_ours_or_is_an_exception(script, runs):
    assert differing(runs[script], script, [s for s in SETTINGS if not s.exception]) == []


def test_the_exceptions_are_few_and_none_is_idle(runs):
    assert len(EXCEPTIONS) <= 8 and {s.exception for s in SETTINGS} == {"", *EXCEPTIONS}
    compared = [s for s in SETTINGS if s.exception and s.flag]
    found = {name for script in METHODS for name in differing(runs[script], script, compared)}
    assert found == {s.theirs for s in compared}


def test_their_own_values_of_alpha_and_eta_are_a_variable_away(tmp_path):
    of_table_3 = [s for s in SETTINGS if s.exception == "Table 3"]
    for script, variables in {"AR": {"ALPHA": "0.2"}, "Lopti": {"ETA": "0.4"}, "AR-Lopti": {}, "baseline": {}}.items():
        args = parse(KK, tmp_path, METHOD=METHODS[script], **variables)
        assert differing(args, script, of_table_3) == []


def test_the_math_runs_have_the_settings_of_table_2(tmp_path: Path):
    args = parse(MATH, tmp_path)
    published = [s for s in SETTINGS if s.math is not None]
    assert len(published) == 9  # ten rows, of which two are one flag
    for setting in published:
        assert _text(args[setting.flag]) == _text(setting.math if setting.ours is None else setting.ours), setting


def test_a_training_evaluates_greedily_as_theirs(runs):
    assert {str(args["eval.sampling"][-1]) for args in runs.values()} == {"*:n=1,t=0"}


def test_the_page_has_the_table():
    page = (ROOT / "docs/reproduce.md").read_text("utf-8")
    assert table() in page, f"docs/reproduce.md needs this table:\n{table()}"
