"""The page in a browser, over real processes: what is on it, what the keyboard reaches, what is spoken."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import PROGRAM, Browser, Tab, open_browser
from tests.support.exposition import Exposition
from tests.support.processes import Processes, Program, eventually, free_port, open_processes

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.page,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"no program {PROGRAM}"),
]

QUESTION = "t5 t60 t7 t101 t33"
GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}  # outlasts what is done meanwhile
KEY = "key-1"
LIMIT_S = 20.0
IDLE = "document.getElementById('stop').disabled"
NAMED_ROLES = {"textbox", "button", "region"}
READABLE_CONTRAST = 4.5  # of WCAG 2, level AA
KEEP_WHAT_CHANGES = """
    (() => {
      const keep = (id, values, value) => new MutationObserver(() => values.push(value()))
        .observe(document.getElementById(id), {childList: true, characterData: true, subtree: true});
      keep('announcement', window.spoken = [], () => document.getElementById('announcement').textContent);
      keep('messages', window.lengths = [],
        () => [...document.querySelectorAll('.message')].at(-1).innerText.length);
    })()
"""
LEAST_CONTRAST = """
    (() => {
      const bytes = (color) => color.match(/[\\d.]+/g).map(Number);
      const light = (color) => bytes(color).slice(0, 3).map((byte) => byte / 255)
        .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
      const back = (element) => {
        const color = getComputedStyle(element).backgroundColor;
        return bytes(color)[3] === 0 ? back(element.parentElement) : color;
      };
      const contrast = (element) => {
        const [a, b] = [light(getComputedStyle(element).color), light(back(element))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      };
      const isText = (node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim();
      const shown = [...document.body.querySelectorAll(':not(:disabled)')]
        .filter((element) => element.checkVisibility() && [...element.childNodes].some(isText));
      return Math.min(...shown.map(contrast));
    })()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser, processes: Processes) -> Iterator[Tab]:
    """On the page of the processes that stay whole: nothing may go wrong in it, nothing leave it."""
    with browser.tab() as tab:
        open_page(tab, processes.url)
        yield tab
        assert tab.complaints() == []
        assert tab.origins() == {processes.url}


@pytest.fixture
def own(model_folder: Path, tmp_path: Path) -> Iterator[Processes]:
    with open_processes(model_folder, tmp_path) as processes:
        yield processes


def open_page(tab: Tab, url: str) -> None:
    tab.open(url)
    tab.wait("document.getElementById('workers').children.length > 0")
    tab.value(KEEP_WHAT_CHANGES)


def ask_for(tab: Tab, **fields: Any) -> None:
    """What the page sends from now on has these fields, too."""
    tab.value(f"""
        window.realFetch ??= fetch;
        window.fetch = (url, options) => realFetch(url, options.body
          ? {{...options, body: JSON.stringify({{...JSON.parse(options.body), ...{json.dumps(fields)}}})}}
          : options)
    """)


def send(tab: Tab, text: str) -> None:
    tab.value("document.getElementById('prompt').focus()")
    tab.type(text)
    tab.press("Enter")


def answer(processes: Processes, question: str) -> str:
    body = {"model": processes.model.name, "messages": [{"role": "user", "content": question}], **GREEDY}
    response = processes.client.post(f"{processes.url}/v1/chat/completions", json=body)
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def metrics(processes: Processes) -> Exposition:
    return Exposition(processes.client.get(f"{processes.url}/metrics").text)


def latest(tab: Tab, selector: str) -> str:
    text: str = tab.value(f"[...document.querySelectorAll('{selector}')].at(-1)?.textContent ?? ''")
    return text


# ------------------------------------------------------------------ chat


def test_an_answer_streams_in_and_is_told_with_its_timing(processes: Processes, tab: Tab) -> None:
    expected = answer(processes, QUESTION)
    before = metrics(processes)
    ask_for(tab, **GREEDY)
    send(tab, QUESTION)
    tab.wait("document.querySelector('.timing')")
    tab.wait(IDLE)
    assert latest(tab, ".message") == expected
    lengths = [length for length in tab.value("lengths") if length]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3, "the answer came at once"
    after = metrics(processes)
    told = re.fullmatch(
        r"TTFT ([\d.]+) ms · [\d.]+ tokens/s · hand-off gap ([\d.]+) ms", latest(tab, ".timing")
    )
    assert told, latest(tab, ".timing")
    for shown_ms, name in zip(
        told.groups(), ("pdserve_ttft_seconds_sum", "pdserve_handoff_gap_seconds_sum"), strict=True
    ):
        counted_ms = 1000 * (after.total(name) - before.total(name))
        assert float(shown_ms) == pytest.approx(counted_ms, abs=0.06)


def test_the_chat_goes_on_and_can_be_stopped(processes: Processes, tab: Tab) -> None:
    ask_for(tab, **GREEDY)
    send(tab, QUESTION)
    tab.wait("document.querySelectorAll('.timing').length === 1")
    tab.wait(IDLE)
    ask_for(tab, **ENDLESS)
    send(tab, "t9")
    tab.wait("document.querySelectorAll('.message').length === 4")
    tab.wait("[...document.querySelectorAll('.message')].at(-1).textContent")
    tab.press("Tab")  # past the button to send, which is disabled
    assert tab.focused() == "stop"
    tab.press("Space")
    tab.wait(IDLE)
    assert tab.text("#chat-status") == "Stopped."
    assert tab.focused() == "prompt", "the focus was lost with the button"
    processes.assert_blocks_come_back()


# ---------------------------------------------------------------- system


def shown_workers(tab: Tab) -> dict[str, str]:
    items = "[...document.querySelectorAll('#workers li')].map((li) => [li.dataset.address, li.innerText])"
    return dict(tab.value(items))


def totals(tab: Tab) -> dict[str, str]:
    pair = "(div) => [...div.children].map((one) => one.innerText)"
    return dict(tab.value(f"[...document.querySelectorAll('#totals div')].map({pair})"))


def counted_workers(processes: Processes, family: str) -> dict[str, dict[str, int]]:
    counted: dict[str, dict[str, int]] = {}
    for (_, state, worker), value in metrics(processes).values(family).items():
        counted.setdefault(worker, {})[state] = int(value)
    return counted


def test_numbers_are_those_of_the_metrics(processes: Processes, tab: Tab) -> None:
    def agree() -> bool:
        shown = shown_workers(tab)
        assert shown.keys() == {program.address for program in processes.workers}
        return all(
            f" {count} {state}" in shown[worker]
            for family in ("pdserve_worker_blocks", "pdserve_worker_sequences")
            for worker, states in counted_workers(processes, family).items()
            for state, count in states.items()
        )

    def says_running(count: int) -> bool:
        counted = metrics(processes).total("pdserve_requests_running")
        return counted == count and totals(tab)["Requests running"] == str(count)

    ask_for(tab, **ENDLESS)
    send(tab, QUESTION)
    eventually(lambda: says_running(1), LIMIT_S)
    tab.value("document.getElementById('stop').click()")
    eventually(lambda: says_running(0), LIMIT_S)
    eventually(agree, LIMIT_S)
    assert any(states["cached"] for states in counted_workers(processes, "pdserve_worker_blocks").values())


def test_a_killed_worker_is_down_and_a_killed_router_silent(own: Processes, browser: Browser) -> None:
    with browser.tab() as tab:
        open_page(tab, own.url)
        down = own.decode[0]
        down.kill()
        eventually(lambda: "down" in shown_workers(tab)[down.address], LIMIT_S)
        assert "ready" in shown_workers(tab)[own.prefill[0].address]
        own.router.kill()
        tab.wait("document.getElementById('system-problem').textContent.includes('does not answer')")
        assert "does not answer" in tab.value("spoken").pop()
        own.router.start()
        down.start()
        eventually(lambda: "ready" in shown_workers(tab)[down.address], LIMIT_S)
        assert tab.text("#system-problem") == ""
        assert tab.value("spoken").pop() == "The router answers again."


# ---------------------------------------------------------------- API key


@contextmanager
def router_with_key(processes: Processes, folder: Path) -> Iterator[str]:
    """A second router in front of the same workers; its URL."""
    flags = [*processes.router.flags, "--api-keys", KEY]
    router = Program("pdserve_router", flags, free_port(), folder / "router.log")
    router.start()
    try:
        yield f"http://{router.address}"
    finally:
        router.kill()


def test_without_the_key_nothing_is_shown(processes: Processes, browser: Browser, tmp_path: Path) -> None:
    with router_with_key(processes, tmp_path) as url, browser.tab() as tab:
        eventually(lambda: is_up(url), LIMIT_S)
        tab.open(url)
        tab.wait("document.activeElement.id === 'key'")
        assert tab.text("#key-problem") == ""
        assert tab.text("#workers") == ""
        tab.type("wrong")
        tab.press("Enter")
        tab.wait("document.getElementById('key-problem').textContent.includes('does not know this key')")
        assert tab.focused() == "key"
        assert tab.text("#workers") == ""
        tab.type(KEY)
        tab.press("Enter")
        tab.wait("document.getElementById('workers').children.length > 0")
        ask_for(tab, **GREEDY)
        send(tab, QUESTION)
        tab.wait("document.querySelector('.timing')")
        assert latest(tab, ".message") == answer(processes, QUESTION)
        assert KEY not in tab.value("location.href + JSON.stringify(localStorage)")
        refusals = [told for told in tab.complaints() if "401" not in told]
        assert refusals == []


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


# ---------------------------------------------------------- for everybody


def test_the_keyboard_reaches_everything(tab: Tab) -> None:
    order = []
    for _ in range(3):
        tab.press("Tab")
        order.append(tab.focused())
    assert order == ["messages", "prompt", "send"]
    tab.press("Tab", shift=True)
    assert tab.focused() == "prompt"
    ask_for(tab, **GREEDY)
    tab.type(QUESTION)
    tab.press("Tab")
    tab.press("Space")
    tab.wait("document.querySelector('.timing')")


def test_everything_has_a_name_and_one_region_speaks(tab: Tab) -> None:
    nodes = tab.accessible()
    named = {
        node["role"]["value"]: node["name"]["value"] for node in nodes if node["role"]["value"] in NAMED_ROLES
    }
    assert named.keys() == NAMED_ROLES
    assert all(named.values()), named
    live = [
        node["role"]["value"]
        for node in nodes
        for property in node.get("properties", ())
        if property["name"] == "live" and property["value"]["value"] != "off"
    ]
    assert live == ["status"]


def test_the_answer_is_spoken_once_and_whole(processes: Processes, tab: Tab) -> None:
    ask_for(tab, **GREEDY)
    send(tab, QUESTION)
    tab.wait("document.querySelector('.timing')")
    tab.wait(IDLE)
    assert tab.value("spoken") == ["The model answers.", latest(tab, ".message")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1600, 400])
def test_text_can_be_read_and_fits(tab: Tab, width: int, scheme: str) -> None:
    tab.emulate(width=width, height=900, scheme=scheme)
    ask_for(tab, **GREEDY)
    send(tab, QUESTION)
    tab.wait("document.querySelector('.timing')")
    assert tab.value(LEAST_CONTRAST) >= READABLE_CONTRAST
    assert tab.value("document.documentElement.scrollWidth") <= width


def test_a_violation_of_the_policy_would_be_heard(processes: Processes, browser: Browser) -> None:
    with browser.tab() as tab:
        open_page(tab, processes.url)
        tab.value("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/foreign.png'}))")
        tab.value("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">')")
        eventually(lambda: sum("Content Security Policy" in told for told in tab.complaints()) >= 2, LIMIT_S)
