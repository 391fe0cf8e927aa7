"""Judges pairs of workers: does a request get through, how fast is the link, does it pay? Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from pdserve.cli.doctor.deployment_facts import PairFacts
from pdserve.cli.doctor.finding import Finding, Severity
from pdserve.cli.doctor.probe import Measured

SAME_HOST_TRANSPORT = "shm"


def check_pairs(pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    for pair in pairs:
        yield from _probe(pair)
        yield from _transport(pair)
    yield from _secret(pairs)
    yield from _one_host(pairs)
    yield from _payoff([pair.measured for pair in pairs if pair.measured is not None])


def _probe(pair: PairFacts) -> Iterator[Finding]:
    if pair.problem:
        yield Finding(
            Severity.FAULT,
            f"no request gets through {pair.name}",
            pair.problem,
            "start with the other faults named here; then read both workers' logs",
        )
    elif pair.not_probed and not pair.is_secret_refused:
        yield Finding(Severity.NOTE, f"{pair.name} was not probed", pair.not_probed, "try again later")
    elif pair.measured is not None:
        yield _link(pair, pair.measured)


def _link(pair: PairFacts, measured: Measured) -> Finding:
    figures = (
        f"{measured.num_bytes / 1e6:.2f} MB of KV for {measured.num_prompt_tokens} tokens took "
        f"{measured.transfer_ms:.1f} ms over {measured.transport} ({measured.bytes_per_s / 1e9:.2f} GB/s); "
        f"the prompt took {measured.prefill_ms:.1f} ms; first token after {measured.ttft_ms:.1f} ms, "
        f"second {measured.gap_ms:.1f} ms later"
    )
    if measured.transfer_ms <= measured.prefill_ms:
        return Finding(Severity.OK, f"a request gets through {pair.name}", figures)
    return Finding(
        Severity.SLOW,
        f"the link {pair.name} is slower than the prompts it carries",
        f"{figures}. Prefill computes KV faster than it can be sent, so the second token waits for the link",
        "use a faster network or transport between these two, or place them on one host",
    )


def _transport(pair: PairFacts) -> Iterator[Finding]:
    if pair.measured is None or pair.measured.transport == SAME_HOST_TRANSPORT:
        return
    if _is_on_one_host(pair):
        yield Finding(
            Severity.SLOW,
            f"{pair.name}: one host, but KV goes over {pair.measured.transport}",
            "shared memory is not among decode's --transports, or they do not share a network namespace",
            "let containers of one host share the network, and leave shm in --transports",
        )


def _secret(pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    refused = [pair for pair in pairs if pair.is_secret_refused]
    if refused:
        yield Finding(
            Severity.FAULT,
            "the workers refuse the doctor's secret, so no pair was probed"
            if len(refused) == len(pairs)
            else "not all workers have the same secret",
            "; ".join(sorted({pair.not_probed for pair in refused})),
            "set PDSERVE_SECRET to what the workers were started with; `pdserve up` takes it too",
        )


def _one_host(pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    if pairs and all(map(_is_on_one_host, pairs)):
        yield Finding(
            Severity.NOTE,
            "prefill and decode are on one host",
            "where a worker has no GPU of its own it takes cores and memory bandwidth from the others: "
            "streams get steadier, but there is no more throughput",
        )


def _is_on_one_host(pair: PairFacts) -> bool:
    prefill, decode = pair.prefill.answer, pair.decode.answer
    return prefill is not None and decode is not None and prefill.boot_id == decode.boot_id != ""


def _payoff(measured: Sequence[Measured]) -> Iterator[Finding]:
    """What others' streams are spared, against what a request pays for it."""
    if not measured:
        return
    spared_ms = median(one.prefill_ms for one in measured)
    price_ms = median(one.gap_ms for one in measured)
    num_tokens = round(median(one.num_prompt_tokens for one in measured))
    figures = (
        f"a prompt of {num_tokens} tokens computes for {spared_ms:.0f} ms, which running streams would feel "
        f"on a worker that does both; handing it over leaves {price_ms:.0f} ms between its first two tokens"
    )
    if price_ms < spared_ms:
        yield Finding(
            Severity.OK, "disaggregation is likely to pay", f"{figures}. The longer the prompts, the more"
        )
    else:
        yield Finding(
            Severity.SLOW,
            "disaggregation is not likely to pay",
            figures,
            "compare with the same workers without prefill ones (aggregated), or use a faster link",
        )
