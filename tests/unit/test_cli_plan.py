from pathlib import Path

import pytest

from pdserve.cli import plan
from pdserve.cli.settings import UpSettings
from pdserve.config import load

MODEL = Path("/models/tiny")


def up(*flags: str) -> UpSettings:
    return load(UpSettings, flags, {})


def flag(program: plan.Program, name: str) -> str:
    return program.flags[program.flags.index(name) + 1]


def test_workers_are_numbered_and_listen_on_free_loopback_ports() -> None:
    settings = up("--prefill", "2", "--decode", "1", "--host", "0.0.0.0", "--port", "80")
    workers = plan.prefill_workers(settings, MODEL, num_cores=4) + plan.decode_workers(
        settings, MODEL, num_cores=4
    )
    assert [worker.name for worker in workers] == ["prefill-0", "prefill-1", "decode-0"]
    assert {flag(worker, "--port") for worker in workers} == {"0"}
    assert not any("--host" in worker.flags for worker in workers)


def test_no_prefill_workers_is_the_aggregated_server() -> None:
    assert plan.prefill_workers(up("--prefill", "0"), MODEL, num_cores=4) == []


@pytest.mark.parametrize(
    ("flags", "num_cores", "threads"),
    [([], 8, "4"), (["--decode", "3"], 8, "2"), ([], 1, "1"), (["--threads", "5"], 8, "5")],
)
def test_workers_share_the_cores(flags: list[str], num_cores: int, threads: str) -> None:
    [worker] = plan.prefill_workers(up(*flags), MODEL, num_cores=num_cores)
    assert flag(worker, "--threads") == threads
    assert worker.environment["OMP_NUM_THREADS"] == threads


def test_transports_are_a_matter_of_the_decode_workers() -> None:
    settings = up("--transports", "grpc,tcp")
    [decode] = plan.decode_workers(settings, MODEL, num_cores=1)
    [prefill] = plan.prefill_workers(settings, MODEL, num_cores=1)
    assert flag(decode, "--transports") == "grpc,tcp"
    assert "--transports" not in prefill.flags


def test_the_router_learns_where_the_workers_are() -> None:
    router = plan.router(up("--port", "0"), MODEL, prefill_addresses=[], decode_addresses=["a:1", "b:2"])
    assert flag(router, "--prefill-workers") == ""
    assert flag(router, "--decode-workers") == "a:1,b:2"
    assert flag(router, "--port") == "0"


def test_the_settings_file_is_handed_on(tmp_path: Path) -> None:
    file = tmp_path / "pdserve.toml"
    file.write_text("[up]\nprefill = 1\n[decode]\nmax_num_seqs = 3\n")
    [prefill] = plan.prefill_workers(up("--config", str(file)), MODEL, num_cores=1)
    assert flag(prefill, "--config") == str(file)
