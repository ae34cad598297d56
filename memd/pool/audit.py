"""Recounts the whole pool from its sequences and its tree, and mends what does not add up."""

from collections import Counter
from dataclasses import dataclass

from memd.pool.audit_disk import check_disk
from memd.pool.audit_formats import check_formats
from memd.pool.keys import page_key
from memd.pool.pages import PageState
from memd.pool.pool import Pool
from memd.types import PageId


@dataclass(frozen=True)
class AuditReport:
    """What an audit found. Leaked pages are held by nobody known; repaired ones were taken back."""

    problems: list[str]
    leaked_pages: int
    repaired_pages: int
    released_quarantine_pages: int


def expected_references(pool: Pool) -> Counter[PageId]:
    """References each page should have: sequences that list it, and copies that need it."""
    expected: Counter[PageId] = Counter()
    for sequence in pool.sequences.values():
        expected.update(sequence.pages)
        expected.update(copy.source for copy in sequence.copies)
    expected.update(pool.claimed.held)
    for move in pool.residency.moves.values():
        # A page that arrives, or that leaves with nobody wanting it, belongs to its transfer.
        if move.transfer.path == "h2d" or move.node is None:
            expected[move.transfer.page] += 1
    return expected


def check(pool: Pool) -> list[str]:
    """Every contradiction in the pool's state, in words; empty when sound. Changes nothing."""
    return [
        *_check_references(pool),
        *_check_tree(pool),
        *_check_sequences(pool),
        *_check_totals(pool),
        *check_formats(pool),
        *_check_host(pool),
        *check_disk(pool),
        *_check_pins(pool),
        *_check_tenants(pool),
    ]


def audit(pool: Pool) -> AuditReport:
    """Check, take leaked pages back, and let quarantined ones go."""
    problems = check(pool)
    leaked = _leaks(pool)
    expected = expected_references(pool)
    for page in leaked:
        surplus = pool.pages.refs[page] - expected[page]
        pool.blocks.put(pool.pages.drop([page] * surplus, pool.now()))
    quarantined = [
        PageId(page)
        for page, state in enumerate(pool.pages.state)
        if state == PageState.QUARANTINED
    ]
    for page in quarantined:
        pool.pages.pardon(page)
    pool.blocks.put(quarantined)
    return AuditReport(problems, len(leaked), len(leaked), len(quarantined))


def _leaks(pool: Pool) -> list[PageId]:
    expected = expected_references(pool)
    refs = pool.pages.refs
    return [PageId(page) for page, count in enumerate(refs) if count > expected[PageId(page)]]


def _check_references(pool: Pool) -> list[str]:
    expected = expected_references(pool)
    return [
        f"page {page} has {count} references, {expected[PageId(page)]} are accounted for"
        for page, count in enumerate(pool.pages.refs)
        if count != expected[PageId(page)]
    ]


def _check_tree(pool: Pool) -> list[str]:
    problems: list[str] = []
    pages, tree = pool.pages, pool.tree
    in_tree: set[PageId] = set()
    for namespace in tree.namespaces():
        for node in tree.walk(namespace):
            if node.is_fork and len(node.children) < 2:
                problems.append(f"a fork in {namespace!r} parts nothing")
            if node.host is not None and node.end < tree.page_tokens:
                problems.append(f"part-filled page in host slot {node.host}")
            if node.page is None:
                continue
            page = node.page
            if page in in_tree:
                problems.append(f"page {page} is in the tree twice")
            in_tree.add(page)
            label = tree.page_label(node)
            parent = tree.page_parent(node)
            if pages.node[page] is not node or pages.state[page] != PageState.SEALED:
                problems.append(f"page {page} of the tree is not sealed there")
            if len(label) != pages.tokens[page] * 4 or node.key != page_key(parent.key, label):
                problems.append(f"page {page} does not hold the tokens of its place in the tree")
            if node.children and node.end < tree.page_tokens:
                problems.append(f"part-filled page {page} has children")
            held = parent.page is not None and pages.refs[parent.page] > 0
            if pages.refs[page] and not held and not parent.is_root:
                problems.append(f"page {page} is held, the page before it is not")
            pinned = parent.page is not None and pages.pins[parent.page] > 0
            if pages.pins[page] and not pinned and not parent.is_root:
                problems.append(f"page {page} is pinned, the page before it is not")
    sealed = {PageId(p) for p, state in enumerate(pages.state) if state == PageState.SEALED}
    problems += [f"page {page} is sealed but not in the tree" for page in sealed - in_tree]
    return problems


def _check_sequences(pool: Pool) -> list[str]:
    problems: list[str] = []
    page_tokens = pool.layout.page_tokens
    for sequence in pool.sequences.values():
        node = sequence.node
        for index in range(sequence.sealed_pages - 1, -1, -1):
            start = index * page_tokens
            label = sequence.tokens[start : start + page_tokens].tobytes()
            if node.page != sequence.pages[index] or pool.tree.page_label(node) != label:
                problems.append(
                    f"{sequence.request_id}: page {index} of its table is not that of the tree"
                )
                break
            node = pool.tree.page_parent(node)
        problems += [
            f"{sequence.request_id}: unsealed page {page} is not its own"
            for page in sequence.pages[sequence.sealed_pages :]
            if pool.pages.state[page] != PageState.WRITING or pool.pages.refs[page] != 1
        ]
    return problems


