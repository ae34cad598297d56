"""Which shapes of steps are captured, and when decodes join prefill chunks."""

import pytest

from memd.engine.graphs import PrefillShape, joins, mixed_shapes, prefill_shapes, suits


@pytest.mark.parametrize("max_sequences", [1, 20, 256, 1000])
@pytest.mark.parametrize("max_tokens", [16, 64, 300, 4096, 8192, 20_000])
def test_there_is_a_shape_for_a_full_step(max_tokens: int, max_sequences: int) -> None:
    for shapes in (
        prefill_shapes(max_tokens, max_sequences),
        mixed_shapes(max_tokens, max_sequences),
    ):
        sizes = [shape.tokens for shape in shapes]
        assert sizes == sorted({*sizes})
        assert sizes[-1] >= min(max_tokens, 8192) > max([0, *sizes[:-1]])
        for shape in shapes:
            assert shape.decodes <= min(max_sequences, shape.tokens) >= shape.chunks
            places = shape.decodes + shape.chunks
            assert shape.sampled == min(max_sequences, places, shape.tokens)
    assert not any(shape.decodes for shape in prefill_shapes(max_tokens, max_sequences))


def test_decodes_have_room_beside_a_full_chunk() -> None:
    largest = mixed_shapes(8192, 256)[-1]
    assert largest.holds(PrefillShape(8192 + 248, 248, 8, 256))
    assert not largest.holds(PrefillShape(8192 + 257, 257, 8, 256))
    assert not largest.holds(PrefillShape(200, 100, 100, 257))


def test_decodes_join_where_padding_costs_less_than_a_pass() -> None:
    largest = PrefillShape(8448, 256, 256, 256)
    assert joins(largest, 8192, 1)
    assert joins(largest, 8192, 256)
    assert not joins(largest, 7168, 256)
    small = PrefillShape(160, 128, 10, 138)
    assert joins(small, 16, 1)
    assert joins(small, 128, 100)


def test_a_step_with_much_padding_is_an_eager_pass_where_launches_do_not_bind() -> None:
    assert suits(PrefillShape(512, 0, 32, 32), 260)
    assert suits(PrefillShape(2048, 0, 128, 128), 1900)
    assert not suits(PrefillShape(2048, 0, 128, 128), 1100)
