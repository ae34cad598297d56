"""What an operator can tell the engine to do between two steps."""

import logging
from typing import Any

from memd.engine.elasticity import Elasticity, NotElastic
from memd.engine.messages import (
    ApplySettings,
    ArmFaults,
    Describe,
    Explain,
    PoolCommand,
    Preempt,
    PrefixCommand,
    Reply,
    SetPriority,
)
from memd.engine.prefix_commands import PrefixError, explain_prompt, prefix_command
from memd.engine.request import Request
from memd.engine.scheduler import Scheduler
from memd.engine.tenancy import Tenancy
from memd.faults import Faults
from memd.pool import audit, describe
from memd.pool.pins import PinRefused
from memd.pool.pool import Pool
from memd.pool.prefixes import list_prefixes
from memd.types import RequestId

logger = logging.getLogger(__name__)

Command = (
    PoolCommand
    | PrefixCommand
    | Describe
    | Explain
    | ApplySettings
    | Preempt
    | SetPriority
    | ArmFaults
)


class Commands:
    """Carries out commands; owns the revision of the settings in force.

    Args:
        pool: The KV memory's bookkeeping.
        scheduler: Over the same pool.
        elasticity: Over the same pool.
        revision: Of the settings at the start.
        automatic: What "auto" means on this device, by key.
        namespace: What every request shares besides its salt.
        faults: Injected on demand; None: none can be.
    """

    def __init__(
        self,
        pool: Pool,
        scheduler: Scheduler,
        elasticity: Elasticity,
        revision: int,
        automatic: dict[str, int],
        namespace: str,
        faults: Faults | None = None,
    ) -> None:
        self.revision = revision
        self._automatic = automatic
        self._namespace = namespace
        self.tenancy = Tenancy(pool, scheduler)
        elastic = elasticity.elastic
        defragmenter = elastic.defragmenter
        self._live: dict[str, tuple[object, str]] = {
            "memory.watermark.high": (pool.watermarks, "high"),
            "memory.watermark.low": (pool.watermarks, "low"),
            "memory.regret_window": (pool, "regret_window_seconds"),
            "memory.pin_limit": (pool.pins, "limit_ratio"),
            "memory.host.limit": (pool, "host_limit_bytes"),
            "memory.disk.limit": (pool.disk, "limit_bytes"),
            "memory.disk.expensive_tokens": (pool.disk, "expensive_tokens"),
            "memory.prefetch.window": (scheduler.limits, "prefetch_window"),
            "memory.prefetch.lookahead": (scheduler.limits, "prefetch_lookahead"),
            "memory.prefetch.timeout": (scheduler.limits, "prefetch_timeout_seconds"),
            "memory.reclaim_pages_per_step": (scheduler.limits, "reclaim_pages_per_step"),
            "memory.limit": (elasticity, "limit"),
            "memory.defrag.every_requests": (defragmenter, "every_requests"),
            "memory.defrag.max_fragmentation": (defragmenter, "max_fragmentation"),
            "memory.defrag.pages_per_step": (defragmenter, "pages_per_step"),
            "memory.elastic.idle": (elastic, "idle_seconds"),
            "memory.elastic.reserve": (elastic, "reserve_bytes"),
            "engine.max_batch_tokens": (scheduler.limits, "max_batch_tokens"),
            "engine.reserve_tokens": (scheduler.limits, "reserve_tokens"),
            "tenants": (self.tenancy, "configured"),
        }
        self.audit_runs = {"clean": 0, "leak": 0}
        self.leaked_pages = 0
        self.leak_repaired_pages = 0
        self._pool = pool
        self._scheduler = scheduler
        self._elasticity = elasticity
        self._faults = faults

    def settings_in_force(self) -> dict[str, float]:
        """The value of every live setting that is a number now, in base units."""
        values = {key: getattr(*place) for key, place in self._live.items()}
        return {key: value for key, value in values.items() if isinstance(value, int | float)}

    def execute(self, command: Command) -> Reply:
        """Do it; an error in words for what cannot be done."""
        try:
            return self._execute(command)
        except (PrefixError, PinRefused, NotElastic) as error:
            return Reply(command.command_id, error=str(error))

    def _execute(self, command: Command) -> Reply:
        match command:
            case PoolCommand():
                result = self._pool_command(command)
            case PrefixCommand():
                result = prefix_command(self._pool, command)
            case Explain():
                result = explain_prompt(self._pool, self._namespace, command)
            case Describe():
                result = self._describe(command)
            case ApplySettings():
                return self._apply(command)
            case Preempt():
                request = self._scheduler.requests.get(RequestId(command.request_id))
                if request is None or request.sequence is None:
                    return Reply(command.command_id, error="no running request of this id")
                self._scheduler.preempt(request)
                result = {"request_id": request.id}
            case SetPriority():
                request = self._scheduler.requests.get(RequestId(command.request_id))
                if request is None:
                    return Reply(command.command_id, error="no open request of this id")
                self._scheduler.set_priority(request, command.priority)
                result = {"request_id": request.id, "priority": request.priority}
            case ArmFaults():
                return self._arm(command)
        return Reply(command.command_id, result)

    def _pool_command(self, command: PoolCommand) -> dict[str, Any]:
        pool = self._pool
        match command.action:
            case "flush":
                return {"evicted_pages": pool.flush()}
            case "reclaim":
                low = int(pool.watermarks.low * pool.capacity_pages)
                pages = command.pages
                if pages is None:
                    pages = max(0, pool.occupied_pages - low)
                return {"evicted_pages": pool.evict(pages)}
            case "audit":
                return self._audit()
            case "defrag":
                return self._elasticity.ask("idle" if command.idle else "admin")

    def _audit(self) -> dict[str, Any]:
        report = audit.audit(self._pool)
        self.audit_runs["leak" if report.leaked_pages else "clean"] += 1
        self.leaked_pages = report.leaked_pages
        self.leak_repaired_pages += report.repaired_pages
        for problem in report.problems:
            logger.error("audit: %s", problem)
        return {
            "clean": not report.problems,
            "problems": report.problems,
            "leaked_pages": report.leaked_pages,
            "repaired_pages": report.repaired_pages,
            "released_quarantine_pages": report.released_quarantine_pages,
        }

    def _describe(self, command: Describe) -> dict[str, Any]:
        match command.what:
            case "blocks":
                return describe.blocks(self._pool, command.offset, command.limit)
            case "prefixes":
                return list_prefixes(
                    self._pool, command.limit, command.sort, command.tenant, command.pinned
                )
            case "requests":
                return {"requests": self._requests(command.offset, command.limit, command.shares)}

    def _requests(self, offset: int, limit: int, shares: bool) -> list[dict[str, Any]]:
        everyone = [*self._scheduler.running, *self._scheduler.waiting]
        return [
            {
                "request_id": request.id,
                "state": "running" if request.sequence is not None else "waiting",
                "waiting_for": self._scheduler.waiting_for.get(request.id),
                "priority": request.priority,
                "tenant": request.tenant,
                "prompt_tokens": request.prompt_length,
                "cached_tokens": request.cached_tokens,
                "missed": request.missed._asdict() if request.missed else None,
                "computed_tokens": request.num_computed,
                "generated_tokens": request.num_generated,
                "max_tokens": request.sampling.max_tokens,
                "pages": len(request.sequence.pages) if request.sequence is not None else 0,
                "dropped_pages": request.sequence.dropped_pages if request.sequence else 0,
                **({"attention_shares": self._shares(request)} if shares else {}),
                "pinned_tokens": request.pinned_tokens,
                "preemptions": request.preemptions,
                "queue_seconds": request.queue_seconds,
            }
            for request in everyone[offset : offset + limit]
        ]

    def _shares(self, request: Request) -> list[float] | None:
        """Of a sequence's leading pages; None: not measured, or not yet."""
        found = request.sequence.shares if request.sequence is not None else []
        return [round(share, 5) for share in found] or None

    def _arm(self, command: ArmFaults) -> Reply:
        if self._faults is None:
            return Reply(command.command_id, error="debug.faults is off")
        if command.plan is not None:
            self._faults.arm(command.plan)
        return Reply(command.command_id, {"injected": dict(self._faults.injected)})

    def _apply(self, command: ApplySettings) -> Reply:
        unknown = command.values.keys() - self._live.keys()
        if unknown:
            return Reply(command.command_id, error=f"not live: {', '.join(sorted(unknown))}")
        limit = command.values.get("memory.limit")
        if limit is not None and (refusal := self._elasticity.refusal(limit)) is not None:
            return Reply(command.command_id, error=refusal)
        for key, value in command.values.items():
            owner, attribute = self._live[key]
            setattr(owner, attribute, self._automatic[key] if value == "auto" else value)
        if limit is not None:  # quotas that are shares of it
            self.tenancy.configured = self.tenancy.configured
        self.revision = command.revision
        return Reply(command.command_id, {"revision": self.revision})