def _check_totals(pool: Pool) -> list[str]:
    problems: list[str] = []
    pages = pool.pages
    refs, state = pages.refs, pages.state
    free = {PageId(p) for p, each in enumerate(state) if each == PageState.FREE}
    resting = [
        PageId(p) for p, count in enumerate(refs) if state[p] == PageState.SEALED and not count
    ]
    pinned = [page for page in resting if pages.pins[page]]
    cached = set(resting).difference(pinned)
    in_order = pool.lru.in_order()
    counted = {
        "active": (pages.active, sum(1 for count in refs if count)),
        "shared": (pages.shared, sum(1 for count in refs if count >= 2)),
        "references": (pages.references, sum(refs)),
        "sealed": (pages.sealed, state.count(PageState.SEALED)),
        "quarantined": (pages.quarantined, state.count(PageState.QUARANTINED)),
        "cached": (pages.cached, len(cached)),
        "pinned": (pages.pinned, len(pinned)),
        "in use": (pool.occupied_pages, len(state) - len(free)),
        "cached tokens": (pages.cached_tokens, sum(pages.tokens[p] for p in cached)),
        "pinned tokens": (pages.pinned_tokens, sum(pages.tokens[p] for p in pinned)),
        "sum": (
            pool.free_pages + pages.active + pages.cached + pages.pinned + pages.quarantined,
            pool.capacity_pages,
        ),
    }
    problems += [
        f"{name}: {kept} kept, {found} counted"
        for name, (kept, found) in counted.items()
        if kept != found
    ]
    if set(in_order) != cached or len(in_order) != len(cached):
        problems.append("the eviction order does not hold exactly the cached pages")
    if not (in_blocks := pool.blocks.free_page_ids()) <= free:
        problems.append("a block's free list holds a page that is not free")
    if len(in_blocks) != pool.blocks.committed_full_pages + pool.blocks.free_packed_pages:
        problems.append("a page without memory is in use, or a free one is in no block's list")
    return problems


def _check_host(pool: Pool) -> list[str]:
    """Each host slot in use belongs to one live node or to a transfer, and back."""
    problems: list[str] = []
    moves = pool.residency.moves.values()
    moving = {move.transfer.slot for move in moves}
    moving |= {move.transfer.slot for move in pool.disk.under_way.values()}
    in_tree = {
        node.host: node
        for namespace in pool.tree.namespaces()
        for node in pool.tree.walk(namespace)
        if node.host is not None
    }
    holders = pool.host.holders()
    for slot, node in in_tree.items():
        if holders.get(slot) is not node:
            problems.append(f"host slot {slot} of the tree is not that node's")
    problems += [
        f"host slot {slot} is in use by nobody" for slot in holders.keys() - in_tree.keys() - moving
    ]
    host_only = sum(1 for node in in_tree.values() if node.page is None)
    clean = len(in_tree) - host_only
    if (host_only, clean) != (pool.residency.host_only, pool.residency.clean_pages):
        problems.append(f"{host_only} pages are on the host only, {clean} on both: not as kept")
    if pool.host.pinned != len(moving):
        problems.append(f"{pool.host.pinned} host slots are pinned, {len(moving)} are copied")
    leaving = {move.transfer.page for move in moves if move.transfer.path == "d2h" and move.node}
    if pool.residency.leaving < leaving:
        problems.append("a page is copied out and not known to leave")
    if any(pool.pages.state[page] != PageState.SEALED for page in pool.residency.restored.tiers):
        problems.append("a page counts as restored and is not sealed")
    return problems


def _check_pins(pool: Pool) -> list[str]:
    """Each page has the pins that cover it, and each pin covers a prefix that is there."""
    problems: list[str] = []
    expected = Counter(pool.pins.protected())
    problems += [
        f"page {page} has {count} pins, {expected[PageId(page)]} are accounted for"
        for page, count in enumerate(pool.pages.pins)
        if count != expected[PageId(page)]
    ]
    problems += [
        "a pin is kept under a node that it does not end at"
        for node, pin in pool.pins.by_node.items()
        if pin.nodes[-1] is not node or pin.ended
    ]
    return problems


def _check_tenants(pool: Pool) -> list[str]:
    """Each tenant is charged for exactly the pages that it took and that are not free."""
    pages, tenants = pool.pages, pool.tenants
    taken = [page for page, state in enumerate(pages.state) if state != PageState.FREE]
    used = Counter(pages.owner[page] for page in taken)
    pinned = Counter(pages.owner[page] for page in taken if pages.pins[page])
    return [
        f"{kind}: tenant {name!r} is charged for {kept} pages, {counted[number]} are its own"
        for kind, kept_pages, counted in (
            ("used", tenants.used_pages, used),
            ("pinned", tenants.pinned_pages, pinned),
        )
        for number, (name, kept) in enumerate(zip(tenants.names, kept_pages, strict=True))
        if kept != counted[number]
    ]
