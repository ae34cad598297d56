"""What is chosen on a page. The address keeps it, so that a link or a reload shows it again.

The session holds it: parts of a page ask to be drawn again at any moment, and the browser sends
the address along that it has then. Sent before a choice came back to it, that is an older one.
"""

import time
from dataclasses import dataclass, field

import streamlit as st

_LATE_SECONDS = 10.0  # how long an address that was left may still come


@dataclass
class _Held:
    chosen: str | None
    left: dict[str | None, float] = field(default_factory=dict)  # when, by what was chosen before


def chosen(parameter: str) -> str | None:
    """What the page has chosen, or else what the address that was opened says."""
    told = st.query_params.get(parameter)
    held = _held(parameter)
    if told != held.chosen:
        if time.monotonic() - held.left.get(told, float("-inf")) < _LATE_SECONDS:
            _tell(parameter, held.chosen)
        else:  # a link was followed
            held.chosen = told
    return held.chosen


def choose(parameter: str, value: str | None) -> None:
    """Choose it, or nothing."""
    held = _held(parameter)
    now = time.monotonic()
    held.left[held.chosen] = held.left[st.query_params.get(parameter)] = now
    held.left.pop(value, None)
    held.chosen = value
    _tell(parameter, value)


def _held(parameter: str) -> _Held:
    start = _Held(st.query_params.get(parameter))
    held: _Held = st.session_state.setdefault(f"chosen-{parameter}", start)
    return held


def _tell(parameter: str, value: str | None) -> None:
    if value is None:
        st.query_params.pop(parameter, None)
    else:
        st.query_params[parameter] = value
