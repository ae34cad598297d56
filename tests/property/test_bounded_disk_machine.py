"""The pool under budgets and windows with a disk tier: files hold what precedes the first page that
was let go, and what is brought up from them is let go like all else.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, initialize, rule
from pool_machines import budget_machine, disk_machine, pool_machine


class BoundedDiskMachine(budget_machine.BudgetMachine, disk_machine.DiskMachine):  # type: ignore[misc,name-defined]
    running = Bundle("running")

    @initialize(
        capacity=st.integers(6, 14),
        marks=st.sampled_from([(0.9, 0.5), (0.6, 0.3)]),
        host=st.sampled_from([0, 1, 3]),
        staging=st.sampled_from([2, 5]),
        pages=st.sampled_from([6, 100]),
        expensive_tokens=st.sampled_from([1, 12]),
        sinks=st.sampled_from([0, 1, 4, 6]),
        more=st.sampled_from([2, 3, 5, 9]),
        policy=st.sampled_from(["recency", "attention_share", "window"]),
    )
    def start(
        self,
        capacity: int,
        marks: tuple[float, float],
        host: int,
        staging: int,
        pages: int,
        expensive_tokens: int,
        sinks: int,
        more: int,
        policy: str,
    ) -> None:
        self.begin(capacity, marks, host, 0.5)
        self.open_disk(staging, pages, expensive_tokens)
        self.bound(sinks, more, policy)

    def serve_once(self, tokens: list[int], namespace: str, packs: bool) -> None:
        """Nothing is packed under a budget."""
        self.serve_and_end(tokens, namespace)

    @rule(shorter=st.integers(0, 9), longer=st.integers(1, 9), namespace=pool_machine.namespaces)
    def outgrow_what_is_on_disk(self, shorter: int, longer: int, namespace: str) -> None:
        """As in memory, with all of it on disk alone meanwhile."""
        text = self.leave_a_beginning(shorter, longer, namespace)
        self.carry(2)
        self.evict(pool_machine.MOST_PAGES)
        self.carry(1)
        self.fetch(text, namespace)


TestBoundedDiskMachine = BoundedDiskMachine.TestCase
TestBoundedDiskMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
