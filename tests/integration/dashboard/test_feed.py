"""The feed: pages never wait for the daemon, and a daemon that hangs or goes is told as such."""

import threading
import time
from pathlib import Path

import pytest
import recorded
from memd_dashboard.feed import Feed, Feeds
from memd_dashboard.snapshot import STALE_SECONDS, TOPICS
from starving import starved_seconds

TOPICS_OF_A_PAGE = ("pool", "requests", "metrics")


@pytest.fixture
def daemon():
    with recorded.fake_daemon() as running:
        yield running


@pytest.fixture
def feed(daemon):
    made = Feed(daemon.url, None)
    yield made
    made.close()


def until(met, seconds, what):
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        time.sleep(0.05)


def sockets():
    links = (path for path in Path("/proc/self/fd").iterdir())
    return sum(path.is_symlink() and "socket" in str(path.readlink()) for path in links)


def test_a_page_gets_what_it_wants_and_nothing_else_is_asked_for(daemon, feed):
    snap = feed.snapshot(TOPICS_OF_A_PAGE)
    assert not snap.stale
    assert snap.state == "ready"
    assert snap.get("pool")["capacity_pages"] > 0
    assert snap.rows("requests", "requests")
    assert snap.window().last("memd_pool_active_ratio") is not None
    assert set(daemon.calls) == {
        "/admin/v1/status",
        "/admin/v1/pool",
        "/admin/v1/requests",
        "/metrics",
    }


def test_many_pages_cost_the_daemon_what_one_does(daemon, feed):
    feed.snapshot(TOPICS_OF_A_PAGE)
    before, ends = len(daemon.calls), time.monotonic() + 3
    while time.monotonic() < ends:
        for _ in range(20):
            feed.snapshot(TOPICS_OF_A_PAGE)
        time.sleep(0.05)
    # In 3 s: the state every second, pool and requests every 2 s, metrics every 5 s.
    assert len(daemon.calls) - before <= 3 + 2 + 2 + 1 + 2


def test_who_comes_back_later_sees_new_data_and_no_failure(daemon, feed, monkeypatch):
    monkeypatch.setattr("memd_dashboard.feed.IDLE_SECONDS", 2.0)
    monkeypatch.setattr("memd_dashboard.feed.WANTED_SECONDS", 2.0)
    feed.snapshot(TOPICS_OF_A_PAGE)
    until(lambda: feed._thread is None, 30, "nobody looks")
    time.sleep(STALE_SECONDS - 1.0)  # the last answer is old then
    before = time.time()
    snap = feed.snapshot(TOPICS_OF_A_PAGE)
    assert not snap.stale
    assert all(snap.reading(name).at > before for name in ("status", *TOPICS_OF_A_PAGE))


def test_a_route_that_is_missing_is_no_failure(daemon, feed):
    del daemon.answers["/admin/v1/jobs"]
    snap = feed.snapshot(("jobs",))
    assert snap.reading("jobs").missing
    assert not snap.stale


def test_a_refusal_is_kept_with_its_words(daemon, feed):
    daemon.answers["/admin/v1/pool"] = "not JSON"
    snap = feed.snapshot(("pool",))
    assert "not as memd does" in (snap.reading("pool").problem or "")
    assert snap.reading("pool").value is None


def test_an_action_is_seen_at_once(daemon, feed):
    feed.snapshot(("pool",))
    daemon.answers["/admin/v1/pool"]["cached_pages"] = 4242
    feed.refresh("pool")
    assert feed.snapshot(("pool",)).get("pool")["cached_pages"] == 4242


def test_a_daemon_that_was_never_there(feed, daemon):
    daemon.stop()
    snap = feed.snapshot(())
    assert snap.stale
    assert snap.state == "unreachable"
    assert snap.answered_at is None
    assert snap.unreachable_since is not None
    assert "cannot reach" in (snap.problem or "")


def test_c130_stopped_hung_and_back_again(daemon, feed):
    """100 looks, the daemon stopped, hung for long, and back: constant threads and sockets."""
    feed.snapshot(TOPICS_OF_A_PAGE)
    theirs = {thread for thread in threading.enumerate() if "memd-feed" in thread.name}
    assert len(theirs) == 1
    before = sockets()
    for _ in range(100):
        assert not feed.snapshot(TOPICS_OF_A_PAGE).stale
    daemon.stop()
    stopped = time.monotonic()
    until(lambda: feed.snapshot(TOPICS_OF_A_PAGE).stale, 3.0, "told as unreachable")
    assert time.monotonic() - stopped <= 3.0
    snap = feed.snapshot(TOPICS_OF_A_PAGE)
    assert snap.unreachable_since is not None
    assert snap.get("pool")["capacity_pages"] > 0, "the last values stay"

    daemon.hang_seconds = 30.0
    daemon.start()
    for _ in range(100):
        looked = time.monotonic() - starved_seconds()
        assert feed.snapshot(TOPICS_OF_A_PAGE).stale
        took = time.monotonic() - starved_seconds() - looked
        assert took < 0.2, "a look never waits for the daemon"
        time.sleep(0.03)

    daemon.hang_seconds = 0.0
    until(lambda: not feed.snapshot(TOPICS_OF_A_PAGE).stale, 60, "well again by itself")
    assert feed.snapshot(TOPICS_OF_A_PAGE).unreachable_since is None
    feeds = {thread for thread in threading.enumerate() if "memd-feed" in thread.name}
    assert feeds == theirs
    # What is left of hung answers is the fake daemon's; the feed has one connection.
    assert sockets() <= before + 2 * TOPICS_OF_A_PAGE.__len__()


def test_a_hung_daemon_is_told_as_unreachable_in_time(daemon, feed):
    feed.snapshot(())
    daemon.hang_seconds = 30.0
    until(lambda: feed.snapshot(()).stale, STALE_SECONDS + 1.5, "told as unreachable")


def test_sessions_with_the_same_key_share_a_feed():
    feeds = Feeds()
    one = feeds.of("http://127.0.0.1:1", "secret")
    assert feeds.of("http://127.0.0.1:1", "secret") is one
    other = feeds.of("http://127.0.0.1:1", None)
    assert other is not one
    assert "secret" not in repr(vars(feeds))


def test_a_closed_feed_leaves_no_thread(daemon):
    feed = Feed(daemon.url, None)
    feed.snapshot(())
    feed.close()
    assert not [thread for thread in threading.enumerate() if "memd-feed" in thread.name]


def test_every_topic_is_asked_for_by_a_path_that_was_recorded(daemon, feed):
    snap = feed.snapshot(tuple(TOPICS))
    until(lambda: all(name in feed.snapshot(tuple(TOPICS)).readings for name in TOPICS), 20, "all")
    snap = feed.snapshot(tuple(TOPICS))
    assert [name for name in TOPICS if snap.reading(name).value is None] == []
