from dataclasses import replace

import pytest

from pdserve.cli.doctor.deployment_checks import check_deployment
from pdserve.cli.doctor.deployment_facts import DeploymentFacts, PairFacts
from pdserve.cli.doctor.finding import Finding, Severity
from pdserve.cli.doctor.pair_checks import check_pairs
from pdserve.cli.doctor.probe import Measured
from pdserve.cli.doctor.router_facts import ListedWorker, RouterFacts
from pdserve.cli.doctor.worker_facts import Answer, WorkerFacts

URL = "http://127.0.0.1:8000"
ANSWER = Answer(
    role="decode",
    model_name="tiny",
    model_fingerprint="aaaa",
    version="1",
    boot_id="host-1",
    max_context_tokens=1000,
    room_tokens=1000,
    is_draining=False,
    last_step_age_s=0.0,
    clock_ahead_s=0.0,
    round_trip_s=0.001,
)
DECODE = WorkerFacts(ListedWorker("d:1", "decode", "ready", ""), ANSWER)
PREFILL = WorkerFacts(ListedWorker("p:1", "prefill", "ready", ""), replace(ANSWER, role="prefill"))
ROUTER = RouterFacts(URL, workers=(PREFILL.listed, DECODE.listed))
MEASURED = Measured(
    num_prompt_tokens=512,
    ttft_ms=105.0,
    gap_ms=20.0,
    prefill_ms=100.0,
    transport="shm",
    num_bytes=20_000_000,
    transfer_ms=10.0,
)
PAIR = PairFacts(PREFILL, DECODE, MEASURED)


def text(findings: list[Finding], severity: Severity) -> str:
    return "\n".join(f"{f.what}: {f.why}" for f in findings if f.severity is severity)


def of(severity: Severity, *workers: WorkerFacts, router: RouterFacts = ROUTER) -> str:
    return text(list(check_deployment(DeploymentFacts(router, workers))), severity)


def of_pairs(severity: Severity, *pairs: PairFacts) -> str:
    return text(list(check_pairs(pairs)), severity)


def decode(**changes: object) -> WorkerFacts:
    return replace(DECODE, answer=replace(ANSWER, **changes))  # type: ignore[arg-type]


def test_a_sound_deployment_has_no_fault_and_nothing_slow() -> None:
    for severity in (Severity.FAULT, Severity.SLOW):
        assert of(severity, PREFILL, DECODE) == ""
        assert of_pairs(severity, PAIR) == ""


def test_a_router_that_cannot_be_asked_is_the_only_finding() -> None:
    facts = DeploymentFacts(RouterFacts(URL, "the port is closed"))
    (finding,) = check_deployment(facts)
    assert finding.severity is Severity.FAULT
    assert "the port is closed" in finding.why


def test_a_name_without_addresses_is_a_fault() -> None:
    router = replace(ROUTER, unresolved=("decode:9000",))
    assert "decode:9000 stands for no address" in of(Severity.FAULT, DECODE, router=router)


def test_a_closed_port_is_a_fault_and_without_prefill_it_will_be_slow() -> None:
    listed = ListedWorker("p:1", "prefill", "down", "unavailable")
    gone = WorkerFacts(listed, problem="the port is closed: nothing listens there")
    assert "prefill worker p:1 is down: the port is closed" in of(Severity.FAULT, gone, DECODE)
    assert "prefill is down" in of(Severity.SLOW, gone, DECODE)


def test_a_worker_that_only_the_router_reaches_is_not_called_down() -> None:
    hidden = WorkerFacts(DECODE.listed, problem="no answer")
    assert "cannot be reached from here, though the router has it" in of(Severity.FAULT, hidden)


def test_a_worker_that_only_the_doctor_reaches_is_a_fault_with_the_routers_reason() -> None:
    listed = replace(DECODE.listed, state="down", problem="wrong session proof")
    assert "wrong session proof" in of(Severity.FAULT, replace(DECODE, listed=listed))


def test_a_worker_in_the_wrong_list_is_a_fault() -> None:
    assert "is a prefill worker, but listed as decode" in of(Severity.FAULT, decode(role="prefill"))


def test_a_worker_whose_engine_stands_still_is_a_fault() -> None:
    assert "stands still" in of(Severity.FAULT, decode(last_step_age_s=60.0))


def test_two_models_are_a_fault_that_names_both() -> None:
    fault = of(Severity.FAULT, PREFILL, decode(model_name="other", model_fingerprint="bbbb"))
    assert "prefill worker p:1: tiny (aaaa); decode worker d:1: other (bbbb)" in fault


@pytest.mark.parametrize(("ahead_s", "words"), [(3600.0, "3600 s ahead of"), (-90.0, "90 s behind")])
def test_clocks_far_apart_are_a_fault_with_their_direction(ahead_s: float, words: str) -> None:
    fault = of(Severity.FAULT, decode(clock_ahead_s=ahead_s))
    assert f"the clock of decode worker d:1 is {words} this host's" in fault


def test_what_the_round_trip_explains_is_not_held_against_a_clock() -> None:
    slow_network = decode(clock_ahead_s=1.2, round_trip_s=2.0)
    assert "clock" not in of(Severity.NOTE, slow_network)
    assert "clock" in of(Severity.NOTE, decode(clock_ahead_s=1.2))


def test_a_draining_worker_and_mixed_versions_are_noted() -> None:
    assert "is draining" in of(Severity.NOTE, decode(is_draining=True))
    assert "different versions: 1, 2" in of(Severity.NOTE, PREFILL, decode(version="2"))


def test_a_pair_that_fails_is_a_fault_with_its_reason() -> None:
    failed = replace(PAIR, measured=None, problem="the hand-off was aborted: incompatible_peer")
    assert "p:1 → decode d:1: the hand-off was aborted: incompatible_peer" in of_pairs(Severity.FAULT, failed)


def test_a_busy_pair_is_only_noted() -> None:
    busy = replace(PAIR, measured=None, not_probed="no_free_blocks")
    assert of_pairs(Severity.FAULT, busy) == ""
    assert "was not probed: no_free_blocks" in of_pairs(Severity.NOTE, busy)


def test_a_refused_secret_is_one_fault_however_many_pairs() -> None:
    refused = replace(PAIR, measured=None, not_probed="d:1 refuses the secret", is_secret_refused=True)
    assert of_pairs(Severity.FAULT, refused, refused).count("refuse the doctor's secret") == 1
    assert "not all workers have the same secret" in of_pairs(Severity.FAULT, refused, PAIR)


def test_a_link_slower_than_prefill_will_be_slow_and_does_not_pay() -> None:
    slow = of_pairs(Severity.SLOW, replace(PAIR, measured=replace(MEASURED, transfer_ms=400.0, gap_ms=320.0)))
    assert "is slower than the prompts it carries" in slow
    assert "not likely to pay" in slow


def test_a_fast_link_is_measured_and_pays() -> None:
    fine = of_pairs(Severity.OK, PAIR)
    assert "20.00 MB of KV for 512 tokens took 10.0 ms over shm (2.00 GB/s)" in fine
    assert "likely to pay: a prompt of 512 tokens computes for 100 ms" in fine


def test_tcp_within_one_host_will_be_slow() -> None:
    over_tcp = replace(PAIR, measured=replace(MEASURED, transport="tcp"))
    assert "one host, but KV goes over tcp" in of_pairs(Severity.SLOW, over_tcp)
    elsewhere = replace(over_tcp, decode=decode(boot_id="host-2"))
    assert of_pairs(Severity.SLOW, elsewhere) == ""
