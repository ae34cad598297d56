"""Every block of the pool in physical order, and what one of them holds."""

import altair as alt
import numpy
import streamlit as st

from memd.client import ClientError
from memd_dashboard import address, frame, markup, palette, show
from memd_dashboard.map_component import pool_map as draw_map
from memd_dashboard.snapshot import JSON, Snapshot
from memd_dashboard.view import chart, pool_map

TOPICS = ("pool", "blocks", "pool_maps")
_FILTERS = ("active", "cached", "pinned", "quarantined", "free", "not committed")


def draw() -> None:
    """The page."""
    frame.header(
        "Pool map",
        "One cell is a block, the piece of memory that is taken from and given back to the device. "
        "A block is cut into pages, each holding the keys and values of a few tokens.",
    )
    with st.container(key="page"):
        frame.live(_map, 3.0)


def _map() -> None:
    snap = frame.snapshot(*TOPICS)
    if frame.missing(snap.reading("blocks"), "The map"):
        return
    then = _replayed(snap)
    answer, pool = (then, then["pool"]) if then else (snap.get("blocks"), snap.get("pool"))
    blocks, layout = pool_map.read(answer), snap.get("pool").get("layout") or {}
    if not len(blocks):
        frame.note("The pool has no blocks yet.")
        return
    left, right = st.columns([3, 1.1], gap="medium")
    with left:
        mode, shown = _controls()
        states = numpy.array([pool_map.STATES.index(name) for name in shown])
        dimmed = ~numpy.isin(blocks.states, states) if len(shown) < len(_FILTERS) else None
        chosen = _selected(len(blocks))
        picture = pool_map.picture(blocks, mode, dimmed)
        draw_map(blocks, picture, chosen, lambda block: address.choose("block", str(block)), "map")
        st.html(markup.legend(pool_map.legend(blocks, mode)))
    with right:
        _card(blocks, chosen, layout)
        if then is None:
            _actions(snap)
        else:
            with st.container(border=True):
                st.markdown(f"**As it was at {show.clock(then['time'], frame.zone())}**")
                frame.note("Move the slider to the right end to see the present again.")
    _figures(blocks, pool)
    _ages(blocks, pool)


def _replayed(snap: Snapshot) -> JSON | None:
    """The map that the slider asks for; None: the present one."""
    maps = snap.get("pool_maps")
    steps = pool_map.steps_back(maps)
    if len(steps) < 2:
        return None
    held: tuple[float, JSON] | None = st.session_state.get("map_then")
    back = st.select_slider(
        "Look back",
        steps,
        value=0.0,
        format_func=pool_map.back_text,
        help=f"A map is kept every {show.duration(maps['every_seconds'])}, for "
        f"{show.duration(maps['keep_seconds'])}.",
        key="map_back",
    )
    if not back:
        st.session_state.pop("map_then", None)
        st.session_state.pop("map_from", None)
        return None
    # The present from which it is reckoned stands still, so that the picture does too.
    moment = st.session_state.setdefault("map_from", snap.now) - back
    if held is None or held[0] != moment:
        try:
            held = moment, frame.act(lambda client: client.all_blocks(moment))
        except ClientError as error:
            oldest = show.clock(maps["times"][0], frame.zone())
            frame.note(
                f"No map that old is kept: the oldest is of {oldest}."
                if error.status == 404
                else error.message
            )
            return None
        st.session_state["map_then"] = held
    return held[1]


def _controls() -> tuple[str, list[str]]:
    left, right = st.columns([1, 2])
    known = list(pool_map.MODES)
    wanted = st.query_params.get("colour", "state")
    mode = left.selectbox(
        "Colour by",
        known,
        index=known.index(wanted) if wanted in known else 0,
        key="map_colour",
        help="\n\n".join(f"**{name}**: {words}" for name, words in pool_map.MODES.items()),
    )
    given = [each for each in st.query_params.get("states", "").split(",") if each in _FILTERS]
    shown = right.pills(
        "Show blocks that are",
        _FILTERS,
        selection_mode="multi",
        default=given or list(_FILTERS),
        key="map_states",
    )
    st.query_params["colour"] = mode
    st.query_params["states"] = ",".join(shown) if len(shown) < len(_FILTERS) else ""
    return mode, list(shown or _FILTERS)


