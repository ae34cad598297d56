"""Messages to the service manager: what is sent when, and that nothing blocks or is lost."""

import asyncio
import os
from pathlib import Path

import pytest
from notify import NotifySocket

from memd.api.engine_client import EngineClient
from memd.service_manager import Look, ServiceManager, look_at


class Story:
    """A daemon whose state the test sets."""

    def __init__(self) -> None:
        self.now = Look("loading", "loading: weights, 10%", (0.0,))

    def __call__(self, _: float) -> Look:
        return self.now


def test_the_environment_is_taken_not_read() -> None:
    environment = {
        "NOTIFY_SOCKET": "/run/notify",
        "WATCHDOG_USEC": "60000000",
        "WATCHDOG_PID": str(os.getpid()),
        "HOME": "/",
    }
    manager = ServiceManager.from_environment(environment)
    assert manager.watchdog_seconds == 60
    assert environment == {"HOME": "/"}
    other = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}
    assert ServiceManager.from_environment(other).watchdog_seconds is None
    assert ServiceManager.from_environment({}).watchdog_seconds is None


@pytest.mark.parametrize("watchdog", ["", "0", "soon", "-5"])
def test_no_watchdog_from_nonsense(watchdog: str) -> None:
    environment = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": watchdog}
    assert ServiceManager.from_environment(environment).watchdog_seconds is None


def test_an_address_that_is_no_unix_socket(caplog: pytest.LogCaptureFixture) -> None:
    async def life() -> None:
        manager = ServiceManager.from_environment({"NOTIFY_SOCKET": "vsock:2:1234"})
        manager.start(Story())
        manager.ready()
        await manager.stop()

    asyncio.run(life())
    assert "no Unix socket" in caplog.text


@pytest.mark.parametrize("name", ["notify", "@memd-test-{pid}"])
def test_a_life(tmp_path: Path, name: str) -> None:
    with NotifySocket(tmp_path, name.format(pid=os.getpid())) as systemd:
        story = Story()

        async def life() -> None:
            manager = ServiceManager(systemd.address, watchdog_seconds=0.4)
            manager.start(story)
            await asyncio.sleep(0.05)
            manager.reloading()  # while it loads: nobody is told
            manager.reloaded()
            story.now = Look("ready", "serves\ntiny", (1.0,))
            manager.ready()
            await asyncio.sleep(0.15)
            manager.reloading()
            manager.reloaded()
            manager.stopping(90)
            manager.reloaded()  # too late
            await manager.stop()
            manager.ready()  # too late: nothing is sent

        asyncio.run(life())
        came = systemd.receive(0.2)
    reload = came.pop(next(i for i, each in enumerate(came) if "RELOADING" in each))
    assert reload["RELOADING"] == "1"
    assert int(reload["MONOTONIC_USEC"]) > 0
    assert came == [
        {"STATUS": "loading: weights, 10%"},
        {"EXTEND_TIMEOUT_USEC": "60000000"},
        {"WATCHDOG": "1"},
        {"READY": "1"},
        {"STATUS": "serves tiny"},
        {"WATCHDOG": "1"},
        {"READY": "1"},
        {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "120000000"},
    ]


def test_the_watchdog_is_fed_by_progress_only(tmp_path: Path) -> None:
    with NotifySocket(tmp_path) as systemd:
        story = Story()

        async def life() -> list[int]:
            manager = ServiceManager(systemd.address, watchdog_seconds=0.2)
            manager.start(story)
            fed = []
            for progress in ((1.0,), (1.0,), (2.0,)):
                story.now = Look("ready", "serves", progress)
                await asyncio.sleep(0.3)
                fed.append(sum("WATCHDOG" in each for each in systemd.receive(0.01)))
            await manager.stop()
            return fed

        first, second, third = asyncio.run(life())
    assert first >= 1
    assert second == 0
    assert third == 1


def test_a_full_socket_blocks_nobody_and_loses_no_readiness(tmp_path: Path) -> None:
    with NotifySocket(tmp_path) as systemd:
        story = Story()

        async def life() -> None:
            manager = ServiceManager(systemd.address)
            manager.start(story)
            manager.ready()
            await asyncio.sleep(0.1)
            for _ in range(2000):  # more than the kernel queues
                manager.reloading()
            manager.reloaded()
            await asyncio.sleep(0)
            systemd.receive(0.02)
            while "READY" not in systemd.messages[-1]:
                systemd.receive(0.02)
                await asyncio.sleep(0.1)
            await manager.stop()

        asyncio.run(asyncio.wait_for(life(), 60))
    assert len(systemd.messages) < 2000


def test_a_service_manager_that_is_gone_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def life() -> None:
        manager = ServiceManager(str(tmp_path / "nobody"))
        manager.start(Story())
        for _ in range(5):
            manager.ready()
        await manager.stop()

    asyncio.run(life())
    assert len(caplog.records) == 1


def test_what_is_told_of_an_engine() -> None:
    engine = EngineClient()
    engine.set_stage("weights", 0.43)
    assert look_at(engine, "tiny", 1.0).line == "loading: weights, 43%"
    assert look_at(engine, "tiny", 1.0).progress != look_at(engine, "tiny", 2.0).progress
    engine.fail("no memory")
    assert look_at(engine, "tiny", 1.0)[:2] == ("failed", "failed: no memory")
    assert look_at(engine, "tiny", 1.0).progress == look_at(engine, "tiny", 2.0).progress
