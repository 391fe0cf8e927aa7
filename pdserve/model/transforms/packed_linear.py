"""Linear layers with weights packed once for the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pdserve.kernels.matmul import PANEL, matmul, packed_shape
from pdserve.model.cpu_threads import CpuThreads

Floats = NDArray[np.float32]
MAX_FP16 = 65_504.0


class PackedWeights:
    """The weights of linear layers that share their input; outputs side by side.

    ``weight_dtype``: ``fp16`` (halves the memory and its traffic; relative rounding error 2⁻¹¹, none
    where the checkpoint is fp16), ``fp32`` (exact) or ``int8`` (symmetric, one scale an output).
    Arithmetic is fp32 in all of them. Weights that overflow fp16 stay fp32.
    """

    def __init__(self, linears: Sequence[nn.Linear], weight_dtype: str, threads: CpuThreads) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.out_features, self.in_features = weight.shape
        self._bias = _bias(linears)
        self._scale: Tensor | None = None
        self._threads = threads
        if weight_dtype == "int8":
            weight = weight.float()
            self._scale = weight.abs().amax(dim=1).clamp(min=1e-20) / 127
            weight = (weight / self._scale.unsqueeze(1)).round().to(torch.int8)
        elif weight_dtype == "fp16" and float(weight.abs().max()) <= MAX_FP16:
            weight = weight.half()
        elif weight_dtype != "int8":
            weight = weight.float()
        panels = _panels(weight)
        # numba has no 16-bit floats: the kernel takes their bits, see kernels.lanes.
        self._panels = (panels.view(torch.uint16) if panels.dtype is torch.float16 else panels).numpy()

    def multiply(self, x: Floats) -> Floats:
        """``x``: [rows, in_features], contiguous; returns [rows, out_features]."""
        num_panels = len(self._panels)
        y = np.empty((len(x), num_panels * PANEL), np.float32)

        def part(begin: int, end: int) -> None:
            matmul(x, self._panels, y, begin, end)

        self._threads.split(part, num_panels, len(x) * self._panels.size)
        y = y[:, : self.out_features]
        if self._scale is not None:
            y *= self._scale.numpy()
        if self._bias is not None:
            y += self._bias.numpy()
        return y


def _bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    """nn.Linear's annotation hides that a bias may be None."""
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(linear.out_features) if bias is None else bias.detach().float()
            for linear, bias in zip(linears, biases, strict=True)
        ]
    )


def _panels(weight: Tensor) -> Tensor:
    """[out, in] as [panels, in, 16], zeros behind the last output."""
    out_features, in_features = weight.shape
    num_panels, _, _ = packed_shape(out_features, in_features)
    padded = weight
    if out_features != num_panels * PANEL:
        padded = weight.new_zeros(num_panels * PANEL, in_features)
        padded[:out_features] = weight
    return padded.view(num_panels, PANEL, in_features).transpose(1, 2).contiguous()


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear, weight_dtype: str, threads: CpuThreads) -> None:
        super().__init__()
        self._weights = PackedWeights([linear], weight_dtype, threads)

    def forward(self, states: Tensor) -> Tensor:
        """``states``: [..., in_features], float32."""
        rows = states.reshape(-1, self._weights.in_features).contiguous()
        output = torch.from_numpy(self._weights.multiply(rows.numpy()))
        return output.reshape(*states.shape[:-1], self._weights.out_features)
