"""What targets are, and what a name stands for."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve_router import resolve as module
from pdserve_router.resolve import LookupFailed, Target, parse_target, resolve


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("decode:7000", Target("decode", 7000)),
        ("10.0.0.1:7000", Target("10.0.0.1", 7000)),
        ("[fd00::1]:7000", Target("fd00::1", 7000)),
    ],
)
def test_a_target_is_host_and_port_and_reads_as_it_was_written(text: str, target: Target) -> None:
    assert parse_target(text) == target
    assert str(target) == text


@pytest.mark.parametrize("text", ["decode", ":7000", "decode:", "decode:0", "decode:65536", "decode:²", ""])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        parse_target(text)


def answer_with(monkeypatch: pytest.MonkeyPatch, answer: list[Any] | Exception) -> None:
    def getaddrinfo(*arguments: Any, **options: Any) -> list[Any]:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def entry(address: str) -> tuple[Any, ...]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return (family, socket.SOCK_STREAM, 6, "", (address, 7000))


def test_a_name_stands_for_each_of_its_addresses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [entry("10.0.0.2"), entry("10.0.0.1"), entry("10.0.0.2"), entry("fd00::1")])
    assert asyncio.run(resolve(Target("decode", 7000))) == ["10.0.0.1:7000", "10.0.0.2:7000"]


def test_a_name_with_ipv6_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, [entry("fd00::1")])
    assert asyncio.run(resolve(Target("decode", 7000))) == ["[fd00::1]:7000"]


def test_a_name_that_nobody_has_stands_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    assert asyncio.run(resolve(Target("decode", 7000))) == []


def test_a_name_server_in_trouble_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
    with pytest.raises(LookupFailed, match="Temporary failure"):
        asyncio.run(resolve(Target("decode", 7000)))


def test_a_silent_name_server_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*arguments: Any, **options: Any) -> None:
        await asyncio.Event().wait()

    async def look_up() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", silent)
        await resolve(Target("decode", 7000))

    monkeypatch.setattr(module, "LOOKUP_LIMIT_S", 0.01)
    with pytest.raises(LookupFailed, match="no answer"):
        asyncio.run(look_up())
