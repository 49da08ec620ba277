"""Ports for servers that a test starts in processes of their own."""

import os
import random
import socket


def free_port() -> int:
    """Return a port of this machine that nobody listens on.

    The kernel gives ports from 32768 on to whoever asks for any, which Ray does all the time.
    """
    ports = random.Random(os.urandom(8))
    while True:
        port = ports.randrange(20000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:  # taken
                continue
            return port
