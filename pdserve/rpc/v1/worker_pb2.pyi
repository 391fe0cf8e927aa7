from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole

class ToWorker(_message.Message):
    __slots__ = ("attach", "reserve", "prefill", "generate", "release", "heartbeat")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    reserve: Reserve
    prefill: Prefill
    generate: Generate
    release: Release
    heartbeat: Heartbeat
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., generate: _Optional[_Union[Generate, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("protocol_version", "router_id", "proof")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    router_id: str
    proof: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., router_id: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop_token_ids", "ignore_eos", "num_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    num_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("prompt_token_ids", "output_token_ids", "sampling")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: bytes
    output_token_ids: bytes
    sampling: SamplingParams
    def __init__(self, prompt_token_ids: _Optional[bytes] = ..., output_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("request_id", "sequence", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sequence: Sequence
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., sequence: _Optional[_Union[Sequence, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("request_id", "sequence", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sequence: Sequence
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., sequence: _Optional[_Union[Sequence, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("request_id", "sequence", "handoff", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sequence: Sequence
    handoff: Handoff
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., sequence: _Optional[_Union[Sequence, _Mapping]] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("reservation", "ticket")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    reservation: Reservation
    ticket: bytes
    def __init__(self, reservation: _Optional[_Union[Reservation, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("challenge", "status", "reserved", "refused", "tokens", "handoff", "failed")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    challenge: SessionChallenge
    status: WorkerStatus
    reserved: Reserved
    refused: Refused
    tokens: TokenBatch
    handoff: HandoffReport
    failed: Failed
    def __init__(self, challenge: _Optional[_Union[SessionChallenge, _Mapping]] = ..., status: _Optional[_Union[WorkerStatus, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., tokens: _Optional[_Union[TokenBatch, _Mapping]] = ..., handoff: _Optional[_Union[HandoffReport, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class SessionChallenge(_message.Message):
    __slots__ = ("protocol_version", "nonce", "identity")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    nonce: bytes
    identity: WorkerIdentity
    def __init__(self, protocol_version: _Optional[int] = ..., nonce: _Optional[bytes] = ..., identity: _Optional[_Union[WorkerIdentity, _Mapping]] = ...) -> None: ...

class WorkerIdentity(_message.Message):
    __slots__ = ("role", "incarnation", "model_name", "model_fingerprint", "max_context_tokens", "block_size", "num_blocks", "version", "boot_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    incarnation: int
    model_name: str
    model_fingerprint: str
    max_context_tokens: int
    block_size: int
    num_blocks: int
    version: str
    boot_id: str
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ..., incarnation: _Optional[int] = ..., model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., version: _Optional[str] = ..., boot_id: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("identity", "num_waiting", "num_running", "num_reserved", "num_free_blocks", "num_owned_blocks", "num_cached_blocks", "num_quarantined_blocks", "draining", "num_waiting_prefill_tokens", "last_step_age_s", "counters", "wall_clock_unix_s")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    WALL_CLOCK_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    identity: WorkerIdentity
    num_waiting: int
    num_running: int
    num_reserved: int
    num_free_blocks: int
    num_owned_blocks: int
    num_cached_blocks: int
    num_quarantined_blocks: int
    draining: bool
    num_waiting_prefill_tokens: int
    last_step_age_s: float
    counters: _containers.ScalarMap[str, float]
    wall_clock_unix_s: float
    def __init__(self, identity: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_reserved: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_owned_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., draining: _Optional[bool] = ..., num_waiting_prefill_tokens: _Optional[int] = ..., last_step_age_s: _Optional[float] = ..., counters: _Optional[_Mapping[str, float]] = ..., wall_clock_unix_s: _Optional[float] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("request_id", "reservation", "lease_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reservation: Reservation
    lease_ms: int
    def __init__(self, request_id: _Optional[str] = ..., reservation: _Optional[_Union[Reservation, _Mapping]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("reservation_id", "fence", "decode_incarnation", "num_tokens", "num_cached_tokens", "endpoints")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    fence: int
    decode_incarnation: int
    num_tokens: int
    num_cached_tokens: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, reservation_id: _Optional[int] = ..., fence: _Optional[int] = ..., decode_incarnation: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("transport", "address", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request_id", "reason", "retry_after_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    retry_after_ms: int
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceTokens]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceTokens, _Mapping]]] = ...) -> None: ...

class SequenceTokens(_message.Message):
    __slots__ = ("request_id", "first_index", "token_ids", "logprobs", "finish_reason", "num_cached_tokens", "stop_token_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: str
    num_cached_tokens: int
    stop_token_id: int
    def __init__(self, request_id: _Optional[str] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class HandoffReport(_message.Message):
    __slots__ = ("request_id", "sealed", "abort_reason", "transport", "num_bytes", "transfer_ms", "hidden_transfer_ms", "queue_ms", "prefill_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    ABORT_REASON_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    sealed: bool
    abort_reason: str
    transport: str
    num_bytes: int
    transfer_ms: float
    hidden_transfer_ms: float
    queue_ms: float
    prefill_ms: float
    def __init__(self, request_id: _Optional[str] = ..., sealed: _Optional[bool] = ..., abort_reason: _Optional[str] = ..., transport: _Optional[str] = ..., num_bytes: _Optional[int] = ..., transfer_ms: _Optional[float] = ..., hidden_transfer_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "error", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    error: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("check_integrity",)
    CHECK_INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    check_integrity: bool
    def __init__(self, check_integrity: _Optional[bool] = ...) -> None: ...
