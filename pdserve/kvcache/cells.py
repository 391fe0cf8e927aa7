"""Cells in plain torch, above all quantized ones: the elements of one token and head, then their scale.

A quantized cell is as many bytes as the head is wide, and a float32. Symmetric: the largest magnitude
becomes the largest number of the type. The CPU kernels write and read the same cells; this is what they
are tested against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kvcache.layout import SCALE_BYTES, KVLayout

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LEAST_MAGNITUDE = 1e-20  # so that a cell of zeros has a scale too


def as_cells(states: Tensor, layout: KVLayout) -> Tensor:
    """[..., head_dim] -> [..., cell_elements], as a pool of ``layout`` holds them."""
    dtype = getattr(torch, layout.dtype)
    return quantize(states, dtype) if layout.is_quantized else states.to(dtype)


def states_of(cells: Tensor, layout: KVLayout) -> Tensor:
    """The other way round; quantized cells become float32, others stay what they are."""
    return dequantize(cells) if layout.is_quantized else cells


def quantize(states: Tensor, dtype: torch.dtype) -> Tensor:
    """``states``: [..., head_dim] -> [..., head_dim + SCALE_BYTES] of ``dtype``."""
    largest = states.abs().amax(-1, keepdim=True).float().clamp(min=LEAST_MAGNITUDE)
    scale = largest / _LARGEST[dtype]
    scaled = states / scale
    elements = scaled.round().to(dtype) if dtype is torch.int8 else scaled.to(dtype)
    return torch.cat([elements.view(torch.uint8), scale.contiguous().view(torch.uint8)], -1).view(dtype)


def dequantize(cells: Tensor) -> Tensor:
    """[..., head_dim + SCALE_BYTES] -> [..., head_dim], float32."""
    elements, scale = cells[..., :-SCALE_BYTES], cells[..., -SCALE_BYTES:]
    return elements.float() * scale.contiguous().view(torch.uint8).view(torch.float32)
