"""Settings of the operator plane: history, alerts, telemetry."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from memd.config_types import LIVE, DurationSeconds, Section, SizeBytes
from memd.units import parse_share, parse_size


class HistorySettings(Section):
    """What is kept in the database, and for how long."""

    url: str | None = Field(
        None,
        description="postgresql://USER@HOST/NAME or sqlite:///PATH, without a password; default: "
        "SQLite in the state directory",
    )
    url_file: Path | None = Field(
        None, description="File that holds the URL instead, for one with a password"
    )
    sample_every: Annotated[DurationSeconds, Field(ge=1)] = Field(
        15.0, description="How often figures for charts are kept"
    )
    keep_samples: DurationSeconds = Field(7 * 86400.0, description="Figures for charts")
    keep_requests: DurationSeconds = Field(30 * 86400.0, description="Finished requests")
    keep_traces: DurationSeconds = Field(7 * 86400.0, description="Recorded traces")
    keep_events: DurationSeconds = Field(90 * 86400.0, description="Events, job runs, incidents")
    map_every: Annotated[DurationSeconds, Field(ge=1)] = Field(
        15.0, description="How often a map of all blocks is kept, for the pool map's replay"
    )
    keep_maps: Annotated[DurationSeconds, Field(ge=0, le=3600)] = Field(
        600.0, description="Such maps, in memory, 64 MiB of them at most; 0: none"
    )
    queue_rows: int = Field(
        10_000, ge=100, description="Rows that may wait for the database; more are dropped"
    )

    @field_validator("url")
    @classmethod
    def _without_secret(cls, url: str | None) -> str | None:
        # Settings are shown to operators, and a command line to every user of the machine.
        parts = urlsplit(url or "")
        if parts.password is not None or "password" in parse_qs(parts.query):
            raise ValueError(
                "a password does not belong here: put the URL into a file and name that with "
                "history.url_file"
            )
        return url

    @model_validator(mode="after")
    def _one_url(self) -> "HistorySettings":
        if self.url is not None and self.url_file is not None:
            raise ValueError("url and url_file exclude each other")
        return self


class AlertSettings(Section):
    """The built-in evaluation of alert rules, and who is told."""

    enabled: bool = Field(True, description="Evaluate the rules in the daemon")
    evaluate_every: Annotated[DurationSeconds, Field(ge=1)] = Field(15.0, description="How often")
    channels: Path | None = Field(
        None, description="YAML file of notification channels, name: apprise URL"
    )
    alertmanager: str | None = Field(None, description="URL of an Alertmanager that is told too")
    rules: Path | None = Field(
        None, description="Rule file, as docs/alerts.md describes; default: the rules of memd"
    )
    runbooks: str = Field(
        "docs/runbooks", description="Where runbook pages are, a URL or folder put before /NAME.md"
    )
    instance: str | None = Field(
        None, description="Label `instance` of alerts; default: host:port, as Prometheus has it"
    )

    @field_validator("alertmanager")
    @classmethod
    def _plain_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url[:200]!r} is not a URL such as http://127.0.0.1:9093")
        if parts.username or parts.password or parts.query:
            raise ValueError("the URL must not hold credentials: settings are shown to operators")
        return url.rstrip("/")


class TraceSettings(Section):
    """Recording of traffic for the simulator: lengths, times and digests, no text."""

    record: bool = Field(
        False, description="Record all requests, all the time", json_schema_extra=LIVE
    )
    limit: Annotated[SizeBytes, Field(ge=10**6)] = Field(
        256 * 10**6,
        description="Room for recorded sequences; the oldest are deleted",
        json_schema_extra=LIVE,
    )
    tenant_names: bool = Field(
        False,
        description="Continuous recordings name tenants, instead of digests",
        json_schema_extra=LIVE,
    )


class TelemetrySettings(Section):
    """What is read from the GPUs."""

    gpu_every: Annotated[DurationSeconds, Field(ge=1)] = Field(
        5.0, description="How often NVML is read"
    )


def _quota(value: object) -> object:
    """`20%` or `2GB`: checked here; a share is kept as it was written, so that 1 is never 100%."""
    if isinstance(value, str) and value.rstrip().endswith("%"):
        parse_share(value.strip())
        return value.strip()
    return None if value is None else parse_size(value)  # type: ignore[arg-type]


class TenantSettings(Section):
    """One tenant: who shares memory and steps with the others, as keys name it."""

    name: str = Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")
    quota: Annotated[str | int | None, BeforeValidator(_quota)] = Field(
        None, description="Pages above it go first when others need them; null: none"
    )
    weight: float = Field(
        1.0, gt=0, le=1000, description="Of its share of the steps, against the others'"
    )


def _by_name(tenants: tuple[TenantSettings, ...]) -> tuple[TenantSettings, ...]:
    names = sorted(tenant.name for tenant in tenants)
    twice = [name for name, following in pairwise(names) if name == following]
    if twice:
        raise ValueError(f"the tenant {twice[0]!r} is there twice")
    return tuple(sorted(tenants, key=lambda tenant: tenant.name))


Tenants = Annotated[tuple[TenantSettings, ...], Field(max_length=1000), AfterValidator(_by_name)]
