"""Why prompt tokens of a request were not found in the cache."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns."""
    for name in ("missed_tokens", "missed_evicted_tokens", "first_missing_token"):
        op.add_column("requests", sa.Column(name, sa.Integer(), nullable=True))
    op.add_column("requests", sa.Column("miss_reason", sa.String(), nullable=True))
