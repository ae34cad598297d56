"""The pool with a disk tier, against the same model: files hold tokens, too."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, rule
from pool_machines import pool_machine
from pool_model import Published, Running

from memd.pool.files import FileReport, FileTransfer, IndexReport, PageFile
from memd.pool.keys import page_key, root_key
from memd.pool.prefix_tree import Node

FILE_BYTES = 5000  # takes twice the room of the file of a packed page
PAGE_TOKENS, PAGE_BYTES, MOST_PAGES = (
    pool_machine.PAGE_TOKENS,
    pool_machine.PAGE_BYTES,
    pool_machine.MOST_PAGES,
)
TEXTS = st.sampled_from([[number % 2] * 6 + [number // 2] * 11 for number in range(4)])


class DiskMachine(pool_machine.PackedPoolMachine):  # type: ignore[misc,name-defined]
    @initialize(
        capacity=st.integers(1, 14),
        marks=st.sampled_from([(0.9, 0.5), (0.6, 0.3)]),
        host=st.sampled_from([0, 1, 3]),
        pin_limit=st.sampled_from([0.0, 0.5]),
        staging=st.sampled_from([2, 5]),
        pages=st.sampled_from([1, 6, 100]),
        expensive_tokens=st.sampled_from([1, 12]),
        packed_bytes=st.sampled_from([None, 5]),
    )
    def start(
        self,
        capacity: int,
        marks: tuple[float, float],
        host: int,
        pin_limit: float,
        staging: int,
        pages: int,
        expensive_tokens: int,
        packed_bytes: int | None,
    ) -> None:
        self.begin(capacity, marks, host, pin_limit, packed_bytes)
        self.open_disk(staging, pages, expensive_tokens, 0 if packed_bytes is None else 50)

    def open_disk(
        self, staging: int, pages: int, expensive_tokens: int, packed_file_bytes: int = 0
    ) -> None:
        self.pool.disk.expensive_tokens = expensive_tokens
        self.pool.disk.open(FILE_BYTES, (18 + 2 * pages) * 4096, staging, packed_file_bytes)
        self.pool.advance_disk([IndexReport(last=True)])
        self.transfers: list[FileTransfer] = []
        self.files: dict[bytes, tuple[PageFile, bytes]] = {}

    def expected_match(self, tokens: list[int], namespace: str) -> int:
        in_tree: int = super().expected_match(tokens, namespace)
        data = b"".join(token.to_bytes(4, "little") for token in tokens[:-1])
        key, size = root_key(namespace), PAGE_TOKENS * 4
        found = 0
        for start in range(0, len(data) - size + 1, size):
            key = page_key(key, data[start : start + size])
            if start >= in_tree // PAGE_TOKENS * size:
                if self.pool.disk.fault is not None or not self.pool.disk.holds(key):
                    break
                found += 1
        return in_tree if not found else (in_tree // PAGE_TOKENS + found) * PAGE_TOKENS

    def path_of(self, node: Node) -> tuple[str, list[int]]:
        """The namespace and all tokens up to a node's end."""
        data = b""
        while not node.is_root:
            data = self.pool.tree.page_label(node) + data
            node = self.pool.tree.page_parent(node)
        tokens = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
        return node.label.decode(), tokens

    @rule(tokens=pool_machine.token_lists, namespace=pool_machine.namespaces)
    def restore(self, tokens: list[int], namespace: str) -> None:
        before = set(self.pool.disk.reading)
        super().restore(tokens, namespace)
        for node in self.pool.disk.reading.keys() - before:
            space, path = self.path_of(node)
            self.published.append(Published(space, path, node))

    @rule()
    def advance_disk(self) -> None:
        self.pool.advance_disk([])

    @rule()
    def start_files(self) -> None:
        for order in self.pool.disk.take_orders():
            for key in order.remove:
                self.files.pop(key, None)
            if isinstance(order, FileTransfer):
                self.transfers.append(order)

    @rule(which=st.integers(0, 20), outcome=st.sampled_from(["ok", "ok", "ok", "full", "altered"]))
    def end_file(self, which: int, outcome: str) -> None:
        if not self.transfers:
            return
        transfer = self.transfers.pop(which % len(self.transfers))
        key, slot = transfer.file.key, transfer.slot
        fault = "full" if outcome == "full" else None
        bad = "altered" if outcome == "altered" and transfer.path == "f2h" else None
        if fault is None and bad is None:
            if transfer.path == "h2f":
                packed, content = self.host_memory[slot]
                assert packed == transfer.file.packed
                self.files[key] = transfer.file, content
            elif key in self.files:
                file, content = self.files[key]
                assert file == transfer.file, "whoever reads expects what was written"
                self.host_memory[slot] = file.packed, content
            else:
                fault = "gone"
        elif bad is not None:
            self.files.pop(key, None)
        self.pool.advance_disk([FileReport(transfer.id, fault, bad)])  # type: ignore[arg-type]
        late = self.pool.counters.late_transfers
        self.pool.advance_disk([FileReport(transfer.id)])
        assert self.pool.counters.late_transfers == late + 1

    @rule(tokens=TEXTS, namespace=pool_machine.namespaces)
    def serve(self, tokens: list[int], namespace: str) -> None:
        """A request from beginning to end, packed as far as may be."""
        self.serve_once(tokens, namespace, packs=True)

    def serve_once(self, tokens: list[int], namespace: str, packs: bool) -> None:
        run = self.admit(tokens, namespace, 0)
        if isinstance(run, Running):
            self.compute(run, len(tokens))
            if packs:
                self.pack(run, 0)
            self.finish(run)

    @rule(rounds=st.integers(1, 3))
    def carry(self, rounds: int) -> None:
        """Everything that is under way ends well."""
        for _ in range(rounds):
            self.start_copies()
            while self.copying:
                self.end_copy(0, True)
            self.advance_disk()
            self.start_files()
            while self.transfers:
                self.end_file(0, "ok")

    @rule(tokens=TEXTS, namespace=pool_machine.namespaces)
    def fetch(self, tokens: list[int], namespace: str) -> None:
        """What is in lower tiers comes up, and is used."""
        for _ in range(3):
            self.restore(tokens, namespace)
            self.carry(1)
        self.serve_once(tokens, namespace, packs=False)

    @rule(tokens=TEXTS, namespace=pool_machine.namespaces)
    def ask_while_it_moves(self, tokens: list[int], namespace: str) -> None:
        self.restore(tokens, namespace)
        self.start_files()
        self.serve(tokens, namespace)

    @rule(tokens=TEXTS, namespace=pool_machine.namespaces)
    def leave_and_return(self, tokens: list[int], namespace: str) -> None:
        """What is written, full at first and packed later, is found when the device knows it no
        more."""
        for packs in (False, True):
            self.serve_once(tokens, namespace, packs)
            self.carry(2)
        self.evict(MOST_PAGES)
        self.carry(1)
        self.fetch(tokens, namespace)

    @rule(pages=st.sampled_from([0, 2, 100]))
    def limit_disk(self, pages: int) -> None:
        self.pool.disk.limit_bytes = (18 + 2 * pages) * 4096

    @rule()
    def time_passes(self) -> None:
        self.time += 1000

    def teardown(self) -> None:
        if hasattr(self, "transfers"):
            self.pool.disk.wanted.clear()
            self.start_files()
            while self.transfers:
                self.end_file(0, "ok")
        super().teardown()
        if hasattr(self, "transfers"):
            assert not self.pool.disk.under_way
            assert self.pool.host.doomed == 0
            self.start_files()
            assert not self.files


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
