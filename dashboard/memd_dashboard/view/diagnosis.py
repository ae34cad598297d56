"""Why is it slow, full or missing? Simple rules over the last ten minutes, ranked, each with its
evidence and the one thing to do about it.
"""

from memd_dashboard import show
from memd_dashboard.snapshot import Snapshot
from memd_dashboard.view import overview, tuning
from memd_dashboard.view.diagnosis_rules import RULES
from memd_dashboard.view.facts import Facts, Finding

WINDOW_SECONDS = 600.0
TOPICS = ("pool", "requests", "metrics", "settings", "prefixes", "tenants")


def facts(snap: Snapshot) -> Facts:
    """Of a snapshot with the topics above."""
    return Facts(
        snap.get("pool"),
        snap.window(WINDOW_SECONDS),
        {key: entry.get("value") for key, entry in tuning.live(snap.get("settings")).items()},
        snap.rows("requests", "requests"),
        snap.rows("prefixes", "prefixes"),
        snap.rows("tenants", "tenants"),
    )


def findings(given: Facts) -> list[Finding]:
    """What is wrong, the worst first; [] when nothing is seen."""
    found = [finding for rule in RULES for finding in rule(given)]
    return sorted(found, key=lambda finding: -finding.severity)


def looked_at(given: Facts, snap: Snapshot) -> list[tuple[str, str]]:
    """What the rules had to go by, so that an empty list is not taken for health unseen."""
    window = given.window
    rows = [
        (
            "Looked at",
            f"{show.duration(window.seconds)} of metrics, {len(window.scrapes)} readings",
        ),
        ("Occupied", show.share(window.last("memd_pool_occupied_ratio"))),
        ("Cannot be evicted", show.share(window.last("memd_pool_active_ratio"))),
        (
            "Prompt tokens found",
            show.share(
                window.ratio("memd_prefix_hit_tokens_total", "memd_prefix_query_tokens_total")
            ),
        ),
        ("Evicted pages", show.count(window.increase("memd_evicted_pages_total"))),
        (
            "Evicted by requests themselves",
            show.count(window.increase("memd_direct_reclaimed_pages_total")),
        ),
        ("Preemptions", show.count(window.increase("memd_preemptions_total"))),
    ]
    reasons = "; ".join(f"{number} {words}" for _, number, words in overview.waiting(snap))
    return [*rows, ("Waiting", reasons or "nobody waits")]
