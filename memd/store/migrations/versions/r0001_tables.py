"""The tables, each with an index by time, which retention deletes by."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _id() -> sa.Column[int]:
    return sa.Column("id", _ROW_ID, primary_key=True)


def _need(name: str, kind: sa.types.TypeEngine[Any]) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False)


def _may(name: str, kind: sa.types.TypeEngine[Any]) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=True)


def upgrade() -> None:
    """Make all tables."""
    _settings_and_events()
    _requests()
    _alerts()
    _jobs()


def _settings_and_events() -> None:
    op.create_table(
        "settings_revisions",
        sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
        _need("time", sa.Float()),
        _need("who", sa.String()),
        _need("reason", sa.Text()),
        _need("kind", sa.String()),
        _need("changes", sa.JSON()),
        _may("undoes", sa.BigInteger()),
    )
    op.create_table(
        "events",
        _id(),
        _need("time", sa.Float()),
        _need("kind", sa.String(64)),
        _need("message", sa.Text()),
        _need("details", sa.JSON()),
    )
    op.create_index("ix_events_time", "events", ["time"])
    op.create_table(
        "samples",
        _id(),
        _need("time", sa.Float()),
        _need("metric", sa.String()),
        _need("labels", sa.Text()),
        _need("value", sa.Float()),
    )
    op.create_index("ix_samples_time", "samples", ["time"])


def _requests() -> None:
    op.create_table(
        "requests",
        _id(),
        _need("time", sa.Float()),
        _need("received_at", sa.Float()),
        _need("request_id", sa.String()),
        _may("client_id", sa.String()),
        _need("tenant", sa.String()),
        _need("endpoint", sa.String()),
        _need("model", sa.String()),
        _need("outcome", sa.String()),
        _may("finish_reason", sa.String()),
        _may("priority", sa.Integer()),
        _may("sequences", sa.Integer()),
        _may("prompt_tokens", sa.Integer()),
        _may("generated_tokens", sa.Integer()),
        _may("cached_device_tokens", sa.Integer()),
        _may("cached_host_tokens", sa.Integer()),
        _may("peak_pages", sa.Integer()),
        _may("preemptions", sa.Integer()),
        _may("queue_seconds", sa.Float()),
        _may("stall_seconds", sa.Float()),
        _may("time_to_first_token_seconds", sa.Float()),
        _need("duration_seconds", sa.Float()),
    )
    op.create_index("ix_requests_time", "requests", ["time"])


def _alerts() -> None:
    op.create_table(
        "incidents",
        sa.Column("id", sa.String, primary_key=True),
        _need("time", sa.Float()),
        _need("name", sa.String()),
        _need("labels", sa.Text()),
        _need("severity", sa.String()),
        _need("state", sa.String()),
        _may("value", sa.Float()),
        _may("threshold", sa.Float()),
        _need("summary", sa.Text()),
        _may("fired_at", sa.Float()),
        _may("resolved_at", sa.Float()),
    )
    op.create_index("ix_incidents_time", "incidents", ["time"])
    op.create_table(
        "silences",
        sa.Column("id", sa.String, primary_key=True),
        _need("time", sa.Float()),
        _need("matchers", sa.JSON()),
        _need("reason", sa.Text()),
        _need("author", sa.String()),
        _need("expires_at", sa.Float()),
    )
    op.create_index("ix_silences_time", "silences", ["time"])
    op.create_table(
        "notifications",
        _id(),
        _need("time", sa.Float()),
        _need("channel", sa.String()),
        _need("kind", sa.String()),
        _may("alert", sa.String()),
        _may("incident_id", sa.String()),
        _need("outcome", sa.String()),
        _need("attempts", sa.Integer()),
        _may("error", sa.Text()),
    )
    op.create_index("ix_notifications_time", "notifications", ["time"])


def _jobs() -> None:
    op.create_table(
        "job_runs",
        _id(),
        _need("time", sa.Float()),
        _need("job", sa.String()),
        _need("outcome", sa.String()),
        _may("duration_seconds", sa.Float()),
        _may("error", sa.Text()),
    )
    op.create_index("ix_job_runs_time", "job_runs", ["time"])
