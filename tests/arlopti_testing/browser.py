"""Open a page in headless Chromium, at a width, light or dark, and look at it by the DevTools protocol."""

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """Controls one page. `requests` are the addresses that it has asked for."""

    def __init__(self, socket) -> None:
        self.socket, self.count, self.requests = socket, 0, []
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict:
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": parameters}))
        while True:
            answer = self._receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self) -> dict:
        message = json.loads(self.socket.recv(timeout=60))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def open(self, page: Path | str, width: int, dark: bool) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"]["value"]

    def screenshot(self) -> bytes:
        """Return a PNG of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start headless Chromium without network, with `profile` as its folder."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    flags += ["--no-first-run", "--disable-background-networking", "--proxy-server=127.0.0.1:9"]
    process = subprocess.Popen([CHROMIUM, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = _wait_for_port(profile / "DevToolsActivePort", process)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as response:
            pages = [target for target in json.load(response) if target["type"] == "page"]
        with connect(pages[0]["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_for_port(file: Path, process: subprocess.Popen) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and file.read_text():
            return file.read_text().split()[0]
        time.sleep(0.1)
    raise RuntimeError(f"Chromium did not start (exit status {process.poll()})")
