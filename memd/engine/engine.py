"""The engine: a plain loop in one thread, the only owner of pool and device.

A step has five stages: take messages, finish transfers, schedule, launch, publish results. Where
the device works beside the host, the results are those of the step before: the host plans one step
ahead, and what a sequence turns out not to have needed is thrown away.
"""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import msgspec

from memd.engine.commands import Commands
from memd.engine.counters import EngineCounters
from memd.engine.disk import settle
from memd.engine.elasticity import Elasticity
from memd.engine.messages import (
    Abort,
    ApplySettings,
    ArmFaults,
    Describe,
    Explain,
    Output,
    PoolCommand,
    Preempt,
    PrefixCommand,
    Reply,
    SetPriority,
    Shutdown,
    Start,
    StepReport,
    Submit,
    TokenLogprobs,
)
from memd.engine.packing import Packing
from memd.engine.plan import StepPlan
from memd.engine.port import EnginePort
from memd.engine.request import Request
from memd.engine.results import Collect, StepResult
from memd.engine.runner import PlanRunner
from memd.engine.sampling import Sampled
from memd.engine.scheduler import Scheduler
from memd.engine.snapshot import take_snapshot
from memd.engine.snapshot_types import EngineSnapshot
from memd.errors import RequestError
from memd.pool.pool import Pool
from memd.tiers.copier import Copier
from memd.tiers.disk import Disk
from memd.types import FinishReason, RequestId

logger = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_SECONDS = 0.05
COPY_WAIT_SECONDS = 0.001
IDLE_WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class LaunchedStep:
    """A plan on its way: `collects` wait for its results, one call for each part it ran in."""

    plan: StepPlan
    collects: list[Collect]
    started_at: float


