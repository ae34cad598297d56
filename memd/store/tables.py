"""The tables of the database, typed. `memd/store/migrations` makes them, and a test compares.

Times are Unix seconds. A column that is null means: not known. No table holds text of prompts or
answers. Rows of `KEYED` tables replace the row of the same key; all others are only ever added.
"""

import json
from typing import Any, Literal, get_args

from sqlalchemy import (
    JSON,
    BigInteger,
    Dialect,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

TableName = Literal[
    "settings_revisions",
    "events",
    "samples",
    "requests",
    "incidents",
    "silences",
    "notifications",
    "job_runs",
    "traces",
    "trace_requests",
]
TABLES: tuple[TableName, ...] = get_args(TableName)
KEYED: frozenset[TableName] = frozenset({"settings_revisions", "incidents", "silences", "traces"})

# SQLite numbers the rows of an INTEGER primary key itself, and of no other.
_RowId = BigInteger().with_variant(Integer(), "sqlite")


class Labels(TypeDecorator[dict[str, str]]):
    """Labels of a series as JSON text with sorted keys, so that equal labels are equal text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: dict[str, str] | None, dialect: Dialect) -> str | None:
        """To the database."""
        return None if value is None else json.dumps(value, sort_keys=True, ensure_ascii=False)

    def process_result_value(self, value: str | None, dialect: Dialect) -> dict[str, str] | None:
        """From the database."""
        return None if value is None else json.loads(value)


class Base(DeclarativeBase):
    """Of all tables; names of constraints and indexes are the same on every database."""

    metadata = MetaData(
        naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"}
    )
    type_annotation_map = {dict[str, Any]: JSON, list[dict[str, Any]]: JSON}  # noqa: RUF012


class SettingsRevision(Base):
    """One change of live settings, or one start."""

    __tablename__ = "settings_revisions"

    revision: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    time: Mapped[float]
    who: Mapped[str]
    reason: Mapped[str] = mapped_column(Text)
    kind: Mapped[str]
    changes: Mapped[dict[str, Any]]  # dotted key -> {"old", "new"}, in base units
    undoes: Mapped[int | None] = mapped_column(BigInteger)
    confirm_by: Mapped[float | None]  # reverts by itself then, unless confirmed
    source: Mapped[str | None]  # cli, api, dashboard, file or schedule
    persist: Mapped[bool] = mapped_column(server_default=false())  # kept over a restart


class Event(Base):
    """Something that happened to the daemon."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "time"), Index(None, "kind", "time"))

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    time: Mapped[float]
    kind: Mapped[str] = mapped_column(String(64))
    message: Mapped[str] = mapped_column(Text)
    details: Mapped[dict[str, Any]]


class Sample(Base):
    """The value of one series at one time; `metric` is its name in the metrics registry."""

    __tablename__ = "samples"
    __table_args__ = (Index(None, "time"), Index(None, "metric", "time"))

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    time: Mapped[float]
    metric: Mapped[str]
    labels: Mapped[dict[str, str]] = mapped_column(Labels)
    value: Mapped[float]


class FinishedRequest(Base):
    """One request for text, after its end. Of what was refused the counts are null."""

    __tablename__ = "requests"
    __table_args__ = (Index(None, "time"), Index(None, "tenant", "time"))

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    time: Mapped[float]  # of its end
    received_at: Mapped[float]
    request_id: Mapped[str]  # as in its answer
    client_id: Mapped[str | None]  # the client's X-Request-Id
    tenant: Mapped[str]
    endpoint: Mapped[str]
    model: Mapped[str]
    outcome: Mapped[str]
    finish_reason: Mapped[str | None]  # of its sequences, by commas where they differ
    priority: Mapped[int | None]
    sequences: Mapped[int | None]
    prompt_tokens: Mapped[int | None]
    generated_tokens: Mapped[int | None]
    cached_device_tokens: Mapped[int | None]
    cached_host_tokens: Mapped[int | None]
    missed_tokens: Mapped[int | None]  # these: of the sequence that missed most
    missed_evicted_tokens: Mapped[int | None]  # of those: were there once
    first_missing_token: Mapped[int | None]
    miss_reason: Mapped[str | None]
    peak_pages: Mapped[int | None]  # held by its sequences, shared ones counted for each
    preemptions: Mapped[int | None]
    queue_seconds: Mapped[float | None]  # these two: of the sequence that had the longest
    stall_seconds: Mapped[float | None]
    time_to_first_token_seconds: Mapped[float | None]
    duration_seconds: Mapped[float]


class Incident(Base):
    """One life of an alert, from pending to resolved."""

    __tablename__ = "incidents"
    __table_args__ = (Index(None, "time"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    time: Mapped[float]  # since when its condition holds
    name: Mapped[str]
    labels: Mapped[dict[str, str]] = mapped_column(Labels)
    severity: Mapped[str]
    state: Mapped[str]
    value: Mapped[float | None]
    threshold: Mapped[float | None]
    summary: Mapped[str] = mapped_column(Text)
    fired_at: Mapped[float | None]
    resolved_at: Mapped[float | None]


class Silence(Base):
    """Alerts that nobody is told of for a while."""

    __tablename__ = "silences"
    __table_args__ = (Index(None, "time"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    time: Mapped[float]  # when it was made
    matchers: Mapped[list[dict[str, Any]]]
    reason: Mapped[str] = mapped_column(Text)
    author: Mapped[str]
    expires_at: Mapped[float]  # moved to the moment when it is taken back


class Notification(Base):
    """One message to one channel, sent or not."""

    __tablename__ = "notifications"
    __table_args__ = (Index(None, "time"),)

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    time: Mapped[float]
    channel: Mapped[str]
    kind: Mapped[str]  # firing, resolved or test
    alert: Mapped[str | None]
    incident_id: Mapped[str | None]
    outcome: Mapped[str]
    attempts: Mapped[int]
    error: Mapped[str | None] = mapped_column(Text)


class JobRun(Base):
    """One run of a job, or one that should have been."""

    __tablename__ = "job_runs"
    __table_args__ = (Index(None, "time"), Index(None, "job", "time"))

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    time: Mapped[float]  # of its start
    job: Mapped[str]
    outcome: Mapped[str]
    duration_seconds: Mapped[float | None]
    error: Mapped[str | None] = mapped_column(Text)


class RecordedTrace(Base):
    """One recording of traffic; `header` is that of its export."""

    __tablename__ = "traces"
    __table_args__ = (Index(None, "time"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    time: Mapped[float]  # of its start
    updated_at: Mapped[float]
    ended_at: Mapped[float | None]  # null: it goes on, or its daemon died
    kind: Mapped[str] = mapped_column(String(16))  # manual or continuous
    who: Mapped[str]
    reason: Mapped[str] = mapped_column(Text)
    dropped: Mapped[int] = mapped_column(BigInteger)  # sequences for which there was no room
    header: Mapped[dict[str, Any]]


class TraceSequence(Base):
    """One sequence of a recording; digests are 8 bytes, those of pages one after the other."""

    __tablename__ = "trace_requests"
    __table_args__ = (Index(None, "time"), Index(None, "trace_id", "time"))

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    time: Mapped[float]  # of its arrival
    trace_id: Mapped[str]
    request: Mapped[bytes] = mapped_column(LargeBinary)
    namespace: Mapped[bytes] = mapped_column(LargeBinary)
    tenant: Mapped[str]
    priority: Mapped[int]
    prompt_tokens: Mapped[int]
    output_tokens: Mapped[int]
    max_tokens: Mapped[int]
    outcome: Mapped[str] = mapped_column(String(16))
    duration_seconds: Mapped[float]
    cached_tokens: Mapped[int | None]
    pages: Mapped[bytes] = mapped_column(LargeBinary)


def table(name: TableName) -> Table:
    """A table by its name."""
    return Base.metadata.tables[name]
