"""Flags that cannot work are found by name, in seconds, and flags that can are not."""

import json
import re
from pathlib import Path

import pytest
from arlopti_testing.preflight_command import FITTING, arguments, findings
from test_scripts import SCRIPTS, launch

from arlopti_openrlhf.cli import quickstart
from arlopti_openrlhf.cli.quickstart_tasks import TASKS, Plan
from arlopti_openrlhf.ops.preflight import placement, values

ROOT = Path(__file__).parents[3]
TWO_SETS = "--data.prompt_dataset a.jsonl,b.jsonl"
IMAGES = "--data.max_images_per_prompt"
CORRECTION = "--algo.advantage.is_correction"
GAE = "--algo.advantage.estimator gae --critic.num_gpus_per_node 1"


@pytest.mark.parametrize(
    ("flags", "flag", "said"),
    [
        # Values.
        ("--actor.adam.lr -1", "--actor.adam.lr", "no learning rate"),
        ("--actor.adam.lr 1e6", "--actor.adam.lr", "no learning rate"),
        ("--actor.adam.lr nan", "--actor.adam.lr", "no learning rate"),
        (f"{GAE} --critic.adam.lr -1", "--critic.adam.lr", "no learning rate"),
        ("--rollout.max_new_tokens 0", "--rollout.max_new_tokens", "[1, inf)"),
        ("--rollout.temperature 0", "--rollout.temperature", "(0, inf)"),
        ("--rollout.top_p 95", "--rollout.top_p", "(0, 1]"),
        ("--actor.entropy_coef nan", "--actor.entropy_coef", "(-inf, inf)"),
        ("--rollout.batch_size 0", "--rollout.batch_size", "[1, inf)"),
        ("--vllm.num_engines 0", "--vllm.num_engines", "vLLM alone"),
        ("--ckpt.max_num 0", "--ckpt.max_num", "[1, inf)"),
        ("--ckpt.save_steps 0", "--ckpt.save_steps", "[1, inf)"),
        ("--eval.steps 0 --eval.dataset x", "--eval.steps", "[1, inf)"),
        ("--logger.logging_steps 0", "--logger.logging_steps", "[1, inf)"),
        ("--ds.zero_stage 1 --ds.grad_accum_dtype fp32", "--ds.grad_accum_dtype", "take --ds.zero_stage 2"),
        ("--reward.remote_url=", "--reward.remote_url", "no source of rewards"),
        ("--reward.remote_url nowhere.py", "--reward.remote_url", "there is no such file; correct the path"),
        ("--train.agent_func_path nowhere", "--train.agent_func_path", "there is no such file; correct the path"),
        ("--data.prompt_dataset=", "--data.prompt_dataset", "there is no data"),
        ("--actor.model_name_or_path=", "--actor.model_name_or_path", "there is no model"),
        # What ends a run after its first rollout, or trains on nothing.
        (
            "--rollout.max_new_tokens 128 --reward.overlong_buffer_len 256",
            "--reward.overlong_buffer_len",
            "128 at most",
        ),
        ("--reward.stop_properly_penalty_coef 2", "--reward.stop_properly_penalty_coef", "(-inf, 1]"),
        ("--train.enable_ema --ds.lora.rank 8", "--train.enable_ema", "train without LoRA"),
        (f"{CORRECTION}_level token {CORRECTION}_threshold 5 0.5", f"{CORRECTION}_threshold", "give LOW HIGH"),
        ("--reward.clip_range 5 -5", "--reward.clip_range", "give LOW HIGH"),
        ("--actor.eps_clip_low_high 0.28 -0.2", "--actor.eps_clip_low_high", "[0, inf)"),
        # What becomes of prompts.
        ("--data.input_template Q:", "--data.input_template", "it has no {}, so OpenRLHF would leave it out"),
        ("--data.input_template {}\\boxed{}", "--data.input_template", "IndexError: Replacement index 1 out of"),
        ("--data.input_template {}{answer}", "--data.input_template", "write {{ and }} for braces that stay"),
        ("--data.input_template {}{", "--data.input_template", "ValueError: Single '{' encountered"),
        # Samples, steps and ranks.
        ("--algo.ar.alpha 0.3 --train.batch_size 24", "--train.batch_size", "= 32"),
        ("--algo.ar.alpha 0.3 --train.batch_size 64", "--train.batch_size", "= 32"),
        ("--algo.ar.alpha 0.3 --actor.update stock --train.batch_size 64", "--train.batch_size", "= 32"),
        ("--ds.tensor_parallel_size 2", "--actor.num_gpus_per_node", "1 ranks are not divided by"),
        (
            "--actor.num_gpus_per_node 3 --ref.num_gpus_per_node 3 --vllm.num_engines 3 --train.batch_size 48",
            "--rollout.batch_size",
            "from 10 to 11",
        ),
        ("--train.micro_batch_size 5", "--train.batch_size", "micro-batches of 5 on 1 ranks of actor"),
        ("--algo.ar.alpha 0.3 --train.micro_batch_size 5", "--train.batch_size", "give a multiple of 5"),
        ("--actor.fill_memory", "--actor.fill_memory", "is for the selective update"),
        ("--algo.mask_truncated --actor.update stock", "--algo.mask_truncated", "needs the selective update"),
        (
            "--algo.ar.alpha 0.3 --actor.fill_memory --train.dynamic_batch_enable",
            "--actor.fill_memory",
            "--train.max_tokens_per_gpu",
        ),
        # Placement.
        (f"{GAE} --critic.num_gpus_per_node 2", "--critic.num_gpus_per_node", "1 at most"),
        (
            "--algo.kl.init_coef 0.01 --ref.num_gpus_per_node 2",
            "--ref.num_gpus_per_node",
            "with the actor",
        ),
        ("--vllm.num_engines 2", "--vllm.num_engines", "the engines have 2 GPUs, and with --train.colocate_all"),
        (f"{GAE} --train.colocate_critic_reward --reward.num_gpus_per_node 2", "--reward.num_gpus_per_node", "give 1"),
        # Images.
        (f"{IMAGES} 1 --ds.packing_samples", "--ds.packing_samples", "does not support"),
        (f"{IMAGES} 1 --train.dynamic_batch_enable", IMAGES, "--train.dynamic_batch_enable True: it packs"),
        (f"{IMAGES} 1 --ds.ring_attn_size 2", IMAGES, "--ds.ring_attn_size 2: it packs"),
        (f"{IMAGES} -1", IMAGES, "[0, inf)"),
        (f"{IMAGES} 1 {GAE}", "--critic.model_name_or_path", "does not support"),
        # What upstream itself refuses, after it has imported everything.
        ("--rollout.n_samples_per_prompt 1 --rollout.batch_size 32", "--rollout.n_samples_per_prompt", "group_norm"),
        ("--train.partial_rollout_enable", "--train.async_enable", "requires"),
        ("--vllm.enable_sleep --train.async_enable", "--vllm.enable_sleep", "not supported"),
        ("--rollout.vllm_generate_batch_size 16", "--train.async_enable", "requires"),
    ],
)
def test_a_mistake_is_one_fatal_finding_that_names_its_flag(flags, flag, said):
    fatal = [finding for finding in findings([*FITTING, *flags.split()]) if finding.is_fatal]
    assert flag in [finding.flag for finding in fatal], fatal
    found = next(str(finding) for finding in fatal if finding.flag == flag)
    assert said in found and "\n" not in found, found


