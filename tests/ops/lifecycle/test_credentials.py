"""Keys come from the environment, reach those that use them, and are shown nowhere."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from arlopti_openrlhf.cli import train_ppo_ray
from arlopti_openrlhf.cli.command_line import hierarchize
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.rollouts import reward_http

KEY, TOKEN = "0123456789abcdef" * 2, "t0ken/+="


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setattr(credentials.os, "environ", dict(credentials.os.environ))


def test_wandbs_key_moves_to_the_environment_and_a_url_stays_as_it_is_written():
    credentials.os.environ |= {"MINE": "abc-secret", "ARLOPTI_REWARD_TOKEN": TOKEN}
    url = "http://host:5000/${MINE}/get_reward"
    flat = train_ppo_ray.parse(
        ["--actor.model_name_or_path", "m", "--logger.wandb.key", KEY, "--reward.remote_url", url]
    )
    credentials.hide(flat)
    args = hierarchize(flat)
    assert (args.logger.wandb.key, args.reward.remote_url) == ("WANDB_API_KEY", url)
    secrets = credentials.collect(args.logger.wandb.key, [url])
    assert secrets == {"WANDB_API_KEY": KEY, "MINE": "abc-secret", "ARLOPTI_REWARD_TOKEN": TOKEN}
    assert credentials.expand(url) == "http://host:5000/abc-secret/get_reward"
    assert credentials.missing("http://${MINE}/${OTHER}") == ["OTHER"]


@pytest.mark.parametrize("url", ["http://me:pa,ss-w0rd@host/get_reward", "http://pass-w0rd@host", "me:ss-w0rd@host"])
def test_a_url_with_a_user_is_refused_and_not_shown(url, capsys):
    with pytest.raises(SystemExit) as refused:
        train_ppo_ray.parse(["--actor.model_name_or_path", "m", "--reward.remote_url", url])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and "w0rd" not in said
    assert "argument --reward.remote_url: it has a user or a password in it: set ARLOPTI_REWARD_TOKEN" in said


def test_a_file_may_have_any_name():
    assert credentials.without_user("a@b.py") == "a@b.py"


def test_the_server_gets_the_token_and_messages_do_not():
    """It refuses the request, and repeats what it was sent."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(403)
            self.end_headers()
            self.wfile.write(f"not you: {self.path} {self.headers['Authorization']}".encode())

        def log_message(self, *args):
            pass

    credentials.os.environ |= {"MINE": "abc-secret", "ARLOPTI_REWARD_TOKEN": TOKEN}
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(reward_http.RewardError) as refused:
        asyncio.run(reward_http.post(f"http://127.0.0.1:{server.server_port}/get?key=${{MINE}}", "q", "p", "l"))
    server.shutdown()
    server.server_close()
    assert asked == [("/get?key=abc-secret", f"Bearer {TOKEN}")]
    assert "status 403: not you: /get?key=${MINE} Bearer ${ARLOPTI_REWARD_TOKEN}" in str(refused.value)
