"""Whose turn it is: tenants share the engine by the tokens computed for them."""

from collections import Counter


class TenantShares:
    """Tokens charged to each tenant that has requests; the one with the least goes first.

    A tenant that comes back starts level with the least served of the others: it has neither saved
    up a claim while it was away nor kept a debt.

    Source:
        Start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996, with tokens for packets.
    """

    def __init__(self) -> None:
        self._charged: dict[str, int] = {}
        self._requests: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._charged)

    def enter(self, tenant: str) -> None:
        """A request of the tenant was queued."""
        if tenant not in self._charged:
            self._charged[tenant] = min(self._charged.values(), default=0)
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant has ended."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant], self._charged[tenant]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens are computed for a tenant that has requests."""
        self._charged[tenant] += num_tokens

    def charged(self, tenant: str) -> int:
        """Tokens charged to a tenant that has requests."""
        return self._charged[tenant]
