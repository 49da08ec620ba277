"""The real reward server in a process of its own, and requests to it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from arlopti_testing.processes import free_port


@contextmanager
def server(*flags, log=None, **environment):
    port = free_port()
    command = [sys.executable, "-m", "arlopti_openrlhf", "serve", "--port", str(port), *map(str, flags)]
    with open(log or os.devnull, "w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env=os.environ | environment)
    process.url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(process.url + "/ready", timeout=5)
                break
            except OSError:
                time.sleep(0.1)
                assert process.poll() is None
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def post(url, message, **headers):
    """(status, answer)"""
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
