"""Keys, passwords and tokens leave the arguments at once, and reach only those that use them."""

import asyncio
import base64
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from arlopti_openrlhf.cli import train_ppo_ray
from arlopti_openrlhf.cli.command_line import hierarchize
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.rollouts import reward_client

KEY, PASSWORD, TOKEN = "0123456789abcdef" * 2, "pass-w0rd", "t0ken/+="


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setattr(credentials.os, "environ", dict(credentials.os.environ))


def hidden(*flags: str):
    flat = train_ppo_ray.parse(["--actor.model_name_or_path", "m", *flags])
    credentials.hide(flat)
    return flat


def test_no_secret_is_left_in_the_arguments():
    flat = hidden(
        "--logger.wandb.key",
        KEY,
        "--reward.remote_url",
        f"http://user:{PASSWORD}@host:5000/get?token={TOKEN}&v=,http://other/x",
    )
    assert not [secret for secret in (KEY, PASSWORD, TOKEN) if secret in str(vars(flat))]
    args = hierarchize(flat)
    urls = args.reward.remote_url.split(",")
    assert urls[1] == "http://other/x" and "@host:5000/get?token=${" in urls[0]
    assert credentials.expand(urls[0]) == f"http://user:{PASSWORD}@host:5000/get?token={TOKEN}&v="
    secrets = credentials.collect(args.logger.wandb.key, urls)
    assert sorted(secrets.values()) == sorted([KEY, f"user:{PASSWORD}", TOKEN])
    assert secrets["WANDB_API_KEY"] == KEY


def test_a_user_may_name_the_variables(monkeypatch):
    credentials.os.environ.update(WANDB_API_KEY=KEY, MY_TOKEN=TOKEN)
    flat = hidden("--logger.wandb.key", "WANDB_API_KEY", "--reward.remote_url", "http://host/?token=${MY_TOKEN}")
    args = hierarchize(flat)
    assert args.logger.wandb.key == "WANDB_API_KEY" and args.reward.remote_url == "http://host/?token=${MY_TOKEN}"
    assert credentials.collect("WANDB_API_KEY", [args.reward.remote_url]) == {"WANDB_API_KEY": KEY, "MY_TOKEN": TOKEN}


@pytest.mark.parametrize("source", ["kk", "a folder/reward?x=1#.py", "http://host:5000/get_reward"])
def test_other_sources_stay_as_they_are(source):
    assert hidden("--reward.remote_url", source).__dict__["reward.remote_url"] == source


@pytest.fixture
def server():
    """Yield a reward server's port, and what it was asked. It refuses each request, and repeats its path."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(403)
            self.end_headers()
            self.wfile.write(f"not you: {self.path}".encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, asked
    server.shutdown()
    server.server_close()


def test_the_server_gets_them_and_messages_do_not(server):
    port, asked = server
    flat = hidden("--reward.remote_url", f"http://user:{PASSWORD}@127.0.0.1:{port}/get?token=abc-secret")
    with pytest.raises(reward_client.RewardError) as refused:
        asyncio.run(reward_client._post(vars(flat)["reward.remote_url"], "q", "p", "l"))
    [(path, authorization)] = asked
    assert path == "/get?token=abc-secret"
    assert base64.b64decode(authorization.removeprefix("Basic ")).decode() == f"user:{PASSWORD}"
    assert "status 403" in str(refused.value) and "not you" in str(refused.value)
    assert "abc-secret" not in str(refused.value) and PASSWORD not in str(refused.value)
