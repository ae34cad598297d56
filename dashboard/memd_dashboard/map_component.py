"""The picture of the pool in the browser: hover tells a block, a click selects it.

The daemon's data reaches the script as numbers and a PNG only, never as HTML.
"""

import base64
from collections.abc import Callable
from typing import Any

import streamlit as st

from memd_dashboard.view.pool_map import STATES, Blocks, columns_of

_CSS = """
.map {position: relative; width: 100%; line-height: 0}
canvas {width: 100%; cursor: pointer; border-radius: 4px}
.tip {position: absolute; display: none; pointer-events: none; z-index: 9; line-height: 1.35;
  padding: .3rem .55rem; border-radius: .3rem; font-size: .8rem; white-space: nowrap;
  background: var(--st-secondary-background-color); color: var(--st-text-color);
  border: 1px solid var(--st-border-color); font-family: var(--st-font)}
"""
_HTML = '<div class="map"><canvas></canvas><div class="tip"></div></div>'
_JS = """
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector('.map');
  const canvas = root.querySelector('canvas'), tip = root.querySelector('.tip');
  const { count, columns, names } = data;
  const rows = Math.ceil(count / columns);
  const state = bytes(data.states), filled = bytes(data.filled);
  const image = new Image();
  let cell = 8;

  function draw() {
    const width = root.clientWidth;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    cell = Math.min(32, width / columns);
    canvas.style.width = cell * columns + 'px';
    canvas.style.height = cell * rows + 'px';
    canvas.width = Math.round(cell * columns * ratio);
    canvas.height = Math.round(cell * rows * ratio);
    const ink = canvas.getContext('2d');
    ink.imageSmoothingEnabled = false;
    ink.drawImage(image, 0, 0, canvas.width, canvas.height);
    const side = cell * ratio, gap = Math.max(1, Math.min(2, side / 8));
    const line = number => Math.round(number * side - gap / 2);
    for (let c = 1; c < columns; c++) ink.clearRect(line(c), 0, gap, canvas.height);
    for (let r = 1; r < rows; r++) ink.clearRect(0, line(r), canvas.width, gap);
    if (data.selected !== null && data.selected < count) {
      const x = (data.selected % columns) * side, y = Math.floor(data.selected / columns) * side;
      ink.lineWidth = Math.max(2, side / 6);
      ink.strokeStyle = getComputedStyle(root).color;
      ink.strokeRect(x + 1, y + 1, side - 2, side - 2);
    }
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / cell);
    const row = Math.floor((event.clientY - box.top) / cell);
    const block = row * columns + column;
    return column >= 0 && column < columns && row >= 0 && block < count ? block : null;
  }

  canvas.onmousemove = event => {
    const block = at(event);
    tip.style.display = block === null ? 'none' : 'block';
    if (block === null) return;
    tip.textContent = `block ${block} · ${names[state[block]]} · ${filled[block]} % full`;
    const x = event.clientX - root.getBoundingClientRect().left;
    tip.style.left = Math.min(x + 14, root.clientWidth - tip.offsetWidth - 4) + 'px';
    tip.style.top = event.clientY - root.getBoundingClientRect().top + 16 + 'px';
  };
  canvas.onmouseleave = () => { tip.style.display = 'none'; };
  canvas.onclick = event => {
    const block = at(event);
    if (block !== null) setTriggerValue('block', block);
  };
  image.onload = draw;
  image.src = 'data:image/png;base64,' + data.png;
  const watcher = new ResizeObserver(draw);
  watcher.observe(root);
  return () => watcher.disconnect();
}
"""

_render = st.components.v2.component("memd.pool_map", html=_HTML, css=_CSS, js=_JS)


def pool_map(
    blocks: Blocks, png: bytes, selected: int | None, on_click: Callable[[int], None], key: str
) -> None:
    """Draw it; `on_click` is called with a block's number before the page is drawn again."""

    def clicked() -> None:
        block = int(st.session_state[key].block)
        if block < len(blocks):
            on_click(block)

    def text(values: Any) -> str:
        return base64.b64encode(values.astype("uint8").tobytes()).decode()

    _render(
        key=key,
        data={
            "png": base64.b64encode(png).decode(),
            "count": len(blocks),
            "columns": columns_of(len(blocks)),
            "states": text(blocks.states),
            "filled": text((100 * blocks.occupancy).round()),
            "names": list(STATES),
            "selected": selected,
        },
        on_block_change=clicked,
    )
