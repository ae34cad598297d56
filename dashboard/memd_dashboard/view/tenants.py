"""Tenants: their quota, what they hold, whether the sharing is fair."""

from collections.abc import Sequence
from typing import Any

from memd_dashboard import palette, show
from memd_dashboard.markup import Bar
from memd_dashboard.snapshot import JSON

NAMELESS = "no tenant"


def table(rows: Sequence[JSON]) -> list[dict[str, Any]]:
    """One row for each tenant, the largest holder first."""
    held = sum(row.get("used_bytes") or 0 for row in rows)
    served = sum(row.get("computed_tokens") or 0 for row in rows)
    return [
        {
            "tenant": name_of(row),
            "used": show.size(row.get("used_bytes")),
            "quota": show.size(row["quota_bytes"]) if row.get("quota_bytes") else "no limit",
            "of its quota": _share(row.get("used_bytes"), row.get("quota_bytes")),
            "pinned": show.size(row.get("pinned_bytes")),
            "of memory": _share(row.get("used_bytes"), held),
            "of tokens": _share(row.get("computed_tokens"), served),
            "weight": row.get("weight"),
            "running": row.get("running"),
            "waiting": row.get("waiting"),
            "refused": row.get("rejections"),
        }
        for row in sorted(rows, key=lambda row: -(row.get("used_bytes") or 0))
    ]


def name_of(row: JSON) -> str:
    """Of a tenant; requests without a key have none."""
    return str(row.get("name") or NAMELESS)


def _share(part: float | None, whole: float | None) -> str:
    return show.share(part / whole) if part is not None and whole else show.UNKNOWN


def fairness(rows: Sequence[JSON]) -> list[Bar]:
    """Of each tenant its share of the memory held, and of the tokens computed."""
    kinds = (
        ("memory", "used_bytes", palette.ACTIVE),
        ("tokens", "computed_tokens", palette.WARNING),
    )
    whole = {field: sum(row.get(field) or 0 for row in rows) for _, field, _ in kinds}
    return [
        Bar(f"{name_of(row)}: {kind}", share, show.share(share), colour=colour)
        for row in rows
        for kind, field, colour in kinds
        if whole[field]
        for share in [(row.get(field) or 0) / whole[field]]
    ]
