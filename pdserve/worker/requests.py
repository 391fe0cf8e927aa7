"""A wire sequence becomes an engine sequence; anything a router of ours would not send is refused."""

from __future__ import annotations

from pdserve.engine.sequence import Sequence
from pdserve.rpc.convert import sampling_from_proto, unpack_token_ids
from pdserve.rpc.v1 import worker_pb2 as pb


def sequence_from_proto(request_id: str, message: pb.Sequence, *, keep_blocks: bool = False) -> Sequence:
    """Raises ``RequestError``; token ids are checked against the vocabulary by the engine."""
    return Sequence(
        seq_id=request_id,
        prompt_token_ids=unpack_token_ids(message.prompt_token_ids),
        output_token_ids=unpack_token_ids(message.output_token_ids),
        sampling=sampling_from_proto(message.sampling),
        keep_blocks=keep_blocks,
    )
