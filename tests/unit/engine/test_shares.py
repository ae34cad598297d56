"""Whose turn it is between tenants, and between salts where there are none."""

from memd.engine.shares import Shares

A, B = ("a", ""), ("b", "")


def test_the_least_served_goes_first() -> None:
    shares = Shares()
    for account in (A, B):
        shares.enter(account)
    shares.charge(A, 100)
    assert shares.charged(B) < shares.charged(A)


def test_who_comes_back_has_neither_claim_nor_debt() -> None:
    shares = Shares()
    shares.enter(A)
    shares.charge(A, 500)
    shares.enter(B)
    assert shares.charged(B) == 500
    shares.charge(B, 1000)
    shares.leave(B)
    assert len(shares) == 1
    shares.enter(B)
    assert shares.charged(B) == 500


def test_nothing_is_kept_of_tenants_without_requests() -> None:
    shares = Shares()
    for number in range(1000):
        account = "", str(number)
        shares.enter(account)
        shares.charge(account, 5)
        shares.leave(account)
    assert len(shares) == 0
    assert shares.computed_tokens == {"": 5000}