def _selected(count: int) -> int | None:
    try:
        number = int(address.chosen("block") or "")
    except ValueError:
        return None
    return number if 0 <= number < count else None


def _card(blocks: pool_map.Blocks, number: int | None, layout: dict[str, object]) -> None:
    with st.container(border=True):
        if number is None:
            st.markdown("**No block selected**")
            frame.note("Click a cell to see what the block holds, and whether it may be evicted.")
            return
        st.markdown(f"**Block {number:,}**")
        st.html(markup.fields(pool_map.card(blocks, number, layout)))


def _actions(snap: Snapshot) -> None:
    with st.container(border=True):
        st.markdown("**Pool**")
        reclaim, audit = st.columns(2)
        _defrag(snap)
        with reclaim:
            if frame.button(
                snap,
                "Reclaim",
                "reclaim",
                "Evict cached pages down to the low mark.",
                width="stretch",
            ):
                frame.confirm(
                    "Reclaim to the low mark",
                    "The least recently used cached pages are evicted until the pool is at its low "
                    "mark. Requests that run are not touched; prompts may have to "
                    "be computed again.",
                    lambda client, reason, _: client.reclaim(reason=reason),
                    lambda answer: f"{show.count(answer.get('evicted_pages'))} pages evicted",
                    ("pool", "blocks"),
                )
        with audit:
            if frame.button(
                snap, "Audit", "audit", "Recount every page and repair leaks.", width="stretch"
            ):
                frame.confirm(
                    "Audit the pool",
                    "Every page is counted again from the requests and the prefix tree. Leaks are "
                    "repaired and reported. The step under way waits for it.",
                    lambda client, reason, _: client.audit(reason),
                    lambda answer: (
                        "Clean" if answer.get("clean") else "; ".join(answer["problems"])
                    ),
                    ("pool", "blocks"),
                )


def _defrag(snap: Snapshot) -> None:
    pool = snap.get("pool")
    if pool.get("defrag_running"):
        frame.note("Pages are being moved together.")
    elif frame.button(
        snap,
        "Defragment",
        "defrag",
        "Move pages together, so that whole blocks become empty.",
        width="stretch",
    ):
        frame.confirm(
            "Defragment the pool",
            "Pages move from the emptiest blocks into the fullest, a few in each step; blocks that "
            "become empty go back to the device. Requests go on, and nothing is evicted.",
            lambda client, reason, _: client.defrag(reason),
            lambda answer: (
                f"{show.count(answer.get('surplus_blocks'))} blocks are being emptied"
                if answer.get("running")
                else "Nothing to do: pages lie as densely as they can"
            ),
            ("pool", "blocks"),
        )


def _figures(blocks: pool_map.Blocks, pool: dict[str, object]) -> None:
    st.html(
        markup.cards(
            [markup.Card(name, value, text) for name, value, text in pool_map.summary(blocks, pool)]
        )
    )


def _ages(blocks: pool_map.Blocks, pool: dict[str, object]) -> None:
    cut = pool_map.low_mark_cut(blocks, pool)
    rows = pool_map.idle_histogram(blocks, cut)
    if not rows:
        return
    with st.container(border=True):
        st.markdown("**How long cached pages have been idle**")
        st.caption(
            f"Coming down to the low mark would evict {show.count(cut.pages)} pages"
            + (f", idle for {show.duration(cut.idle_seconds)} or longer." if cut.pages else ".")
        )
        kinds = ["stays", "evicted by the low mark"]
        st.altair_chart(
            alt.Chart(chart.data(rows), height=130 + chart.AXIS_PIXELS + chart.LEGEND_PIXELS)
            .mark_bar(cornerRadiusEnd=3)
            .encode(
                x=alt.X(
                    "name:N",
                    sort=[row["name"] for row in rows],
                    axis=alt.Axis(title=None, labelAngle=0),
                ),
                y=alt.Y("pages:Q", axis=chart.value_axis("pages")),
                color=alt.Color(
                    "goes:N",
                    scale=alt.Scale(domain=kinds, range=[palette.CACHED, palette.WARNING]),
                    legend=alt.Legend(title=None, orient="top"),
                ),
                tooltip=[alt.Tooltip("name:N", title="idle"), alt.Tooltip("pages:Q", format=",")],
            ),
            width="stretch",
        )
