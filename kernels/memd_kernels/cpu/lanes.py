"""Eight float32 at once for numba's functions: one vector register, and no vectoriser to please.

They come from arrays of float32, of int16, which are the bits of bfloat16, or of uint8, and go to
arrays of the first two. Positions count from an array's first element; the last axis is contiguous,
and nothing is checked.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 8
LOG2_E = 1.4426950408889634
_INDEX = ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_INTEGERS = ir.VectorType(_INDEX, LANES)
_UNDEFINED = ir.Constant(_FLOATS, ir.Undefined)

# By the types of its arguments; numba's own type takes their count for that of the generator.
_generated: Callable[..., Any] = intrinsic


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)  # type: ignore[no-untyped-call]


_lanes = _Lanes()


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any, vector: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def _constant(kind: Any, value: float) -> Any:
    """A number in each lane of a vector, or as it is."""
    return ir.Constant(kind, [value] * LANES if isinstance(kind, ir.VectorType) else value)


def _read(context: Any, builder: Any, signature: Any, arguments: Any, lanes: int) -> Any:
    """Float32 at a position: eight, or one without a vector."""

    def of(kind: Any) -> Any:
        return ir.VectorType(kind, LANES) if lanes > 1 else kind

    number = signature.args[0].dtype
    bits = number.bitwidth
    stored = ir.FloatType() if bits == 32 else ir.IntType(bits)
    array, at = arguments
    read = builder.load(_pointer(context, builder, signature.args[0], array, at, of(stored)))
    read.align = bits // 8
    if bits == 32:
        return read
    wide = builder.zext(read, of(ir.IntType(32)))
    if bits == 8:
        return builder.sitofp(wide, of(ir.FloatType()))
    return builder.bitcast(builder.shl(wide, _constant(wide.type, 16)), of(ir.FloatType()))


def _write(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
    """Put float32 at a position; for bfloat16 rounded to the nearest, halves to even."""
    array, at, value = arguments
    if signature.args[0].dtype.bitwidth == 16:
        lanes = isinstance(value.type, ir.VectorType)
        wide = _INTEGERS if lanes else _INDEX
        bits = builder.bitcast(value, wide)
        half = builder.lshr(bits, _constant(wide, 16))
        odd = builder.and_(half, _constant(wide, 1))
        rounded = builder.add(bits, builder.add(odd, _constant(wide, 0x7FFF)))
        upper = builder.lshr(rounded, _constant(wide, 16))
        # Rounding could carry a NaN over to infinity.
        quiet = builder.or_(half, _constant(wide, 0x40))
        upper = builder.select(builder.fcmp_unordered("uno", value, value), quiet, upper)
        value = builder.trunc(
            upper, ir.VectorType(ir.IntType(16), LANES) if lanes else ir.IntType(16)
        )
    place = _pointer(context, builder, signature.args[0], array, at, value.type)
    builder.store(value, place).align = signature.args[0].dtype.bitwidth // 8


def _in_all(builder: Any, value: Any) -> Any:
    first = builder.insert_element(_UNDEFINED, value, _INDEX(0))
    return builder.shuffle_vector(first, _UNDEFINED, ir.Constant(_INTEGERS, [0] * LANES))


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _turned(builder: Any, x: Any, distance: int) -> Any:
    lanes = [(lane + distance) % LANES for lane in range(LANES)]
    return builder.shuffle_vector(x, _UNDEFINED, ir.Constant(_INTEGERS, lanes))


def _call(builder: Any, name: str, arguments: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(arguments))
    function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, kind, f"llvm.{name}.v{LANES}f32"
    )
    return builder.call(function, arguments)


@_generated
def load(typing: Any, array: Any, at: Any) -> Any:
    """array[at : at + 8]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _read(context, builder, signature, arguments, LANES)

    return _lanes(array, types.intp), generate


@_generated
def store(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at : at + 8] = value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _write(context, builder, signature, arguments)
        return context.get_dummy_value()

    return types.void(array, types.intp, _lanes), generate