class Engine:
    """Serves sequences from the pool, one step at a time.

    Args:
        port: Where messages come from and go to.
        pool: The KV memory's bookkeeping.
        scheduler: Over the same pool.
        runner: Over the same pool's memory.
        copier: Of the same pool's pages.
        disk: Of the same pool's files.
        clock: Monotonic seconds.
        namespace: What every request shares besides its salt: model and KV format.
        commands: Over the same pool and scheduler.
        elasticity: Over the same pool and scheduler.
        packing: Likewise; None: all pages are full.
        stage: Names a stage of the step for profilers.
        allocator_bytes: Device memory that torch's allocator has taken; None: no GPU.
    """

    def __init__(
        self,
        port: EnginePort,
        pool: Pool,
        scheduler: Scheduler,
        runner: PlanRunner,
        copier: Copier,
        disk: Disk,
        clock: Callable[[], float],
        namespace: str,
        commands: Commands,
        elasticity: Elasticity,
        packing: Packing | None = None,
        stage: Callable[[str], AbstractContextManager[object]] = nullcontext,
        allocator_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.counters = EngineCounters()
        self.last_step_at: float | None = None
        self.stopping = False
        self._port = port
        self._runner = runner
        self._copier = copier
        self._disk = disk
        self._clock = clock
        self._namespace = namespace
        self.commands = commands
        self.elasticity = elasticity
        self.packing = packing
        self._stage = stage
        self._allocator_bytes = allocator_bytes
        self._arrivals = 0
        self._outputs: list[Output] = []
        self._replies: list[Reply] = []
        self._snapshot_at: float | None = None
        self._launched: deque[LaunchedStep] = deque()

    @property
    def busy(self) -> bool:
        """Whether the next step has something to do without a message."""
        return bool(
            self.scheduler.requests
            or self._launched
            or self.pool.watermarks.reclaiming
            or self.pool.residency.moves
            or self.elasticity.elastic.busy
            or self.pool.disk.busy
        )

    def run(self) -> None:
        """Step until told to shut down."""
        computed = False
        while not self.stopping:
            if computed:
                wait_seconds = 0.0
            else:  # nothing to do, or only copies to wait for
                wait_seconds = COPY_WAIT_SECONDS if self.busy else IDLE_WAIT_SECONDS
            computed = self.step(wait_seconds)
        settle(self.pool, self._copier, self._disk, self._clock)
        self._disk.close()
        self._copier.close()

    def step(self, wait_seconds: float = 0.0) -> bool:
        """One pass: messages in, one forward launched at most, one report out.

        Args:
            wait_seconds: How long to wait for a message when none has come.

        Returns:
            Whether anything was launched or completed.
        """
        for message in self._port.receive(wait_seconds):
            self._take(message)
        with self._stage("transfers"):
            for transfer_id, succeeded in self._copier.poll():
                self.pool.finish_transfer(transfer_id, succeeded)
        with self._stage("schedule"):
            self.elasticity.begin_step()
            if self.packing is not None:
                self.packing.advance()
            self.pool.advance_disk(self._disk.poll())  # what is due is written packed
            plan = self.scheduler.schedule()
        with self._stage("launch"):
            started_at = self._clock()
            self._copier.start(self.pool.residency.take_orders())
            self.elasticity.move(idle=not plan.chunks)
            self._disk.start(self.pool.disk.take_orders())
            if plan.chunks:
                self._launch(plan, started_at)
            self.elasticity.resize(self._launched[0].started_at if self._launched else None)
        for request in plan.starved:
            self._fail(request, self._no_room(request), "pool_exhausted")
        ahead = self._runner.steps_ahead if plan.chunks and not plan.needs_results else 0
        computing = bool(self._launched)
        while len(self._launched) > ahead:
            with self._stage("publish"):
                self._collect(self._launched.popleft())
        self._report()
        return computing

    def snapshot(self) -> EngineSnapshot:
        """The state now, as metrics and the operator see it."""
        if self.packing is not None:
            self.packing.watch()
        return take_snapshot(
            self.pool,
            self.scheduler,
            self.commands,
            self.elasticity,
            self.packing,
            self.counters,
            None if self.last_step_at is None else self._clock() - self.last_step_at,
            self._allocator_bytes(),
        )

    def _take(self, message: object) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                request = self.scheduler.requests.get(RequestId(message.request_id))
                if request is not None:
                    self._finish(request, message.reason)
            case (
                PoolCommand()
                | PrefixCommand()
                | Describe()
                | Explain()
                | ApplySettings()
                | Preempt()
                | SetPriority()
                | ArmFaults()
            ):
                self._replies.append(self.commands.execute(message))
            case Shutdown():
                self.stopping = True
            case Start():
                logger.warning("a second Start is ignored")

    def _submit(self, message: Submit) -> None:
        self._arrivals += 1
        namespace = f"{self._namespace}/{message.salt}"
        ends = self._runner.vocabulary.eos_token_ids
        request = Request.from_message(message, namespace, self._arrivals, self._clock(), ends)
        try:
            if request.id in self.scheduler.requests:
                raise RequestError(f"request id {request.id} is in use", "request_id")
            self.scheduler.submit(request)
            if message.output_tokens:
                # It may have been complete when the engine before this one died.
                reason = _finish_reason(request, message.output_tokens[-1])
                if reason is not None:
                    self._finish(request, reason)
        except RequestError as error:
            self.counters.finished["error"] += 1
            self._outputs.append(
                Output(
                    request.id, finish_reason="error", error=error.message, error_code=error.code
                )
            )

    def _launch(self, plan: StepPlan, started_at: float) -> None:
        """Start a plan; if that fails, one sequence at a time, and fail those that fail alone.

        Args:
            started_at: Before pages were moved for it: when it has ended, so have they.
        """
        try:
            collects = [self._runner.launch(plan)]
        except Exception:
            logger.exception("a step failed; its sequences run one by one")
            collects = self._launch_one_by_one(plan)
        self.scheduler.launched(plan)
        self._launched.append(LaunchedStep(plan, collects, started_at))

    def _launch_one_by_one(self, plan: StepPlan) -> list[Collect]:
        collects: list[Collect] = []
        for chunk in plan.chunks:
            alone = StepPlan([chunk], []) if chunk in plan.decodes else StepPlan([], [chunk])
            try:
                collects.append(self._runner.launch(alone))
            except Exception:
                logger.exception("request %s failed", chunk.request.id)
                self._fail(chunk.request, "the model failed on this request", "model_error")
        return collects

    def _collect(self, step: LaunchedStep) -> None:
        """Wait for a step's results and publish them."""
        waiting_since = self._clock()
        results = [collect() for collect in step.collects]
        self.counters.wait_seconds += self._clock() - waiting_since
        self._publish(step.plan, results)
        now, mode = self._clock(), step.plan.mode
        started_at = max(step.started_at, self.last_step_at or step.started_at)
        self.last_step_at = now
        self.counters.steps[mode] += 1
        replayed = bool(results) and all(result.replayed for result in results)
        self.counters.replayed_steps[mode] += replayed
        self.counters.shared_prefix_steps += any(result.shared_prefix for result in results)
        self.counters.step_seconds[mode].observe(now - started_at)
        self.elasticity.stepped(now - started_at)

    def _publish(self, plan: StepPlan, results: list[StepResult]) -> None:
        """Account what was computed, then hand out tokens and finish what is done."""
        failed = {
            sampled.request.id for result in results for sampled in result.sampled if sampled.failed
        }
        for result in results:
            for request, logprobs in result.prompt_logprobs:
                request.prompt_logprobs += logprobs
        for chunk in plan.chunks if failed else ():
            if chunk.request.id in failed and not chunk.request.ended:
                self.counters.nan_logits += 1
                self._fail(chunk.request, "the model's output is not a number", "numerical_error")
        # Others may have ended, or been preempted, since the step began.
        running = [chunk for chunk in plan.chunks if chunk.request.sequence is not None]
        self.scheduler.completed(running)
        for chunk in running:
            if chunk.samples and not chunk.request.sampling.max_tokens:
                self._finish(chunk.request, "length")
        for result in results:
            for sampled in result.sampled:
                if not sampled.failed and not sampled.request.ended:
                    self._hand_out(sampled)

    def _hand_out(self, sampled: Sampled) -> None:
        request, token_id = sampled.request, sampled.token_id
        request.in_flight -= 1
        request.tokens.append(token_id)
        self.counters.generated_tokens += 1
        if request.reported and sampled.logprobs is None:
            self._outputs.append(Output(request.id, [token_id]))
        else:
            self._output(request, [token_id], sampled.logprobs)
        reason = _finish_reason(request, token_id)
        if reason is not None:
            self._finish(request, reason)

    def _output(
        self, request: Request, token_ids: list[int], logprobs: TokenLogprobs | None = None
    ) -> None:
        first = not request.reported
        request.reported = True
        self._outputs.append(
            Output(
                request.id,
                token_ids,
                logprobs=[logprobs] if logprobs is not None else None,
                prompt_logprobs=request.prompt_logprobs or None if first else None,
                cached_tokens=request.cached_tokens if first else None,
                restored_tokens=dict(request.restored_tokens.items()) if first else None,
                pinned_tokens=request.pinned_tokens if first else None,
                queue_seconds=request.queue_seconds if first else None,
                missed=request.missed if first else None,
            )
        )

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        code: str | None = None,
    ) -> None:
        usage = request.usage
        self.scheduler.finish(request, keep=error is None)
        self.elasticity.finished(request)
        self.counters.finished[reason] += 1
        last = self._outputs[-1] if self._outputs else None
        if last is None or last.request_id != request.id:
            self._output(request, [])
        self._outputs[-1] = msgspec.structs.replace(
            self._outputs[-1], finish_reason=reason, error=error, error_code=code, usage=usage
        )

    def _no_room(self, request: Request) -> str:
        pool = self.pool
        return (
            f"the pool cannot hold this request now: it needs "
            f"{pool.retention.peak_pages(len(request.tokens))} pages, of {pool.capacity_pages} "
            f"{pool.pages.pinned} are pinned and {pool.pages.quarantined} in quarantine"
        )

    def _fail(self, request: Request, error: str, code: str) -> None:
        self._finish(request, "error", error, code)

    def _report(self) -> None:
        """Send the step's one message, with a snapshot when something rests or time has passed."""
        now = self._clock()
        due = self._snapshot_at is None or now - self._snapshot_at >= SNAPSHOT_INTERVAL_SECONDS
        events = self.elasticity.take_events()
        if self.packing is not None:
            events += self.packing.take_events()
        if not (self._outputs or self._replies or events or due):
            return
        snapshot = None
        if due or self._replies or not self.busy:
            snapshot = self.snapshot()
            self._snapshot_at = now
        self._port.send(StepReport(self._outputs, self._replies, snapshot, events))
        self._outputs, self._replies = [], []


def _finish_reason(request: Request, token_id: int) -> FinishReason | None:
    """Why a sequence ends with a token that is its last now, if it does."""
    if token_id in request.end_token_ids:
        return "stop"
    return "length" if len(request.tokens) >= request.max_length else None
