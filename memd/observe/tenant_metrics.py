"""Metrics of tenants: those named in the settings, and all others together."""

from collections import defaultdict
from collections.abc import Collection, Iterator

from prometheus_client.core import Metric

from memd.engine.snapshot_types import EngineSnapshot, TenantSnapshot
from memd.observe.families import counter, gauge

OTHER = "other"
REJECTIONS = ("queue", "quota", "priority")


class Rejections:
    """Requests that were refused, by tenant and reason. Tenants are those of keys, so few."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def count(self, tenant: str, reason: str) -> None:
        """A request of a tenant was refused: `queue`, `quota` or `priority`."""
        self._counts.setdefault(tenant, dict.fromkeys(REJECTIONS, 0))[reason] += 1

    def of(self, tenant: str) -> dict[str, int]:
        """One tenant's, by reason."""
        return dict(self._counts.get(tenant, dict.fromkeys(REJECTIONS, 0)))

    def metric(self, configured: Collection[str]) -> Metric:
        """The family, with the tenants that are not configured as one."""
        totals = {(name, reason): 0 for name in (*configured, OTHER) for reason in REJECTIONS}
        for tenant, counts in self._counts.items():
            for reason, count in counts.items():
                totals[tenant if tenant in configured else OTHER, reason] += count
        return counter("memd_tenant_rejections", list(totals.items()))


def tenant_metrics(snapshot: EngineSnapshot | None) -> Iterator[Metric]:
    """All families of tenants. Names come with requests, so only configured ones are labels."""
    tenants = snapshot.tenants if snapshot else {}
    groups: dict[str, list[TenantSnapshot]] = defaultdict(list)
    groups[OTHER] = []
    for name, tenant in tenants.items():
        groups[name if tenant.configured else OTHER].append(tenant)
    if snapshot is not None:
        yield from _gauges(groups)
    yield counter(
        "memd_tenant_computed_tokens",
        [((name,), sum(each.computed_tokens for each in some)) for name, some in groups.items()],
    )


def _gauges(groups: dict[str, list[TenantSnapshot]]) -> Iterator[Metric]:
    quotas = [
        ((name,), each.quota_pages)
        for name, some in groups.items()
        for each in some
        if each.configured and each.quota_pages is not None
    ]
    if quotas:
        yield gauge("memd_tenant_quota_pages", quotas)
    for name, field in (
        ("memd_tenant_used_pages", "used_pages"),
        ("memd_tenant_pinned_pages", "pinned_pages"),
    ):
        yield gauge(
            name,
            [((key,), sum(getattr(each, field) for each in some)) for key, some in groups.items()],
        )
    yield gauge(
        "memd_tenant_sequences",
        [
            ((key, state), sum(getattr(each, state) for each in some))
            for key, some in groups.items()
            for state in ("running", "waiting")
        ],
    )
