"""Whose turn it is between tenants, and between salts where there are none."""

from collections.abc import Iterator
from dataclasses import dataclass

from memd.engine.shares import Account, Shares

A, B, C = ("a", ""), ("b", ""), ("c", "")


@dataclass
class Waiting:
    account: Account
    arrival: int
    priority: int = 0


def turns(shares: Shares, *accounts: Account, behind: set[Account] | None = None) -> Iterator[str]:
    """Whose turn it is, of requests that came in this order."""
    waiting = [Waiting(account, arrival) for arrival, account in enumerate(accounts)]
    for request in shares.in_turn(waiting, lambda each: each.account in (behind or set())):
        yield request.account[0]


def test_the_least_served_goes_first() -> None:
    shares = Shares()
    for account in (A, B):
        shares.enter(account)
    shares.charge(A, 100)
    assert "".join(turns(shares, A, A, B, B)) == "bbaa"


def test_a_turn_sees_what_was_charged_for_the_one_before() -> None:
    shares = Shares()
    shares.weights = {"b": 2.0}
    for account in (A, B, C):
        shares.enter(account)
    taken = ""
    for name in turns(shares, *(A,) * 4, *(B,) * 4, *(C,) * 4):
        taken += name
        shares.charge((name, ""), 10)
    assert taken == "abcbabcbacac"


def test_accounts_that_come_last_are_asked_for_at_each_turn() -> None:
    shares = Shares()
    for account in (A, B):
        shares.enter(account)
    behind = {A}
    taken = ""
    for name in turns(shares, A, A, B, B, B, behind=behind):
        taken += name
        if len(taken) == 2:
            behind.clear()
    assert taken == "bbaab"


def test_priority_comes_before_shares_and_arrival_behind() -> None:
    shares = Shares()
    for account in (A, B):
        shares.enter(account)
    waiting = [Waiting(B, 1, -1), Waiting(A, 0), Waiting(B, 2), Waiting(A, 3)]
    shares.charge(B, 5)
    assert [each.arrival for each in shares.in_turn(waiting, lambda _: False)] == [1, 0, 3, 2]
    shares.charge(A, 5)
    assert [each.arrival for each in shares.in_turn(waiting, lambda _: False)] == [1, 0, 2, 3]


def test_who_comes_back_has_neither_claim_nor_debt() -> None:
    shares = Shares()
    shares.enter(A)
    shares.charge(A, 500)
    shares.enter(B)
    assert "".join(turns(shares, A, B)) == "ab"
    assert "".join(turns(shares, B, A)) == "ba"
    shares.charge(B, 1000)
    shares.leave(B)
    assert len(shares) == 1
    shares.enter(B)
    assert "".join(turns(shares, B, A)) == "ba"
    shares.charge(B, 1)
    assert "".join(turns(shares, B, A)) == "ab"


def test_nothing_is_kept_of_tenants_without_requests() -> None:
    shares = Shares()
    for number in range(1000):
        account = "", str(number)
        shares.enter(account)
        shares.charge(account, 5)
        shares.leave(account)
    assert len(shares) == 0
    assert shares.computed_tokens == {"": 5000}
