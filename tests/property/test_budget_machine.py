"""The pool under budgets and windows against the model of it: pages in the middle of sequences are
let go.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, initialize, rule
from pool_machines import pool_machine
from pool_model import Published, Running

from memd.errors import PoolExhausted
from memd.pool.budget import Budget
from memd.pool.pages import PageState
from memd.types import PageId, RequestId

PAGE_TOKENS, MOST_PAGES = pool_machine.PAGE_TOKENS, pool_machine.MOST_PAGES
TEXTS = st.sampled_from([[n % 2] * 9 + [n // 2] * 17 for n in range(4)])


class BudgetMachine(pool_machine.PackedPoolMachine):  # type: ignore[misc,name-defined]
    """A text that may become longer than the budget keeps sinks and some of the rest; with a window
    every text does.
    """

    grab = None  # would give a sequence more than its budget

    running = Bundle("running")

    @initialize(
        capacity=st.integers(3, MOST_PAGES),
        marks=st.sampled_from([(0.9, 0.5), (1.0, 0.99)]),
        host=st.sampled_from([0, 3, 30]),
        pin_limit=st.sampled_from([0.0, 0.5]),
        sinks=st.sampled_from([0, 1, 4, 6]),
        more=st.sampled_from([2, 3, 5, 9]),
        policy=st.sampled_from(["recency", "attention_share", "window"]),
    )
    def start(
        self,
        capacity: int,
        marks: tuple[float, float],
        host: int,
        pin_limit: float,
        sinks: int,
        more: int,
        policy: str,
    ) -> None:
        self.begin(capacity, marks, host, pin_limit)
        self.bound(sinks, more, policy)

    def bound(self, sinks: int, more: int, policy: str) -> None:
        sink_pages = self.pool.layout.pages_for(sinks)
        self.budget: Budget | None = None
        if policy == "window":
            self.pool.retention.window = 2 * more
        else:
            self.budget = Budget(sink_pages + more, sink_pages, policy, PAGE_TOKENS)  # type: ignore[arg-type]
        self.pool.retention.budget, self.pool.retention.sinks = self.budget, sinks
        self.places: dict[RequestId, list[int]] = {}  # by page of a table: its place in the text
        self.tables: dict[RequestId, list[PageId]] = {}  # as the device knows them
        self.let_go = 0

    def longest(self, tokens: list[int]) -> int:
        """What begins with a 1 goes on after its prompt."""
        return len(tokens) + 12 * tokens[0]

    def expected_match(self, tokens: list[int], namespace: str) -> int:
        if self.budget is not None and self.longest(tokens) > self.budget.tokens:
            tokens = tokens[: self.budget.tokens - PAGE_TOKENS + 1]
        return int(super().expected_match(tokens, namespace))

    def note_growth(self, run: Running) -> list[int]:
        """Tell the device's table and the places what has come, by what the pool says."""
        sequence = run.sequence
        table = self.tables.setdefault(sequence.request_id, [])
        places = self.places.setdefault(sequence.request_id, [])
        for index in sequence.rewritten:
            if index < min(len(table), len(sequence.pages)):
                table[index] = sequence.pages[index]
        sequence.rewritten.clear()
        del table[len(sequence.pages) :]
        table += sequence.pages[len(table) :]
        assert table == sequence.pages, "the device reads other pages than the pool says"
        while len(places) < len(sequence.pages):
            places.append(sequence.span_pages - len(sequence.pages) + len(places))
        return places

    def write(self, run: Running, upto: int) -> None:
        """As without a budget, for the pages that are left."""
        sequence = run.sequence
        for page, place in zip(sequence.pages, self.note_growth(run), strict=True):
            for position in range(place * PAGE_TOKENS, min((place + 1) * PAGE_TOKENS, upto)):
                offset, token = position % PAGE_TOKENS, sequence.tokens[position]
                if position >= run.num_computed:
                    assert self.pool.pages.state[page] == PageState.WRITING
                    self.memory.write(page, offset, token)
                assert self.memory.read(page)[offset] == token
        run.num_computed = upto

    def remember(self, run: Running, upto: int) -> None:
        tokens = run.sequence.tokens.tolist()[:upto]
        for page, place in zip(run.sequence.pages, self.note_growth(run), strict=True):
            end, node = min((place + 1) * PAGE_TOKENS, upto), self.pool.pages.node[page]
            if end > place * PAGE_TOKENS and node is not None:
                self.published.append(Published(run.namespace, tokens[:end], node))

    def make_way(self, run: Running, num_tokens: int) -> bool:
        """Let pages go as a budget says and have others for the tokens that come."""
        pool, sequence, budget = self.pool, run.sequence, self.budget
        sinks = pool.retention.sink_pages
        places, before = self.note_growth(run), list(sequence.pages)
        refs = {page: pool.pages.refs[page] for page in before}
        if sequence.bounded:
            assert all(pool.pages.node[page] is None for page in before[sinks:]), "its own"
        pool.retention.let_go(sequence, run.num_computed, num_tokens)
        gone = [index for index, page in enumerate(before) if page not in set(sequence.pages)]
        self.let_go += len(gone)
        if gone and budget is not None:
            assert sinks <= gone[0] <= gone[-1] < len(before) - budget.recent_pages
            assert sequence.bounded, "what cannot outgrow the budget is kept whole"
        elif gone:
            assert gone == list(range(sinks, sinks + len(gone)))
            seen_from = run.num_computed + 1 - pool.retention.window
            assert all((places[index] + 1) * PAGE_TOKENS <= seen_from for index in gone)
        assert all(pool.pages.refs[before[index]] == refs[before[index]] - 1 for index in gone)
        self.places[sequence.request_id] = [
            place for index, place in enumerate(places) if index not in set(gone)
        ]
        self.note_growth(run)
        self.write(run, run.num_computed)
        try:
            pool.grow(sequence, num_tokens)
        except PoolExhausted:
            return False
        if budget is not None and sequence.bounded:
            assert len(sequence.pages) <= budget.pages
        return True

    @rule(run=running, more=st.integers(1, 9))
    def compute(self, run: Running, more: int) -> None:
        """A step of a prompt: what is to be computed at once ends where pages have to go."""
        if run.sequence.request_id not in self.pool.sequences:
            return
        self.pool.copied(run.sequence)
        count = min(more, self.pool.retention.chunk_tokens(run.num_computed))
        upto = min(len(run.sequence.tokens), run.num_computed + count)
        if not self.make_way(run, upto):
            return
        self.write(run, upto)
        self.pool.publish(run.sequence, run.num_computed)
        self.write(run, run.num_computed)
        self.remember(run, run.num_computed // PAGE_TOKENS * PAGE_TOKENS)

    @rule(run=running, token=st.integers(0, 1), count=st.integers(1, 8))
    def decode(self, run: Running, token: int, count: int) -> None:
        sequence = run.sequence
        for _ in range(count):
            done = run.num_computed < len(sequence.tokens) or len(sequence.tokens) >= self.most(run)
            if sequence.request_id not in self.pool.sequences or done:
                return
            self.pool.copied(sequence)
            sequence.tokens.append(token)
            if not self.make_way(run, len(sequence.tokens)):
                sequence.tokens.pop()
                return
            self.write(run, len(sequence.tokens))

    def most(self, run: Running) -> int:
        """A sequence that may not outgrow the budget has been told to end before."""
        return 60 if self.budget is None or run.sequence.bounded else self.budget.tokens

    @rule(run=running, shares=st.lists(st.floats(0, 1), max_size=10))
    def measure(self, run: Running, shares: list[float]) -> None:
        """Shares of attention of the leading pages become known."""
        run.sequence.shares = shares[: len(run.sequence.pages)]

    @rule(run=running)
    def go_on(self, run: Running) -> None:
        """A prompt is computed to its end, and then a page more."""
        for _ in range(len(run.sequence.tokens)):
            self.compute(run, 9)
        self.decode(run, 1, 3 * PAGE_TOKENS)

    @rule(shorter=st.integers(0, 9), longer=st.integers(1, 9), namespace=pool_machine.namespaces)
    def outgrow_what_is_cached(self, shorter: int, longer: int, namespace: str) -> None:
        """What a text that fits the budget has left is where one that does not begins."""
        self.serve_and_end(self.leave_a_beginning(shorter, longer, namespace), namespace)

    def leave_a_beginning(self, shorter: int, longer: int, namespace: str) -> list[int]:
        """Serve the beginning of a text as far as the budget holds it whole; returns the text."""
        tokens = 24 if self.budget is None else self.budget.tokens
        text = [0] + [1] * (tokens + longer)
        self.serve_and_end(text[: max(1, tokens - shorter)], namespace)
        return text

    @rule(tokens=TEXTS, namespace=pool_machine.namespaces)
    def come_back(self, tokens: list[int], namespace: str) -> None:
        """What has been let go or has ended, and went to the host, is found and used again."""
        self.serve_and_end(tokens, namespace)
        self.offload(MOST_PAGES)
        self.restore(tokens, namespace)
        self.start_copies()
        while self.copying:
            self.end_copy(0, True)
        self.serve_and_end(tokens, namespace)

    @rule(target=running, tokens=TEXTS, namespace=pool_machine.namespaces)
    def serve(self, tokens: list[int], namespace: str) -> object:
        """A whole prompt, as far as there is room."""
        run = self.admit(tokens, namespace, 0)
        if isinstance(run, Running):
            self.go_on(run)
        return run


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
