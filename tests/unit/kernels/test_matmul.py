"""Packed weights give the product of the weights they were packed from, and each row its own bits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pdserve.model.cpu_threads import CpuThreads
from pdserve.model.transforms.packed_linear import PackedLinear, PackedWeights

ONE_THREAD = CpuThreads(1)
SIZES = st.integers(1, 70)


def linear(in_features: int, out_features: int, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(in_features, out_features, bias=bias).requires_grad_(False)


@given(
    rows=SIZES, in_features=SIZES, out_features=SIZES, weight_dtype=st.sampled_from(["fp32", "fp16", "int8"])
)
@settings(max_examples=120, deadline=None)
def test_any_shape_gives_the_product_of_the_rounded_weights(
    rows: int, in_features: int, out_features: int, weight_dtype: str
) -> None:
    layer = linear(in_features, out_features)
    x = torch.randn(rows, in_features)
    got = PackedLinear(layer, weight_dtype, ONE_THREAD)(x)
    torch.testing.assert_close(got, nn.functional.linear(x, rounded(layer.weight, weight_dtype), layer.bias))


def rounded(weight: torch.Tensor, weight_dtype: str) -> torch.Tensor:
    if weight_dtype == "fp16":
        return weight.half().float()
    if weight_dtype == "int8":
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return (weight / scale).round() * scale
    return weight


@pytest.mark.parametrize("weight_dtype", ["fp32", "fp16", "int8"])
@given(num_rows=st.integers(2, 200), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_row_has_the_same_bits_in_every_batch(
    weight_dtype: str, num_rows: int, data: st.DataObject
) -> None:
    packed = PackedWeights([linear(57, 49)], weight_dtype, ONE_THREAD)
    x = np.random.default_rng(1).standard_normal((num_rows, 57)).astype(np.float32)
    together = packed.multiply(x)
    row = data.draw(st.integers(0, num_rows - 1))
    assert np.array_equal(packed.multiply(x[row : row + 1])[0], together[row])
    begin = data.draw(st.integers(0, row))
    end = data.draw(st.integers(row + 1, num_rows))
    assert np.array_equal(packed.multiply(x[begin:end])[row - begin], together[row])


def test_layers_that_share_their_input_lie_side_by_side() -> None:
    layers = [linear(24, 40, seed=1), linear(24, 8, bias=False, seed=2), linear(24, 3, seed=3)]
    x = torch.randn(5, 24)
    got = PackedWeights(layers, "fp32", ONE_THREAD).multiply(x.numpy())
    torch.testing.assert_close(torch.from_numpy(got.copy()), torch.cat([layer(x) for layer in layers], dim=1))


def test_two_threads_give_the_bits_of_one() -> None:
    layer = linear(600, 1000)
    x = torch.randn(100, 600)
    one, two = (PackedLinear(layer, "fp16", CpuThreads(count))(x) for count in (1, 2))
    assert torch.equal(one, two)


def test_weights_that_overflow_fp16_stay_exact() -> None:
    layer = linear(8, 8, bias=False)
    layer.weight[0, 0] = 1e6
    x = torch.randn(3, 8)
    torch.testing.assert_close(PackedLinear(layer, "fp16", ONE_THREAD)(x), layer(x))
