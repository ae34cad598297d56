"""Recorded traces: one row for each recording, and one for each sequence in it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make both tables."""
    op.create_table(
        "traces",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float, nullable=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("dropped", sa.BigInteger, nullable=False),
        sa.Column("header", sa.JSON, nullable=False),
    )
    op.create_index("ix_traces_time", "traces", ["time"])
    op.create_table(
        "trace_requests",
        sa.Column("id", _ROW_ID, primary_key=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("trace_id", sa.String, nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("namespace", sa.LargeBinary, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("output_tokens", sa.Integer, nullable=False),
        sa.Column("max_tokens", sa.Integer, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("duration_seconds", sa.Float, nullable=False),
        sa.Column("cached_tokens", sa.Integer, nullable=True),
        sa.Column("pages", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_trace_requests_time", "trace_requests", ["time"])
    op.create_index("ix_trace_requests_trace_id_time", "trace_requests", ["trace_id", "time"])
