"""The daemon's side: state over restarts, channels, silences, Alertmanager, what is counted."""

import asyncio
import json
import stat
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml
from scrapes import Sample
from webhook import webhook

from memd.alerting import MAX_SILENCES, STATE_FILE, AlertError, Alerting
from memd.config_operator import AlertSettings

RULES = {
    "rules": [
        {
            "name": "MemdHot",
            "group": "g",
            "severity": "page",
            "summary": "it is {value}",
            "expression": {"value": {"metric": "memd_requests_running"}},
            "above": 10.0,
        }
    ]
}


class Book:
    """Takes what the store would."""

    def __init__(self):
        self.rows = []
        self.events = []

    def add_event(self, kind, message, details=None):
        self.events.append((kind, message, details))

    def add_rows(self, name, rows):
        self.rows += [(name, dict(row)) for row in rows]

    def of(self, name):
        return [row for table, row in self.rows if table == name]


class Stand:
    """An Alerting whose time and samples are the test's. A second one is a restart."""

    def __init__(self, directory, now=1_000_000.0, **settings):
        self.directory, self.now, self.heat = directory, now, 0.0
        self.book = Book()
        rules = directory / "rules.yml"
        if not rules.exists():
            rules.write_text(yaml.safe_dump(RULES))
        self.alerting = Alerting(
            AlertSettings(rules=rules, **settings),
            directory,
            "a:1",
            lambda: [] if self.heat is None else [Sample("memd_requests_running", {}, self.heat)],
            self.book,
            lambda: self.now,
        )
        self.alerting.start()

    async def see(self, heat, after=15.0):
        """Evaluate, and wait until everything is sent."""
        self.now += after
        self.heat = heat
        await self.alerting.evaluate()
        while self.alerting._sending:
            await asyncio.wait(self.alerting._sending.values())

    @property
    def states(self):
        return [alert.state for alert in self.alerting.state.alerts]

    def restarted(self, **settings):
        return Stand(self.directory, self.now, **settings)


def channels(directory, **urls):
    path = directory / "channels.yml"
    path.write_text(yaml.safe_dump(urls))
    path.chmod(0o600)
    return path


def test_c132_one_notification_over_a_restart_while_it_fires(tmp_path):
    with webhook() as hook:
        given = {"channels": channels(tmp_path, team=hook.channel)}

        async def first():
            stand = Stand(tmp_path, **given)
            await stand.see(11)
            await stand.see(17)
            return stand  # killed: it is not stopped

        stand = asyncio.run(first())
        began = stand.now - 15.0

        async def second():
            again = stand.restarted(**given)
            assert again.states == ["firing"]
            await again.see(None)
            await again.see(12)
            await again.see(3)
            await again.alerting.stop()
            return again

        again = asyncio.run(second())
        assert [body["title"][:10] for body in hook.bodies] == ["[FIRING] M", "[RESOLVED]"]
    (row,) = again.book.of("incidents")
    assert stand.book.of("incidents")[0]["id"] == row["id"]
    assert (row["fired_at"], row["resolved_at"]) == (began, again.now)
    assert (row["value"], row["state"]) == (17, "resolved")
    assert [kind for kind, _, _ in again.book.events] == ["alert_resolved"]
    notifications = stand.book.of("notifications") + again.book.of("notifications")
    assert [(r["kind"], r["outcome"]) for r in notifications] == [
        ("firing", "sent"),
        ("resolved", "sent"),
    ]


def test_what_is_kept_is_for_the_owner_and_whole(tmp_path):
    async def life():
        stand = Stand(tmp_path)
        await stand.see(11)
        await stand.alerting.silence({"alertname": "MemdHot"}, 60.0, "why", "who")

    asyncio.run(life())
    path = tmp_path / STATE_FILE
    assert json.loads(path.read_text())["alerts"][0]["rule"] == "MemdHot"
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert list(tmp_path.glob("*.new")) == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"alerts": [{}]}', b"\xff\xfe"])
def test_a_broken_state_file_is_no_reason_not_to_start(tmp_path, content, caplog):
    (tmp_path / STATE_FILE).write_bytes(content)
    stand = Stand(tmp_path)
    assert stand.states == []
    assert "alerts begin anew" in caplog.text
    asyncio.run(stand.see(11))
    assert stand.restarted().states == ["firing"]


