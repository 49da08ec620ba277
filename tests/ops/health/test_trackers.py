"""A resumed run continues in one curve of TensorBoard and in one run of wandb. No tracker ends a run."""

import json
import logging
import resource
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import psutil
import pytest
import wandb
from arlopti_testing.processes import wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arlopti_openrlhf.cli import command_line, train_ppo_ray
from arlopti_openrlhf.ops.checkpoints import state
from arlopti_openrlhf.ops.health import trackers
from arlopti_openrlhf.ops.lifecycle import credentials, progress

logging.getLogger("wandb.sdk.lib.asyncio_manager").disabled = True  # its thread logs a lost process in a later test


def arguments(folder, run_name: str, resumes: bool, **wandb) -> SimpleNamespace:
    wandb = SimpleNamespace(**{"key": None, "org": None, "group": None, "project": "p", "run_name": run_name} | wandb)
    logger = SimpleNamespace(tensorboard_dir=str(folder / "tensorboard"), wandb=wandb)
    ckpt = SimpleNamespace(path=str(folder / "ckpt"), load_enable=resumes, disable_ds=False, save_hf=False)
    return SimpleNamespace(logger=logger, ckpt=ckpt)


@pytest.mark.parametrize(("checkpoint", "kept"), [(2, [0, 2]), (0, [])])
def test_lost_steps_are_in_tensorboard_once(checkpoint, kept, tmp_path):
    args = arguments(tmp_path, "run", True)
    killed = trackers.ResumableTensorboard(args)
    killed.log_eval(0, {"accuracy": 0.0})
    for step in (1, 2, 3, 4):
        killed.log_train(step, {"reward": float(step)})
    killed.log_eval(2, {"accuracy": 0.2})
    killed.log_eval(4, {"accuracy": 0.4})
    killed.close()
    second = int(time.time())  # TensorBoard reads files by their second, which their names have
    assert wait_until(lambda: time.time() >= second + 1)
    resumed = trackers.ResumableTensorboard(args)
    resumed.drop_from(checkpoint + 1 if checkpoint else 0)
    for step in range(checkpoint + 1, 6):
        resumed.log_train(step, {"reward": 10.0 * step})
    resumed.log_eval(5, {"accuracy": 0.5})
    resumed.close()

    events = EventAccumulator(str(tmp_path / "tensorboard" / "run"), size_guidance={"scalars": 0})
    events.Reload()
    values = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert values == [(step, step * (10.0 if step > checkpoint else 1.0)) for step in (1, 2, 3, 4, 5)]
    assert [event.step for event in events.Scalars("eval/accuracy")] == [*kept, 5]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Let wandb write to tmp_path alone."""
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that what the test leaves there is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield
    with suppress(ConnectionError):  # its process has been killed
        wandb.teardown()  # it would keep the folder for the next test


def test_wandb_goes_on_in_the_same_run_with_a_nested_config_that_holds_no_secret(offline, tmp_path):
    """Offline, wandb says which run it would go on in. α is a number there, by which runs can be filtered."""
    key = "0123456789abcdef" * 2
    flags = f"--logger.wandb.key {key} --logger.wandb.run_name mine --actor.model_name_or_path m"
    flags += " --reward.remote_url http://host/${MINE}/get_reward --algo.ar.alpha 0.3 --algo.lopti.eta 0.5"
    flags += f" --eval.dataset d --eval.steps 9 --eval.sampling a:n=2,t=1 --ckpt.path {tmp_path / 'ckpt'}"
    flat = train_ppo_ray.parse(flags.split())
    credentials.hide(flat)
    args, _ = command_line.check(flat)
    with trackers.resumable(state.identify(args)):
        tracker = trackers.ppo_trainer.WandbLogger(args)
    tracker.log_eval(3, {"accuracy": 0.5})
    run = wandb.run
    assert run.summary["eval/global_step"] == 3 and "eval/epoch" not in run.summary.keys()  # the x-axis is the former
    config, settings = dict(run.config), (run.id, run.name, run.settings.resume, run.settings.finish_timeout)
    tracker.close_for_good()
    assert not [child for child in psutil.Process().children() if "wandb" in child.name()]  # Ray would kill it
    kept = json.loads((tmp_path / "ckpt" / progress.RUN_FILE).read_text())
    assert settings == (kept["wandb_id"], "mine", "allow", 60)  # an outage of wandb does not hold up the end
    assert config["algo"]["ar"]["alpha"] == 0.3 and config["algo"]["lopti"]["eta"] == 0.5
    assert config["eval"]["sampling"] == [["*", 4, 0.6], ["a", 2, 1.0]] and "namespace(" not in str(config)
    assert config["logger"]["wandb"]["key"] == "WANDB_API_KEY"
    assert config["reward"]["remote_url"] == ["http://host/${MINE}/get_reward"]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"alpha" in written and key.encode() not in written


@pytest.fixture
def refusing():
    """Return the URL of a server that refuses everything."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        do_POST = do_GET

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("name", "tracker"), [("wandb", "WandbLogger"), ("TensorBoard", "TensorboardLogger")])
def test_a_tracker_that_cannot_start_is_left_out(name, tracker, refusing, offline, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", refusing)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    (tmp_path / "tensorboard").touch()
    with trackers.resumable("an-id"):
        assert getattr(trackers.ppo_trainer, tracker)(arguments(tmp_path, "mine", False)) is None
    assert f"arlopti_openrlhf: {name} cannot start, and the run goes on without it: " in capsys.readouterr().out


def test_tensorboard_on_a_full_disk_is_left_out(tmp_path, capsys):
    """Its thread fails to write, and each later call raises the thread's error."""
    with trackers.resumable("an-id"):
        tracker = trackers.ppo_trainer.TensorboardLogger(arguments(tmp_path, "mine", False))
    tracker.log_train(1, {"reward": 1.0})
    tracker.flush()
    [file] = (tmp_path / "tensorboard" / "mine").iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, limits[1]))
    try:
        for call in (lambda: tracker.log_train(2, {"reward": 2.0}), tracker.flush, tracker.close_for_good):
            call()
            call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().out
    assert said.startswith("arlopti_openrlhf: TensorBoard has failed, and the run goes on without it: OSError: ")
    assert said.count("\n") == 1


def test_wandb_whose_process_has_died_is_left_out(offline, tmp_path, capsys):
    args = arguments(tmp_path, "mine", False, key=credentials.WANDB)
    with trackers.resumable("an-id"):
        tracker = trackers.ppo_trainer.WandbLogger(args)
    [core] = [child for child in psutil.Process().children() if "wandb" in child.name()]
    core.kill()
    core.wait(30)
    for step in (1, 2):
        tracker.log_train(step, {"reward": 1.0})
    tracker.close_for_good()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("arlopti_openrlhf: ")]
    assert len(said) == 1 and "wandb has failed, and the run goes on without it: " in said[0]
