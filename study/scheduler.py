"""Make the inputs of the study's runs and train the runs, several at a time."""

import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from arlopti_openrlhf.lab.analysis.curves import read_scalars
from study import runs
from study.runs import ROOT, Run
from study.stored import STAMP, refuse_another_warm_start, sha256, write, write_whole
from study.summary import step_seconds, summarize

_Context = SpawnContext | ForkServerContext
_FRESH, _PREPARED = SpawnContext(), ForkServerContext()  # the second's processes need not import what trains
# Of all runs. Ray's cluster hands them on to its workers.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    # The policy is too small for a second thread to help; where a core is taken, threads wait for each other.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # each engine would bind itself to the same first core
    # The model runs in the engine's own process. In two, each would spin while the other computes.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns that this will be its default
    "RAY_worker_niceness": "0",  # added to this process's own; Ray's default of 15 yields to everything
}


class Scheduler:
    """Runs the study's runs, each as a process of its own with its log in its folder.

    Those that take the whole stack share one Ray cluster.

    Args:
        work: folder for models and logs.
        results: .jsonl file for the results.
        parallel: runs at a time; each computes with one thread.
        timeout: of one run, in seconds.
    """

    def __init__(self, work: Path, results: Path, parallel: int, timeout: float) -> None:
        self.work, self.results, self.parallel, self.timeout = work, results, parallel, timeout
        self.stopped = False
        self.processes: set[subprocess.Popen] = set()

    def run(self, open_runs: list[Run]) -> int:
        """Train every run. SIGTERM and SIGINT end the study, and the runs that are going.

        Returns:
            The exit status: 1 if a run failed or the study was stopped, else 0.
        """
        os.environ.update(ENVIRONMENT)
        _PREPARED.set_forkserver_preload(["study.in_process"])
        if not all(run.is_in_process for run in open_runs):
            self._start_cluster()
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        failed = []

        def attempt(run: Run, made: Future) -> None:
            wait([made])
            if self.stopped:
                return
            start = time.time()
            try:
                made.result()  # raises what its process did
                result = self._train(run)
            except Exception as error:  # the others go on
                failed.append(run.name)
                print(f"{run.name}: failed: {error}", flush=True)
            else:
                write(result, self.results)
                after = [f"{s} {m['accuracy'][0]:.3f}" for s, m in result["after"].items()]
                print(f"{run.name}: {', '.join(after)}, {time.time() - start:.0f} s", flush=True)

        with ThreadPoolExecutor(self.parallel) as pool:
            # Those of a seed are made side by side, before its first run. So a study that is cut short has runs.
            made: dict[Path, Future] = {}
            attempts = []
            for run in open_runs:
                for other in (r for r in open_runs if r.seed == run.seed):
                    if (folder := self._inputs(other)) not in made:
                        made[folder] = pool.submit(self._make_inputs, other)
                attempts.append(pool.submit(attempt, run, made[self._inputs(run)]))
            for done in attempts:
                done.result()
        print(f"{'stopped' if self.stopped else 'finished'}; failed: {', '.join(failed) or 'none'}", flush=True)
        return 1 if failed or self.stopped else 0

    def _stop(self, *_) -> None:
        self.stopped = True
        for process in multiprocessing.active_children():
            process.kill()
        for driver in list(self.processes):
            os.killpg(driver.pid, signal.SIGKILL)  # Ray ends the workers of a driver that is gone

    def _start_cluster(self) -> None:
        """Start a Ray cluster that ends with this process and whose workers import this repository."""
        from arlopti_openrlhf import cpu

        cpu.enable()  # first, so that the cluster inherits what it puts into the environment
        import ray

        gpus = 2 * self.parallel
        context = ray.init(num_gpus=gpus, num_cpus=gpus + 4 * self.parallel, include_dashboard=False)
        imported = Path(ray.get(ray.remote(_package_file).remote()))
        if not imported.is_relative_to(ROOT):
            raise SystemExit(f"Ray's workers import {imported}, which is not in {ROOT}")
        os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]

    def _train(self, run: Run) -> dict:
        inputs = self._inputs(run)
        made = json.loads((inputs / STAMP).read_text("utf-8"))
        warm_start = sha256(inputs / "model" / "model.safetensors")
        refuse_another_warm_start(run, warm_start, self.results)
        out = self.work / run.name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        log = out / "train.log"
        flags = runs.flags(run, inputs, out)
        start, at = time.time(), commit()
        if run.is_in_process:
            self._call(_PREPARED, train_in_process, flags, log, what=str(log))
        else:
            self._train_on_the_stack(flags, log)
        # Keep the log, and not the model, which nobody needs any more.
        seconds = time.time() - start
        shutil.rmtree(out / "model", ignore_errors=run.is_in_process)
        scalars = read_scalars(out / "tensorboard")
        return summarize(run, scalars) | {
            "seconds": {"run": round(seconds, 1), "warm_start": made["seconds"]} | step_seconds(scalars),
            "commit": at,
            "machine": machine() | {"parallel": self.parallel},
            "warm_start_sha256": warm_start,
        }

    def _train_on_the_stack(self, flags: list[str], log: Path) -> None:
        """Run the real command, in a session of its own, whose processes can be killed as one group."""
        # A run's configuration does not name this folder, in which it leaves no checkpoint.
        path = f"--ckpt.path={log.parent / 'checkpoints'}"
        command = [sys.executable, "-m", "arlopti_openrlhf.cli.train_ppo_ray", *flags, path]
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.processes.add(process)
            try:
                status = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise RuntimeError(f"no end after {self.timeout / 60:.0f} minutes: {log}") from None
            finally:
                self.processes.remove(process)
        if status:
            raise RuntimeError(f"status {status}: {log}")

    def _call(self, context: _Context, function: Callable[..., None], *args, what: str) -> None:
        """Call a function in a process of its own, whose memory is free again once it ends.

        Args:
            context: where the process comes from.
            function: of this module.
            args: the function's.
            what: names the call in an error.

        Raises:
            RuntimeError: it failed, or took too long.
        """
        process = context.Process(target=function, args=args)
        process.start()
        process.join(self.timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise RuntimeError(f"no end after {self.timeout / 60:.0f} minutes: {what}")
        if process.exitcode:
            raise RuntimeError(f"status {process.exitcode}: {what}")

    def _inputs(self, run: Run) -> Path:
        """Return the folder of the puzzles and the warm-started model that the runs of a seed and condition share."""
        return self.work / f"inputs-{run.condition}-{run.seed}"

    def _make_inputs(self, run: Run) -> None:
        """Make a run's inputs, unless they are there. If that fails, all runs that share them fail.

        Raises:
            RuntimeError: the process that makes them failed.
        """
        folder, configuration = self._inputs(run), runs.inputs_configuration(run.condition, run.seed)
        stamp = folder / STAMP
        if self.stopped or (stamp.exists() and json.loads(stamp.read_text("utf-8"))["configuration"] == configuration):
            return
        shutil.rmtree(folder, ignore_errors=True)
        start = time.time()
        self._call(_FRESH, make_inputs, run.condition, run.seed, folder, what=f"the warm start in {folder}")
        write_whole(json.dumps({"configuration": configuration, "seconds": round(time.time() - start, 1)}), stamp)


def train_in_process(flags: list[str], log: Path) -> None:
    """Train a run in this process, with its output in `log`."""
    with open(log, "w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    from study import in_process

    in_process.main(flags)


def make_inputs(condition: str, seed: int, folder: Path) -> None:
    """Write a seed's training puzzles, held-out puzzles and warm-started model, in one of `runs.CONDITIONS`.

    The greedy answers have held-out puzzles of their own: OpenRLHF's evaluation knows a puzzle by its prompt.
    """
    from arlopti_openrlhf.lab.data import tiny_policy
    from arlopti_openrlhf.lab.data.preparation import generate_rows, write_rows

    def rows(count: int, held_out: bool) -> list[dict]:
        return generate_rows(runs.PEOPLE, count, held_out=held_out, seed=seed, names=tiny_policy.NAMES)

    folder.mkdir(parents=True)
    train = rows(-(-runs.STEPS * runs.PROMPTS_PER_STEP // len(runs.PEOPLE)), held_out=False)
    write_rows(train[: runs.STEPS * runs.PROMPTS_PER_STEP], folder / "train.jsonl")
    test = rows(runs.HELD_OUT + runs.HELD_OUT_GREEDY, held_out=True)
    sampled = runs.HELD_OUT * len(runs.PEOPLE)  # the sources alternate
    greedy = [row | {"datasource": f"{row['datasource']}_greedy"} for row in test[sampled:]]
    write_rows(test[:sampled] + greedy, folder / "test.jsonl")
    warm_start = runs.CONDITIONS[condition].warm_start
    arguments = {name: value for name, value in warm_start.items() if name not in runs.FIXED}
    tiny_policy.make_policy(folder / "model", people=runs.PEOPLE, seed=seed, **arguments)


def _package_file() -> str:
    import arlopti_openrlhf

    return arlopti_openrlhf.__file__


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return result.stdout.strip()


def commit() -> str:
    """Return the checkout's commit, with a + if there are changes to it beside results."""
    changes = _git("status", "-s", "-uno", "--", ".", ":!study/results")
    return _git("rev-parse", "--short=12", "HEAD") + ("+" if changes else "")


def machine() -> dict:
    """Return the processor's name and its number of cores."""
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "cores": os.cpu_count()}
