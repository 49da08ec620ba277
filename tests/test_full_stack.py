"""Runs the command on the whole stack (Ray, DeepSpeed, vLLM, weight sync), a few times with many features on."""

import decimal
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.serialization import get_unsafe_globals_in_checkpoint

pytestmark = pytest.mark.long

REWARD = str(Path(__file__).parents[1] / "rewards" / "kk_reward.py")
GRPO = "--algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 0.001"


@pytest.fixture
def train(tiny_model, tiny_data, tmp_path):
    """Return train(flags), which returns the run's log. Each 8 prompts, with 4 samples each, are a step."""

    def run(
        flags: str, prompts: int = 16, reward: str = REWARD, fails: bool = False, saves: str = "model.safetensors"
    ) -> str:
        command = f"""
            {sys.executable} -m arlopti_openrlhf.cli.train_ppo_ray
            --actor.model_name_or_path {tiny_model} --data.prompt_dataset {tiny_data} --data.max_samples {prompts}
            --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 96
            --reward.remote_url {reward} --rollout.max_new_tokens 16
            --rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 4
            --train.batch_size 16 --train.micro_batch_size 4
            --vllm.enforce_eager --vllm.sync_backend gloo
            --actor.adam.lr 1e-3 --ckpt.output_dir {tmp_path}/final --ckpt.path {tmp_path}/ckpt
            --logger.tensorboard_dir {tmp_path}/tensorboard --logger.wandb.run_name run
        """.split()
        # One test has vLLM's worker in a process of its own, as on a GPU.
        processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if "--ds.zero_stage 3" in flags else {}
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", **processes}
        environment |= {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
        for name in ("ARLOPTI_ANNOUNCED", "ARLOPTI_ENABLED"):
            environment.pop(name, None)
        result = subprocess.run(
            command + flags.split(), env=environment, capture_output=True, text=True, timeout=600, errors="replace"
        )
        log = f"{result.stdout}{result.stderr}\nstatus {result.returncode}"
        assert (result.returncode != 0) == fails, log[-6000:]
        assert (tmp_path / "final" / saves).exists() != fails
        if not fails:  # as what wandb's process prints when Ray kills it
            assert "exited unexpectedly" not in log, log[-6000:]
        return log

    return run


def steps(log: str) -> list[str]:
    """Return the lines with the metrics of each global step, which the controller prints."""
    return [line for line in log.splitlines() if re.search(r"Global step \d+: \{", line)]


# The tiny model's answers all earn the same reward for a puzzle. This one differs between the samples of a prompt.
NOISY_REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    import torch
    rewards = torch.tensor([float(sum(map(ord, query)) % 7) - 3 for query in queries])
    return {"rewards": rewards, "scores": (rewards > 0).float(), "extra_logs": {}}
"""


@pytest.fixture
def noisy_reward(tmp_path) -> str:
    path = tmp_path / "reward.py"
    path.write_text(NOISY_REWARD, encoding="utf-8")
    return str(path)


def scalars(folder: Path, name: str) -> dict[int, float]:
    """Return {step: value} from a run's TensorBoard log."""
    events = EventAccumulator(str(folder / "tensorboard" / "run"), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


TWO_RANKS = f"""{GRPO} --algo.ar.alpha 0.3 --algo.lopti.quantile 0.3 --ds.zero_stage 3 --ds.packing_samples
    --actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 --vllm.num_engines 2 --train.colocate_all
    --train.enable_ema --ckpt.save_steps 1 --logger.wandb.key offline"""
EVALUATION = "--eval.steps 10 --eval.sampling kk_*:n=2,t=1"


def test_two_ranks_two_engines_under_zero3_packed_with_token_methods_ema_and_evaluation(
    train, tiny_data, noisy_reward, tmp_path
):
    """AR, Lopti, a user's file, 80/20, whose tokens of weight 0 are not computed, and DPPO with vLLM's log-probs."""
    flags = f"""{TWO_RANKS} {EVALUATION} --eval.dataset {tiny_data}
        --algo.token_method examples/token_method.py eighty_twenty dppo
        --algo.advantage.is_correction_level token --algo.advantage.is_correction_threshold 0 inf
        --algo.token_method_args token_method.weight=0.5"""
    log = train(flags, reward=noisy_reward)
    assert "OpenRLHF runs on the CPU" in log
    assert len(steps(log)) == 2
    for line in steps(log):
        for name in ("lopti/low/policy_loss", "lopti/high/policy_loss", "lopti/low_share", "ar/mean_weight"):
            assert f"'{name}'" in line
        assert "nan" not in line
    for name in ("mean_weight", "zero_share", "effective_share"):
        shares = [
            scalars(tmp_path, f"train/token_method/{method}/{name}") for method in ("token_method", "eighty_twenty")
        ]
        assert all(list(share) == [1, 2] for share in shares)
    assert 0.19 < shares[1][1] < 0.25  # the effective share of a mask is what it keeps
    # vLLM has the actor's weights, so no token has moved.
    assert list(scalars(tmp_path, "train/token_method/dppo/mean_weight").values()) == [1, 1]
    gaps = scalars(tmp_path, "train/rollout/gap")
    assert list(gaps) == [1, 2] and max(gaps.values()) < 0.05  # in nats
    accuracy = scalars(tmp_path, "eval/kk_2ppl/accuracy")
    assert list(accuracy) == [0, 2]  # before the first step and after the last
    assert all(0 <= value <= 1 for value in accuracy.values())
    for step in ("global_step2", "best_global_step2"):
        checkpoint = tmp_path / "ckpt" / "_actor" / step
        files = sorted(checkpoint.glob("*.pt"))
        named = {name.partition(".")[0] for path in files for name in get_unsafe_globals_in_checkpoint(path)}
        assert len(files) == 6 and named == {"deepspeed"}  # three of each rank, and no class of another package
        kept = torch.load(files[-2], weights_only=False)
        kept = {key: kept[key] for key in list(kept)[list(kept).index("ds_version") + 1 :]}  # of the controller
        of_best = {"checkpoint_metric_key"} if step.startswith("best") else set()
        assert kept.keys() == of_best | {
            "episode", "global_step", "total_consumed_prompts", "data_loader_state_dict", "kl_coefficient",
            "best_eval_metric_key", "best_eval_metric_value", "latest_eval_metric_value",
        }  # fmt: skip
        assert len(str(kept)) < 1000  # upstream prints it


PEAK = """
def reward_func(queries, prompts, labels, **kwargs):
    import pathlib
    reward = float(sum(map(ord, queries[0])) % 7) - 3
    steps = [int(path.name.removeprefix("global_step")) for path in pathlib.Path({actor!r}).glob("global_step*")]
    score = max(steps, default=0) == 2 if labels[0] == "held out" else reward > 0
    return {{"rewards": [reward], "scores": [float(score)]}}
"""


def test_the_best_checkpoint_of_asynchronous_training_is_the_one_that_was_evaluated(train, tiny_data, tmp_path):
    """Two held-out sets are answered rightly after the second of four steps alone."""
    actor = tmp_path / "ckpt" / "_actor"
    (tmp_path / "peak.py").write_text(PEAK.format(actor=str(actor)), encoding="utf-8")
    rows = [json.loads(line) for line in Path(tiny_data).read_text("utf-8").splitlines()[:4]]
    for source in ("first", "second"):
        lines = [json.dumps(row | {"label": "held out", "datasource": source}) + "\n" for row in rows]
        (tmp_path / f"{source}.jsonl").write_text("".join(lines), encoding="utf-8")
    flags = f"""--train.async_enable --actor.num_gpus_per_node 1 --vllm.num_engines 1 --ckpt.save_steps 1
        --ckpt.max_num 9 --algo.advantage.estimator group_norm --algo.kl.init_coef 0 --algo.ar.alpha 0.3
        --eval.dataset {tmp_path}/first.jsonl,{tmp_path}/second.jsonl --eval.steps 1"""
    train(flags, prompts=32, reward=str(tmp_path / "peak.py"))
    for source in ("first", "second"):
        accuracy = scalars(tmp_path, f"eval/{source}/accuracy")
        assert accuracy == {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0, 4: 0.0}
    steps = ("global_step2", "global_step3", "best_global_step2")
    second, third, best = (
        torch.load(actor / step / "mp_rank_00_model_states.pt", weights_only=False)["module"] for step in steps
    )
    assert all(torch.equal(best[name], weight) for name, weight in second.items())
    assert not all(torch.equal(best[name], weight) for name, weight in third.items())
    assert [path.name for path in actor.glob("best_*")] == ["best_global_step2"]


@pytest.mark.timeout(1800)
def test_a_resumed_run_goes_on_with_other_prompts_and_another_console(train, tiny_data, noisy_reward, tmp_path):
    flags = f"""{TWO_RANKS} {EVALUATION} --eval.dataset {tiny_data}"""
    train(flags, reward=noisy_reward)
    resuming = " --ckpt.load_enable --ckpt.load_changed --logger.console progress"  # there are other prompts now
    resumed = train(flags + resuming, prompts=24, reward=noisy_reward)
    everything = (tmp_path / "ckpt" / "train.log").read_text("utf-8")
    assert [re.search(r"Global step (\d+)", line)[1] for line in steps(everything)] == ["3"]
    # The console has a line for the step, the accuracies, and nothing of Ray's.
    assert re.search(r"^step 3, 24 of 24 prompts: (held out .+, )?reward -?[\d.]+, .*tok/s$", resumed, re.MULTILINE)
    assert re.search(r"^kk_2ppl +0\.\d+ \(0\.\d+ to [01]\.\d+\)$", resumed, re.MULTILINE)
    assert f"{tmp_path}/final\n" in resumed and "pid=" in everything and "pid=" not in resumed
    for group in ("low", "high"):
        assert list(scalars(tmp_path, f"train/lopti/{group}/actor_grad_norm")) == [1, 2, 3]
    accuracy = scalars(tmp_path, "eval/accuracy")
    assert list(accuracy) == [0, 2, 3] and all(0 <= value <= 1 for value in accuracy.values())
    assert 0 <= scalars(tmp_path, "eval/kk_2ppl/pass@2")[3] <= 1


ONE_RANK = "--actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 --train.colocate_all"


def test_lora_is_its_own_reference(train, noisy_reward, tmp_path):
    """The adapter begins at zero, so the first rollout batch has no KL at all, to the last bit."""
    flags = f"{ONE_RANK} --ds.lora.rank 4 --algo.ar.alpha 0.3 --algo.advantage.estimator reinforce"
    flags += " --algo.kl.estimator k1 --algo.kl.init_coef 0.01"
    log = train(flags, reward=noisy_reward, saves="adapter_model.safetensors")
    assert "no second model" in log and "ReferenceModelActor" not in log and "PolicyModelActor" in log
    kl = scalars(tmp_path, "train/kl")
    assert kl[1] == 0 and kl[2] != 0


def test_a_reward_server_that_restarts_in_mid_run(train, noisy_reward, tmp_path):
    """No sample and no step is lost although the server is gone for 12 s after the first rollout."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "arlopti_openrlhf", "serve", "--grader", noisy_reward, "--workers", "1"]
    graded = []

    def start() -> subprocess.Popen:
        return subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL)

    def count() -> float:
        try:
            metrics = urllib.request.urlopen(f"{url}/metrics", timeout=5).read().decode()
        except OSError:
            return 0.0
        found = re.search(r'reward_gradings_total{grader="reward"} (\S+)', metrics)
        return float(found[1]) if found else 0.0

    def restart() -> None:
        server = start()
        try:
            while (before := count()) < 32 and not done.wait(0.02):
                pass
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            done.wait(12)
            server = start()
            while not done.wait(0.2):
                graded.append(before + count())
        finally:
            server.kill()

    done = threading.Event()
    thread = threading.Thread(target=restart)
    thread.start()
    try:
        log = train(f"{GRPO} {ONE_RANK} --algo.ar.alpha 0.3", prompts=24, reward=f"{url}/get_reward")
    finally:
        done.set()
        thread.join()
    assert len(steps(log)) == 3
    assert "samples wait for" in log and "answers again" in log
    assert max(graded) >= 3 * 32


# The pre-flight asks the function 44 times, in a process that ends with it: 4 rows, one wrong answer, 10 right ones.
# The run asks it 32 times for a step, so the second step meets the error.
RAISES = """
calls = 0


def reward_func(queries, prompts, labels, **kwargs):
    global calls
    calls += 1
    if calls > 50:
        raise KeyError("in the function")
    return [0.0]
"""


def test_a_reward_function_that_raises_stops_the_run(train, tmp_path):
    path = tmp_path / "raises.py"
    path.write_text(RAISES, encoding="utf-8")
    log = train(f"{GRPO} {ONE_RANK}", reward=str(path), fails=True)
    assert "reward_func raised KeyError: 'in the function'" in log
    assert 'raises.py", line 9, in reward_func' in log and "query: <|im_start|>user" in log
    assert len(steps(log)) == 1


# It sets an alarm, as math-verify does, and gives no answer a score, so dynamic filtering leaves out each prompt.
ALARM = """
import decimal
import signal


def reward_func(queries, prompts, labels, **kwargs):
    assert labels == [decimal.Decimal("42.50")]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
    signal.alarm(0)
    return {"rewards": [1.0], "scores": [0.0]}
"""


def test_a_run_whose_prompts_are_all_left_out_is_no_success(train, tmp_path):
    """Its reward works in no thread, and its labels are decimals, which are no JSON."""
    (tmp_path / "reward.py").write_text(ALARM, encoding="utf-8")
    prompt = [[{"role": "user", "content": "A puzzle."}]] * 16
    labels = pyarrow.array([decimal.Decimal("42.50")] * 16, pyarrow.decimal128(10, 2))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompt, "label": labels}), tmp_path / "data.parquet")
    flags = f"{GRPO} {ONE_RANK} --algo.dynamic_filtering_enable --data.prompt_dataset {tmp_path}/data.parquet"
    log = train(flags, reward=f"{tmp_path}/reward.py", fails=True)
    assert "warning: --reward.remote_url" in log and "no right answer to 4 of the first 4 rows" in log
    assert "filtered out: mean score 0.00" in log and not steps(log)
    assert "arlopti_openrlhf: run stopped: no step was trained: dynamic filtering left out every prompt" in log
    assert "status 6" in log


AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Instance(AgentInstanceBase):
    def __init__(self):
        pass

    async def step(self, state_dict, **kwargs):
        score = torch.tensor(1.0)
        return {"rewards": torch.rand(()), "scores": score, "environment_feedback": "", "done": True}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Instance)
"""
METHOD = """
from next_to_the_method import WEIGHT


def weigh(tokens):
    return tokens.mask.float() * WEIGHT
"""


def test_a_method_that_imports_a_module_next_to_it_and_an_agent(train, tmp_path):
    for name, text in (
        ("agent/agent.py", AGENT),
        ("method/method.py", METHOD),
        ("method/next_to_the_method.py", "WEIGHT = 0.5"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    flags = f"--train.agent_func_path {tmp_path}/agent/agent.py --algo.token_method {tmp_path}/method/method.py"
    log = train(f"{GRPO} {ONE_RANK} {flags}", prompts=8)
    assert len(steps(log)) == 1 and "'score': 1.0" in log
    assert list(scalars(tmp_path, "train/token_method/method/mean_weight").values()) == [0.5]
