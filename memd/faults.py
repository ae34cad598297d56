"""Faults on demand: what shall go wrong, and how often it has. For tests and debugging.

With `debug.faults` on, the engine is built with a memory driver, a copier, a disk, a clock and a
runner that ask here before they do their work (memd.arena.faults, memd.tiers.faults,
memd.engine.faults).
"""

import random
from collections import Counter
from typing import Any, Literal

import msgspec

from memd.types import DiskFault, FilePath, RequestId, TransferPath

RequestFault = Literal["nan", "error", "hang", "kill"]
MoveFault = Literal["error", "kill"]
ANY_REQUEST = "*"


class FaultPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """What shall go wrong from now on; by default nothing.

    `requests` says by request id (`*`: any) what happens in each step that computes it: its logits
    are NaN, the forward pass fails, or the whole engine hangs or is killed.
    """

    seed: int = 0  # of the draws which copies fail
    fail_commits: int = 0  # so many blocks to come get no memory
    delay_copies_seconds: float = 0.0  # before a copy between tiers begins
    fail_write_backs: float = 0.0  # share of copies to the host
    fail_restores: float = 0.0  # share of copies from the host
    delay_files_seconds: float = 0.0  # before a page file is written or read
    fail_file_writes: float = 0.0  # share of page files that are not written
    fail_file_reads: float = 0.0  # share of page files that cannot be read
    tear_files: float = 0.0  # share of page files that lose their second half once written
    disk_full: bool = False  # nothing can be written
    nan_in_free_pages: bool = False  # what nobody has written is NaN, in every page
    step_clock_seconds: float = 0.0  # the engine's clock jumps ahead, once
    requests: dict[str, RequestFault] = {}
    moves: MoveFault | None = None  # of pages within the pool: fail, or end the engine half-way

    def armed(self) -> dict[str, Any]:
        """The fields that make something go wrong."""
        nothing = FaultPlan()
        values = msgspec.structs.asdict(self)
        return {name: each for name, each in values.items() if each != getattr(nothing, name)}


class Faults:
    """The plan in force in an engine, and what has come of it. Engine thread only.

    Args:
        plan: In force from the start.
    """

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.injected: Counter[str] = Counter()  # by kind, since the engine's start
        self.clock_ahead_seconds = 0.0
        self.arm(plan or FaultPlan())

    def arm(self, plan: FaultPlan) -> None:
        """Replace the plan in force; draws and counts of it begin anew."""
        self.plan = plan
        self.clock_ahead_seconds += plan.step_clock_seconds
        self._commits_to_fail = plan.fail_commits
        self._chance = random.Random(plan.seed)

    def commit_fails(self) -> bool:
        """Whether the block that is about to get memory gets none."""
        if self._commits_to_fail <= 0:
            return False
        self._commits_to_fail -= 1
        self.injected["commit"] += 1
        return True

    def copy_fails(self, path: TransferPath) -> bool:
        """Whether the copy that is about to begin fails."""
        share = self.plan.fail_write_backs if path == "d2h" else self.plan.fail_restores
        fails = self._chance.random() < share
        self.injected[path] += fails
        return fails

    def of_moves(self) -> MoveFault | None:
        """What happens to the moves of pages that are about to be made."""
        if self.plan.moves is not None:
            self.injected[f"move_{self.plan.moves}"] += 1
        return self.plan.moves

    def file_fails(self, path: FilePath) -> DiskFault | None:
        """What the file system says to the page file that is about to be written or read."""
        if path == "h2f" and self.plan.disk_full:
            self.injected[path] += 1
            return "full"
        share = self.plan.fail_file_writes if path == "h2f" else self.plan.fail_file_reads
        if self._chance.random() >= share:
            return None
        self.injected[path] += 1
        return "failed"

    def file_tears(self) -> bool:
        """Whether a page file that has just been written loses its second half."""
        tears = self._chance.random() < self.plan.tear_files
        self.injected["torn"] += tears
        return tears

    def of_request(self, request_id: RequestId) -> RequestFault | None:
        """What happens to a sequence when it is computed; its request's id stands for it too."""
        requests = self.plan.requests
        if not requests:
            return None
        names = (request_id, request_id.rpartition("-")[0], ANY_REQUEST)
        return next((requests[name] for name in names if name in requests), None)
