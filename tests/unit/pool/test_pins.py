"""Pins: what they protect, for how long, and within which budget."""

from array import array

import pytest
from pool_model import FakeBacking

from memd.pool.audit import audit, check
from memd.pool.layout import KVLayout
from memd.pool.pins import PinRefused
from memd.pool.pool import Pool
from memd.pool.prefix_tree import Node
from memd.pool.prefixes import explain, find_prefix, list_prefixes
from memd.pool.watermarks import Watermarks
from memd.types import RequestId

PAGE_TOKENS = 4


def ids(text: str) -> "array[int]":
    """A token for each byte."""
    return array("i", list(text.encode()))


class Place:
    """A pool of 16 pages, half of them for pins, and requests that run in no time."""

    def __init__(self, host_pages: int = 0) -> None:
        self.time = 100.0
        layout = KVLayout(1, 1, 1, 1, PAGE_TOKENS, 4 * PAGE_TOKENS * 2)
        marks = Watermarks(1.0, 0.9)
        self.pool = Pool(layout, 16, FakeBacking(), marks, lambda: self.time, 60.0, host_pages)
        self.pool.host_limit_bytes = host_pages * layout.page_bytes
        self.pool.pins.limit_ratio = 0.5
        self.serial = 0

    def serve(self, prompt: str, namespace: str = "", tenant: str = "") -> int:
        """Returns its cached tokens."""
        self.serial += 1
        tokens = ids(prompt)
        match = self.pool.match(tokens, namespace).on_device(PAGE_TOKENS)
        sequence, cached = self.pool.admit(
            RequestId(str(self.serial)), tokens, namespace, match, tenant=tenant
        )
        self.pool.release(sequence, len(tokens))
        assert check(self.pool) == []
        return cached

    def node(self, prompt: str, namespace: str = "") -> Node:
        """Of the last page of a cached prompt."""
        return self.pool.match(ids(prompt + "~"), namespace).nodes[-1]

    def finish_copies(self) -> None:
        for transfer in self.pool.residency.take_orders():
            self.pool.finish_transfer(transfer.id, True)
        assert check(self.pool) == []


def test_a_pinned_prefix_stays_while_everything_else_goes() -> None:
    place = Place()
    place.serve("systemprompt")
    place.pool.pins.pin(place.node("systemprompt"), None, "")
    assert (place.pool.pages.pinned, place.pool.pages.cached) == (3, 0)
    for number in range(40):
        place.serve(f"{number:016}")
    assert place.serve("systemprompt and more") == 12
    assert place.pool.flush() > 0
    assert place.pool.occupied_pages == place.pool.pages.pinned == 3
    assert audit(place.pool).problems == []


def test_a_pin_expires_on_the_clock_of_the_steps_and_its_pages_become_evictable() -> None:
    place = Place()
    place.serve("abcdefgh")
    place.pool.pins.pin(place.node("abcdefgh"), 10.0, "")
    place.time += 9.9
    place.pool.advance_pins()
    assert place.pool.pages.pinned == 2
    place.time += 0.1
    place.pool.advance_pins()
    assert (place.pool.pages.pinned, place.pool.pages.cached) == (0, 2)
    assert place.pool.counters.pins["expired"] == 1
    assert place.pool.flush() == 2


@pytest.mark.parametrize(
    ("first", "second", "left"), [(10, 60, 60), (60, 10, 60), (10, None, None)]
)
def test_pinning_again_never_shortens(
    first: float, second: float | None, left: float | None
) -> None:
    place = Place()
    place.serve("abcdefgh")
    node = place.node("abcdefgh")
    place.pool.pins.pin(node, first, "")
    pin = place.pool.pins.pin(node, second, "")
    assert pin.expires_at == (None if left is None else place.time + left)
    place.time += 59
    place.pool.advance_pins()
    assert place.pool.pages.pinned == 2
    assert sum(place.pool.pages.pins) == 2


def test_pins_that_share_pages_protect_them_until_the_last_ends() -> None:
    place = Place()
    place.serve("shared..left")
    place.serve("shared..right...")
    left = place.pool.pins.pin(place.node("shared..left"), None, "")
    place.pool.pins.pin(place.node("shared..right..."), 5.0, "")
    assert place.pool.pins.promised_pages == 5
    place.time += 6
    place.pool.advance_pins()
    assert place.pool.pages.pinned == 3
    place.pool.pins.release(left)
    assert place.pool.pages.pinned == 0
    assert check(place.pool) == []


def test_the_budget_counts_held_pages_and_refuses_with_the_numbers() -> None:
    place = Place()
    place.serve("a" * 16)
    place.serve("b" * 24)
    place.pool.pins.pin(place.node("a" * 16), None, "")
    with pytest.raises(PinRefused, match="needs 6 pages more, 4 are pinned and the limit is 8"):
        place.pool.pins.pin(place.node("b" * 24), None, "")
    assert place.pool.pages.pinned == 4
    place.pool.pins.limit_ratio = 0.1  # what is pinned stays, nothing is added
    with pytest.raises(PinRefused, match="the limit is 1"):
        place.pool.pins.pin(place.node("b" * 4), None, "")
    assert place.pool.counters.pins["refused"] == 2


def test_a_tenant_pins_within_the_same_share_of_its_quota() -> None:
    place = Place()
    place.pool.set_quotas({"ann": 8})
    ann = place.pool.tenants.number("ann")
    place.serve("a" * 24, tenant="ann")
    with pytest.raises(PinRefused, match="the tenant has 0 pinned and its limit is 4"):
        place.pool.pins.pin(place.node("a" * 24), None, "", ann)
    place.pool.pins.pin(place.node("a" * 16), None, "", ann)
    assert place.pool.tenants.pinned("ann") == 4
    place.pool.pins.pin(place.node("a" * 24), None, "")  # an operator may


