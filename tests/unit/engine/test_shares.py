"""Whose turn it is between tenants."""

from memd.engine.shares import TenantShares


def test_the_least_served_goes_first() -> None:
    shares = TenantShares()
    for tenant in ("a", "b"):
        shares.enter(tenant)
    shares.charge("a", 100)
    assert shares.charged("b") < shares.charged("a")


def test_who_comes_back_has_neither_claim_nor_debt() -> None:
    shares = TenantShares()
    shares.enter("a")
    shares.charge("a", 500)
    shares.enter("b")
    assert shares.charged("b") == 500
    shares.charge("b", 1000)
    shares.leave("b")
    assert len(shares) == 1
    shares.enter("b")
    assert shares.charged("b") == 500


def test_nothing_is_kept_of_tenants_without_requests() -> None:
    shares = TenantShares()
    for number in range(1000):
        shares.enter(str(number))
        shares.charge(str(number), 5)
        shares.leave(str(number))
    assert len(shares) == 0
