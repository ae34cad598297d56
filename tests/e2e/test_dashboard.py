"""A browser drives the dashboard against a live daemon under load. Pictures: build/screenshots."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import served
import tiny
from memd_dashboard.feed import Feed
from memd_dashboard.view.requests import phases

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here"),
    pytest.mark.slow,
]

PICTURES = Path(__file__).parents[2] / "build" / "screenshots"
PAGES = {
    "Overview": "overview",
    "Requests": "requests",
    "Alerts": "alerts",
    "Diagnosis": "diagnosis",
    "Pool map": "pool",
    "Prefix tree": "prefixes",
    "Tiers": "tiers",
    "GPUs": "gpus",
    "Tuning": "tuning?key=memory.watermark.low&value=60%25",
    "Tenants": "tenants",
    "Jobs and history": "jobs",
}
PROMPTS = ("abcdefgh" * 40, "the quick brown fox " * 24, "0123456789" * 12)
SLOW_MS = 30_000
expect.set_options(timeout=SLOW_MS)


@contextmanager
def load(daemon: served.Daemon, streams: int) -> Iterator[None]:
    """Requests with shared beginnings, one after another on each stream."""
    ended = threading.Event()
    name = daemon.http.get("/v1/models").json()["data"][0]["id"]

    def ask(number: int) -> None:
        with httpx2.Client(base_url=daemon.url, timeout=120) as http:
            turn = 0
            while not ended.is_set():
                turn += 1
                prompt = f"{PROMPTS[turn % len(PROMPTS)]} {number}.{turn}"
                body = {"model": name, "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
                http.post("/v1/completions", json=body)
                ended.wait(0.1)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def long_request(daemon: served.Daemon) -> Iterator[str]:
    """One that runs until it is cancelled; its id."""
    name = daemon.http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": name, "prompt": "long", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with (
        httpx2.Client(base_url=daemon.url, timeout=120) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        yield re.search(r'"id":\s*"([^"]+)"', first)[1]
        for _ in lines:
            pass


@contextmanager
def dashboard(daemon_url: str, log: Path, base_path: str = "") -> Iterator[str]:
    """`memd dashboard` on a free port, and under a path."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "memd.cli", "dashboard", "--url", daemon_url]
    with log.open("w") as out:
        options = ["--port", str(port), "--base-path", base_path]
        process = subprocess.Popen([*command, *options], stderr=out)
        url = f"http://127.0.0.1:{port}{base_path}"
        try:
            deadline = time.monotonic() + 60
            while not _answers(f"{url}/_stcore/health"):
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield url
            process.terminate()
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model") / "tiny", num_layers=4)


@contextmanager
def small_daemon(state_dir: Path, model: Path) -> Iterator[served.Daemon]:
    settings = ("memory.limit=6MB", "memory.block_size=64KiB", "memory.host.limit=2MB")
    jobs = ("history.sample_every=2s", "alerts.evaluate_every=2s")
    with served.serving(state_dir, str(model), *settings, *jobs) as running:
        yield running


@contextmanager
def opened(browser, url: str, **look: object) -> Iterator[object]:
    """A page as a first visit sees it, with no cache; nothing goes wrong in it until it is closed.

    What the page itself gives up, such as pictures of a page that is left, is no fault.
    """
    problems: list[str] = []
    view = browser.new_page(**look)
    view.set_default_timeout(SLOW_MS)
    view.on("pageerror", lambda error: problems.append(str(error)))
    view.on("console", lambda line: problems.append(line.text) if line.type == "error" else 0)
    view.on("requestfailed", lambda asked: problems.append(f"{asked.url}: {asked.failure}"))
    view.on("response", lambda got: problems.append(got.url) if got.status >= 400 else 0)
    try:
        view.goto(url)
        yield view
    finally:
        view.close()
    assert [each for each in problems if "ERR_ABORTED" not in each] == []


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def daemon(tmp_path, model) -> Iterator[served.Daemon]:
    """For a test that changes it."""
    with small_daemon(tmp_path, model) as running:
        yield running