def test_a_pin_takes_in_what_comes_back_from_the_host() -> None:
    place = Place(host_pages=16)
    place.serve("abcdefghijkl")
    place.pool.evict(3)
    place.finish_copies()
    node = place.node("abcdefghijkl")
    assert node.page is None
    pin = place.pool.pins.pin(node, None, "")
    assert (pin.covered, place.pool.pins.promised_pages) == (0, 3)
    place.pool.advance_pins()
    place.finish_copies()
    place.pool.advance_pins()
    assert (pin.covered, place.pool.pages.pinned) == (3, 3)
    place.pool.evict(16)
    assert place.pool.pages.pinned == 3


def test_a_pin_whose_host_copies_are_lost_keeps_what_it_has() -> None:
    place = Place(host_pages=16)
    place.serve("abcdefghijkl")
    place.pool.evict(1)  # the last page only
    place.finish_copies()
    pin = place.pool.pins.pin(place.node("abcdefghijkl"), 50.0, "")
    assert pin.covered == 2
    place.pool.host_limit_bytes = 0
    place.pool.advance_pins()
    assert (len(pin.nodes), place.pool.pages.pinned) == (2, 2)
    place.time += 51
    place.pool.advance_pins()
    assert (pin.ended, place.pool.pages.pinned) == (True, 0)


def test_a_pin_brings_up_what_comes_before_a_page_that_was_lost() -> None:
    place = Place(host_pages=16)
    place.serve("abcdefghijkl")
    place.pool.evict(3)
    place.finish_copies()
    pin = place.pool.pins.pin(place.node("abcdefghijkl"), None, "")
    lost = pin.nodes[2]
    place.pool.residency.give_up(lost)
    place.pool.advance_pins()
    place.finish_copies()
    place.pool.advance_pins()
    assert (pin.covered, pin.nodes[-1].page is None) == (2, False)
    assert place.pool.pages.pinned == 2
    assert check(place.pool) == []


def test_a_page_pinned_while_it_is_copied_out_stays_on_the_device() -> None:
    place = Place(host_pages=16)
    place.serve("abcdefgh")
    assert place.pool.evict(2) == 2, "ordered: they go when their copies have ended"
    place.pool.pins.pin(place.node("abcdefgh"), None, "")
    place.pool.flush()
    place.finish_copies()
    assert place.pool.pages.pinned == 2
    assert place.serve("abcdefgh!") == 8


def test_the_pages_of_a_pin_that_ends_are_evicted_deepest_first() -> None:
    place = Place()
    place.serve("abcdefghijkl")
    pin = place.pool.pins.pin(place.node("abcdefghijkl"), None, "")
    place.pool.pins.release(pin)
    assert place.pool.lru.in_order() == [node.page for node in reversed(pin.nodes)]


def test_a_part_filled_page_is_not_pinned() -> None:
    place = Place()
    place.serve("abcdef")
    row = list_prefixes(place.pool, 10)["prefixes"][0]
    nodes = find_prefix(place.pool, row["id"])
    with pytest.raises(PinRefused, match="not full"):
        place.pool.pins.pin(nodes[-1], None, "")


def test_a_page_is_charged_to_the_first_that_held_it_until_it_is_free() -> None:
    place = Place()
    place.serve("abcdefgh", tenant="ann")
    place.serve("abcdefghijkl", tenant="bob")
    used = place.pool.tenants.used
    assert (used("ann"), used("bob")) == (2, 1)
    place.pool.flush()
    assert (used("ann"), used("bob")) == (0, 0)


def test_pages_above_a_quota_are_evicted_first() -> None:
    place = Place()
    place.pool.set_quotas({"ann": 2})
    place.serve("b" * 16, "b", "bob")  # older than all of ann's
    for letter in "xyz":
        place.serve(letter * 16, "a", "ann")
    place.pool.evict(10)
    used = place.pool.tenants.used
    assert (used("ann"), used("bob")) == (2, 4)
    place.pool.evict(1)
    assert (used("ann"), used("bob")) == (2, 3), "within quotas the oldest goes"


def test_a_prefix_keeps_its_name_while_it_grows_and_parts() -> None:
    place = Place()
    place.serve("systemprompt")
    (row,) = list_prefixes(place.pool, 10)["prefixes"]
    place.serve("systemprompt, and an answer")
    (grown,) = list_prefixes(place.pool, 10)["prefixes"]
    assert (grown["id"], grown["tokens"], grown["hits"]) == (row["id"], 27, 1)
    place.serve("systemprompt: other")
    rows = list_prefixes(place.pool, 10, "start")["prefixes"]
    assert [each["tokens"] for each in rows if each["id"] == row["id"]] == [12]
    assert {each["parent_id"] for each in rows} == {None, row["id"]}
    assert {each["start_token"] for each in rows} == {0, 12}
    nodes = find_prefix(place.pool, row["id"])
    assert [node.end for node in nodes] == [4, 4, 4]


def test_explain_tells_evicted_from_unseen() -> None:
    place = Place()
    place.serve("abcdefghijkl")
    place.pool.evict(1)
    place.time += 7
    found = explain(place.pool, ids("abcdefghijkl!"), "")
    assert (found["reason"], found["first_missing_token"]) == ("evicted", 8)
    assert found["evicted_age_seconds"] == 7
    again = explain(place.pool, ids("abcdefghijkl!"), "")
    assert again == found, "asking changes nothing"
    other = explain(place.pool, ids("abcdefghwxyz!"), "")
    assert other["reason"] == "unseen"
