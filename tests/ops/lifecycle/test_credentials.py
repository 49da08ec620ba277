"""Keys, passwords and tokens leave the arguments at once, and reach only those that use them."""

import asyncio
import base64
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from yarl import URL

from arlopti_openrlhf.cli import train_ppo_ray
from arlopti_openrlhf.cli.command_line import hierarchize
from arlopti_openrlhf.ops.lifecycle import credentials
from arlopti_openrlhf.ops.rollouts import reward_http

KEY, PASSWORD, TOKEN = "0123456789abcdef" * 2, "pass-w0rd", "t0ken/+="


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setattr(credentials.os, "environ", dict(credentials.os.environ))


def hidden(*flags: str):
    flat = train_ppo_ray.parse(["--actor.model_name_or_path", "m", *flags])
    credentials.hide(flat)
    return flat


def test_no_secret_is_left_in_the_arguments():
    given = f"http://user:{PASSWORD}@host:5000/get?token={TOKEN}&v=,http://other/kk/get_reward"
    flat = hidden("--logger.wandb.key", KEY, "--reward.remote_url", given)
    assert not [secret for secret in (KEY, PASSWORD, TOKEN) if secret in str(vars(flat))]
    args = hierarchize(flat)
    urls = args.reward.remote_url.split(",")
    assert urls[1] == "http://other/kk/get_reward" and "}@host:5000/${" in urls[0] and "?token=${" in urls[0]
    assert ",".join(map(credentials.expand, urls)) == given
    secrets = credentials.collect(args.logger.wandb.key, urls)
    assert {KEY, "user", PASSWORD, TOKEN} <= set(secrets.values()) and secrets["WANDB_API_KEY"] == KEY


SECRET = "s3cr,t%2F"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"http://host:5000/{SECRET.replace(',', '')}/get_reward", "http://host:5000/*/get_reward"),
        ("http://host/s3cr/kk/get_reward", "http://host/*/kk/get_reward"),
        ("http://host/v1/s3cr/", "http://host/*/*/"),
        (f"http://user:{SECRET}@host/get_reward", "http://*:*@host/get_reward"),
        ("http://s3cr@host/get_reward", "http://*@host/get_reward"),
        ("http://user:s3/cr@host/get_reward", "http://*:*/*@host/get_reward"),  # no URL, and is refused
        ("http://user:s3#c?r@host/get_reward", "http://*:*#*?*@host/get_reward"),
        (f"http://host/get_reward?key={SECRET}&user=s3cr", "http://host/get_reward?key=*&user=*"),
        ("http://host/get_reward?s3cr#s3cr", "http://host/get_reward?*#*"),
        ("http://host/get_reward?key=a@s3cr=?", "http://host/get_reward?key=*"),
        ("http://[::1]:5000/s3cr/get_reward", "http://[::1]:5000/*/get_reward"),
        ("host:5000/s3cr/get_reward", "host:5000/*/get_reward"),  # without a scheme, and is refused
        ("http//user:s3cr@host/get_reward", "http//*/get_reward"),
    ],
)
def test_what_may_be_a_secret_is_hidden_wherever_it_stands_and_the_server_gets_it(url, shown):
    found, secrets = credentials.divide(url)
    assert re.sub(r"\$\{\w+\}", "*", found) == shown and "s3" not in found
    assert len(set(secrets)) == shown.count("*")
    credentials.os.environ.update(secrets)
    assert credentials.expand(found).replace("%2C", ",") == url


def test_a_comma_divides_urls_only_before_another_one():
    found, secrets = credentials.divide("http://u:a,b@host/get_reward, https://host/get_reward?key=c,d,http://x,kk")
    assert found.count(",") == 3 and set(secrets.values()) == {"u", "a,b", "c,d"} and found.endswith(",http://x,kk")


