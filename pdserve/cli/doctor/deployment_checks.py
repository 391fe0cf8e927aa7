"""Judges a deployment's parts: router, workers, models, clocks. Pure. Pairs: ``pair_checks``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pdserve.cli.doctor.deployment_facts import DeploymentFacts
from pdserve.cli.doctor.finding import Finding, Severity
from pdserve.cli.doctor.router_facts import RouterFacts
from pdserve.cli.doctor.worker_facts import Answer, WorkerFacts

# NTP keeps hosts within a tenth of a second; a clock this far off is kept by nobody, and drifts on
# until tickets are refused.
CLOCK_FAULT_S = 30.0
CLOCK_NOTE_S = 1.0
STUCK_S = 10.0


def check_deployment(facts: DeploymentFacts) -> Iterator[Finding]:
    yield from _router(facts.router)
    if facts.router.problem:
        return
    for worker in facts.workers:
        yield from _worker(worker)
    yield from _roles(facts)
    yield from _one_model(facts.workers)
    yield from _one_version(facts.workers)
    yield from _clocks(facts.workers)


def _router(router: RouterFacts) -> Iterator[Finding]:
    if router.problem:
        yield Finding(
            Severity.FAULT,
            f"the router at {router.url} cannot be asked",
            router.problem,
            "start it, or give the right --url; nothing else could be checked",
        )
        return
    for reason in router.not_ready:
        yield Finding(Severity.FAULT, "the router is not ready", reason)
    for target in router.unresolved:
        yield Finding(
            Severity.FAULT,
            f"{target} stands for no address",
            "the router looks this name up and finds nobody",
            "start workers behind it, or mend the name in --prefill-workers or --decode-workers",
        )
    if not router.not_ready:
        yield Finding(Severity.OK, f"the router at {router.url} is ready")


def _worker(worker: WorkerFacts) -> Iterator[Finding]:
    answer = worker.answer
    if answer is None:
        yield _unreachable(worker)
    elif answer.role != worker.listed.role:
        yield Finding(
            Severity.FAULT,
            f"{worker.address} is a {answer.role} worker, but listed as {worker.listed.role}",
            "the router does not use it",
            "swap the addresses in --prefill-workers and --decode-workers",
        )
    elif answer.is_draining:
        yield Finding(Severity.NOTE, f"{worker.name} is draining", "it finishes what it has and stops")
    elif answer.last_step_age_s >= STUCK_S:
        yield Finding(
            Severity.FAULT,
            f"{worker.name} stands still",
            f"its engine has made no step for {answer.last_step_age_s:.0f} s",
            "read its log, then restart it",
        )
    elif worker.listed.state != "ready":
        yield Finding(
            Severity.FAULT,
            f"{worker.name} answers us, but not the router",
            f"the router says: {worker.listed.problem or worker.listed.state}",
            "compare PDSERVE_SECRET and the versions of the router and this worker",
        )
    else:
        yield Finding(Severity.OK, f"{worker.name} is up", f"model {answer.model_name}, {answer.version}")


def _unreachable(worker: WorkerFacts) -> Finding:
    if worker.listed.state == "ready":
        return Finding(
            Severity.FAULT,
            f"{worker.name} cannot be reached from here, though the router has it",
            worker.problem,
            "run the doctor where the router runs",
        )
    return Finding(
        Severity.FAULT,
        f"{worker.name} is down",
        worker.problem,
        "start it and read its log; if it runs, compare its --host and --port with the router's settings",
    )


def _roles(facts: DeploymentFacts) -> Iterator[Finding]:
    prefill = facts.of_role("prefill")
    if not prefill:
        yield Finding(
            Severity.NOTE, "no prefill worker is configured", "decode workers run the prompts too: aggregated"
        )
    elif not any(worker.answer for worker in prefill):
        yield Finding(
            Severity.SLOW,
            "prefill is down",
            "decode workers run the prompts instead, and their streams stutter meanwhile",
        )


def _one_model(workers: Sequence[WorkerFacts]) -> Iterator[Finding]:
    answered = _answered(workers)
    counts = Counter(answer.model_fingerprint for _, answer in answered)
    if len(counts) < 2:
        return
    names = "; ".join(f"{worker.name}: {_model(answer)}" for worker, answer in answered)
    yield Finding(
        Severity.FAULT,
        "the workers do not all have the same model",
        f"KV of one means nothing to another. {names}",
        "start every worker and the router with the same --model",
    )


def _one_version(workers: Sequence[WorkerFacts]) -> Iterator[Finding]:
    versions = sorted({answer.version for _, answer in _answered(workers)})
    if len(versions) > 1:
        yield Finding(
            Severity.NOTE,
            f"workers of different versions: {', '.join(versions)}",
            "fine during a rolling upgrade",
        )


def _clocks(workers: Sequence[WorkerFacts]) -> Iterator[Finding]:
    for worker, answer in _answered(workers):
        if answer.clock_ahead_s is None:
            yield Finding(Severity.NOTE, f"{worker.name} does not tell its time", "it is of an older version")
            continue
        apart_s = max(0.0, abs(answer.clock_ahead_s) - answer.round_trip_s / 2)
        if apart_s < CLOCK_NOTE_S:
            continue
        direction = "ahead of" if answer.clock_ahead_s > 0 else "behind"
        yield Finding(
            Severity.FAULT if apart_s >= CLOCK_FAULT_S else Severity.NOTE,
            f"the clock of {worker.name} is {apart_s:.0f} s {direction} this host's",
            "tickets for hand-offs have an expiry: with clocks far apart decode refuses the KV",
            "run chrony or systemd-timesyncd on every host",
        )


def _answered(workers: Sequence[WorkerFacts]) -> list[tuple[WorkerFacts, Answer]]:
    return [(worker, worker.answer) for worker in workers if worker.answer is not None]


def _model(answer: Answer) -> str:
    return f"{answer.model_name} ({answer.model_fingerprint[:12]})"
