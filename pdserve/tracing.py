"""Where a request's time goes, as spans of one trace over all processes; off unless it is asked for.

::

    request (router) ├──────────────────────────────────────────┤
      attempt        ├──────────────────────────────────────────┤   another for every retry
        prefill        ├─────────────────┤                          on the prefill worker
          compute         ├────────┤
          transfer         ├─────────────┤
        decode        ├────────────────────────────────────────┤    on the decode worker
          receive     ├──────────────────┤                          granted to sealed

The client's W3C ``traceparent`` is the parent of ``request``. Between processes it travels as a field of
the messages, not as gRPC metadata: all requests share one stream. A process that does not trace
passes on what it was given. The SDK is imported only by ``pdserve.otel``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pdserve.clock import Clock

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"

Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    @property
    def traceparent(self) -> str:
        """For children in other processes; may be empty."""
        ...

    def record(self, name: str, begin_s: float, end_s: float, attributes: Attributes) -> None:
        """A child that is over already; times are those of the tracer's clock."""
        ...

    def end(self, outcome: str) -> None:
        """``outcome`` as in ``pdserve.outcomes``. Idempotent."""
        ...


class Tracer(Protocol):
    def begin(self, name: str, *, parent: str, request_id: str) -> Span:
        """``parent``: a traceparent from anywhere; an invalid one begins a trace."""
        ...


@dataclass(frozen=True, slots=True)
class UntracedSpan:
    traceparent: str

    def record(self, name: str, begin_s: float, end_s: float, attributes: Attributes) -> None:
        pass

    def end(self, outcome: str) -> None:
        pass


class NoTracer:
    def begin(self, name: str, *, parent: str, request_id: str) -> Span:
        return UntracedSpan(parent)


def tracer(program: str, environment: Mapping[str, str], clock: Clock) -> Tracer:
    """Traces to the collector that the environment names; without one, or without the SDK, not at all."""
    if not environment.get(ENDPOINT_VARIABLE):
        return NoTracer()
    try:
        from pdserve.otel import exporting_tracer
    except ModuleNotFoundError as error:
        logger.warning("not_tracing missing=%s extra=otel", error.name)
        return NoTracer()
    return exporting_tracer(program, clock)
