"""The engine's client: each sequence ends once, whatever arrives in whatever order."""

import asyncio

import pytest

from memd.api.engine_client import STALL_SECONDS, EngineClient
from memd.api.errors import ApiError
from memd.engine.messages import (
    Abort,
    Failed,
    Loading,
    Output,
    PoolCommand,
    Ready,
    Reply,
    SamplingParams,
    StepReport,
    Submit,
)

READY = Ready(1, 100, {}, {"page_tokens": 16, "capacity_pages": 64})


class QueuePort:
    """The api's end of a port whose other end is the test."""

    def __init__(self):
        self.sent = []
        self.frames = asyncio.Queue()

    def send(self, *messages):
        self.sent += messages

    async def receive(self):
        return await self.frames.get()

    def close(self):
        pass


def submit(name: str) -> Submit:
    return Submit(name, [1, 2], SamplingParams(seed=1, max_tokens=5))


def drive(scenario, ready: bool = True):
    """Run a scenario(client, port, tell) with a receiving client."""

    async def main():
        port, now = QueuePort(), [0.0]
        client = EngineClient(port, lambda: now[0])
        running = asyncio.create_task(client.run())

        async def tell(*messages):
            port.frames.put_nowait(list(messages))
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        if ready:
            await tell(READY)
        client.test_clock = now
        try:
            await scenario(client, port, tell)
        finally:
            running.cancel()

    asyncio.run(main())


def test_states():
    async def scenario(client, port, tell):
        assert client.state == "loading"
        await tell(Loading("weights", 0.5))
        assert client.loading == ("weights", 0.5)
        with pytest.raises(ApiError, match="weights, 50%"):
            client.require_ready()
        await tell(READY)
        assert client.state == "ready"
        assert client.settled.is_set()
        client.drain()
        assert client.state == "draining"
        await tell(Failed("no memory"))
        assert (client.state, client.failure) == ("failed", "no memory")
        client.fail("the process ended")
        assert client.failure == "no memory"

    drive(scenario, ready=False)


def test_outputs_of_a_request_come_in_order_and_late_ones_are_dropped():
    async def scenario(client, port, tell):
        with client.generate([submit("r-0"), submit("r-1")]) as outputs:
            await tell(
                StepReport([Output("r-1", [7]), Output("other", [1]), Output("r-0", [8])]),
                StepReport([Output("r-0", [9], finish_reason="length")]),
            )
            got = [await outputs.next() for _ in range(3)]
            assert [(each.request_id, each.token_ids) for each in got] == [
                ("r-1", [7]),
                ("r-0", [8]),
                ("r-0", [9]),
            ]
            assert client.open["r-1"].token_ids == [7]
            assert not client.idle.is_set()
            with pytest.raises(TimeoutError):
                await outputs.next(0.001)
        assert [m for m in port.sent if isinstance(m, Abort)] == [Abort("r-1")]
        assert client.open == {}
        assert client.idle.is_set()
        await tell(StepReport([Output("r-1", [1], finish_reason="abort")]))

    drive(scenario)


def test_a_failed_engine_ends_everything_once():
    async def scenario(client, port, tell):
        with client.generate([submit("a-0")]) as outputs:
            command = asyncio.create_task(client.command(PoolCommand, action="flush"))
            await asyncio.sleep(0)
            await tell(Failed("broken"))
            last = await outputs.next()
            assert (last.finish_reason, last.error_code) == ("error", "engine_failed")
            with pytest.raises(ApiError, match="the engine stopped"):
                await command
        assert not [m for m in port.sent if isinstance(m, Abort)]
        with pytest.raises(ApiError), client.generate([submit("b-0")]):
            pass

    drive(scenario)


def test_ending_a_request_ends_its_sequences_only():
    async def scenario(client, port, tell):
        with client.generate([submit(n) for n in ("a-0", "a-1", "b-0")]) as outputs:
            assert client.end_open("why", "cancelled", "a") == 2
            assert client.end_open("why", "cancelled", "a") == 0
            assert {(await outputs.next()).request_id for _ in range(2)} == {"a-0", "a-1"}
            assert list(client.open) == ["b-0"]

    drive(scenario)


def test_commands():
    async def scenario(client, port, tell):
        first = asyncio.create_task(client.command(PoolCommand, action="flush"))
        second = asyncio.create_task(client.command(PoolCommand, action="audit"))
        await asyncio.sleep(0)
        ids = [m.command_id for m in port.sent if isinstance(m, PoolCommand)]
        assert len(set(ids)) == 2
        await tell(StepReport(replies=[Reply(ids[1], error="no"), Reply(ids[0], {"pages": 3})]))
        assert await first == {"pages": 3}
        with pytest.raises(ApiError) as refused:
            await second
        assert refused.value.status == 409
        with pytest.raises(ApiError) as late:
            await client.command(PoolCommand, 0.001, action="flush")
        assert (late.value.status, late.value.code) == (503, "engine_timeout")
        await tell(StepReport(replies=[Reply(99, {})]))

    drive(scenario)


def test_stuck_means_open_and_silent():
    async def scenario(client, port, tell):
        now = client.test_clock
        now[0] += 10 * STALL_SECONDS
        assert not client.stuck
        with client.generate([submit("a-0")]):
            assert not client.stuck
            now[0] += STALL_SECONDS + 1
            assert client.stuck
            await tell(StepReport([Output("a-0", [1])]))
            assert not client.stuck

    drive(scenario)
