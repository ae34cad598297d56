"""Asks the daemon, on one thread for each address and key, only for what open pages want.

Scripts never wait for the daemon: they read the last answers. So a daemon that hangs freezes no
page, and ten open pages cost it what one does.
"""

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from memd.client import Client, ClientError, Unreachable
from memd_dashboard.scrape import Scrape
from memd_dashboard.snapshot import TOPICS, Reading, Snapshot

TIMEOUT_SECONDS = 2.0
FIRST_ANSWER_SECONDS = 1.5  # a page that has nothing to show yet waits this long for it
WANTED_SECONDS = 12.0  # a topic that no page has asked for since is not fetched
IDLE_SECONDS = 30.0  # without any page the thread ends
SCRAPES_KEPT_SECONDS = 600.0
# A question is repeated after this many times the time its answer took, so that a page cannot
# cost a slow daemon more than a small share of its time.
PAUSE_FACTOR = 20.0
LONGEST_PAUSE_SECONDS = 30.0
RETRY_SECONDS = 1.0


class Feed:
    """The last answers of one daemon to one key.

    Args:
        url: Of the daemon.
        api_key: Where it asks for one.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self._api_key = api_key
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._readings: dict[str, Reading] = {}
        self._scrapes: deque[Scrape] = deque()
        self._wanted: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._looked_at = 0.0
        self._answered_at: float | None = None
        self._heard: float | None = None  # the same, monotonic
        self._unreachable_since: float | None = None
        self._problem: str | None = None
        self._closing = False

    def client(self, timeout_seconds: float = 10.0) -> Client:
        """For an action; the caller closes it."""
        return Client(self.url, self._api_key, timeout_seconds=timeout_seconds)

    def snapshot(self, topics: Iterable[str]) -> Snapshot:
        """The last answers to these topics, which are kept fresh from now on for a while."""
        names = ("status", *topics)
        with self._lock:
            since = time.monotonic() - WANTED_SECONDS
            new = [name for name in names if self._wanted.get(name, -math.inf) < since]
            for name in new:  # what was last asked for long ago is not shown as if it were new
                self._readings.pop(name, None)
                self._due.pop(name, None)
            self._want(names)
            if new:
                self._changed.wait_for(
                    lambda: (
                        all(name in self._readings for name in names)
                        or self._unreachable_since is not None
                    ),
                    FIRST_ANSWER_SECONDS,
                )
            return Snapshot(
                self.url,
                time.time(),
                {name: self._readings[name] for name in names if name in self._readings},
                tuple(self._scrapes),
                self._answered_at,
                None if self._heard is None else time.monotonic() - self._heard,
                self._unreachable_since,
                self._problem,
            )

    def refresh(self, *topics: str) -> None:
        """Ask again at once, as after an action, and wait a moment for the answers."""
        asked_at = time.time()
        with self._lock:
            self._want(topics)
            for name in topics:
                self._due[name] = 0.0
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: all(
                    (self._readings.get(name, Reading()).at or 0.0) >= asked_at for name in topics
                ),
                FIRST_ANSWER_SECONDS,
            )

    @property
    def idle(self) -> bool:
        """Whether no page has looked for a while."""
        return time.monotonic() - self._looked_at > IDLE_SECONDS

    def close(self) -> None:
        """End the thread and its connections."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _want(self, names: Iterable[str]) -> None:
        now = time.monotonic()
        self._looked_at = now
        for name in names:
            self._wanted[name] = now
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name="memd-feed", daemon=True)
            self._thread.start()
        elif any(name not in self._readings for name in names):
            self._changed.notify_all()

    def _run(self) -> None:
        with Client(self.url, self._api_key, timeout_seconds=TIMEOUT_SECONDS) as client:
            while (name := self._wait_for_work()) is not None:
                self._ask(client, name)

    def _wait_for_work(self) -> str | None:
        """The topic to ask for now, the state before all others; None: end."""
        with self._lock:
            while True:
                now = time.monotonic()
                if self._closing or self.idle:
                    self._thread = None
                    self._wanted.clear()
                    return None
                wanted = [
                    name
                    for name in TOPICS
                    if now - self._wanted.get(name, -math.inf) < WANTED_SECONDS
                ]
                due = {name: self._due.get(name, 0.0) for name in wanted}
                if due.get("status", now + 1.0) <= now:
                    return "status"
                name = min(due, key=lambda each: due[each], default=None)
                if name is not None and due[name] <= now:
                    return name
                soonest = now + 1.0 if name is None else due[name]
                self._changed.wait(min(1.0, max(0.01, soonest - now)))

    def _ask(self, client: Client, name: str) -> None:
        topic, started = TOPICS[name], time.monotonic()
        value: Any = None
        error: ClientError | None = None
        try:
            value = topic.ask(client)
        except ClientError as failure:
            error = failure
        now = time.monotonic()
        pause = max(topic.every_seconds, min(PAUSE_FACTOR * (now - started), LONGEST_PAUSE_SECONDS))
        with self._lock:
            self._record(name, value, error)
            # The state is asked for every second even when answers take long.
            self._due[name] = now + (topic.every_seconds if name == "status" else pause)
            if isinstance(error, Unreachable):
                # Whatever else is due waits for the state to come first.
                self._due.update(dict.fromkeys(TOPICS.keys() - {"status"}, now + RETRY_SECONDS))
                self._due["status"] = now + RETRY_SECONDS / 2
            self._changed.notify_all()

    def _record(self, name: str, value: Any, error: ClientError | None) -> None:
        now, before = time.time(), self._readings.get(name, Reading())
        if isinstance(error, Unreachable):
            self._unreachable_since = self._unreachable_since or now
            self._problem = error.message
            return
        self._answered_at, self._heard = now, time.monotonic()
        self._unreachable_since = self._problem = None
        if error is None:
            self._readings[name] = Reading(value, now)
        elif error.status == 404:
            self._readings[name] = Reading(missing=True, problem=error.message)
        else:
            self._readings[name] = replace(before, problem=error.message)
        if isinstance(value, Scrape):
            self._scrapes.append(value)
            while value.at - self._scrapes[0].at > SCRAPES_KEPT_SECONDS:
                self._scrapes.popleft()


class Feeds:
    """The feeds of this process; sessions with the same address and key share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feeds: dict[tuple[str, bytes], Feed] = {}

    def of(self, url: str, api_key: str | None) -> Feed:
        """The feed of an address and a key; those that nobody reads are dropped."""
        name = url, hashlib.sha256((api_key or "").encode()).digest()
        with self._lock:
            if name not in self._feeds:
                self._feeds = {key: feed for key, feed in self._feeds.items() if not feed.idle}
                self._feeds[name] = Feed(url, api_key)
            return self._feeds[name]
