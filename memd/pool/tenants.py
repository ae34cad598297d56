"""Who is charged for pages, and how many of them each tenant may hold before it goes first."""

from collections.abc import Mapping

NO_QUOTA = 0  # the lane of all tenants without one


class Tenants:
    """Pages by tenant. A page is charged once, to the first that held it, until it is free.

    Tenants are numbered as they come, so that a page remembers its tenant in one integer; 0 is the
    nameless one. Those with a quota have a lane each: a part of the eviction order of their own.

    Args:
        quotas: Pages by tenant name; a tenant that is not named has no quota.
    """

    def __init__(self, quotas: Mapping[str, int] | None = None) -> None:
        self.names: list[str] = [""]
        self.used_pages = [0]
        self.pinned_pages = [0]  # protected by pins, held or not
        self._numbers = {"": 0}
        self._lanes = [NO_QUOTA]
        self.quotas: dict[str, int] = {}
        self.set_quotas(quotas or {})

    @property
    def lanes(self) -> int:
        """How many parts the eviction order has."""
        return 1 + len(self.quotas)

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Other quotas, in pages. The eviction order has to be arranged anew after it."""
        self.quotas = dict(quotas)
        for name in quotas:
            self.number(name)
        lanes = {name: lane for lane, name in enumerate(quotas, 1)}
        self._lanes = [lanes.get(name, NO_QUOTA) for name in self.names]

    def number(self, name: str) -> int:
        """The number of a tenant, a new one at its first mention."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
            self.used_pages.append(0)
            self.pinned_pages.append(0)
            self._lanes.append(NO_QUOTA)
        return number

    def lane(self, number: int) -> int:
        """The part of the eviction order that holds a tenant's cached pages."""
        return self._lanes[number]

    def quota(self, number: int) -> int | None:
        """Pages; None: no quota."""
        return self.quotas.get(self.names[number])

    def used(self, name: str) -> int:
        """Pages charged to a tenant."""
        number = self._numbers.get(name)
        return 0 if number is None else self.used_pages[number]

    def pinned(self, name: str) -> int:
        """Of the pages charged to a tenant: those under pins."""
        number = self._numbers.get(name)
        return 0 if number is None else self.pinned_pages[number]

    def over_quota(self, name: str) -> bool:
        """Whether a tenant holds more than its quota."""
        quota = self.quotas.get(name)
        return quota is not None and self.used(name) > quota

    def excess(self) -> list[tuple[int, int]]:
        """Lane and pages above the quota of each tenant that is over it, largest excess first."""
        found = [
            (lane, self.used(name) - quota)
            for lane, (name, quota) in enumerate(self.quotas.items(), 1)
        ]
        return sorted((each for each in found if each[1] > 0), key=lambda each: -each[1])