@pytest.mark.parametrize(
    ("flag", "value", "range_"),
    [
        ("--train.stall_minutes", "10081", "(0, 10080]"),  # a week
        ("--train.stall_minutes", "1e300", "(0, 10080]"),
        ("--train.stall_minutes", "0", "(0, 10080]"),
        ("--reward.timeout_seconds", "604801", "(0, 604800]"),
    ],
)
def test_a_wait_of_more_than_a_week_is_refused(flag, value, range_, capsys):
    with pytest.raises(SystemExit):
        findings([*FITTING, flag, value])
    assert f"argument {flag}: {value} is not a number in {range_}" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "missing"), [("--eval.dataset x", "steps"), ("--eval.steps 5", "dataset")])
def test_half_of_what_an_evaluation_needs_is_a_warning(given, missing):
    (finding,) = values.check(arguments(given))
    assert not finding.is_fatal and f"nothing is evaluated during training without --eval.{missing}" in str(finding)


@pytest.mark.parametrize(("dtype", "share"), [("bf16", "24%"), ("fp16", "3%")])
def test_an_average_in_16_bits_is_a_warning(dtype, share):
    (finding,) = values.check(arguments(f"--train.enable_ema --train.ema_beta 0.992 --ds.param_dtype {dtype}"))
    assert not finding.is_fatal
    assert f"kept in {dtype}, and moves only where weights have moved by {share}" in str(finding)


def test_a_critic_that_shares_a_reward_models_gpus_is_placed_beside_all_others():
    """OpenRLHF makes it a group of its own even with --train.colocate_all, and Ray would wait for its GPU."""
    critic = f"{GAE} --reward.num_gpus_per_node 1"
    assert placement.gpus_placed(arguments(critic)) == 1
    assert placement.gpus_placed(arguments(f"{critic} --train.colocate_critic_reward")) == 2