def test_a_user_may_name_the_variables():
    """They stay as they are, with what else stands in such a part, and no other one gets their names."""
    credentials.os.environ.update(WANDB_API_KEY=KEY, MY_TOKEN=TOKEN, WORD="p@ss/w?rd%", HOST="host:1")
    given = "http://me:${WORD}@${HOST}/v1/${MY_TOKEN}/get_reward?token=${MY_TOKEN}"
    flat = hidden("--logger.wandb.key", "WANDB_API_KEY", "--reward.remote_url", given)
    args = hierarchize(flat)
    assert args.logger.wandb.key == "WANDB_API_KEY" and args.reward.remote_url == given
    secrets = credentials.collect("WANDB_API_KEY", [given])
    assert secrets == {"WANDB_API_KEY": KEY, "MY_TOKEN": TOKEN, "WORD": "p@ss/w?rd%", "HOST": "host:1"}
    url = URL(credentials.expand(given))
    assert (url.user, url.password, url.host, url.port) == ("me", "p@ss/w?rd%", "host", 1)
    assert url.path == f"/v1/{TOKEN}/get_reward"
    kept = "http://host/${ARLOPTI_REWARD_SECRET_0_0}/get_reward?key=new"
    assert credentials.divide(kept)[1] == {"ARLOPTI_REWARD_SECRET_0_1": "new"}
    assert credentials.missing(f"{given}{kept}") == ["ARLOPTI_REWARD_SECRET_0_0"]


@pytest.mark.parametrize(
    "source", ["kk", "a folder/reward?x=1#.py", "a@b:c.py", "rewards/kk_reward", "http://host:5000/math/get_reward/"]
)
def test_other_sources_stay_as_they_are(source):
    assert credentials.divide(source) == (source, {})


@pytest.mark.parametrize(
    "written",
    [
        "a b/c&é",
        "a%20b%2fc%26%C3%A9",
        "a+b%2Fc%26%c3%a9",
        "a%2520b%252Fc%2526%25c3%25a9",
        "a b\\/c\\u0026\\u00e9",
        "a b/c&amp;é",
    ],
)
def test_no_writing_of_a_secret_is_shown(written):
    credentials.os.environ["MINE"] = "a%20b/c%26é"
    assert credentials.mask(f"<{written}>", "http://host/${MINE}/get_reward") == "<${MINE}>"


@pytest.fixture
def server():
    """Yield a reward server's port, and what it was asked. It refuses each request, and repeats it."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(403)
            self.end_headers()
            self.wfile.write(f"not you: {self.path} {self.headers['Authorization']}".encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("user", ["t0ken-only", "t0ken:", ":t0ken", "a:t0ken"])
def test_a_user_is_shown_in_no_form_of_a_header(server, user):
    port, asked = server
    flat = hidden("--reward.remote_url", f"http://{user}@127.0.0.1:{port}/get_reward")
    with pytest.raises(reward_http.RewardError) as refused:
        asyncio.run(reward_http.post(vars(flat)["reward.remote_url"], "q", "p", "l"))
    [(_, authorization)] = asked
    sent = authorization.removeprefix("Basic ")
    assert base64.b64decode(sent).decode() == (user if ":" in user else f"{user}:")
    assert "not you: /get_reward Basic ${...}" in str(refused.value) and sent.rstrip("=") not in str(refused.value)


def test_the_server_gets_them_and_messages_do_not(server):
    port, asked = server
    flat = hidden("--reward.remote_url", f"http://user:{PASSWORD}@127.0.0.1:{port}/get?token=abc-secret")
    with pytest.raises(reward_http.RewardError) as refused:
        asyncio.run(reward_http.post(vars(flat)["reward.remote_url"], "q", "p", "l"))
    [(path, authorization)] = asked
    assert path == "/get?token=abc-secret"
    assert base64.b64decode(authorization.removeprefix("Basic ")).decode() == f"user:{PASSWORD}"
    assert "status 403" in str(refused.value) and "not you" in str(refused.value)
    assert "abc-secret" not in str(refused.value) and PASSWORD not in str(refused.value)
