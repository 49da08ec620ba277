"""Runs the command with keys from the environment: none is in a file or in a line of the run."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_hex
from urllib.parse import unquote

import pytest

pytestmark = [pytest.mark.whole_stack, pytest.mark.long]

NAMED = {"PATH_TOKEN": "tok-named-path", "QUERY_TOKEN": "tok-named-query", "ARLOPTI_REWARD_TOKEN": "tok-bearer"}
URLS = [
    "http://127.0.0.1:{port}/${{PATH_TOKEN}}/get_reward",
    "http://127.0.0.1:{port}/get_reward?key=${{QUERY_TOKEN}}",
]
KEY = "0123456789abcdef" * 2  # wandb's
SECRETS = [KEY, *NAMED.values()]
STEP = 32  # samples


@pytest.fixture
def server():
    """Yield a server that fails once for each URL, refuses from its `refuses` on, and repeats what it was sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def do_POST(self):
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"][0]
            sent = f"{self.path} {self.headers['Authorization']}"
            with lock:
                asked[sent] += 1
                status = 500 if asked[sent] == 1 else 403 if asked.total() > http.refuses else 200
            body = json.dumps({"rewards": float(sum(map(ord, query)) % 7)}) if status == 200 else sent + unquote(sent)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args):
            pass

    asked, lock = Counter(), threading.Lock()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.asked, http.refuses = asked, 10**9
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield http
    http.shutdown()
    http.server_close()


@pytest.fixture
def arlopti(tmp_path):
    """Return arlopti(flags, **variables), which returns the exit code and the output. Ray's files stay in a folder."""
    temporary = Path("/tmp", token_hex(2))  # Ray's sockets need a short path, or another folder is taken
    temporary.mkdir(0o700)

    def run(*flags: str, **variables: str) -> tuple[int, str]:
        environment = {**os.environ, **variables, "RAY_TMPDIR": str(temporary)}
        environment |= {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "arlopti_openrlhf.cli.train_ppo_ray", *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        return done.returncode, done.stdout + done.stderr

    run.folders = [tmp_path, temporary]
    yield run
    shutil.rmtree(temporary)


def test_no_file_and_no_line_of_a_run_holds_a_secret(arlopti, server, tiny_model, tiny_data, tmp_path):
    """It ends when the server refuses, and is resumed from its own flags, which have no secret either."""
    flags = f"""--actor.model_name_or_path {tiny_model} --data.prompt_dataset {tiny_data} --data.max_samples 16
        --data.input_key prompt --data.label_key label --data.apply_chat_template --data.max_len 96
        --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1 --algo.kl.init_coef 0
        --rollout.max_new_tokens 16 --rollout.batch_size 8 --rollout.n_samples_per_prompt 4
        --rollout.micro_batch_size 4 --train.batch_size 16 --train.micro_batch_size 4 --ckpt.load_enable
        --algo.advantage.estimator group_norm --vllm.enforce_eager --vllm.sync_backend gloo --ckpt.save_steps 1
        --ckpt.output_dir {tmp_path}/final --ckpt.path {tmp_path}/ckpt --logger.tensorboard_dir {tmp_path}/tensorboard
        --logger.wandb.key {KEY} --logger.wandb.run_name run""".split()
    urls = ["--reward.remote_url", ",".join(URLS).format(port=server.server_port)]
    (tmp_path / "ckpt").mkdir()
    server.refuses = STEP + len(URLS) + 4
    code, output = arlopti(*flags, *urls, **NAMED)
    assert code == 1 and "refuses the request with status 403" in output and "status 500" in output, output[-6000:]
    assert set(server.asked) == {
        f"{path} Bearer tok-bearer" for path in ("/tok-named-path/get_reward", "/get_reward?key=tok-named-query")
    }

    kept = f"--config={tmp_path}/ckpt/config.yaml"
    code, refused = arlopti(kept, "--dry-run")
    assert code == 2 and "PATH_TOKEN is not in the environment; set it" in refused, refused
    server.refuses = 10**9
    code, resumed = arlopti(kept, **NAMED)
    assert code == 0 and (tmp_path / "final/model.safetensors").exists(), resumed[-6000:]

    files = [path for folder in arlopti.folders for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "run.json"} <= names and any("events.out" in name for name in names)
    assert any(name.startswith("gcs_server") for name in names) and any(name.endswith(".wandb") for name in names)
    for where, text in [(path, path.read_bytes()) for path in files] + [("", (output + refused + resumed).encode())]:
        assert not [secret for secret in SECRETS if secret.encode() in text], where
    of_run = [path for path in (tmp_path / "ckpt").rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert {path.name for path in of_run} <= {".run.lock"}  # which says to everybody who holds it
