"""What a rule would have done with another limit."""

from collections.abc import Sequence
from datetime import tzinfo
from typing import Any

import altair as alt

from memd_dashboard import palette, show
from memd_dashboard.markup import Card
from memd_dashboard.snapshot import JSON
from memd_dashboard.view import chart
from memd_dashboard.view.alerts import figure

FORMS = {"as_it_is": "as it is", "tried": "tried"}
BACK = {"hour": 3600.0, "day": 86_400.0, "7 days": 7 * 86_400.0}


def triable(rows: Sequence[JSON]) -> list[JSON]:
    """The rules that the daemon evaluates itself."""
    return [row for row in rows if "memd" in (row.get("evaluated_by") or ())]


def limit(text: str) -> float | None:
    """What was typed as a limit; None: as it is.

    Raises:
        ValueError: it is no number.
    """
    text = text.strip()
    if not text:
        return None
    number = text.removesuffix("%")
    try:
        return float(number) / (100 if number != text else 1)
    except ValueError:
        raise ValueError(f"{text!r} is not a number, such as 0.2 or 5%") from None


def cards(answer: JSON) -> list[Card]:
    """How often a rule fired, as it is and as changed."""
    found = []
    for form, name in FORMS.items():
        told = answer[form]
        sign = ">" if answer["direction"] == "above" else "<"
        known = told["threshold"] is not None
        threshold = figure(told["threshold"], answer.get("unit")) if known else "measured"
        condition = f"{sign} {threshold} for {show.duration(told['for_seconds'])}"
        found += [
            Card(f"Times fired, {name}", show.count(told["fired"]), more=condition),
            Card(
                f"Firing, {name}",
                show.duration(told["firing_seconds"]) if told["fired"] else "never",
                more=f"pending, and did not last: {show.count(told['pending_only'])}",
            ),
        ]
    return found


def coverage(answer: JSON) -> str:
    """How much of the time there are samples of."""
    whole = answer["until"] - answer["since"]
    known = show.share(min(1.0, answer["covered_seconds"] / whole))
    return f"There are samples of {known} of this time, {show.count(answer['moments'])} of them."


def firings(answer: JSON, zone: tzinfo | None) -> alt.Chart:
    """When it fired: a line for each form."""
    rows: list[dict[str, Any]] = [
        {
            "form": name,
            "start": 1000 * each["fired_at"],
            "end": 1000 * (each["resolved_at"] or answer["until"]),
            "when": show.date(each["fired_at"], zone),
            "lasted": show.duration((each["resolved_at"] or answer["until"]) - each["fired_at"]),
            "peak": figure(each["peak"], answer.get("unit")),
        }
        for form, name in FORMS.items()
        for each in answer[form]["firings"]
    ]
    span = [1000 * answer["since"], 1000 * answer["until"]]
    drawn: alt.Chart = (
        alt.Chart(chart.data(rows), height=70 + chart.AXIS_PIXELS)
        .mark_bar(height=18, cornerRadius=2, stroke=palette.BAD, strokeWidth=1.5)
        .encode(
            x=alt.X(
                "start:T",
                scale=alt.Scale(domain=span, nice=False),
                axis=alt.Axis(title=None, grid=True, tickCount=7),
            ),
            x2="end:T",
            y=alt.Y(
                "form:N",
                scale=alt.Scale(domain=list(FORMS.values())),
                axis=alt.Axis(title=None, domain=False, ticks=False),
            ),
            color=alt.value(palette.BAD),
            tooltip=[
                alt.Tooltip("when:N", title="fired"),
                alt.Tooltip("lasted:N", title="for"),
                alt.Tooltip("peak:N", title="peak"),
            ],
        )
    )
    return drawn