@pytest.fixture
def page(daemon, tmp_path, browser):
    """The overview of this test's daemon."""
    look = {"viewport": {"width": 1280, "height": 900}}
    log = tmp_path / "dashboard.log"
    with dashboard(daemon.url, log) as url, opened(browser, url, **look) as view:
        view.get_by_text("What fills the memory").wait_for()
        yield view


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory, model) -> Iterator[served.Daemon]:
    """For tests that leave it as it was."""
    with small_daemon(tmp_path_factory.mktemp("state"), model) as running:
        yield running


@pytest.fixture(scope="module")
def shared_url(shared_daemon, tmp_path_factory) -> Iterator[str]:
    """Of the shared daemon's dashboard."""
    log = tmp_path_factory.mktemp("dashboard") / "log"
    with dashboard(shared_daemon.url, log) as url:
        yield url


@pytest.fixture
def shared_page(shared_url, browser):
    """The overview of the shared daemon."""
    with opened(browser, shared_url, viewport={"width": 1280, "height": 1000}) as view:
        view.get_by_text("What fills the memory").wait_for()
        yield view


def open_page(view, name: str) -> None:
    view.get_by_test_id("stSidebarNav").get_by_role("link", name=name, exact=True).click()
    expect(view.get_by_role("heading", name=name, exact=True)).to_be_visible()


def confirm(view, reason: str) -> None:
    dialog = view.get_by_role("dialog")
    dialog.get_by_label("Reason").fill(reason)
    dialog.get_by_role("button", name="Confirm").click()
    expect(dialog).to_be_hidden()


def test_an_operator_finds_changes_and_takes_back(daemon, page):
    with load(daemon, 3):
        # The fullest prefix is the first row of the prefix tree.
        open_page(page, "Prefix tree")
        expect(page.get_by_text("Shared beginnings and their branches")).to_be_visible()
        table = page.get_by_test_id("stDataFrame").first
        table.wait_for()
        table.click(position={"x": 18, "y": 52})
        expect(page.get_by_role("button", name="Pin…")).to_be_enabled()
        listed = daemon.http.get("/admin/v1/prefixes?limit=500").json()["prefixes"]
        chosen = page.url.partition("prefix=")[2]
        largest = max(listed, key=lambda row: row["tokens"])["tokens"]
        (found,) = (row for row in listed if row["id"] == chosen)
        assert found["tokens"] >= 0.8 * largest
        table.click(position={"x": 18, "y": 52})  # the same row again: chosen no more
        expect(page.get_by_text("Select a row to pin a prefix")).to_be_visible()

        # A mark: preview, reason, in force, undone.
        open_page(page, "Tuning")
        page.get_by_role("combobox", name="Setting").fill("memory.watermark.high")
        page.get_by_role("option", name="memory.watermark.high").click()
        field = page.get_by_label("New value, now 90 %", exact=True)
        expect(field).to_have_value("90%")
        for value in ("75", "85", "80"):  # the preview is of what is shown, each time
            field.fill(f"{value}%")
            page.get_by_role("button", name="Preview").click()
            expect(
                page.get_by_text(f"memory.watermark.high: 90 % → {value} %").first
            ).to_be_visible()
            expect(page.get_by_role("button", name=f"Apply {value} %…")).to_be_enabled()
        page.get_by_role("button", name="Apply 80 %…").click()
        confirm(page, "latency peaks at noon")
        assert daemon.metric("memd_pool_watermark_ratio", level="high") == 0.8
        history = daemon.http.get("/admin/v1/settings/history").json()["history"]
        assert history[-1]["reason"] == "latency peaks at noon"
        assert (history[-1]["who"], history[-1]["source"]) == ("dashboard", "dashboard")
        expect(page.locator(".memd-strip").get_by_text("revision 2")).to_be_visible()
        page.get_by_role("button", name="Undo…").click()
        # Long enough for every part of the page to have drawn itself again behind the dialog.
        page.wait_for_timeout(6000)
        reason = page.get_by_role("dialog").get_by_label("Reason")
        reason.fill("it did not help")
        reason.press("Enter")  # confirms as the button does
        expect(page.get_by_role("dialog")).to_be_hidden()
        assert daemon.metric("memd_pool_watermark_ratio", level="high") == 0.9
        expect(page.locator(".memd-strip").get_by_text("revision 3")).to_be_visible()