def test_what_the_machine_lacks_stops_a_start_and_not_a_dry_run(monkeypatch):
    """A login node has no GPU, and the run may start on another machine."""
    monkeypatch.setenv("ARLOPTI_DEVICE", "cpu")
    flags = ["--vllm.sync_backend", "--ds.use_liger_kernel"]
    wrong = [flags[0], "nccl", flags[1]]
    for dry_run, is_fatal in (([], True), (["--dry-run"], False)):
        found = findings([*FITTING, *wrong, *dry_run])
        assert [(f.flag, f.is_fatal) for f in found] == [
            (f, is_fatal) for f in ("--vllm.sync_backend", "--ds.use_liger_kernel")
        ]
        assert all("on a machine without a CUDA device" in f.problem for f in found)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # its machines may have GPUs
    assert not list(placement.check(arguments("--vllm.sync_backend nccl")))


def test_a_key_of_wandb_that_is_not_set(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (finding,) = values.check(arguments("--logger.wandb.key WANDB_API_KEY"))
    assert not finding.is_fatal and "the variable is not set" in finding.problem
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert not list(values.check(arguments("--logger.wandb.key WANDB_API_KEY")))


@pytest.mark.parametrize("flags", ["", f"{IMAGES} 1", f"{TWO_SETS} --data.prompt_probs 0.3,0.7"])
def test_nothing_is_wrong_without_a_mistake(flags):
    assert findings([*FITTING, *flags.split()]) == []


def test_every_mistake_of_a_kind_is_found_at_once():
    flags = "--actor.adam.lr -1 --rollout.max_new_tokens 0 --train.partial_rollout_enable"
    found = [finding.flag for finding in findings([*FITTING, *flags.split()])]
    assert sorted(found) == ["--actor.adam.lr", "--rollout.max_new_tokens", "--train.async_enable"]


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ("--actor.adam.lr 0.05", "--actor.adam.lr"),
        ("--actor.adam.lr 0", "--actor.adam.lr"),
        ("--train.batch_size 24", "--train.batch_size"),  # upstream carries the rest over
        ("--train.dynamic_batch_enable --ds.zero_stage 2", "--ds.zero_stage"),
        ("--data.input_template {} --data.apply_chat_template", "--data.input_template"),
    ],
)
def test_what_trains_but_seems_wrong_is_a_warning(flags, flag):
    assert [(f.flag, f.is_fatal) for f in findings([*FITTING, *flags.split()])] == [(flag, False)]


def known_to_work(folder: Path) -> dict[str, list[str]]:
    """Return the flags of every run that the tests, the scripts, the quickstart and the study start."""
    commands = {}
    for script in SCRIPTS:
        for variables in [{}, {"ALGO": "reinforce++"}, {"METHOD": "none"}]:
            done = launch(script, folder, LIGER="0", **variables)  # its kernels are for GPUs
            assert done.returncode == 0
            argv = (folder / "argv").read_text().split("\0")[:-1]
            commands[f"{script.name} {variables}"] = argv[2:] if argv[0] == "-m" else argv[1:]
    for task in TASKS.values():
        plan = Plan(folder, task, task.full, seed=0)
        commands[f"quickstart {task.name}"] = quickstart.training_flags(plan)
    for line in (ROOT / "study/results/ar_lopti.jsonl").read_text("utf-8").splitlines():
        run = json.loads(line)
        commands[run["run"]] = run["configuration"]["flags"].replace("rewards/", f"{ROOT}/rewards/").split()
    source = (ROOT / "tests/test_full_stack.py").read_text()
    base = (
        re.search(r'-m arlopti_openrlhf.cli.train_ppo_ray(.*?)"""\.split', source, re.DOTALL)[1]
        .replace("{prompts}", "16")
        .split()
    )
    # Longer ones hold shorter ones.
    names = dict(re.findall(r'^([A-Z_]+) = f"""(.*?)"""$', source, re.M | re.DOTALL))
    names |= dict(re.findall(r'^([A-Z_]+) = "(--.*)"$', source, re.M))
    for text in re.findall(r'f?"""(.*?)"""', source, re.DOTALL):
        if "--" in text and "train_ppo_ray" not in text:
            for name, value in names.items():
                text = text.replace(f"{{{name}}}", value)
            commands[text[:60]] = [*base, *text.split(), "--reward.remote_url", "kk"]
    return commands


def test_nothing_that_works_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ARLOPTI_DEVICE", "cpu")
    commands = known_to_work(tmp_path)
    assert len(commands) > 40
    for name, argv in commands.items():
        gloo = [*argv, "--vllm.sync_backend", "gloo"]  # the scripts are for GPUs
        said = [finding for finding in findings(gloo) if finding.flag != "--train.enable_ema"]  # a warning, in 16 bits
        assert not list(map(str, said)), name
