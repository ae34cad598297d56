"""Charts that several pages draw. Streamlit's theme colours text and axes, light or dark."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

Rows = Sequence[Mapping[str, Any]]
# What Streamlit takes of a chart's height for itself and the axis below, and for a legend above.
AXIS_PIXELS = 50
LEGEND_PIXELS = 40


def data(rows: Rows) -> alt.Data:
    """Rows inside the chart, without pandas."""
    return alt.InlineData(values=[dict(row) for row in rows])


def time_axis(ticks: int) -> alt.Axis:
    """Hours and minutes, for a chart of an hour or so."""
    return alt.Axis(title=None, grid=False, tickCount=ticks, format="%H:%M", labelOverlap=True)


def value_axis(title: str, unit: str = "") -> alt.Axis:
    """Few grid lines; `unit` is `share`, `bytes`, `seconds` or empty."""
    expression = {
        "share": "format(datum.value, '.0%')",
        "bytes": "datum.value >= 1073741824 ? format(datum.value / 1073741824, '.3~g') + ' GiB' : "
        "datum.value >= 1048576 ? format(datum.value / 1048576, '.3~g') + ' MiB' : "
        "format(datum.value / 1024, '.3~g') + ' KiB'",
        "seconds": "datum.value >= 1 ? format(datum.value, '.3~g') + ' s' : "
        "format(1000 * datum.value, '.3~g') + ' ms'",
        # The letter of a thousandth is taken for a million.
        "": "abs(datum.value) < 1 ? format(datum.value, '.2~g') : format(datum.value, '~s')",
    }[unit]
    return alt.Axis(
        title=title or None, labelExpr=expression, tickCount=4, domain=False, ticks=False
    )
