import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import RequestError
from pdserve.rpc.convert import pack_token_ids, sampling_from_proto, sampling_to_proto, unpack_token_ids
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.sampling import SamplingParams


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_survive_the_wire(token_ids: list[int]) -> None:
    assert unpack_token_ids(pack_token_ids(token_ids)) == token_ids


def test_half_a_token_id_is_refused() -> None:
    with pytest.raises(RequestError):
        unpack_token_ids(b"\0\0\0")


def test_sampling_survives_the_wire() -> None:
    params = SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.125,
        repetition_penalty=1.25,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        logit_bias={3: -100.0},
        seed=2**64 - 1,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        num_logprobs=0,
    )
    assert sampling_from_proto(sampling_to_proto(params)) == params


def test_no_logprobs_and_zero_alternatives_are_told_apart() -> None:
    none = sampling_from_proto(sampling_to_proto(SamplingParams(max_tokens=1)))
    assert none.num_logprobs is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("min_p", math.inf),
    ],
)
def test_values_no_router_would_send_are_refused(field: str, value: float) -> None:
    message = sampling_to_proto(SamplingParams(max_tokens=1))
    setattr(message, field, value)
    with pytest.raises(RequestError, match=field):
        sampling_from_proto(message)


def test_a_missing_message_is_not_read_as_greedy_sampling_without_limit() -> None:
    with pytest.raises(RequestError):
        sampling_from_proto(pb.SamplingParams())
