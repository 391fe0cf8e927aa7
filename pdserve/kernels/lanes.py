"""Eight floats at a time: LLVM building blocks for the kernels' inner loops.

numba vectorizes plain loops, but it neither keeps a tile of accumulators in registers nor knows
16-bit floats. These emit the instructions for both; every function here runs while numba
compiles, takes the LLVM ``builder`` and returns LLVM values. Arithmetic carries no fast-math
flags: what is written is what is computed, in that order.

Element types: float32 as it is, float16 as uint16, bfloat16 as int16, float8 (E4M3) as uint8: numba has no
short floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
INT = ir.IntType(32)
SIZE = ir.IntType(64)
INTS = ir.VectorType(INT, LANES)
# Of the quantized types: their largest number, and what an element as loaded is to be multiplied with.
LARGEST = {types.int8: 127.0, types.uint8: 448.0}
UNIT = {types.int8: 1.0, types.uint8: 256.0}
BYTE_POINTER = ir.IntType(8).as_pointer()

# Options of every kernel: no zero-division checks (they stop vectorizing), and the interpreter lock is free.
KERNEL_OPTIONS = {"error_model": "numpy", "nogil": True, "boundscheck": False, "cache": True}

Builder = Any  # llvmlite has no types
Value = Any


def size(value: int) -> Value:
    return ir.Constant(SIZE, value)


def constant(value: float) -> Value:
    return ir.Constant(VECTOR, [value] * LANES)


def pointer(context: Any, builder: Builder, array_type: Any, array: Value, offset: Value) -> Value:
    """To element ``offset`` of the array's memory, whatever its strides."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def load(builder: Builder, address: Value, element: Any) -> Value:
    """Eight elements of any storable type, as floats."""
    if element == types.float32:
        return _load_as(builder, address, FLOAT, 4)
    if element == types.uint16:
        return builder.fpext(_load_as(builder, address, ir.HalfType(), 2), VECTOR)
    if element == types.int16:
        bits = builder.zext(_load_as(builder, address, ir.IntType(16), 2), INTS)
        return builder.bitcast(builder.shl(bits, _ints(16)), VECTOR)
    if element == types.uint8:
        return builder.fpext(_half_of_float8(builder, _load_as(builder, address, ir.IntType(8), 1)), VECTOR)
    assert element == types.int8, f"no kernel reads {element}"
    return builder.sitofp(_load_as(builder, address, ir.IntType(8), 1), VECTOR)


def _load_as(builder: Builder, address: Value, scalar: Any, align: int) -> Value:
    value = builder.load(builder.bitcast(address, ir.VectorType(scalar, LANES).as_pointer()))
    value.align = align
    return value


def store(builder: Builder, value: Value, address: Value) -> None:
    builder.store(value, builder.bitcast(address, VECTOR.as_pointer())).align = 4


def store_as(builder: Builder, value: Value, address: Value, element: Any) -> None:
    """Eight floats as any storable type, rounded to nearest; int8 expects them within ±127, float8 ±1.75."""
    if element == types.float32:
        narrow, scalar = value, FLOAT
    elif element == types.uint16:
        scalar = ir.HalfType()
        narrow = builder.fptrunc(value, ir.VectorType(scalar, LANES))
    elif element == types.int16:
        scalar = ir.IntType(16)
        bits = builder.bitcast(value, INTS)
        is_odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
        rounded = builder.add(bits, builder.add(is_odd, _ints(0x7FFF)))
        narrow = builder.trunc(builder.lshr(rounded, _ints(16)), ir.VectorType(scalar, LANES))
    elif element == types.uint8:
        scalar = ir.IntType(8)
        narrow = _float8_of_half(builder, builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)))
    else:
        assert element == types.int8, f"no kernel writes {element}"
        scalar = ir.IntType(8)
        whole = builder.fptosi(_call(builder, "llvm.rint.v8f32", VECTOR, value), INTS)
        narrow = builder.trunc(whole, ir.VectorType(scalar, LANES))
    target = builder.bitcast(address, ir.VectorType(scalar, LANES).as_pointer())
    builder.store(narrow, target).align = element.bitwidth // 8


def _half_of_float8(builder: Builder, bits: Value) -> Value:
    """E4M3 is a half with a shorter exponent: the same bits shifted are its 2**-8, subnormals too."""
    wide = builder.zext(bits, _SHORTS)
    sign = builder.shl(builder.and_(wide, _shorts(0x80)), _shorts(8))
    rest = builder.shl(builder.and_(wide, _shorts(0x7F)), _shorts(7))
    return builder.bitcast(builder.or_(sign, rest), ir.VectorType(ir.HalfType(), LANES))


def _float8_of_half(builder: Builder, value: Value) -> Value:
    """The other way round, to nearest, ties to even; for halves within ±1.75, which is ±448."""
    bits = builder.bitcast(value, _SHORTS)
    sign = builder.and_(builder.lshr(bits, _shorts(8)), _shorts(0x80))
    rest = builder.and_(bits, _shorts(0x7FFF))
    is_odd = builder.and_(builder.lshr(rest, _shorts(7)), _shorts(1))
    rounded = builder.lshr(builder.add(rest, builder.add(is_odd, _shorts(0x3F))), _shorts(7))
    return builder.trunc(builder.or_(sign, rounded), ir.VectorType(ir.IntType(8), LANES))


