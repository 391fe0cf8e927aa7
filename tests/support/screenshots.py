"""Takes the pictures of docs/page.md: the real page of ``pdserve up`` while clients chat with the model."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.browser import Tab, open_browser

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
QUESTIONS = [
    "Name three rivers.",
    "Write one sentence about the sea.",
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue. " * 12,
    "Which animals live in the forest? " * 4,
]
NUM_CLIENTS = 2
PAUSE_S = 0.5
ANSWER_LIMIT_S = 60.0
LONGEST_ANSWER_S = 8.0
HEIGHTS = {1600: 960, 400: 900}
MAX_BYTES = 250_000
IDLE = "document.getElementById('stop').disabled"


def main() -> None:
    arguments = argparse.ArgumentParser(prog="scripts/screenshots", description=__doc__)
    arguments.add_argument("--minutes", type=float, default=5.0, help="of traffic before the first picture")
    minutes = arguments.parse_args().minutes
    with tempfile.TemporaryDirectory() as scratch, serving() as url, traffic(url):
        time.sleep(60 * minutes)
        with open_browser(Path(scratch)) as browser, browser.tab() as tab:
            tab.open(url)
            for question in QUESTIONS[1:3]:
                ask(tab, question)
            for width in HEIGHTS:
                for scheme in ("light", "dark"):
                    take(tab, width=width, scheme=scheme)


@contextmanager
def serving() -> Iterator[str]:
    """The URL of a router over one prefill and two decode workers with the embedded model."""
    command = [sys.executable, "-m", "pdserve", "up", "--port", "0", "--decode", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield next(
            found[1] for line in process.stdout if (found := re.search(r"ready at (http://\S+) ", line))
        )
    finally:
        process.terminate()
        process.wait(ANSWER_LIMIT_S)


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Clients that ask one question after the other."""
    ended = threading.Event()
    clients = [threading.Thread(target=chat, args=(url, start, ended)) for start in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        ended.set()
        for client in clients:
            client.join()


def chat(url: str, start: int, ended: threading.Event) -> None:
    number = start
    while not ended.wait(PAUSE_S):
        messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
        body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": 80}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=ANSWER_LIMIT_S).raise_for_status()
        number += NUM_CLIENTS


def ask(tab: Tab, question: str) -> None:
    tab.wait("document.getElementById('workers').children.length > 0")
    tab.value("document.getElementById('prompt').focus()")
    tab.type(question)
    tab.press("Enter")
    tab.wait("document.getElementById('messages').lastChild.textContent")
    deadline_s = time.monotonic() + LONGEST_ANSWER_S
    while not tab.value(IDLE):
        if time.monotonic() > deadline_s:  # so small a model does not always find an end
            tab.value("document.getElementById('stop').click()")
        time.sleep(0.1)


def take(tab: Tab, *, width: int, scheme: str) -> None:
    tab.emulate(width=width, height=HEIGHTS[width], scheme=scheme)
    tab.value("document.activeElement.blur()")
    tab.value("new Promise((shown) => requestAnimationFrame(() => requestAnimationFrame(shown)))")
    picture = tab.picture()
    assert len(picture) < MAX_BYTES, f"{len(picture)} bytes at {width} px"
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"page-{width}-{scheme}.png").write_bytes(picture)


if __name__ == "__main__":
    main()
