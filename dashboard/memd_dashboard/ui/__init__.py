"""The pages, by section of the navigation; in each: path -> title, icon, what draws it.

The folder must not be called `pages`: Streamlit would run its files as scripts of their own.
"""

from collections.abc import Callable

from memd_dashboard.ui import (
    alerts,
    diagnosis,
    gpus,
    jobs,
    overview,
    pool_map,
    prefixes,
    requests,
    tenants,
    tiers,
    tuning,
)

FIRST_PAGE = "overview"
PAGES: dict[str, dict[str, tuple[str, str, Callable[[], None]]]] = {
    "Now": {
        "overview": ("Overview", "dashboard", overview.draw),
        "requests": ("Requests", "swap_horiz", requests.draw),
        "alerts": ("Alerts", "notifications", alerts.draw),
        "diagnosis": ("Diagnosis", "troubleshoot", diagnosis.draw),
    },
    "Memory": {
        "pool": ("Pool map", "grid_view", pool_map.draw),
        "prefixes": ("Prefix tree", "account_tree", prefixes.draw),
        "tiers": ("Tiers", "layers", tiers.draw),
        "gpus": ("GPUs", "memory", gpus.draw),
    },
    "Operation": {
        "tuning": ("Tuning", "tune", tuning.draw),
        "tenants": ("Tenants", "group", tenants.draw),
        "jobs": ("Jobs and history", "history", jobs.draw),
    },
}
