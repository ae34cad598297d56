"""Whose turn it is: tenants share the engine by the tokens computed for them and their weights."""

from collections import Counter
from collections.abc import Mapping


class TenantShares:
    """Tokens by weight charged to each tenant that has requests; the one with the least goes first.

    A tenant with twice the weight of another gets twice the tokens while both have requests.

    A tenant that comes back starts level with the least served of the others: it has neither saved
    up a claim while it was away nor kept a debt.

    Source:
        Start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996, with tokens for packets.
    """

    def __init__(self) -> None:
        self.weights: Mapping[str, float] = {}  # above 0; a tenant that is not named has 1
        self.computed_tokens: Counter[str] = Counter()  # since the start
        self._charged: dict[str, float] = {}
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
        self.computed_tokens[tenant] += num_tokens
        self._charged[tenant] += num_tokens / self.weights.get(tenant, 1.0)

    def charged(self, tenant: str) -> float:
        """Tokens over weight charged to a tenant that has requests."""
        return self._charged[tenant]
