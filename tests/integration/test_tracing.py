"""One trace id from the client's header to the last worker; spans nested as pdserve.tracing draws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bench.cluster import Cluster, open_cluster
from pdserve.clock import MonotonicClock
from pdserve.otel import OtelTracer
from tests.support.engines import greedy
from tests.support.processes import eventually
from tests.support.tiny_models import tiny_model

PROMPT = [5 + index * 7 % 200 for index in range(40)]
TRACE_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736
SPAN_ID = 0x00F067AA0B1902B7
TRACEPARENT = f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"
PARENTS = {
    "attempt": None,
    "prefill": "attempt",
    "compute": "prefill",
    "transfer": "prefill",
    "decode": "attempt",
    "receive": "decode",
}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def cluster(exporter: InMemorySpanExporter) -> Iterator[Cluster]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = OtelTracer(provider, program="test", clock=MonotonicClock())
    with open_cluster(tiny_model("llama"), tracer=tracer, enable_prefix_cache=False) as cluster:
        yield cluster
        cluster.assert_blocks_come_back()


@pytest.fixture
def spans(cluster: Cluster, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Of one whole request, by name."""
    exporter.clear()
    cluster.generate(PROMPT, greedy(6, ignore_eos=True), traceparent=TRACEPARENT)
    eventually(lambda: len(exporter.get_finished_spans()) == len(PARENTS), 5.0)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_all_spans_are_of_the_clients_trace(spans: dict[str, ReadableSpan]) -> None:
    assert {span.context.trace_id for span in spans.values()} == {TRACE_ID}
    assert spans["attempt"].parent is not None
    assert spans["attempt"].parent.span_id == SPAN_ID


def test_spans_are_nested_as_drawn(spans: dict[str, ReadableSpan]) -> None:
    names = {span.context.span_id: name for name, span in spans.items()}
    parents = {name: names.get(span.parent.span_id) for name, span in spans.items() if span.parent}
    assert parents == PARENTS


def test_a_child_lies_within_its_worker_and_starts_before_it_ends(spans: dict[str, ReadableSpan]) -> None:
    slack_ns = 2_000_000  # clocks of the same machine, read one after the other
    for name, parent in PARENTS.items():
        begin_ns, end_ns = times_ns(spans[name])
        assert begin_ns <= end_ns, name
        if name in ("compute", "transfer", "receive") and parent:
            within_ns = times_ns(spans[parent])
            assert within_ns[0] - slack_ns <= begin_ns, name
            assert end_ns <= within_ns[1] + slack_ns, name


def test_a_transfer_tells_what_it_cost(spans: dict[str, ReadableSpan]) -> None:
    attributes = spans["transfer"].attributes or {}
    assert attributes["pdserve.transport"] == "tcp"
    assert attributes["pdserve.outcome"] == "sealed"
    num_bytes, hidden_s, sending_s = (
        float(str(attributes[f"pdserve.{name}"])) for name in ("num_bytes", "hidden_s", "sending_s")
    )
    assert num_bytes > 0
    assert 0 <= hidden_s <= sending_s


def test_what_is_cancelled_ends_as_cancelled(cluster: Cluster, exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    running = cluster.start(PROMPT, greedy(400, ignore_eos=True))
    eventually(lambda: len(running.progress.output_token_ids) > 3, 5.0)
    running.cancel()

    def ended() -> set[object]:
        spans = {span.name: span for span in exporter.get_finished_spans()}
        return {
            (spans[name].attributes or {}).get("pdserve.outcome")
            for name in ("attempt", "decode")
            if name in spans
        }

    eventually(lambda: ended() == {"cancelled"} and len(exporter.get_finished_spans()) == len(PARENTS), 5.0)


def times_ns(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time