@_generated
def get(typing: Any, array: Any, at: Any) -> Any:
    """array[at] alone; unlike an index, a position is never taken as negative."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _read(context, builder, signature, arguments, 1)

    return types.float32(array, types.intp), generate


@_generated
def put(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at] = value alone."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _write(context, builder, signature, arguments)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), generate


@_generated
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Have the cache line of array[at] fetched; nothing waits for it, and it need not exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, number = ir.IntType(8), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [data.as_pointer(), number, number, number])
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, kind, "llvm.prefetch.p0i8"
        )
        array, at = arguments
        place = _pointer(context, builder, signature.args[0], array, at, data)
        read, keep, of_data = number(0), number(3), number(1)
        builder.call(function, [place, read, keep, of_data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@_generated
def splat(typing: Any, value: Any) -> Any:
    """A float32 in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _in_all(builder, arguments[0])

    return _lanes(types.float32), generate


@_generated
def spread(typing: Any, array: Any, at: Any) -> Any:
    """array[at] in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _in_all(builder, _read(context, builder, signature, arguments, 1))

    return _lanes(array, types.intp), generate


@_generated
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "fma", arguments)

    return _lanes(_lanes, _lanes, _lanes), generate


@_generated
def quotient(typing: Any, x: Any, y: Any) -> Any:
    """x / y."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fdiv(*arguments)

    return _lanes(_lanes, _lanes), generate


@_generated
def larger(typing: Any, x: Any, y: Any) -> Any:
    """The larger of each two; y where one is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _larger(builder, *arguments)

    return _lanes(_lanes, _lanes), generate


@_generated
def exp2(typing: Any, x: Any) -> Any:
    """2 ** x; infinite from 127.5 on, 2 ** -126 below that.

    By a polynomial on [-0.5, 0.5] and the exponent's bits; NaN stays NaN.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def constant(value: float) -> Any:
            return _constant(_FLOATS, value)

        most, least = constant(128), constant(-126)
        x = arguments[0]
        x = builder.select(builder.fcmp_ordered(">", x, most), most, x)
        x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
        whole = _call(builder, "floor", [builder.fadd(x, constant(0.5))])
        rest = builder.fsub(x, whole)
        power = constant(1.5404e-4)
        for factor in (
            1.33335581e-3,
            9.61812911e-3,
            5.55041087e-2,
            2.40226507e-1,
            6.93147181e-1,
            1,
        ):
            power = _call(builder, "fma", [power, rest, constant(factor)])
        bias, shift = _constant(_INTEGERS, 127), _constant(_INTEGERS, 23)
        exponent = builder.shl(builder.add(builder.fptosi(whole, _INTEGERS), bias), shift)
        return builder.fmul(power, builder.bitcast(exponent, _FLOATS))

    return _lanes(_lanes), generate


@_generated
def highest(typing: Any, x: Any) -> Any:
    """The largest of the eight, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x = arguments[0]
        for distance in (4, 2, 1):
            x = _larger(builder, x, _turned(builder, x, distance))
        return builder.extract_element(x, _INDEX(0))

    return types.float32(_lanes), generate


@_generated
def total(typing: Any, x: Any) -> Any:
    """The sum of the eight, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x = arguments[0]
        for distance in (4, 2, 1):
            x = builder.fadd(x, _turned(builder, x, distance))
        return builder.extract_element(x, _INDEX(0))

    return types.float32(_lanes), generate


@_generated
def sums(typing: Any, vectors: Any) -> Any:
    """The sum over the lanes of each of eight vectors, as the lanes of one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def add(x: Any, y: Any, low: list[int], high: list[int]) -> Any:
            first = builder.shuffle_vector(x, y, ir.Constant(_INTEGERS, low))
            return builder.fadd(first, builder.shuffle_vector(x, y, ir.Constant(_INTEGERS, high)))

        parts = [builder.extract_value(arguments[0], i) for i in range(LANES)]
        # Neighbours, then pairs, each within the halves of 128 bits, then the halves.
        for low, high in (
            ([0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]),
            ([0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]),
            ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
        ):
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [add(x, y, low, high) for x, y in pairs]
        return parts[0]

    return _lanes(vectors), generate