def test_a_state_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    stand = Stand(tmp_path)
    (tmp_path / "alerts.new").mkdir()
    asyncio.run(stand.see(11))
    assert stand.states == ["firing"]
    assert "cannot be written" in caplog.text


def test_a_notification_that_fails_is_sent_later(tmp_path):
    with webhook() as hook:
        hook.failures = 1

        async def life():
            stand = Stand(tmp_path, channels=channels(tmp_path, team=hook.channel))
            await stand.see(11)
            assert hook.bodies == []
            await stand.see(11, after=2.0)  # before the first retry
            assert hook.bodies == []
            await stand.see(11, after=4.0)
            return stand

        stand = asyncio.run(life())
        assert len(hook.bodies) == 1
    counts = stand.alerting.notification_counts
    assert counts == {("team", "sent"): 1, ("team", "failed"): 1, ("team", "suppressed"): 0}
    first, second = stand.book.of("notifications")
    assert (first["outcome"], first["error"]) == ("failed", "json: not delivered")
    assert second["outcome"] == "sent"


def test_a_silence_keeps_channels_quiet_and_is_counted_once(tmp_path):
    with webhook() as hook:

        async def life():
            stand = Stand(tmp_path, channels=channels(tmp_path, team=hook.channel))
            made = await stand.alerting.silence({"alertname": "MemdHot"}, 600.0, "load test", "me")
            for _ in range(5):
                await stand.see(11)
            assert hook.bodies == []
            assert stand.alerting.notification_counts["team", "suppressed"] == 1
            assert await stand.alerting.unsilence("nobody", "me") is None
            ended = await stand.alerting.unsilence(made.id, "you")
            assert ended.ends_at == stand.now
            assert await stand.alerting.unsilence(made.id, "you") is None
            await stand.see(11)
            return stand

        stand = asyncio.run(life())
        assert len(hook.bodies) == 1
    made, ended = stand.book.of("silences")
    assert made["id"] == ended["id"]
    assert made["expires_at"] > ended["expires_at"]
    assert made["matchers"] == [{"name": "alertname", "value": "MemdHot"}]
    kinds = [kind for kind, _, _ in stand.book.events]
    assert kinds == ["alert_silenced", "alert_firing", "alert_unsilenced"]


def test_silences_survive_a_restart_and_end_by_themselves(tmp_path):
    async def life():
        stand = Stand(tmp_path)
        await stand.alerting.silence({"severity": "page"}, 100.0, "why", "me")
        again = stand.restarted()
        assert [each.reason for each in again.alerting.silences()] == ["why"]
        again.now += 101.0
        assert again.alerting.silences() == []
        await again.see(0)
        assert again.alerting.state.silences == []

    asyncio.run(life())


def test_silences_that_make_no_sense_are_refused(tmp_path):
    async def life():
        stand = Stand(tmp_path)
        with pytest.raises(AlertError, match="no rule is named 'MemdCold'"):
            await stand.alerting.silence({"alertname": "MemdCold"}, 60.0, "why", "me")
        for _ in range(MAX_SILENCES):
            await stand.alerting.silence({"alertname": "Memd*"}, 60.0, "why", "me")
        with pytest.raises(AlertError, match="the limit is 100"):
            await stand.alerting.silence({"alertname": "Memd*"}, 60.0, "why", "me")

    asyncio.run(life())


def test_channels_are_read_again_when_the_file_changes(tmp_path, caplog):
    with webhook() as one, webhook() as other:
        path = channels(tmp_path, one=one.channel)

        async def life():
            stand = Stand(tmp_path, channels=path)
            path.write_text("one: [")
            await stand.see(0)
            assert list(stand.alerting.channels) == ["one"]
            assert "stay in force" in caplog.text
            channels(tmp_path, other=other.channel)
            await stand.see(11)

        asyncio.run(life())
        assert (len(one.bodies), len(other.bodies)) == (0, 1)


