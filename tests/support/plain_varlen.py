"""``torch.nn.attention.varlen.varlen_attn`` over a paged pool, written out for a CPU."""

import torch
from torch import Tensor

from pdserve.model.attention.base import AttentionParams
from pdserve.model.attention.reference import attend_row


def plain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    **options: object,
) -> Tensor:
    del cu_seq_k
    seqused_k, block_table = options["seqused_k"], options["block_table"]
    window_size, scale = options["window_size"], options["scale"]
    assert isinstance(seqused_k, Tensor)
    assert isinstance(block_table, Tensor)
    assert isinstance(window_size, tuple)
    assert isinstance(scale, float)
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert options["enable_gqa"] == (query.shape[1] != key.shape[2])
    assert options["num_splits"] == 1
    left, right = window_size
    assert right == 0, "not causal"
    params = AttentionParams(scale, None if left < 0 else left + 1)
    output = torch.empty_like(query)
    bounds = cu_seq_q.tolist()
    for row, num_context in enumerate(seqused_k.tolist()):
        begin, end = bounds[row : row + 2]
        assert end - begin <= max_q
        assert num_context <= max_k
        keys, values = (
            pool[block_table[row].long()].flatten(0, 1)[:num_context].transpose(0, 1) for pool in (key, value)
        )
        output[begin:end] = attend_row(query[begin:end], keys, values, params)
    return output