def test_an_operator_cancels_a_request(shared_daemon, shared_page):
    daemon, page = shared_daemon, shared_page
    with long_request(daemon) as name:
        # It decodes: the first token is long there, and the timeline says so.
        (row,) = daemon.http.get("/admin/v1/requests").json()["requests"]
        assert 0 < row["time_to_first_token_seconds"] < row["age_seconds"]
        assert [span["phase"] for span in phases(row)][-1] == "decode"
        open_page(page, "Requests")
        table = page.get_by_test_id("stDataFrame").first
        table.wait_for()
        table.click(position={"x": 18, "y": 52})
        page.get_by_role("button", name="Cancel").click()
        confirm(page, "too long")
        open_requests = daemon.http.get("/admin/v1/requests").json()["requests"]
        assert not [row for row in open_requests if row["id"].startswith(name)]

        def told() -> list[str]:  # by the database, which writes a moment later
            answer = daemon.http.get("/admin/v1/events?kind=request_cancel").json()
            return [event["details"]["reason"] for event in answer["events"]]

        daemon.wait_until(told, 10, "the event is in the history")
        assert told() == ["too long"]


def test_an_operator_silences_an_alert(daemon, page):
    # Requests that are refused for want of room are bad ones, and enough of them an alert.
    name = daemon.http.get("/v1/models").json()["data"][0]["id"]
    faulty = {"model": name, "prompt": "x", "max_tokens": 8}
    daemon.settings(engine__max_waiting="1")
    fired: list[dict] = []

    def firing() -> bool:
        with httpx2.Client(base_url=daemon.url, timeout=60) as http:
            threads = [
                threading.Thread(target=lambda: http.post("/v1/completions", json=faulty))
                for _ in range(24)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        listed = daemon.http.get("/admin/v1/alerts").json()["alerts"]
        fired[:] = [row for row in listed if row["state"] in ("pending", "firing")]
        return bool(fired)

    daemon.wait_until(firing, 60, "an alert is pending or fires")
    open_page(page, "Alerts")
    page.get_by_role("button", name="Silence…").first.click()
    confirm(page, "known, being mended")
    (silence,) = daemon.http.get("/admin/v1/alerts/silences").json()["silences"]
    assert silence["reason"] == "known, being mended"
    assert silence["covers"] >= 1
    expect(page.get_by_text("known, being mended").first).to_be_visible()


def test_a_block_of_the_map_is_selected_by_a_click(daemon, page):
    daemon.complete("a block with something in it " * 20, max_tokens=4)
    open_page(page, "Pool map")
    canvas = page.locator("canvas").first
    canvas.wait_for()
    canvas.hover(position={"x": 8, "y": 8})
    expect(page.get_by_text(re.compile(r"^block 0 · cached · \d+ % full$"))).to_be_visible()
    canvas.click(position={"x": 8, "y": 8})
    expect(page.get_by_text("Block 0", exact=True)).to_be_visible()
    assert "block=0" in page.url


def test_pages_are_left_before_they_are_drawn(shared_daemon, shared_page):
    """The strip with the state asks to be drawn every second, also while its page is being left."""
    page = shared_page
    with load(shared_daemon, 2):
        for name in (*PAGES, *reversed(PAGES)):
            page.get_by_test_id("stSidebarNav").get_by_role("link", name=name, exact=True).click()
            page.wait_for_timeout(150)
        expect(page.get_by_role("heading", name="Overview", exact=True)).to_be_visible()
        expect(page.locator(".memd-strip").get_by_text("ready")).to_be_visible()
        expect(page.get_by_text("What fills the memory")).to_be_visible()


def test_every_page_fits_and_is_kept_as_a_picture(shared_daemon, shared_page):
    shared_page.emulate_media(color_scheme="light")
    with load(shared_daemon, 2):
        for name in PAGES:
            open_page(shared_page, name)
            expect_whole(shared_page, name)
            keep_picture(shared_page, f"{name}-1280-light")


def test_every_page_opens_by_its_address_as_the_first_visit(shared_daemon, browser, tmp_path):
    """Under a path of a proxy; without one the addresses are in test_launch and the next test."""
    look = {"viewport": {"width": 1920, "height": 1000}, "color_scheme": "dark"}
    log = tmp_path / "dashboard.log"
    with dashboard(shared_daemon.url, log, "/ops/memd") as url, load(shared_daemon, 2):
        for name, path in PAGES.items():
            with opened(browser, f"{url}/{path}", **look) as view:
                expect_whole(view, name)
                if name == "Tuning":
                    field = view.get_by_label("New value, now 70 %", exact=True)
                    expect(field).to_have_value("60%")
                keep_picture(view, f"{name}-1920-dark")


def expect_whole(view, name: str) -> None:
    """The page shows itself, under its title, as wide as the window at most."""
    expect(view.get_by_role("heading", name=name, exact=True)).to_be_visible()
    expect(view).to_have_title(f"{name} · memd")
    expect(view.locator(".memd-strip").get_by_text("ready")).to_be_visible()
    view.wait_for_timeout(1500)
    main = view.get_by_test_id("stMain")
    assert main.evaluate("each => each.scrollWidth <= each.clientWidth"), name
    expect(view.get_by_test_id("stException")).to_have_count(0)


def keep_picture(view, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    view.screenshot(path=PICTURES / f"{name.lower().replace(' ', '-')}.png")


def test_a_page_is_reloaded_and_the_first_one_has_two_addresses(shared_url, browser):
    with opened(browser, f"{shared_url}/jobs/") as view:
        expect_whole(view, "Jobs and history")
        view.reload()
        expect_whole(view, "Jobs and history")
        view.goto(f"{shared_url}/overview?of=a-link")
        expect_whole(view, "Overview")
        assert view.url == f"{shared_url}/?of=a-link"


def test_an_open_page_costs_the_daemon_under_2_percent_of_a_core(tmp_path, model):
    """The map is the dearest page: 10,000 blocks, asked for every three seconds."""
    settings = ("memory.limit=330MB", "memory.block_size=33KB")
    with served.serving(tmp_path, str(model), *settings) as daemon:
        pool = daemon.http.get("/admin/v1/pool").json()
        assert pool["capacity_blocks"] >= 10_000
        idle = _share_of_a_core(daemon, 10)
        feed = Feed(daemon.url, None)
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(0.5):
                assert not feed.snapshot(("pool", "blocks")).stale

        viewer = threading.Thread(target=look)
        viewer.start()
        try:
            ended.wait(5)
            cost = _share_of_a_core(daemon, 20) - idle
        finally:
            ended.set()
            viewer.join()
            feed.close()
    assert cost < 0.02, f"{cost:.2%}"


def _share_of_a_core(daemon: served.Daemon, seconds: float) -> float:
    """CPU time of the daemon's processes over wall time."""
    children = f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children"
    pids = [daemon.process.pid, *map(int, Path(children).read_text().split())]

    def used() -> float:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")

    before, began = used(), time.monotonic()
    time.sleep(seconds)
    return (used() - before) / (time.monotonic() - began)


def test_c130_the_page_turns_grey_and_recovers(shared_daemon, shared_page):
    """The daemon hangs with its port open; every other state of C130 is in test_feed."""
    daemon, page = shared_daemon, shared_page
    old = page.get_by_text(re.compile("Unreachable since"))
    body = page.locator(".st-key-page")
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        expect(old).to_be_visible(timeout=6_000)
        assert "grayscale" in body.evaluate("each => getComputedStyle(each).filter")
        expect(page.get_by_text("What fills the memory")).to_be_visible()
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    expect(old).to_be_hidden()
    assert "grayscale" not in body.evaluate("each => getComputedStyle(each).filter")
