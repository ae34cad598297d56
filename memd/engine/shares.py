"""Whose turn it is: tenants share the engine by the tokens computed for them and their weights.

Where there are no API keys, and so no tenants, those who keep their caches apart by a salt do.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

Account = tuple[str, str]  # tenant, and the cache salt where there is none: each shares alike


class Waiting(Protocol):
    """A request that may start."""

    account: Account
    arrival: int
    priority: int


W = TypeVar("W", bound=Waiting)


class Shares:
    """Tokens by weight charged to each account with requests; the one with the least goes first.

    A tenant with twice the weight of another gets twice the tokens while both have requests.

    An account that comes back starts level with the least served of the others: it has neither
    saved up a claim while it was away nor kept a debt.

    Source:
        Start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996, with tokens for packets.
    """

    def __init__(self) -> None:
        self.weights: Mapping[str, float] = {}  # above 0; a tenant that is not named has 1
        self.computed_tokens: Counter[str] = Counter()  # of each tenant, since the start
        self._charged: dict[Account, float] = {}
        self._requests: Counter[Account] = Counter()

    def __len__(self) -> int:
        return len(self._charged)

    def enter(self, account: Account) -> None:
        """A request of the account was queued."""
        if account not in self._charged:
            self._charged[account] = min(self._charged.values(), default=0)
        self._requests[account] += 1

    def leave(self, account: Account) -> None:
        """A request of the account has ended."""
        self._requests[account] -= 1
        if not self._requests[account]:
            del self._requests[account], self._charged[account]

    def charge(self, account: Account, num_tokens: int) -> None:
        """Tokens are computed for an account that has requests."""
        tenant, _ = account
        self.computed_tokens[tenant] += num_tokens
        self._charged[account] += num_tokens / self.weights.get(tenant, 1.0)

    def charge_each(self, accounts: Iterable[Account]) -> None:
        """A token is computed for each of some accounts that have requests."""
        for account, num_tokens in Counter(accounts).items():
            self.charge(account, num_tokens)

    def in_turn(self, waiting: list[W], comes_last: Callable[[W], bool]) -> Iterator[W]:
        """Requests in the order in which they may start; each turn sees what was charged before.

        Args:
            waiting: By priority, then arrival.
            comes_last: Whether those of a request's account come after all others, at its turn.
        """
        if len(self) < 2:
            yield from list(waiting)
            return
        queues: dict[Account, deque[W]] = {}
        for request in waiting:
            queues.setdefault(request.account, deque()).append(request)
        while queues:
            turn = min(
                (queue[0] for queue in queues.values()),
                key=lambda first: (
                    comes_last(first),
                    first.priority,
                    self._charged[first.account],
                    first.arrival,
                ),
            )
            queue = queues[turn.account]
            queue.popleft()
            if not queue:
                del queues[turn.account]
            yield turn
