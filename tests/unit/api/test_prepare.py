"""Seeds and limits, apart from HTTP."""

import pytest

from memd.api.body import shown
from memd.api.errors import field_path
from memd.api.prepare import check_length, derive_seed
from memd.engine.messages import Ready
from memd.errors import RequestError

READY = Ready(1, 2048, {}, None, {"page_tokens": 16, "capacity_pages": 64})


@pytest.mark.parametrize("seed", [0, 1, 7, 2**63 - 1])
def test_seeds_of_choices(seed):
    seeds = [derive_seed(seed, index) for index in range(128)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    assert all(0 <= each < 2**63 for each in seeds)
    assert seeds == [derive_seed(seed, index) for index in range(128)]


def test_seeds_do_not_move_by_an_update():
    assert [derive_seed(7, index) for index in (1, 2)] == [2174948161648732372, 2888775511750995287]


@pytest.mark.parametrize(
    ("length", "max_tokens", "words"),
    [
        (0, 1, "empty"),
        (1100, 1, "needs 69 pages of 16 tokens, the pool holds 64"),
        (1025, 1, "needs 65 pages"),
        (1000, 1049, "you requested 2049 tokens (1000 in the prompt, 1049 for the output)"),
    ],
)
def test_what_can_never_run(length, max_tokens, words):
    with pytest.raises(RequestError) as error:
        check_length([1] * length, max_tokens, READY, "prompt")
    assert words in error.value.message
    if length:
        assert "This model's maximum context length is 2048 tokens" in error.value.message
        assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("length", "max_tokens"), [(1024, 1024), (1, 2047), (5, 0)])
def test_what_just_fits(length, max_tokens):
    check_length([1] * length, max_tokens, READY, "prompt")


def test_fields_and_values_as_clients_see_them():
    assert field_path(("messages", 0, "content")) == "messages[0].content"
    assert shown(True) == "true"
    assert shown("x" * 100) == '"' + "x" * 59 + "…"
    assert shown([1, 2]) == "an array of 2"
    assert shown({"a": 1}) == "an object"
    assert shown(2**70) == str(2**70)
