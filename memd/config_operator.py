"""Settings of the operator plane: history, alerts, telemetry."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from memd.config_types import DurationSeconds, Section


class HistorySettings(Section):
    """What is kept in the database, and for how long."""

    url: str | None = Field(
        None, description="SQLAlchemy URL; default: SQLite in the state directory"
    )
    sample_every: Annotated[DurationSeconds, Field(ge=1)] = Field(
        15.0, description="How often figures for charts are kept"
    )
    keep_samples: DurationSeconds = Field(7 * 86400.0, description="Figures for charts")
    keep_requests: DurationSeconds = Field(30 * 86400.0, description="Finished requests")
    keep_events: DurationSeconds = Field(90 * 86400.0, description="Events, job runs, incidents")
    queue_rows: int = Field(
        10_000, ge=100, description="Rows that may wait for the database; more are dropped"
    )


class AlertSettings(Section):
    """The built-in evaluation of alert rules, and who is told."""

    enabled: bool = Field(True, description="Evaluate the rules in the daemon")
    evaluate_every: Annotated[DurationSeconds, Field(ge=1)] = Field(15.0, description="How often")
    channels: Path | None = Field(
        None, description="YAML file of notification channels, name: apprise URL"
    )
    alertmanager: str | None = Field(None, description="URL of an Alertmanager that is told too")


class TelemetrySettings(Section):
    """What is read from the GPUs."""

    gpu_every: Annotated[DurationSeconds, Field(ge=1)] = Field(
        5.0, description="How often NVML is read"
    )
