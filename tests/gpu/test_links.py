"""KV between two processes, on one GPU: ``pytest -m gpu tests/gpu``. Never run on hardware yet.

The same runs over tcp with pools on the CPU, unmarked: that is what keeps this file and
``tests/support/link_end.py`` honest where there is no GPU.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import pytest

START_LIMIT_S = 60.0
# Longer than a link's own limits: what ends in time ends by them.
WAIT_S = 20.0
QUIET_LIMIT_S = 1.0
WAYS = [
    pytest.param("cpu", "tcp", id="cpu-tcp"),
    pytest.param("cuda", "tcp", id="cuda-tcp", marks=pytest.mark.gpu),
    pytest.param("cuda", "cuda-ipc", id="cuda-ipc", marks=pytest.mark.gpu),
    pytest.param("cuda", "nccl", id="nccl", marks=pytest.mark.gpu),
]


def environment(name: str) -> dict[str, str]:
    """NCCL takes two ranks on one GPU for a mistake: since 2.30 it can be told, older ones can be fooled."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NCCL_HOSTID": name,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }


@dataclass
class LinkEnd:
    """A process of ``tests.support.link_end``."""

    process: subprocess.Popen[str]
    ready: dict[str, Any] = field(default_factory=dict)
    _said: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)

    def listen(self) -> None:
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()
        self.ready = self.hear("ready", limit_s=START_LIMIT_S)

    def tell(self, do: str, **content: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **content}) + "\n")
        self.process.stdin.flush()

    def hear(self, event: str, *, limit_s: float = WAIT_S) -> dict[str, Any]:
        """The next thing said, which must be this one."""
        said = self._said.get(timeout=limit_s)
        assert said is not None, "the process has ended"
        assert said["event"] == event, said
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._said.put(json.loads(line))
        self._said.put(None)


@contextmanager
def link_end(role: str, device: str, *, block_size: int = 16, name: str = "") -> Iterator[LinkEnd]:
    command = [sys.executable, "-m", "tests.support.link_end", role, device, str(block_size)]
    with subprocess.Popen(
        command, env=environment(name or role), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            end = LinkEnd(process)
            end.listen()
            yield end
        finally:
            process.kill()


def push(decode: LinkEnd, prefill: LinkEnd, transport: str, *, number: int, commit: bool = True) -> None:
    decode.tell("expect", id=number)
    prefill.tell("push", id=number, transport=transport, address=decode.ready["address"], commit=commit)


def assert_sealed(decode: LinkEnd, prefill: LinkEnd, transport: str, *, number: int) -> None:
    done = prefill.hear("done")
    assert (done["id"], done["sealed"], done["reason"]) == (number, True, "")
    assert done["transport"] == transport
    sealed = decode.hear("sealed")
    assert (sealed["id"], sealed["digest"]) == (number, done["digest"])


def wait_until_landed(decode: LinkEnd) -> None:
    pause = threading.Event()
    for _ in range(200):
        decode.tell("landed")
        if decode.hear("landed")["bytes"]:
            return
        pause.wait(0.05)
    raise AssertionError("nothing has landed")


def drain(decode: LinkEnd, number: int) -> None:
    decode.tell("withdraw", id=number)
    assert decode.hear("quiet", limit_s=QUIET_LIMIT_S)["id"] == number


def assert_still_poisoned(decode: LinkEnd, number: int) -> None:
    decode.tell("is_poisoned", id=number)
    assert decode.hear("poisoned")["answer"], "a late write landed"


@pytest.mark.parametrize("block_size", [16, 8], ids=["blocks", "tokens"])
@pytest.mark.parametrize(("device", "transport"), WAYS)
def test_kv_arrives_bit_for_bit_again_and_again(device: str, transport: str, block_size: int) -> None:
    with (
        link_end("decode", device, block_size=block_size) as decode,
        link_end("prefill", device) as prefill,
    ):
        for number in range(1, 4):
            push(decode, prefill, transport, number=number)
            assert_sealed(decode, prefill, transport, number=number)


@pytest.mark.parametrize(("device", "transport"), WAYS)
def test_a_killed_prefill_process_costs_no_block_and_the_next_one_is_served(
    device: str, transport: str
) -> None:
    with ExitStack() as stack:
        decode = stack.enter_context(link_end("decode", device))
        victim = stack.enter_context(link_end("prefill", device))
        push(decode, victim, transport, number=1, commit=False)
        wait_until_landed(decode)
        victim.kill()
        aborted = decode.hear("aborted")
        assert (aborted["id"], aborted["reason"]) == (1, "link_lost")
        drain(decode, 1)
        assert_still_poisoned(decode, 1)
        prefill = stack.enter_context(link_end("prefill", device, name="prefill-2"))
        push(decode, prefill, transport, number=2)
        assert_sealed(decode, prefill, transport, number=2)


@pytest.mark.parametrize(("device", "transport"), WAYS)
def test_a_stopped_prefill_process_writes_into_no_block_that_was_drained(device: str, transport: str) -> None:
    with link_end("decode", device) as decode, link_end("prefill", device) as prefill:
        push(decode, prefill, transport, number=1, commit=False)
        wait_until_landed(decode)
        prefill.process.send_signal(signal.SIGSTOP)
        drain(decode, 1)
        prefill.process.send_signal(signal.SIGCONT)
        prefill.tell("abort", id=1)
        assert prefill.hear("done")["sealed"] is False
        assert_still_poisoned(decode, 1)
        push(decode, prefill, transport, number=2)
        assert_sealed(decode, prefill, transport, number=2)


@pytest.mark.parametrize(("device", "transport"), WAYS)
def test_a_killed_decode_process_ends_the_push_and_leaves_prefill_able(device: str, transport: str) -> None:
    with ExitStack() as stack:
        victim = stack.enter_context(link_end("decode", device))
        prefill = stack.enter_context(link_end("prefill", device))
        push(victim, prefill, transport, number=1, commit=False)
        wait_until_landed(victim)
        victim.kill()
        assert prefill.hear("done")["sealed"] is False
        decode = stack.enter_context(link_end("decode", device, name="decode-2"))
        push(decode, prefill, transport, number=2)
        assert_sealed(decode, prefill, transport, number=2)


@pytest.mark.gpu
def test_a_worker_with_a_gpu_offers_both_ways() -> None:
    """Else the extra ``cuda`` or libnccl is missing, and the log says which."""
    with link_end("decode", "cuda") as decode:
        assert decode.ready["ways"] == ["cuda-ipc", "nccl"]
