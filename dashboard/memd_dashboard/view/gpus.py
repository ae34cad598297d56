"""The boards as NVML tells them. What is not told is left out."""

from memd_dashboard import palette, show
from memd_dashboard.markup import Card
from memd_dashboard.snapshot import JSON

OWNERS = {
    "pool": ("P", palette.ACTIVE, "KV pages of this daemon"),
    "weights": ("W", palette.GOOD, "The model"),
    "graphs": ("G", palette.PINNED, "CUDA graphs"),
    "other_self": ("S", palette.CACHED, "Other memory of this daemon"),
    "other_processes": ("O", palette.WARNING, "Other programs, an estimate"),
    "reserved": ("R", palette.NEUTRAL, "Kept by the driver"),
    "free": ("F", palette.FREE, "Free"),
}


def title(gpu: JSON) -> str:
    """Number and name of a board."""
    return f"GPU {gpu.get('gpu', '?')} · {gpu.get('name') or 'unknown board'}"


def cards(gpu: JSON) -> list[Card]:
    """What is known of a board's state."""
    memory = gpu.get("memory") or {}
    sensors = gpu.get("temperature_celsius") or {}
    power, limit = gpu.get("power_watts"), gpu.get("power_limit_watts")
    throttled = gpu.get("throttled_by")
    found = [
        Card("Memory", show.size(memory.get("total_bytes")), "Of the board, all owners together."),
        Card("Utilisation", show.share(gpu.get("utilization_ratio")), "Share of time it computed."),
        Card(
            "Temperature",
            _number(sensors.get("core"), "°C"),
            "Of the core.",
            f"memory {sensors['memory']:.0f} °C" if sensors.get("memory") is not None else "",
        ),
        Card("Power", _number(power, "W"), "Drawn now.", f"of {limit:.0f} W" if limit else ""),
    ]
    if throttled is not None:
        words = ", ".join(throttled) or "no"
        found.append(Card("Throttled", words, "Why the clocks are held down at this moment."))
    return [card for card in found if card.value != show.UNKNOWN]


def _number(value: float | None, unit: str) -> str:
    return show.UNKNOWN if value is None else f"{value:.0f} {unit}"


def memory(gpu: JSON) -> list[tuple[str, str, str, float, str]]:
    """Memory by owner, as parts of a bar: name, letter, colour, bytes, as text."""
    owners = (gpu.get("memory") or {}).get("by_owner_bytes") or {}
    return [
        (text, letter, colour, owners[name], show.size(owners[name]))
        for name, (letter, colour, text) in OWNERS.items()
        if owners.get(name) is not None
    ]


def details(gpu: JSON) -> list[tuple[str, str]]:
    """Everything else that is told, as names and values."""
    shown = {"gpu", "name", "memory", "utilization_ratio", "temperature_celsius", "power_watts"}
    rows = []
    for key, value in gpu.items():
        if key in shown or value is None or value in ([], {}):
            continue
        if isinstance(value, dict):
            text = ", ".join(f"{name} {each:,}" for name, each in value.items() if each is not None)
        else:
            text = f"{value:,.0f}" if isinstance(value, int | float) else str(value)
        rows.append((key.replace("_", " ").capitalize(), text))
    return rows
