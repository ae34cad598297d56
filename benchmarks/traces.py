"""What recording costs: time of the event loop and of the thread, for each sequence.

    python benchmarks/traces.py --sequences 2000 --prompt-tokens 1024 --output-tokens 128

The recorder, the store and SQLite are the daemon's own; there is no engine and no HTTP.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from memd.api.engine_client import EngineClient
from memd.api.recovery import OpenSequence
from memd.api.trace_recorder import TraceRecorder
from memd.config import build
from memd.engine.messages import Ready, SamplingParams, Submit
from memd.settings import LiveSettings
from memd.store.database import database_of
from memd.store.store import Store


async def measure(sequences: int, prompt_tokens: int, output_tokens: int, page_tokens: int) -> None:
    """Record sequences of random tokens and print what each of them took."""
    settings = build({})
    engine = EngineClient()
    pool = {"page_tokens": page_tokens, "page_bytes": 2**20, "block_bytes": 2**24}
    engine.ready = engine.life.ready = Ready(1, 10**6, {}, None, {**pool, "capacity_pages": 1000})
    engine.settled.set()
    chance = random.Random(0)
    prompt = [chance.randrange(150_000) for _ in range(prompt_tokens)]
    output = [chance.randrange(150_000) for _ in range(output_tokens)]
    with tempfile.TemporaryDirectory() as directory:
        store = Store(database_of(settings.history, Path(directory)), settings.history)
        store.start()
        recorder = TraceRecorder("bench", engine, LiveSettings(settings), store)
        recorder.begin("bench", "bench", False)
        loop_seconds, cpu = 0.0, time.process_time()
        for at in range(sequences):
            submit = Submit(f"cmpl-{at}-0", prompt, SamplingParams(0, output_tokens))
            sequence = OpenSequence(submit, lambda _: None, time.monotonic(), output)
            started = time.thread_time()
            recorder.opening()
            recorder.closed(sequence, "length")
            loop_seconds += time.thread_time() - started
            if at % 50 == 0:
                await recorder.flush()  # as far apart as a busy server's are, or more
        await recorder.flush()
        cpu = time.process_time() - cpu
        size = (store.database_bytes or 0) / 2**20
        counts = recorder.counts
        await recorder.stop()
        await store.stop(5.0)
    per_loop, per_all = (1e6 * each / sequences for each in (loop_seconds, cpu))
    print(f"{counts['recorded']} recorded, {counts['dropped']} dropped, {size:.1f} MiB")
    print(f"event loop {per_loop:.1f} µs, all threads {per_all:.0f} µs a sequence (CPU time)")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--page-tokens", type=int, default=16)
    given = parser.parse_args()
    asyncio.run(
        measure(given.sequences, given.prompt_tokens, given.output_tokens, given.page_tokens)
    )


if __name__ == "__main__":
    main()
