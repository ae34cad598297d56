"""A long run of everything at once against a daemon of its own; ends with 1 on any violation.

    python benchmarks/soak.py [--minutes 10] [--model smollm2-135m] [--kill] [--seed 1]

Clients stream chats and completions, hang up, change settings, flush, reclaim and audit; `--kill`
kills the engine now and then. It must hold that: the memory of both processes is flat after the
warm-up, audits are clean, counters agree with one another and with what the clients saw, nothing is
held at the end, and no answer is a failure that nobody asked for.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
from daemon_process import serving
from soak_checks import Memory, await_idle, check_counters, check_memory
from streams import Target
from workload import WORDS

SETTINGS = ("memory.page_tokens=16", "memory.limit=4096 tokens")
LIVE = {
    "memory.watermark.high": ("90%", "80%", "70%"),
    "memory.watermark.low": ("60%", "50%", "30%"),
    "engine.max_batch_tokens": (64, 256, 512),
    "engine.reserve_tokens": (0, 8, 64),
}
SAMPLE_SECONDS = 2.0


class Soak:
    """The actors of one run.

    Args:
        url: Of the daemon.
        model: Its served name.
        clients: Requests at once.
        seed: Of all that is random.
        ends_at: Monotonic seconds.
    """

    def __init__(self, url: str, model: str, clients: int, seed: int, ends_at: float) -> None:
        self._target = Target(url, timeout_seconds=120)
        self._http = httpx2.AsyncClient(base_url=url, timeout=30)
        self._model = model
        self._clients = clients
        self._seed = seed
        self._ends_at = ends_at
        self.outcomes: Counter[str] = Counter()  # of requests
        self.sequences: Counter[str] = Counter()  # the same, in sequences
        self.actions: Counter[str] = Counter()
        self.violations: list[str] = []
        self.memory: dict[str, Memory] = {"api": Memory(), "engine": Memory()}

    async def run(self, kills: bool) -> None:
        """Everything until the time is over."""
        async with self._http, asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(random.Random(f"{self._seed} {number}")))
            chance = random.Random(f"{self._seed} operator")
            group.create_task(self._operate(chance))
            group.create_task(self._sample())
            if kills:
                group.create_task(self._kill(chance))

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._ends_at

    async def _client(self, chance: random.Random) -> None:
        shared = [f"{name} " * 60 for name in WORDS[:4]]
        while not self._over:
            words = " ".join(chance.choices(WORDS, k=chance.randrange(1, 80)))
            text = (chance.choice(shared) if chance.random() < 0.5 else "") + words
            body: dict[str, Any] = {
                "model": self._model,
                "max_tokens": chance.randrange(1, 100),
                "stream": True,
                "n": chance.choice((1, 1, 1, 2)),
                "seed": chance.randrange(1000),
                "cache_salt": chance.choice((None, None, "a", "b")),
            }
            path = "/v1/completions"
            if chance.random() < 0.3:
                path = "/v1/chat/completions"
                body["messages"] = [{"role": "user", "content": text}]
            else:
                body["prompt"] = text
            cut = chance.expovariate(2.0) if chance.random() < 0.25 else None
            answer = await self._target.stream(path, body, cut_after_seconds=cut)
            outcome = answer.failure or "finished"
            self.outcomes[outcome] += 1
            self.sequences[outcome] += body["n"]
            await asyncio.sleep(chance.expovariate(5.0))

    async def _operate(self, chance: random.Random) -> None:
        while not self._over:
            await asyncio.sleep(chance.expovariate(1.0))
            action = chance.choice(("settings", "undo", "flush", "reclaim", "audit", "audit"))
            try:
                answer = await self._act(action, chance)
            except httpx2.TransportError as error:
                self.violations.append(f"{action}: {type(error).__name__} {error}")
                continue
            self.actions[f"{action} {answer.status_code}"] += 1
            if action == "audit" and answer.status_code == 200 and not answer.json()["clean"]:
                self.violations.append(f"an audit was not clean: {answer.text[:300]}")

    async def _act(self, action: str, chance: random.Random) -> httpx2.Response:
        if action == "settings":
            revision = (await self._http.get("/admin/v1/settings")).json()["revision"]
            key = chance.choice(list(LIVE))
            changes = {key: chance.choice(LIVE[key])}
            body = {"revision": revision, "reason": "soak", "changes": changes}
            return await self._http.patch("/admin/v1/settings", json=body)
        if action == "undo":
            return await self._http.post("/admin/v1/settings/undo", json={"reason": "soak"})
        return await self._http.post(f"/admin/v1/pool/{action}", json={})

    async def _sample(self) -> None:
        while not self._over:
            status = (await self._http.get("/admin/v1/status")).json()
            self.memory["api"].take(status["pid"])
            if status["engine"]["pid"] is not None:
                self.memory["engine"].take(status["engine"]["pid"])
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _kill(self, chance: random.Random) -> None:
        while not self._over:
            await asyncio.sleep(chance.uniform(15, 30))
            status = (await self._http.get("/admin/v1/status")).json()
            if status["state"] == "ready" and not self._over:
                with suppress(ProcessLookupError):
                    os.kill(status["engine"]["pid"], signal.SIGKILL)
                    self.actions["kill"] += 1


def soak(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """One run: what happened, and what should not have."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with (
            serving(directory, arguments.model, *SETTINGS, *arguments.set) as (url, process),
            httpx2.Client(base_url=url, timeout=30) as http,
        ):
            model = http.get("/v1/models").json()["data"][0]["id"]
            ends_at = time.monotonic() + arguments.minutes * 60
            run = Soak(url, model, arguments.clients, arguments.seed, ends_at)
            asyncio.run(run.run(arguments.kill))
            time.sleep(1.0)  # for the last hang-ups to be noticed
            end = await_idle(http)
        log = (directory / "log").read_text()
    violations = [*run.violations, *answered_badly(run)]
    violations += check_counters(
        end["metrics"], run.outcomes, run.sequences, kills=run.actions["kill"]
    )
    report = {"outcomes": dict(run.outcomes), "actions": dict(run.actions), "memory": {}}
    for side, memory in run.memory.items():
        report["memory"][side], violation = check_memory(side, memory, arguments.minutes * 60)
        violations += violation
        if Path(f"/proc/{memory.pid}").exists():
            violations.append(f"the {side} process {memory.pid} is still there")
    if not end["audit"]["clean"]:
        violations.append(f"the last audit was not clean: {end['audit']}")
    if process.returncode != 0:
        violations.append(f"the daemon ended with code {process.returncode}")
    if "Traceback" in log:
        violations.append(f"the log has a traceback: {log[log.index('Traceback') :][:1500]}")
    return report, violations


def answered_badly(run: Soak) -> list[str]:
    """Answers that nobody asked for.

    While an engine is replaced, new requests and commands are told to come back (503); requests
    that are open go on.
    """
    killed = run.actions["kill"] > 0
    expected = ("finished", "cut", "http 503") if killed else ("finished", "cut")
    bad = [
        f"{count} requests ended with: {kind}"
        for kind, count in run.outcomes.items()
        if kind not in expected
    ]
    for action, count in run.actions.items():
        status = action.split()[-1]
        if status.startswith("5") and not (killed and status == "503"):
            bad.append(f"{count} times {action}")
    return bad


def main() -> int:
    """1 when anything was wrong."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--kill", action="store_true", help="kill the engine now and then")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--format", choices=["table", "json"], default="table")
    arguments = options.parse_args()
    report, violations = soak(arguments)
    if arguments.format == "json":
        print(json.dumps({**report, "violations": violations}, indent=1))
    else:
        for name, rows in report.items():
            print(name)
            for key, value in sorted(rows.items()):
                print(f"  {key:<24}{value}")
        print("\n".join(["violations", *(f"  {each}" for each in violations or ["none"])]))
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
