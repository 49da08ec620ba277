"""A tiny real training to inject faults into: the real command, with Ray, vLLM, DeepSpeed and weight sync."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from arlopti_openrlhf.lab.data import tiny_policy
from arlopti_openrlhf.lab.data.preparation import generate_rows, write_rows
from arlopti_openrlhf.ops.checkpoints import files as checkpoint_files

STEPS, SAVE_EVERY, PROMPTS, SAMPLES = 8, 2, 8, 4  # PROMPTS with SAMPLES each are a step
STALL_SECONDS = 150  # the start counts too, and a busy machine takes longer than a minute for it
BAD_STEPS = 3  # in a row end the run: --train.max_bad_steps
# Nothing is left of a run so many seconds after its end.
GRACE_SECONDS = 60  # Ray's agents look for a killed control store for half of that
MARKER = "ARLOPTI_CHAOS_RUN"
PARENT, DRIVER = "the parent", "the driver"
_LONGEST = 420  # seconds that one start of the training may take, on a machine that does more than this
# Under nohup, what is started ignores SIGHUP, and so would a training whose terminal closes.
_SUITES = Path(__file__).parents[1]  # where a start finds `chaos.inject`
_HEARS = ("env", "--default-signal=HUP")

# Rewards differ between the samples of a prompt, as the untrained policy's answers never would by K&K's rules. Each
# call leaves a line, so that no prompt can be lost unnoticed.
REWARD = """
import os

# Of one sample each, in the process of one of the engines: those of CHAOS_STEP steps, and some of the next.
CALLS_BEFORE_FAULT = CALLS_OF_A_STEP * int(os.environ["CHAOS_STEP"]) // int(os.environ["CHAOS_RANKS"]) + 6
calls = 0


def reward_func(queries, prompts, labels, **kwargs):
    global calls
    calls += 1
    if calls > CALLS_BEFORE_FAULT and "CHAOS_REWARD" in os.environ:
        open(os.environ["CHAOS_FOLDER"] + "/faulted", "a").close()
        exec(os.environ["CHAOS_REWARD"])
    with open(os.environ["CHAOS_FOLDER"] + "/prompts.txt", "a") as log:
        log.write("".join(f"{label}\\n" for label in labels))
    rewards = [float(sum(map(ord, query)) % 7) - 3 for query in queries]
    return {"rewards": rewards, "scores": [float(reward > 0) for reward in rewards]}
""".replace("CALLS_OF_A_STEP", str(PROMPTS * SAMPLES))


def make_inputs(folder: Path, steps: int = STEPS) -> None:
    """Write an untrained policy, the prompts of so many steps, and a reward file."""
    rows = generate_rows((2,), steps * PROMPTS, held_out=False, seed=0, names=tiny_policy.NAMES)
    write_rows([row | {"label": str(i)} for i, row in enumerate(rows)], folder / "train.jsonl")
    tokenizer = tiny_policy.make_tokenizer([json.dumps(row["prompt"]) for row in rows])
    torch.manual_seed(0)
    model = tiny_policy.make_model(tokenizer)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def command(inputs: Path, folder: Path, ranks: int, module: str) -> list[str]:
    """Return the training's command line, which saves to `folder`."""
    return f"""
        {sys.executable} -m {module}
        --algo.ar.alpha 0.3 --algo.lopti.eta 0.5
        --algo.advantage.estimator group_norm --algo.kl.init_coef 0
        --actor.model_name_or_path {inputs}/model --data.prompt_dataset {inputs}/train.jsonl
        --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 256
        --reward.remote_url {inputs}/reward.py
        --rollout.batch_size {PROMPTS} --rollout.n_samples_per_prompt {SAMPLES} --rollout.max_new_tokens 24
        --rollout.micro_batch_size 8 --train.batch_size {PROMPTS * SAMPLES // 2} --train.micro_batch_size 8
        --actor.num_gpus_per_node {ranks} --vllm.num_engines {ranks} --train.colocate_all
        --vllm.enforce_eager --vllm.sync_backend gloo --vllm.gpu_memory_utilization 0.5
        --actor.adam.lr 1e-4 --ds.zero_stage 2 --ds.attn_implementation sdpa
        --ckpt.save_steps {SAVE_EVERY} --ckpt.load_enable --ckpt.best_metric_key none
        --ckpt.path {folder}/checkpoints --ckpt.output_dir {folder}/final
        --logger.tensorboard_dir {folder}/tensorboard --logger.wandb.run_name run
        --train.stall_minutes {STALL_SECONDS / 60} --train.max_bad_steps {BAD_STEPS}
    """.split()


