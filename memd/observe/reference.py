"""The reference page of all metrics: `python -m memd.observe.reference > docs/metrics.md`."""

import sys
from collections.abc import Sequence

from memd.observe.family import Family
from memd.observe.registry import FAMILIES, SECTIONS

_INTRODUCTION = """\
# Metrics

Written by `python -m memd.observe.reference > docs/metrics.md`; a test keeps it true.

`GET /metrics` on the daemon's port, in Prometheus' text format or OpenMetrics. With a keys file it
asks for a key with the scope `metrics`. It is answered while the engine loads, restarts or hangs,
and while the daemon drains.

- Everything of the pool in one scrape is of one moment: the states of its pages add up.
- Counters and histograms exist from the first scrape with all values of their labels. What the
  engine counts begins at 0 again when the engine is replaced.
- What is not known is absent, never 0; the last column says when. *No report*: until the engine has
  reported, and while it is replaced. *Not told*: where NVML does not tell, as there is no NVIDIA
  driver, the engine is on the CPU, or the board cannot say; `GET /admin/v1/gpus` gives the reason.
- Label values are bounded. Nothing that a client sends becomes one.
- `gpu` is always 0: the one device of the daemon. `memd_gpu_info` tells which board that is.
- Besides these, `process_*` tell of the api process, as of any program: its start, memory, time on
  the CPU and open files.

How to read the pool: `memd_pool_active_ratio` is pressure, and what alerts compare with.
`memd_pool_occupied_ratio` moves between the watermarks when all is well. Free and cached pages are
the room for new prompts. `memd_regretted_pages_total` over `memd_evicted_pages_total` is the share
of evictions that were wrong; `memd_direct_reclaimed_pages_total` grows when reclaim comes too late.
`memd_prefix_hit_tokens_total` over `memd_prefix_query_tokens_total` is the hit ratio.
"""
_HEAD = """
| metric | type | unit | labels | meaning | absent |
|---|---|---|---|---|---|
"""


def metrics_page() -> str:
    """The page, as Markdown."""
    parts = [_INTRODUCTION]
    for title, families in SECTIONS.items():
        rows = "".join(f"{_row(family)}\n" for family in families)
        parts.append(f"\n## {title}\n{_HEAD}{rows}")
    parts.append(f"\n## Buckets\n\n| upper bounds | histograms |\n|---|---|\n{_buckets()}")
    return "".join(parts)


def _row(family: Family) -> str:
    labels = "<br>".join(f"`{name}`: {_values(bound)}" for name, bound in family.labels.items())
    cells = (f"`{family.scraped_name}`", family.kind, family.unit, labels, family.help)
    return f"| {' | '.join(cells)} | {family.absent} |"


def _values(bound: Sequence[str] | str) -> str:
    if isinstance(bound, str):
        return bound
    return "a live setting" if "memory.watermark.high" in bound else ", ".join(bound)


def _buckets() -> str:
    names: dict[tuple[float, ...], list[str]] = {}
    for family in FAMILIES.values():
        if family.kind == "histogram":
            names.setdefault(tuple(family.buckets), []).append(f"`{family.name}`")
    return "".join(
        f"| {' '.join(f'{bound:g}' for bound in bounds)} | {', '.join(same)} |\n"
        for bounds, same in names.items()
    )


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
