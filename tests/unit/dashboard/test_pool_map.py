"""The picture of the pool."""

import io

import numpy
import pytest
import recorded
from memd_dashboard import palette
from memd_dashboard.view import pool_map
from PIL import Image


def blocks(**changes):
    answer = recorded.answers()["/admin/v1/pool/blocks"]
    count = len(changes.get("committed", [0, 0, 0, 0]))
    base = {name: [0] * count for name in answer["columns"]}
    base |= {"committed": [True] * count, "age_seconds": [None] * count}
    base |= {"tenant": [None] * count, "victim_rank": [None] * count}
    return pool_map.read({"columns": base | changes, "tenants": ["", "blue"]})


def pixels(png):
    return numpy.asarray(Image.open(io.BytesIO(png)))


def test_the_recorded_pool_is_read_and_drawn_in_every_mode():
    answer = recorded.answers()
    found = pool_map.read(answer["/admin/v1/pool/blocks"])
    assert len(found) == 48
    assert (found.size == found.size[0]).all()
    for mode in pool_map.MODES:
        picture = pixels(pool_map.picture(found, mode))
        assert picture.shape[1] == pool_map.columns_of(48)
        assert picture.shape[0] * picture.shape[1] >= 48
        assert all(len(entry) == 3 for entry in pool_map.legend(found, mode))


def test_a_block_shows_the_state_that_most_hinders_giving_it_back():
    found = blocks(
        committed=[False, True, True, True, True, True],
        free=[4, 4, 3, 2, 2, 1],
        cached=[0, 0, 1, 1, 1, 1],
        pinned=[0, 0, 0, 1, 0, 1],
        quarantined=[0, 0, 0, 0, 1, 0],
        active=[0, 0, 0, 0, 0, 1],
    )
    names = [pool_map.STATES[state] for state in found.states]
    assert names == ["not committed", "free", "cached", "pinned", "quarantined", "active"]
    drawn = pixels(pool_map.picture(found, "state")).reshape(-1, 4)
    assert tuple(drawn[5][:3]) == palette.rgb(palette.ACTIVE)
    # The legend has what is faint in the picture as faint.
    key = {words.split(" (")[0]: colour for _, colour, words in pool_map.legend(found, "state")}
    for block, name in enumerate(("not committed", "free")):
        assert int(key[name][7:], 16) == pytest.approx(drawn[block][3], abs=1)
    assert key["active"] == palette.ACTIVE


def test_a_fuller_block_is_stronger_and_a_filtered_one_fades():
    found = blocks(committed=[True, True], free=[3, 0], cached=[1, 4])
    strengths = pixels(pool_map.picture(found, "state"))[:, :, 3].reshape(-1)[:2]
    assert strengths[0] < strengths[1]
    faded = pool_map.picture(found, "state", numpy.array([True, False]))
    assert pixels(faded)[:, :, 3].reshape(-1)[0] < strengths[0] // 4


def test_the_cut_of_the_low_mark_takes_the_oldest_first():
    found = blocks(
        committed=[True] * 3, cached=[4, 4, 4], free=[0] * 3, age_seconds=[5.0, 500.0, 50.0]
    )
    pool = {"capacity_pages": 12, "free_pages": 0, "watermark_low": 0.5}
    cut = pool_map.low_mark_cut(found, pool)
    assert cut == pool_map.Cut(6, 50.0)
    rows = {row["name"]: row for row in pool_map.idle_histogram(found, cut) if row["pages"]}
    assert rows["< 10 s"]["goes"] == "stays"
    assert rows["< 10 min"]["goes"] == "evicted by the low mark"
    below = {"capacity_pages": 12, "free_pages": 8, "watermark_low": 0.5}
    assert pool_map.low_mark_cut(found, below) == pool_map.Cut(0, None)


@pytest.mark.parametrize(
    ("counts", "rank", "words"),
    [
        ({"active": [1], "cached": [0]}, None, "no: it has active pages"),
        ({"active": [1], "cached": [2]}, 3, "in part: 2 cached pages may go"),
        ({"cached": [2]}, 6, "place 7: by least recent use"),
        ({"free": [2]}, None, "no: nothing to evict"),
    ],
)
def test_a_card_says_whether_and_why_a_block_is_the_next_victim(counts, rank, words):
    found = blocks(committed=[True], victim_rank=[rank], **counts)
    card = dict(pool_map.card(found, 0, {"block_bytes": 2**24, "page_tokens": 16}))
    assert card["Next victim"] == words
    assert card["Offset in the pool"] == "from 0 B to 16.0 MiB"


def test_owners_are_named_most_blocks_first():
    found = blocks(committed=[True] * 4, tenant=[1, None, 0, 1])
    assert pool_map.tenants(found) == ["blue", "no tenant"]


def test_no_blocks_are_no_error():
    empty = pool_map.read({})
    assert len(empty) == 0
    for mode in pool_map.MODES:
        pool_map.colours(empty, mode)


def test_the_longest_free_run_is_found():
    found = blocks(committed=[True] * 6, free=[1, 0, 1, 1, 1, 0], cached=[0, 1, 0, 0, 0, 1])
    rows = {name: value for name, value, _ in pool_map.summary(found, {})}
    assert rows["Longest free run"] == "3 in a row"
    assert rows["Empty blocks"] == "4"


def test_the_replay_reaches_as_far_back_as_maps_are_kept():
    maps = {"every_seconds": 15.0, "keep_seconds": 60.0, "times": [1.0]}
    assert pool_map.steps_back(maps) == [60.0, 45.0, 30.0, 15.0, 0.0]
    assert pool_map.steps_back({**maps, "times": []}) == []
    assert pool_map.steps_back({**maps, "keep_seconds": 0.0}) == []
    assert pool_map.steps_back({}) == []
    assert [pool_map.back_text(seconds) for seconds in (75.0, 60.0, 15.0, 0.0)] == [
        "1 min 15 s back",
        "1 min back",
        "15 s back",
        "now",
    ]


def test_the_card_tells_the_format_of_pages():
    found = blocks(packed=[False, True, False, False])
    formats = [dict(pool_map.card(found, number, {}))["Page format"] for number in range(4)]
    assert formats == ["full", "packed", "full", "full"]
