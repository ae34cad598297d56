"""What a metric is called, counts and carries: one declaration, from which all else follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]
Bound = tuple[str, ...] | str  # all values of a label, or in words what there is one value for

_UNITS = {
    "bytes": "bytes",
    "seconds": "seconds",
    "ratio": "share, 0 to 1",
    "pages": "pages",
    "blocks": "blocks",
    "tokens": "tokens",
    "rows": "rows",
    "celsius": "°C",
    "watts": "watts",
    "joules": "joules",
}


@dataclass(frozen=True)
class Family:
    """One metric family.

    Args:
        name: As scraped, without the `_total` of a counter and the suffixes of a histogram.
        kind: Of metric.
        help: A phrase for people.
        labels: By name, in order: all its values, or what bounds them.
        buckets: Of a histogram: upper bounds, ascending, without +Inf.
        absent: When a scrape lacks it, in words; "": never.
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, Bound] = field(default_factory=dict)
    buckets: Sequence[float] = ()
    absent: str = ""

    @property
    def scraped_name(self) -> str:
        """The name in rules and expressions; a histogram's has `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names of its samples in a scrape."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "count", "sum"))
        return (self.scraped_name,)

    @property
    def unit(self) -> str:
        """What a value counts, by the unit in the name."""
        if self.help.startswith("1"):
            return "1 or 0"
        if self.name.endswith("timestamp_seconds"):
            return "Unix seconds"
        words = [word for word in self.name.split("_") if word in _UNITS]
        return _UNITS[words[-1]] if words else "count"
