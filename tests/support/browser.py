"""A headless Chromium, driven through its DevTools protocol: what people see, press and hear of the page.

Every tab has a connection of its own. What the tab did on the network and complained about is kept
from the moment it was opened.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import websockets.sync.client

PROGRAM = "chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]
LIMIT_S = 30.0
MAX_MESSAGE_BYTES = 32 << 20
# Key, and the number that pages know it by.
KEYS = {"Tab": 9, "Enter": 13, "Space": 32}
TEXT_OF_KEYS = {"Enter": "\r", "Space": " "}

Event = dict[str, Any]


def is_installed() -> bool:
    return shutil.which(PROGRAM) is not None


class Tab:
    def __init__(self, connection: websockets.sync.client.ClientConnection) -> None:
        self._connection = connection
        self._last_id = 0
        self.events: list[Event] = []
        for domain in ("Page", "Runtime", "Network", "Log", "Audits"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._last_id += 1
        self._connection.send(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(LIMIT_S))
            if message.get("id") == self._last_id:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.events.append(message)

    # ------------------------------------------------------------- what is done

    def open(self, url: str) -> None:
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def press(self, key: str, *, shift: bool = False) -> None:
        common = {"key": " " if key == "Space" else key, "code": key, "modifiers": 8 if shift else 0}
        common["windowsVirtualKeyCode"] = KEYS[key]
        self.call("Input.dispatchKeyEvent", type="keyDown", text=TEXT_OF_KEYS.get(key, ""), **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def emulate(self, *, width: int, height: int, scheme: str) -> None:
        """``scheme``: light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self) -> bytes:
        """The whole page as PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        return base64.b64decode(data)

    # ------------------------------------------------------------- what is seen

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What is rendered of the first match."""
        text: str = self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return text

    def wait(self, expression: str, limit_s: float = LIMIT_S) -> None:
        until(lambda: bool(self.value(f"Boolean({expression})")), expression, limit_s)

    def focused(self) -> str:
        focused: str = self.value("document.activeElement.id || document.activeElement.tagName")
        return focused

    def accessible(self) -> list[Event]:
        """What a screen reader is told: the nodes of the accessibility tree."""
        nodes: list[Event] = self.call("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node["ignored"]]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, uncaught exceptions, violations of the content policy."""
        self.value("0")  # takes in what has been reported until now
        return [told for event in self.events if (told := _complaint(event))]

    def origins(self) -> set[str]:
        """Where the tab has sent requests to."""
        urls = [
            urlsplit(event["params"]["request"]["url"])
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return {f"{url.scheme}://{url.netloc}" for url in urls if url.scheme != "data"}


def _complaint(event: Event) -> str:
    parameters = event["params"]
    match event["method"]:
        case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
            return f"console: {parameters['args']}"
        case "Runtime.exceptionThrown":
            return f"exception: {parameters['exceptionDetails']}"
        case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
            entry = parameters["entry"]
            return f"{entry['source']}: {entry['text']} {entry.get('url', '')}"
        case "Audits.issueAdded":
            return f"issue: {parameters['issue']}"
    return ""


class Browser:
    def __init__(self, port: int) -> None:
        self._port = port

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        """Has a session storage of its own."""
        target = httpx.put(f"http://127.0.0.1:{self._port}/json/new?about:blank", timeout=LIMIT_S).json()
        address = target["webSocketDebuggerUrl"]
        with websockets.sync.client.connect(address, max_size=MAX_MESSAGE_BYTES, proxy=None) as connection:
            yield Tab(connection)


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """``folder``: for its profile and its log; empty."""
    command = [PROGRAM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Browser(_port(folder / "profile" / "DevToolsActivePort"))
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait(10)


def _port(file: Path) -> int:
    """Chromium writes it there as soon as it listens."""

    def port() -> int:
        lines = file.read_text().splitlines() if file.exists() else []
        return int(lines[0]) if len(lines) > 1 else 0

    until(lambda: port() > 0, f"{file} names a port", LIMIT_S)
    return port()


def until(condition: Callable[[], bool], wanted: str, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {wanted}"
        time.sleep(0.02)
