"""Every error that crosses a boundary, and the one label each has everywhere.

The label is the same in HTTP bodies, in ``Failed`` messages and in metrics::

    PdserveError
    ├── RequestError            invalid_request_error  400  the client can mend it
    │   ├── ModelNotFound       model_not_found        404
    │   ├── ContextTooLong      context_length_exceeded 400
    │   └── BodyTooLarge        request_too_large      413
    ├── Unauthorized            unauthorized           401
    ├── Overloaded              overloaded             503  try again after retry_after_s
    ├── DeadlineExceeded        deadline_exceeded      504
    ├── PeerError               peer_error             502  a worker or link misbehaved
    │   ├── WorkerLost          worker_lost            502
    │   ├── ProtocolViolation   protocol_violation     502
    │   ├── IncompatiblePeer    incompatible_peer      502
    │   └── DeviceFault         device_fault           502  our own GPU failed under a link
    ├── EngineFailure           engine_failure         500  a step raised
    ├── ConfigError             config_error           the operator can mend it
    └── UnsupportedModel        unsupported_model      the operator can mend it

What is not here: a full pool (a value, see ``kvcache.block_pool``) and broken
invariants (assertions with their values).
"""

from __future__ import annotations

from typing import ClassVar


class PdserveError(Exception):
    """Base of all. ``str(error)`` is fit to show to the person who can act."""

    label: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500


class RequestError(PdserveError):
    """The request is wrong; ``param`` names the field, in OpenAI's sense."""

    label = "invalid_request_error"
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(RequestError):
    label = "model_not_found"
    http_status = 404


class ContextTooLong(RequestError):
    label = "context_length_exceeded"


class BodyTooLarge(RequestError):
    label = "request_too_large"
    http_status = 413


class Unauthorized(PdserveError):
    label = "unauthorized"
    http_status = 401


class Overloaded(PdserveError):
    """Nothing is broken, there is no room now."""

    label = "overloaded"
    http_status = 503

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(PdserveError):
    label = "deadline_exceeded"
    http_status = 504


class PeerError(PdserveError):
    label = "peer_error"
    http_status = 502


class WorkerLost(PeerError):
    label = "worker_lost"


class ProtocolViolation(PeerError):
    label = "protocol_violation"


class IncompatiblePeer(PeerError):
    """Two workers cannot exchange KV; ``field`` is the first that differs."""

    label = "incompatible_peer"

    def __init__(self, field: str, *, ours: object, theirs: object) -> None:
        super().__init__(f"{field} differs: ours is {ours!r}, the peer's is {theirs!r}")
        self.field = field


class DeviceFault(PeerError):
    """For the peer it is a link that ended."""

    label = "device_fault"


class EngineFailure(PdserveError):
    label = "engine_failure"


class ConfigError(PdserveError):
    label = "config_error"


class UnsupportedModel(PdserveError):
    label = "unsupported_model"
