"""Charts that several pages draw. Streamlit's theme colours text and axes, light or dark."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

Rows = Sequence[Mapping[str, Any]]


def data(rows: Rows) -> alt.Data:
    """Rows inside the chart, without pandas."""
    return alt.InlineData(values=[dict(row) for row in rows])


def value_axis(title: str, unit: str = "") -> alt.Axis:
    """Few grid lines; `unit` is `share`, `bytes`, `seconds` or empty."""
    expression = {
        "share": "format(datum.value, '.0%')",
        "bytes": "datum.value >= 1073741824 ? format(datum.value / 1073741824, '.3~g') + ' GiB' : "
        "datum.value >= 1048576 ? format(datum.value / 1048576, '.3~g') + ' MiB' : "
        "format(datum.value / 1024, '.3~g') + ' KiB'",
        "seconds": "datum.value >= 1 ? format(datum.value, '.3~g') + ' s' : "
        "format(1000 * datum.value, '.3~g') + ' ms'",
        "": "format(datum.value, '~s')",
    }[unit]
    return alt.Axis(
        title=title or None, labelExpr=expression, tickCount=4, domain=False, ticks=False
    )