def test_a_file_of_channels_that_others_may_read_is_warned_of(tmp_path, caplog):
    path = channels(tmp_path, team="json://127.0.0.1:1")
    path.chmod(0o644)
    Stand(tmp_path, channels=path)
    assert "holds secrets" in caplog.text


@pytest.mark.parametrize("setting", ["rules", "channels"])
def test_a_daemon_with_a_broken_file_does_not_start(tmp_path, setting):
    broken = tmp_path / "broken.yml"
    broken.write_text("a: [")
    alerting = Alerting(
        AlertSettings(**{setting: broken}), tmp_path, "a:1", list, Book(), lambda: 0.0
    )
    with pytest.raises(AlertError, match=r"broken\.yml is not YAML"):
        alerting.start()


def test_a_test_message_says_whether_it_arrived(tmp_path):
    with webhook() as hook:

        async def life():
            stand = Stand(tmp_path, channels=channels(tmp_path, team=hook.channel))
            assert await stand.alerting.test("team", "me") is None
            hook.failures = 1
            assert await stand.alerting.test("team", "me") == "json: not delivered"
            with pytest.raises(KeyError):
                await stand.alerting.test("alertmanager", "me")
            return stand

        stand = asyncio.run(life())
        assert "asked for by me" in hook.bodies[0]["message"]
    assert [row["kind"] for row in stand.book.of("notifications")] == ["test", "test"]


class FakeManager:
    """Takes posts to Alertmanager's API, as long as it is up."""

    def __init__(self):
        self.posts, self.status, outer = [], 200, self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.posts.append((self.path, json.loads(body)))
                self.send_response(outer.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                """Nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def test_alertmanager_is_told_anew_while_an_alert_fires_and_when_it_ends(tmp_path):
    with FakeManager() as manager:

        async def life():
            stand = Stand(tmp_path, alertmanager=manager.url)
            await stand.see(11)
            for _ in range(8):
                await stand.see(11)
            refreshed = len(manager.posts)
            await stand.see(1)
            for _ in range(8):
                await stand.see(1)
            return stand, refreshed

        stand, refreshed = asyncio.run(life())
    assert refreshed == 3  # at 0, 60 and 120 s
    assert len(manager.posts) == 4
    assert {path for path, _ in manager.posts} == {"/api/v2/alerts"}
    (alert,) = manager.posts[0][1]
    assert alert["labels"] == {"alertname": "MemdHot", "severity": "page", "instance": "a:1"}
    assert alert["startsAt"].startswith("1970-01-12T13:46:55")
    assert alert["endsAt"] > alert["startsAt"]
    ended = manager.posts[-1][1][0]
    assert ended["endsAt"] < manager.posts[-2][1][0]["endsAt"]
    counts = stand.alerting.notification_counts
    assert counts["alertmanager", "sent"] == 2


def test_an_alertmanager_that_is_down_is_told_when_it_is_back(tmp_path):
    with FakeManager() as manager:
        manager.status = 503

        async def life():
            stand = Stand(tmp_path, alertmanager=manager.url)
            await stand.see(11)
            assert stand.alerting.state.channels["alertmanager"].last_error == (
                "alertmanager: HTTP 503"
            )
            manager.status = 200
            await stand.see(11)
            return stand

        stand = asyncio.run(life())
    assert len(manager.posts) == 2
    assert stand.alerting.notification_counts["alertmanager", "sent"] == 1
    assert stand.alerting.notification_counts["alertmanager", "failed"] == 1


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("127.0.0.1:9093", "is not a URL"),
        ("ftp://127.0.0.1", "is not a URL"),
        ("http://me:secret@127.0.0.1:9093", "must not hold credentials"),
    ],
)
def test_an_alertmanager_url_that_cannot_be_used_is_refused(url, says):
    with pytest.raises(ValueError, match=says):
        AlertSettings(alertmanager=url)