class Training:
    """One start of the training, which begins at its newest checkpoint.

    Args:
        inputs: what `make_inputs` wrote.
        folder: the run's own; several starts of one run share it.
        ranks: training processes, and engines.
        module: what is started: the command, or `chaos.inject` around it.
        flags: further flags.
        step: the steps of this start after which a fault in its environment comes.
        environment: further variables.
        prefix: a command that becomes this one, by `exec`.
    """

    def __init__(
        self,
        inputs: Path,
        folder: Path,
        *,
        ranks: int = 1,
        module: str = "arlopti_openrlhf.cli.train_ppo_ray",
        flags: str = "",
        step: int = 1,
        environment: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.inputs, self.folder, self.ranks, self.run_id = inputs, folder, ranks, uuid.uuid4().hex
        self.log = folder / f"start{len(list(folder.glob('start*.log')))}.log"
        self.environment = {
            **os.environ,
            "CHAOS_FOLDER": str(folder),
            "CHAOS_RANKS": str(ranks),
            "CHAOS_STEP": str(step),
            MARKER: self.run_id,
            "PYTHONPATH": os.pathsep.join(path for path in (str(_SUITES), os.environ.get("PYTHONPATH")) if path),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            **(environment or {}),
        }
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [*_HEARS, *prefix, *command(inputs, folder, ranks, module), *flags.split()],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.sessions = {self.process.pid}
        self.deadline = time.monotonic() + _LONGEST

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def steps(self) -> list[int]:
        """Return the global steps of this start, in the order of the log."""
        return [int(found) for found in re.findall(r"Global step (\d+): \{", self.text)]

    def resumed_from(self) -> list[int]:
        """Return the step of the checkpoint that this start resumed from, if it did."""
        return [int(found) for found in re.findall(r"resumes from \S*global_step(\d+)", self.text)][:1]

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def wait_for(self, holds: Callable[[], object], every: float = 0.05) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutError: the run ended before that, or takes too long.
        """
        while not holds():
            if self.is_over() or time.monotonic() > self.deadline:
                raise TimeoutError(f"{self.log}: the moment for the fault did not come")
            time.sleep(every)

    def wait(self, says: str) -> tuple[int, float | None]:
        """Return the exit status, negative for a signal, and when the log said `says`, in seconds since the epoch.

        Raises:
            TimeoutError: the run does not end.
        """
        said = None
        while True:
            is_over = self.is_over()
            if said is None and says and says in self.text:
                said = time.time()
            if is_over:
                return self.process.returncode, said
            if time.monotonic() > self.deadline:
                raise TimeoutError(f"{self.log.name}: still running after {_LONGEST} s")
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this start that live, zombies apart."""
        return [p for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        # psutil's own reading of the environment loses the beginning of it where a process has renamed itself.
        mark = f"{MARKER}={self.run_id}".encode()
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            # Ray's agents overwrite all of it. Most processes stay in the session of the driver, which has it.
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                self.sessions.add(os.getsid(process.pid))
            return os.getsid(process.pid) in self.sessions
        except (psutil.Error, OSError):
            return False

    def driver(self) -> int:
        """Return the id of the child that trains."""
        parent = psutil.Process(self.process.pid)
        return next(child.pid for child in parent.children() if child.cmdline() == parent.cmdline())

    def find(self, title: str) -> list[int]:
        """Return the process ids whose command line or title begins with `title`, or names that program."""
        return [p.pid for p in self.processes() if _is_called(_command_line(p), title)]

    def signal(self, title: str, signum: signal.Signals) -> None:
        """Send a signal to the first process of that title, to the parent or to the driver."""
        pids = [self.process.pid] if title == PARENT else [self.driver()] if title == DRIVER else self.find(title)
        if not pids:
            raise LookupError(f"{self.log}: no process is called {title}")
        os.kill(pids[0], signum)

    def kill_rest(self) -> list[str]:
        """Kill every process that is left, and return their command lines."""
        rest = []
        for process in self.processes():
            rest.append(" ".join(" ".join(_command_line(process)).split())[:60])
            try:
                process.kill()
            except psutil.Error:
                continue
        self.process.wait()
        return rest


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _is_called(line: list[str], title: str) -> bool:
    return bool(line) and (" ".join(line).startswith(title) or Path(line[0]).name == title)


def checkpoints(folder: Path) -> list[Path]:
    """Return the policy's checkpoints, the newest last."""
    actor = folder / "checkpoints" / "_actor"
    return [actor / tag for tag in reversed(checkpoint_files.newest_first([actor]))]


def checkpoint_step(path: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(re.sub(r"\D", "", path.name))


def trained_prompts(folder: Path) -> Iterator[int]:
    """Return the labels that the reward function saw, in order."""
    return map(int, (folder / "prompts.txt").read_text(encoding="utf-8").split())
