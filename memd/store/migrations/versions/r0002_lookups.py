"""Indexes for what people look up, and more of what is told of a change of settings.

Without the index a chart of one metric reads the samples of all metrics in its range.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_LOOKUPS = (("events", "kind"), ("samples", "metric"), ("requests", "tenant"), ("job_runs", "job"))


def upgrade() -> None:
    """Add them."""
    for table, name in _LOOKUPS:
        op.create_index(f"ix_{table}_{name}_time", table, [name, "time"])
    columns: tuple[sa.Column[Any], ...] = (
        sa.Column("confirm_by", sa.Float(), nullable=True),
        sa.Column("source", sa.String(), nullable=True),
        sa.Column("persist", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    for column in columns:
        op.add_column("settings_revisions", column)