_SHORTS = ir.VectorType(ir.IntType(16), LANES)


def _shorts(value: int) -> Value:
    return ir.Constant(_SHORTS, [value] * LANES)


def _ints(value: int) -> Value:
    return ir.Constant(INTS, [value] * LANES)


def splat(builder: Builder, scalar: Value) -> Value:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTS, [0] * LANES))


def fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """a * b + c, rounded once."""
    return _call(builder, "llvm.fma.v8f32", VECTOR, a, b, c)


def maximum(builder: Builder, a: Value, b: Value) -> Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def largest_lane(builder: Builder, vector: Value) -> Value:
    largest = builder.extract_element(vector, ir.Constant(INT, 0))
    for lane in range(1, LANES):
        other = builder.extract_element(vector, ir.Constant(INT, lane))
        largest = builder.select(builder.fcmp_ordered(">", other, largest), other, largest)
    return largest


def prefetch(builder: Builder, address: Value) -> None:
    """Into all cache levels; never faults, whatever the address."""
    read, keep, is_data = (ir.Constant(INT, value) for value in (0, 3, 1))
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [BYTE_POINTER, INT, INT, INT]),
        "llvm.prefetch.p0",
    )
    builder.call(function, [builder.bitcast(address, BYTE_POINTER), read, keep, is_data])


def exp(builder: Builder, x: Value) -> Value:
    """Relative error below 2e-7; exactly 0 below -87, where the result would leave the normal floats.

    2**n times a polynomial on [-ln 2 / 2, ln 2 / 2]; coefficients of Cephes' expf.
    """
    x = builder.select(builder.fcmp_ordered("<", x, constant(88.0)), x, constant(88.0))
    is_tiny = builder.fcmp_unordered("<", x, constant(-87.0))
    x = builder.select(is_tiny, constant(-87.0), x)
    n = _call(builder, "llvm.rint.v8f32", VECTOR, builder.fmul(x, constant(1.44269504088896341)))
    x = fma(builder, n, constant(-0.693359375), x)
    x = fma(builder, n, constant(2.12194440e-4), x)
    y = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = fma(builder, y, x, constant(coefficient))
    y = builder.fadd(fma(builder, builder.fmul(x, x), y, x), constant(1.0))
    exponent = builder.add(builder.fptosi(n, INTS), _ints(127))
    power = builder.bitcast(builder.shl(exponent, _ints(23)), VECTOR)
    return builder.select(is_tiny, constant(0.0), builder.fmul(y, power))


def sum_lanes(builder: Builder, vector: Value) -> Value:
    """One float, always added in the same order: ``sums_of_four`` does the same adds."""
    four = builder.fadd(
        _lanes(builder, vector, vector, range(4)), _lanes(builder, vector, vector, range(4, 8))
    )
    two = builder.fadd(_lanes(builder, four, four, (0, 1)), _lanes(builder, four, four, (2, 3)))
    first, second = (builder.extract_element(two, ir.Constant(INT, lane)) for lane in (0, 1))
    return builder.fadd(first, second)


def sums_of_four(builder: Builder, vectors: list[Value]) -> Value:
    """The lane sums of four vectors as a vector of four."""
    a, b, c, d = (
        builder.fadd(_lanes(builder, v, v, range(4)), _lanes(builder, v, v, range(4, 8))) for v in vectors
    )
    ab, cd = (
        builder.fadd(_lanes(builder, x, y, (0, 1, 4, 5)), _lanes(builder, x, y, (2, 3, 6, 7)))
        for x, y in ((a, b), (c, d))
    )
    return builder.fadd(_lanes(builder, ab, cd, (0, 2, 4, 6)), _lanes(builder, ab, cd, (1, 3, 5, 7)))


def _lanes(builder: Builder, a: Value, b: Value, chosen: Any) -> Value:
    lanes = list(chosen)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))


class Registers:
    """A tile of accumulators that LLVM keeps in registers: stack slots whose address never escapes."""

    def __init__(self, builder: Builder, rows: int, columns: int) -> None:
        self._builder = builder
        self._slots = [[cgutils.alloca_once(builder, VECTOR) for _ in range(columns)] for _ in range(rows)]

    def get(self, row: int, column: int) -> Value:
        return self._builder.load(self._slots[row][column])

    def set(self, row: int, column: int, value: Value) -> None:
        self._builder.store(value, self._slots[row][column])

    def fill(self, value: Callable[[int, int], Value]) -> None:
        for row, columns in enumerate(self._slots):
            for column in range(len(columns)):
                self.set(row, column, value(row, column))


def _call(builder: Builder, name: str, result: Any, *args: Value) -> Value:
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


@intrinsic
def prefetch_line(context: Any, array: Any, offset: Any) -> Any:
    """The cache line of element ``offset``, for kernels in Python."""

    def generate(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        prefetch(builder, pointer(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.intp), generate
