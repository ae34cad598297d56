"""The engine's client: each sequence ends once, whatever arrives in whatever order."""

import asyncio

import msgspec
import pytest
from http_stand import engine_snapshot

from memd.api.engine_client import EngineClient
from memd.api.errors import ApiError
from memd.engine.messages import (
    Abort,
    ArmFaults,
    Failed,
    Loading,
    Output,
    PoolCommand,
    Ready,
    Reply,
    SamplingParams,
    StepReport,
    Submit,
    Working,
)
from memd.faults import FaultPlan

READY = Ready(1, 100, {}, None, {"page_tokens": 16, "capacity_pages": 64})


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
        port = QueuePort()
        client = EngineClient(port)
        running = asyncio.create_task(client.run())

        async def tell(*messages):
            port.frames.put_nowait(list(messages))
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        if ready:
            await tell(READY)
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
        client.lose_engine()
        assert client.state == "restarting"
        with pytest.raises(ApiError, match="the engine is restarting"):
            client.require_ready()
        client.drain()
        assert client.state == "draining"
        client.fail("died too often")
        client.fail("and again")
        assert (client.state, client.failure) == ("failed", "died too often")

    drive(scenario, ready=False)


def test_a_model_that_cannot_be_loaded_fails_at_once_and_later_errors_are_last_words():
    async def scenario(client, port, tell):
        await tell(Failed("no memory"))
        assert (client.state, client.failure) == ("failed", "no memory")

    drive(scenario, ready=False)

    async def later(client, port, tell):
        await tell(Failed("broken"))
        assert client.state == "ready"
        assert client.life.last_words == "broken"

    drive(later)


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
            client.fail("broken")
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


def restart(client, port) -> QueuePort:
    """The engine dies and another one is to come, at a port of its own."""
    client.lose_engine()
    port.sent.clear()
    client.connect(port)
    return port


def handed_over(port) -> list[str]:
    return [m.request_id for m in port.sent if isinstance(m, Submit)]


def first_output(name: str, token: int) -> Output:
    return Output(name, [token], cached_tokens=1, queue_seconds=0.1, prompt_logprobs=[None])


def test_open_sequences_go_on_with_what_they_have():
    async def scenario(client, port, tell):
        scored = Submit("a-0", [1, 2], SamplingParams(1, 5, prompt_logprobs=0))
        with client.generate([scored, submit("b-0")]) as outputs:
            await tell(StepReport([first_output("a-0", 7)]))
            command = asyncio.create_task(client.command(PoolCommand, action="flush"))
            await asyncio.sleep(0)
            restart(client, port)
            with pytest.raises(ApiError, match="the engine is restarting"):
                await command
            with pytest.raises(ApiError) as refused, client.generate([submit("c-0")]):
                pass
            assert (refused.value.status, refused.value.code) == (503, "restarting")
            assert port.sent == []
            await tell(READY)
            assert port.sent == [
                Submit("a-0", [1, 2], SamplingParams(1, 5), output_tokens=[7]),
                submit("b-0"),
            ]
            await tell(StepReport([first_output("a-0", 8), first_output("b-0", 9)]))
            got = [await outputs.next() for _ in range(3)]
            assert got == [first_output("a-0", 7), Output("a-0", [8]), first_output("b-0", 9)]

    drive(scenario)


def test_a_sequence_dropped_meanwhile_is_not_handed_over():
    async def scenario(client, port, tell):
        with client.generate([submit("a-0"), submit("a-1")]):
            restart(client, port)
            client.abort("a-0")
            assert port.sent == []
            await tell(READY)
            assert handed_over(port) == ["a-1"]

    drive(scenario)


def test_the_one_that_kills_the_engine_fails_and_the_others_live():
    async def scenario(client, port, tell):
        names = ["a-0", "bad-0", "c-0"]
        with client.generate([submit(name) for name in names]) as outputs:
            restart(client, port)
            await tell(READY)
            assert handed_over(port) == names
            restart(client, port)
            await tell(READY)
            assert handed_over(port) == ["a-0"]
            assert client.state == "restarting"
            await tell(StepReport())
            assert handed_over(port) == ["a-0"]
            await tell(StepReport([Output("a-0", [1])]))
            assert handed_over(port) == ["a-0", "bad-0"]
            client.lose_engine()
            assert (await outputs.next()).token_ids == [1]
            last = await outputs.next()
            assert (last.request_id, last.error_code) == ("bad-0", "engine_failed")
            assert last.error == "the engine died 3 times on this request"
            restart(client, port)
            await tell(READY)
            assert handed_over(port) == ["c-0"]
            await tell(StepReport([Output("c-0", [1], finish_reason="length")]))
            assert handed_over(port) == ["c-0", "a-0"]
            assert client.state == "ready"

    drive(scenario)


def test_progress_is_a_step_or_having_nothing_to_do():
    async def scenario(client, port, tell):
        def report(steps: int) -> StepReport:
            snapshot = engine_snapshot()
            return StepReport(
                snapshot=msgspec.structs.replace(snapshot, steps={"decode": steps, "mixed": 0})
            )

        async def signs_of(message) -> int:
            before = client.life.signs
            await tell(message)
            return client.life.signs - before

        assert await signs_of(Loading("weights", 0.1)) == 1
        await tell(READY)
        assert await signs_of(report(0)) == 1
        with client.generate([submit("a-0")]):
            assert await signs_of(report(0)) == 0
            assert await signs_of(report(1)) == 1
            assert await signs_of(report(1)) == 0
            assert await signs_of(Working()) == 1

    drive(scenario, ready=False)


def test_each_engine_is_told_of_faults_before_it_gets_work():
    async def scenario(client, port, tell):
        client.faults = FaultPlan(requests={"a": "kill"})
        with client.generate([submit("a-0")]):
            client.lose_engine()
            port.sent.clear()
            await tell(READY)
            assert [type(message) for message in port.sent] == [ArmFaults, Submit]
            assert port.sent[0].plan == client.faults
            client.faults = FaultPlan()
            client.lose_engine()
            port.sent.clear()
            await tell(READY)
            assert [type(message) for message in port.sent] == [Submit]

    drive(scenario)
