"""Values that no run can use, or that would train something else than its user wants."""

import os
from operator import attrgetter
from types import SimpleNamespace

from arlopti_openrlhf.ops.preflight import interval
from arlopti_openrlhf.ops.preflight.finding import Finding

# The smallest value of whole numbers.
_AT_LEAST = {
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 1,
    "vllm.tensor_parallel_size": 1,
    "ds.tensor_parallel_size": 1,
    "ds.ring_attn_size": 1,
    "rollout.batch_size": 1,
    "rollout.n_samples_per_prompt": 1,
    "rollout.micro_batch_size": 1,
    "train.batch_size": 1,
    "train.micro_batch_size": 1,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "train.async_queue_size": 1,
    "data.max_len": 2,
    "data.max_samples": 1,
    "logger.logging_steps": 1,
    "ckpt.max_num": 1,
    "eval.n_samples_per_prompt": 1,
}
# Steps between two events. -1 is never.
_INTERVALS = ("ckpt.save_steps", "eval.steps")
# The range of other numbers, with a bracket where the end belongs to it.
_BETWEEN = {
    "vllm.gpu_memory_utilization": "(0, 1]",
    "rollout.temperature": "(0, inf)",
    "rollout.top_p": "(0, 1]",
    "eval.temperature": "[0, inf)",
    "train.ema_beta": "[0, 1]",
    "actor.eps_clip": "[0, inf)",
    "actor.max_norm": "[0, inf)",
    "algo.kl.init_coef": "[0, inf)",
    "algo.advantage.gamma": "[0, 1]",
    "algo.advantage.lambd": "[0, 1]",
    "ckpt.max_mem": "(0, inf]",
}
_OF_AN_OPTIMIZER = {
    "adam.eps": "(0, inf)",
    "adam.weight_decay": "[0, inf)",
    "lr_warmup_ratio": "[0, 1]",
    "min_lr_ratio": "[0, 1]",
    "max_norm": "[0, inf)",
}
# Adam moves a weight by about the learning rate in each step, and weights are mostly below 0.1.
_ABSURD_RATE, _HIGH_RATE = 1.0, 1e-2


def check(args: SimpleNamespace) -> list[Finding]:
    """Return the values that are out of range."""
    findings = [_outside(f, _value(args, f), f"[{low}, inf)") for f, low in _AT_LEAST.items()]
    findings += [_outside(f, _value(args, f), range_) for f, range_ in _BETWEEN.items()]
    findings += [_outside(f, _value(args, f), "[1, inf)") for f in _INTERVALS if _value(args, f) != -1]
    # Where the flag is not given, a default follows from other flags.
    for flag in ("rollout.max_new_tokens", "rollout.max_tokens_per_gpu"):
        if _value(args, flag) is not None:
            findings.append(_outside(flag, _value(args, flag), "[1, inf)"))
    if args.actor.dual_clip is not None:
        findings.append(_outside("actor.dual_clip", args.actor.dual_clip, "(1, inf)"))
    trained = ("actor", "critic") if args.critic.model_name_or_path else ("actor",)
    for name in trained:
        findings += _check_optimizer(args, name)
    findings += [_check_device(), _check_engines(args), _check_stage(args), _check_reward(args)]
    return [finding for finding in findings if finding]


def _value(args: SimpleNamespace, flag: str):
    return attrgetter(flag)(args)


def _outside(flag: str, value: float, range_: str) -> Finding | None:
    """Return a finding if the value is not in the range."""
    if interval.contains(range_, value):
        return None
    return Finding(f"--{flag}", value, f"is not in {range_}", "give a value there")


def _check_optimizer(args: SimpleNamespace, name: str) -> list[Finding | None]:
    findings = [_outside(f"{name}.{f}", _value(args, f"{name}.{f}"), range_) for f, range_ in _OF_AN_OPTIMIZER.items()]
    findings += [_outside(f"{name}.adam.betas", beta, "[0, 1)") for beta in _value(args, f"{name}.adam.betas")]
    kinds = ["adam", "muon"] if _value(args, f"{name}.optim") == "muon" else ["adam"]
    return findings + [_check_rate(f"{name}.{kind}.lr", _value(args, f"{name}.{kind}.lr")) for kind in kinds]


def _check_rate(flag: str, rate: float) -> Finding | None:
    if not 0 <= rate <= _ABSURD_RATE:  # NaN too
        problem = (
            f"is no learning rate: each step moves a weight by about that, and it has to be in (0, {_ABSURD_RATE:g}]"
        )
        return Finding(f"--{flag}", rate, problem, "RL takes 1e-7 to 1e-3")
    if rate == 0:
        return Finding(f"--{flag}", rate, "nothing is learned", "give a rate above 0", is_fatal=False)
    if rate > _HIGH_RATE and ".adam." in flag:
        problem = "is very high for Adam, and training is likely to diverge"
        return Finding(f"--{flag}", rate, problem, "RL takes 1e-7 to 1e-3", is_fatal=False)
    return None


def _check_device() -> Finding | None:
    device = os.environ.get("ARLOPTI_DEVICE", "")
    if device in ("", "cpu", "cuda"):
        return None
    return Finding("ARLOPTI_DEVICE", device, "is no device", "set it to cpu or cuda, or unset it")


def _check_engines(args: SimpleNamespace) -> Finding | None:
    if (args.vllm.num_engines or 0) >= 1:
        return None
    problem = "OpenRLHF generates with vLLM alone, and no engine is asked for"
    return Finding("--vllm.num_engines", args.vllm.num_engines, problem, "give at least 1")


def _check_stage(args: SimpleNamespace) -> Finding | None:
    if args.ds.zero_stage in (0, 1, 2, 3):
        return None
    return Finding("--ds.zero_stage", args.ds.zero_stage, "is no stage of ZeRO", "give 0, 1, 2 or 3")


def _check_reward(args: SimpleNamespace) -> Finding | None:
    if args.reward.remote_url or args.reward.model_name_or_path or args.train.agent_func_path:
        return None
    remedy = "give --reward.remote_url, --reward.model_name_or_path or --train.agent_func_path"
    return Finding("--reward.model_name_or_path", None, "there is no source of rewards", remedy)
