"""Tenants as the settings have them, put in force in pool and scheduler."""

from collections.abc import Mapping, Sequence
from typing import Any

from memd.engine.scheduler import Scheduler
from memd.pool.pool import Pool
from memd.units import parse_share


class Tenancy:
    """Owns which tenants are configured; quotas live in the pool, weights in the shares.

    Args:
        pool: Whose pages have quotas.
        scheduler: Over the same pool.
    """

    def __init__(self, pool: Pool, scheduler: Scheduler) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._configured: list[dict[str, Any]] = []

    @property
    def configured(self) -> Sequence[Mapping[str, Any]]:
        """The setting `tenants`: `name`, `quota` (a share of the pool, bytes or None), `weight`."""
        return self._configured

    @configured.setter
    def configured(self, tenants: Sequence[Mapping[str, Any]]) -> None:
        self._configured = [dict(tenant) for tenant in tenants]
        quotas = {
            tenant["name"]: self._pages(tenant["quota"])
            for tenant in tenants
            if tenant["quota"] is not None
        }
        if quotas != self._pool.tenants.quotas:
            self._pool.set_quotas(quotas)
        self._scheduler.shares.weights = {each["name"]: each["weight"] for each in tenants}

    def _pages(self, quota: str | int) -> int:
        if isinstance(quota, str):
            return int(parse_share(quota) * self._pool.configured_pages)
        return quota // self._pool.layout.page_bytes
