"""Wire types in, domain types out, once, at the edge. Pure."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence as SequenceOf

from pdserve.errors import RequestError
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.sampling import SamplingParams

_TOKEN_ID_BYTES = 4


def pack_token_ids(token_ids: SequenceOf[int]) -> bytes:
    """Little-endian uint32 each: an order of magnitude faster than a repeated field."""
    return _little_endian(array("I", token_ids)).tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    if len(packed) % _TOKEN_ID_BYTES:
        raise RequestError(f"{len(packed)} bytes of token ids are not a multiple of {_TOKEN_ID_BYTES}")
    token_ids = array("I")
    token_ids.frombytes(packed)
    return _little_endian(token_ids).tolist()


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        num_logprobs=params.num_logprobs,
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Raises ``RequestError`` for values no router of ours would send."""
    params = SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )
    _check(params)
    return params


def _check(params: SamplingParams) -> None:
    if params.max_tokens < 1:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(params, name)):
            raise RequestError(f"{name} must be finite", param=name)
    if params.temperature < 0:
        raise RequestError("temperature must not be negative", param="temperature")
    if not 0 < params.top_p <= 1:
        raise RequestError("top_p must be in (0, 1]", param="top_p")
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        raise RequestError("repetition_penalty must be positive", param="repetition_penalty")


def _little_endian(token_ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids
