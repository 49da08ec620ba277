"""Read a whole command line for tests of the checks: what `main` hands to them, without their running."""

from types import SimpleNamespace
from typing import Any

from arlopti_openrlhf.cli import command_line, method_checks, train_ppo_ray
from arlopti_openrlhf.ops.preflight import placement, values
from arlopti_openrlhf.ops.preflight.finding import Finding

# A run that nothing is wrong with.
FITTING = (
    "--actor.model_name_or_path model --data.prompt_dataset data.jsonl --reward.remote_url kk "
    "--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 4 --rollout.batch_size 8 "
    "--rollout.micro_batch_size 4 --train.batch_size 16 --train.micro_batch_size 4 --vllm.sync_backend gloo "
    "--actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 --train.colocate_all"
).split()


def arguments(flags: str = "") -> SimpleNamespace:
    """Return upstream's nested arguments, as its `train` gets them."""
    return command_line.check(train_ppo_ray.parse([*FITTING, *flags.split()])).args


# A small run that leaves model, data and reward to the test.
_SMALL = (
    "--data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 512 "
    "--rollout.batch_size 1 --rollout.max_new_tokens 16 --train.batch_size 4"
)


def changed(**values: Any) -> SimpleNamespace:
    """Return the arguments of a small run with changes: `changed(data__max_len=40)` stands for --data.max_len 40."""
    args = arguments(_SMALL)
    given = {"actor__model_name_or_path": None, "data__prompt_dataset": None, "reward__remote_url": None}
    for name, value in (given | values).items():
        group, _, leaf = name.partition("__")
        assert leaf in vars(vars(args)[group]), name
        setattr(vars(args)[group], leaf, value)
    return args


def findings(argv: list[str]) -> list[Finding]:
    """Return what is found in the flags alone."""
    flat = command_line.parse(argv)
    given = command_line.hierarchize(flat)
    checked = command_line.check(flat)
    found = [
        *values.check_combinations(given),
        *method_checks.check_flags(given),
        *checked.findings,
        *values.check_ranges(checked.args),
        *values.check(checked.args),
    ]
    if any(finding.is_fatal for finding in found):
        return found
    update = method_checks.describe_update(checked.args)
    return [*found, *placement.check_batches(checked.args, update), *placement.check(checked.args)]
