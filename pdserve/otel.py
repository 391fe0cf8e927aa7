"""Spans by OpenTelemetry's SDK. Imported only where tracing is on; see ``pdserve.tracing``."""

from __future__ import annotations

import time

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdserve.clock import Clock
from pdserve.outcomes import NOT_NEEDED, OK, SEALED
from pdserve.tracing import Attributes, Span

GOOD = frozenset({OK, SEALED, NOT_NEEDED})


def exporting_tracer(program: str, clock: Clock) -> OtelTracer:
    """To the collector that the environment names; what waits is sent when the process ends."""
    # The environment's own service name goes before ours.
    resource = Resource({SERVICE_NAME: program}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelTracer(provider, program=program, clock=clock)


class OtelTracer:
    def __init__(self, provider: TracerProvider, *, program: str, clock: Clock) -> None:
        self._tracer = provider.get_tracer(program)
        self._clock = clock

    def begin(self, name: str, *, parent: str, request_id: str) -> Span:
        context = TraceContextTextMapPropagator().extract({"traceparent": parent})
        span = self._tracer.start_span(name, context, attributes={"pdserve.request_id": request_id})
        return _Span(span, self._tracer, self._clock)


class _Span:
    def __init__(self, span: trace.Span, tracer: trace.Tracer, clock: Clock) -> None:
        self._span = span
        self._tracer = tracer
        self._clock = clock

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(self._span))
        return carrier["traceparent"]

    def record(self, name: str, begin_s: float, end_s: float, attributes: Attributes) -> None:
        child = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span),
            start_time=self._unix_ns(begin_s),
            attributes={f"pdserve.{key}": value for key, value in attributes.items()},
        )
        child.end(self._unix_ns(end_s))

    def end(self, outcome: str) -> None:
        if not self._span.is_recording():  # ended already, or not sampled
            return
        self._span.set_attribute("pdserve.outcome", outcome)
        if outcome not in GOOD:
            self._span.set_status(trace.StatusCode.ERROR, outcome)
        self._span.end()

    def _unix_ns(self, at_s: float) -> int:
        return time.time_ns() - round((self._clock.now_s() - at_s) * 1e9)
