"""What must be true after a soak: memory flat, counters consistent."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

WARM_UP_SHARE = 0.25  # of the run
MAX_GROWTH = 0.05  # of the mean, over the run's length
MIN_SAMPLES = 10
IDLE_SECONDS = 20.0
MIB = 2**20


class Memory:
    """Resident memory of a process by time; begins anew with another process."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.started_at = time.monotonic()
        self.lives: list[list[tuple[float, int]]] = []

    def take(self, pid: int) -> None:
        """Sample a process now; nothing if it is gone."""
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        resident = next((line for line in status.splitlines() if line.startswith("VmRSS:")), None)
        if resident is None:  # a zombie
            return
        if pid != self.pid:
            self.pid = pid
            self.lives.append([])
        self.lives[-1].append((time.monotonic() - self.started_at, int(resident.split()[1]) * 1024))

    @property
    def longest(self) -> list[tuple[float, int]]:
        """The samples of the process that lived longest."""
        return max(self.lives, key=len, default=[])


def check_memory(side: str, memory: Memory, run_seconds: float) -> tuple[str, list[str]]:
    """A line about the memory's growth after the warm-up, and a violation if it is too large.

    Growth is the slope of a least-squares line, over the length of the run, by the mean. Lives that
    end before they have MIN_SAMPLES after the warm-up are not judged.
    """
    samples = memory.longest
    if not samples:
        return "unknown", [f"the memory of the {side} process was never seen"]
    begins_at = samples[0][0] + WARM_UP_SHARE * run_seconds
    settled = [sample for sample in samples if sample[0] >= begins_at]
    if len(settled) < MIN_SAMPLES:
        return f"unknown: no life of {MIN_SAMPLES} samples after the warm-up", []
    times, sizes = zip(*settled, strict=True)
    mean_time, mean_size = sum(times) / len(times), sum(sizes) / len(sizes)
    slope = sum((t - mean_time) * (s - mean_size) for t, s in settled) / sum(
        (t - mean_time) ** 2 for t in times
    )
    growth = slope * run_seconds / mean_size
    line = (
        f"{sizes[0] / MIB:.0f} to {sizes[-1] / MIB:.0f} MiB after the warm-up, "
        f"slope {slope * 60 / MIB:+.3f} MiB/min, {growth:+.1%} a run"
    )
    if growth > MAX_GROWTH:
        return line, [f"the {side} process grows: {line}, the limit is {MAX_GROWTH:.0%}"]
    return line, []


class Metrics:
    """One scrape."""

    def __init__(self, samples: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
        self._samples = samples

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name with these labels; KeyError if there is none."""
        found = [
            value
            for (sample, have), value in self._samples.items()
            if sample == name and labels.items() <= have
        ]
        if not found:
            raise KeyError(name)
        return sum(found)

    @property
    def waiting(self) -> float:
        """Requests that wait."""
        return self.total("memd_requests_waiting")


def read_metrics(text: str) -> Metrics:
    """Parse a scrape."""
    return Metrics(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


def check_counters(
    metrics: Metrics, outcomes: Counter[str], sequences: Counter[str], kills: int
) -> list[str]:
    """Violations of the sums that must hold when nothing runs.

    Args:
        metrics: Scraped when idle.
        outcomes: Of the requests, as their clients saw them.
        sequences: The same, counted in sequences.
        kills: How often the engine was killed, which resets what it counts.
    """
    total = metrics.total
    hits, misses = total("memd_prefix_hit_tokens_total"), total("memd_prefix_miss_tokens_total")
    queries = total("memd_prefix_query_tokens_total")
    pages = {
        state: total("memd_pool_pages", state=state)
        for state in ("active", "cached", "quarantined", "free")
    }
    capacity = total("memd_pool_capacity_pages")
    answered = sum(
        total("memd_requests_total", endpoint=endpoint)
        for endpoint in ("completions", "chat_completions")
    )
    sent, cut = sum(outcomes.values()), outcomes["cut"]
    sums = [
        (queries == hits + misses, f"{queries:g} queries, {hits:g} hits + {misses:g} misses"),
        (sum(pages.values()) == capacity, f"{pages} pages of {capacity:g}"),
        (pages["active"] == 0, f"{pages['active']:g} pages are held"),
        # A client that hangs up at once may not have been heard at all.
        (sent - cut <= answered <= sent, f"{answered:g} requests counted, {sent} sent, {cut} cut"),
    ]
    restarts = total("memd_engine_restarts_total")
    sums.append((restarts == kills, f"{restarts:g} restarts, {kills} kills"))
    if not kills:
        ended = {
            reason: total("memd_finished_sequences_total", reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        whole, every = ended["stop"] + ended["length"], sum(ended.values())
        least, most = sequences["finished"], sum(sequences.values())
        sums += [
            (ended["error"] == 0, f"{ended['error']:g} sequences ended with an error"),
            (whole >= least, f"{whole:g} sequences finished, clients saw {least}"),
            (least <= every <= most, f"{ended} sequences, clients sent {most} and saw {least}"),
        ]
    return [f"counters disagree: {text}" for holds, text in sums if not holds]


def await_idle(http: httpx2.Client) -> dict[str, Any]:
    """The metrics once nothing runs; SystemExit when something goes on."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        metrics = read_metrics(http.get("/metrics").text)
        ready = http.get("/health/ready").status_code == 200
        if ready and metrics.total("memd_requests_running") == 0 and not metrics.waiting:
            return {"metrics": metrics, "audit": http.post("/admin/v1/pool/audit", json={}).json()}
        if time.monotonic() > deadline:
            raise SystemExit(f"not idle {IDLE_SECONDS:g} s after the last request")
        time.sleep(0.2)
