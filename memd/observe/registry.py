"""Every metric family of memd, declared once.

Collectors take help, labels and buckets from here by name; the reference page, the Grafana
dashboard and the alert rules are generated from it or checked against it.
"""

from types import MappingProxyType

from memd.observe.catalog import daemon, engine, gpu, pool, requests, tiers
from memd.observe.family import Family

SECTIONS: dict[str, tuple[Family, ...]] = {
    "Pool": pool.LAYOUT + pool.STATE + pool.PRESSURE,
    "Elastic pool": pool.ELASTIC,
    "Packed pages": pool.PACKING,
    "Eviction": pool.EVICTION,
    "Tiers and transfers": tiers.TIERS,
    "Prefix sharing": pool.PREFIX,
    "Pins": pool.PINS,
    "Leak audit": pool.AUDIT,
    "Requests": requests.REQUESTS,
    "Sequences": engine.SEQUENCES,
    "Tenants": engine.TENANTS,
    "Engine": engine.STEPS,
    "GPU": gpu.GPUS,
    "Daemon": daemon.DAEMON,
    "Settings": daemon.SETTINGS,
    "Jobs, history and alerts": daemon.OPERATOR,
}

FAMILIES = MappingProxyType(
    {family.name: family for families in SECTIONS.values() for family in families}
)


def family_of(sample_name: str) -> Family | None:
    """The family that a scraped name, such as `memd_requests_total`, belongs to."""
    return _BY_SAMPLE.get(sample_name)


_BY_SAMPLE = {
    sample_name: family for family in FAMILIES.values() for sample_name in family.sample_names
}
