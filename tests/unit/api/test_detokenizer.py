"""Text appears as soon as it is certain, and never before."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memd.api.detokenizer import Detokenizer


def run(pieces: list[str | bytes], stops: list[str], include: bool = False) -> list[str]:
    """The deltas, one a piece, and the flushed end unless a stop string was complete."""
    detokenizer = Detokenizer(stops, include)
    deltas = []
    for piece in pieces:
        text, stopped = detokenizer.push(piece.encode() if isinstance(piece, str) else piece)
        deltas.append(text)
        if stopped:
            return [*deltas, "<stop>"]
    return [*deltas, detokenizer.flush()]


@pytest.mark.parametrize(
    ("pieces", "stops", "deltas"),
    [
        (["ab", "X", "Y", "!"], ["XYZ"], ["ab", "", "", "XY!", ""]),
        (["ab", "XY"], ["XYZ"], ["ab", "", "XY"]),
        (["aa", "ab", "c"], ["aab"], ["", "a", "<stop>"]),
        (["a", "b", "c", "d"], ["bcd", "c"], ["a", "", "b", "<stop>"]),
        (["abcd"], ["bcd", "c"], ["ab", "<stop>"]),
        (["xab"], ["ab", "b"], ["x", "<stop>"]),
        (["one. two"], ["."], ["one", "<stop>"]),
        (["XX", "XYZ"], ["XYZ"], ["X", "X", "<stop>"]),
        (["XYXY", "Z"], ["XYZ"], ["XY", "", "<stop>"]),
        (["a", "b"], [], ["a", "b", ""]),
        ([b"\xf0\x9f", b"\x98\x80!"], [], ["", "😀!", ""]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80"], ["😀!"], ["", "", "", "", "😀"]),
        ([b"\xf0\x9f\x98"], [], ["", "\ufffd"]),
        ([b"\xff", b"a"], [], ["\ufffd", "a", ""]),
        ([b"\xc3", b"\xa9"], ["é"], ["", "", "<stop>"]),
    ],
)
def test_deltas(pieces, stops, deltas):
    assert run(pieces, stops) == deltas


def test_the_stop_string_can_belong_to_the_text():
    assert run(["ab", "X", "Yc"], ["XY"], include=True) == ["ab", "", "XY", "<stop>"]


def test_a_stop_before_it_may_stop_is_text():
    detokenizer = Detokenizer(["."])
    assert detokenizer.push(b"a.", may_stop=False) == ("a.", False)
    assert detokenizer.push(b"b.") == ("b", True)


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.sets(st.integers(0, 30)),
)
def test_cuts_make_no_difference(text, stops, cuts):
    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(at)]
    whole, parts = run([text], stops), run(pieces, stops)
    assert "".join(whole) == "".join(parts)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        assert parts[-1] == "<stop>"
    else:
        assert "".join(parts) == text
