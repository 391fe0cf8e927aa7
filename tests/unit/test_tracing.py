"""Tracing is off unless the environment names a collector, and hands on what it was given."""

import subprocess
import sys

from pdserve.clock import MonotonicClock
from pdserve.otel import OtelTracer
from pdserve.tracing import NoTracer, tracer

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0b1902b7-01"


def test_without_a_collector_nothing_is_traced() -> None:
    assert isinstance(tracer("test", {}, MonotonicClock()), NoTracer)


def test_with_a_collector_it_is() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert isinstance(tracer("test", environment, MonotonicClock()), OtelTracer)


def test_a_process_that_does_not_trace_hands_on_the_parent() -> None:
    span = NoTracer().begin("request", parent=TRACEPARENT, request_id="r")
    assert span.traceparent == TRACEPARENT


def test_without_the_extra_it_is_off() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from pdserve.clock import MonotonicClock\n"
        "from pdserve.tracing import ENDPOINT_VARIABLE, tracer\n"
        "print(type(tracer('test', {ENDPOINT_VARIABLE: 'http://127.0.0.1:9'}, MonotonicClock())).__name__)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "NoTracer"
