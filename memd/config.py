"""The settings tree: one typed, frozen model, and the same tree as plain data by dotted key.

Where values come from is told by memd.config_sources. Keys marked live can be changed while the
daemon runs (memd.settings).
"""

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from memd.config_kv import KvSettings, check_kv_format
from memd.config_memory import DefragSettings, ElasticSettings
from memd.config_operator import (
    AlertSettings,
    HistorySettings,
    TelemetrySettings,
    Tenants,
    TraceSettings,
)
from memd.config_types import LIVE, Auto, DurationSeconds, Section, Share, SizeBytes
from memd.errors import SettingsError, requirement
from memd.units import parse_share, parse_size, parse_size_or_zero

MAX_UDS_BYTES = 100  # the system's 107, less what is appended while it is made


def _limit(value: object) -> object:
    """`80%`, `24GB` or `1024 tokens`: checked here, kept as it was written."""
    if isinstance(value, str) and value.split()[-1:] == ["tokens"]:
        if not value.split()[0].isdigit() or len(value.split()) != 2 or int(value.split()[0]) < 1:
            raise ValueError(f"{value!r} is not a number of tokens, such as 1024 tokens")
        return value
    if isinstance(value, str) and value.rstrip().endswith("%"):
        if parse_share(value.strip()) == 0:
            raise ValueError("0% leaves no memory")
        return value
    return parse_size(value)  # type: ignore[arg-type]


def _mode(value: object) -> object:
    """Permissions as people write them; YAML reads 0660 as the number, which is no text."""
    return f"{value:04o}" if type(value) is int else value


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ModelSettings(Section):
    """Which model is served, and how it is loaded."""

    path: str = Field("smollm2-135m", description="Directory, GGUF file, hub name or demo name")
    name: str | None = Field(None, description="Name served to clients; default: from the path")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Of weights and KV; auto: the checkpoint's where the device is fast in it",
    )
    max_len: Auto | Annotated[int, Field(ge=2)] = Field(
        "auto",
        description="Longest prompt plus output, tokens; above the model's only with a window",
    )
    shared_heads: str | None = Field(
        None, description="Plan of shared KV heads, as memd analyse-heads --out writes it"
    )
    chat_template: str | None = Field(
        None, description="File with a template, instead of the model's"
    )


class WatermarkSettings(Section):
    """Marks of the occupied ratio between which background reclaim works."""

    high: Share = Field(0.9, description="Reclaim starts at this share", json_schema_extra=LIVE)
    low: Share = Field(0.7, description="Reclaim stops at this share", json_schema_extra=LIVE)

    @model_validator(mode="after")
    def _ordered(self) -> "WatermarkSettings":
        if not 0 < self.low < self.high:
            raise ValueError(
                f"low ({self.low:.6g}) must be above 0 and below high ({self.high:.6g})"
            )
        return self


class PrefetchSettings(Section):
    """How pages of waiting requests are brought up from lower tiers."""

    window: int = Field(
        5,
        ge=1,
        description="Steps whose pages are under way at most",
        json_schema_extra={**LIVE, "unit": "steps"},
    )
    lookahead: int = Field(
        3,
        ge=0,
        description="Steps before its start that a request's pages are asked for",
        json_schema_extra={**LIVE, "unit": "steps"},
    )
    timeout: DurationSeconds = Field(
        2.0,
        description="A request that could start waits for its pages this long, then recomputes",
        json_schema_extra=LIVE,
    )


class HostSettings(Section):
    """The host tier."""

    limit: Auto | Annotated[int, BeforeValidator(parse_size_or_zero)] = Field(
        "auto",
        description="Memory for pages that leave the device; 0: none; auto: 8GB with a GPU",
        json_schema_extra=LIVE,
    )


class DiskSettings(Section):
    """The disk tier."""

    path: Path | None = Field(
        None, description="Directory for pages that outlive the daemon; null: no disk tier"
    )
    limit: Annotated[int, BeforeValidator(parse_size_or_zero)] = Field(
        50 * 10**9,
        description="Room its files may take; the least recently used go first",
        json_schema_extra=LIVE,
    )
    expensive_tokens: Auto | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description=(
            "Prefixes at least so long are written when first computed, others when used again; "
            "1: all; auto: 1 on a CPU, 1024 on a GPU"
        ),
        json_schema_extra=LIVE,
    )
    staging: SizeBytes = Field(
        64 * 10**6, description="Host memory, beside memory.host.limit, for pages on their way"
    )


class MemorySettings(Section):
    """The pool."""

    limit: Annotated[str | int, BeforeValidator(_limit)] = Field(
        "80%",
        description="Share of the device's free memory after loading, bytes, or `N tokens`",
        json_schema_extra={**LIVE, "unit": "bytes"},
    )
    block_size: SizeBytes = Field(16 * 10**6, description="About this; see docs/architecture.md")
    page_tokens: Auto | Annotated[int, Field(ge=1, le=256)] = Field(
        "auto", description="Tokens in a page; auto: 64, or 16 of full pages on a CPU"
    )
    watermark: WatermarkSettings = WatermarkSettings()
    prefetch: PrefetchSettings = PrefetchSettings()
    defrag: DefragSettings = DefragSettings()
    elastic: ElasticSettings = ElasticSettings()
    host: HostSettings = HostSettings()
    disk: DiskSettings = DiskSettings()
    pin_limit: Share = Field(
        0.25,
        description="Share of the pool, and of a tenant's quota, that pins may keep from eviction",
        json_schema_extra=LIVE,
    )
    reclaim_pages_per_step: Auto | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="Most pages background reclaim takes in one step",
        json_schema_extra=LIVE,
    )
    regret_window: DurationSeconds = Field(
        60.0, description="An evicted page asked for again within it counts", json_schema_extra=LIVE
    )


class EngineSettings(Section):
    """Scheduler and runner."""

    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: a GPU where there is one"
    )
    max_sequences: int = Field(256, ge=1, le=4096, description="Most sequences in one batch")
    max_batch_tokens: Auto | Annotated[int, Field(ge=16)] = Field(
        "auto",
        description="Most prompt tokens computed in one step, beside the decoding sequences",
        json_schema_extra=LIVE,
    )
    max_waiting: int = Field(
        1024,
        ge=1,
        description="Sequences that may wait to start; behind them requests get 429",
        json_schema_extra={**LIVE, "unit": "sequences"},
    )
    reserve_tokens: int = Field(
        8, ge=0, description="Room kept for the output of a new sequence", json_schema_extra=LIVE
    )
    batch_invariant: bool = Field(False, description="Texts never depend on the batch; slower")
    threads: Auto | Annotated[int, Field(ge=1)] = Field("auto", description="CPU threads of torch")
    hang_timeout: DurationSeconds = Field(
        30.0,
        ge=1,
        description="Without progress for as long the engine is restarted; a layer is progress",
    )


class ServerSettings(Section):
    """The HTTP side."""

    host: str | None = Field(
        "127.0.0.1",
        description="Address to listen at; other than loopback only with keys. null: only `uds`",
    )
    port: int = Field(8733, ge=0, le=65535, description="0: any free one")
    uds: str | None = Field(
        None, max_length=MAX_UDS_BYTES, description="Path of a Unix socket to listen at as well"
    )
    uds_mode: Annotated[str, BeforeValidator(_mode)] = Field(
        "0660", pattern=r"^0[0-7]{3}$", description="Its permissions, octal"
    )
    keys_file: Path | None = Field(
        None, description="API keys (memd keys); all but health then needs one"
    )
    max_body: SizeBytes = Field(8 * 2**20, description="Larger request bodies get 413")
    request_timeout: Annotated[DurationSeconds, Field(gt=0)] = Field(
        60.0, description="A request that takes longer to arrive gets 408"
    )
    generation_timeout: Annotated[DurationSeconds, Field(gt=0)] | None = Field(
        None, description="A request that runs longer ends with an error; null: no limit"
    )
    write_timeout: Annotated[DurationSeconds, Field(gt=0)] = Field(
        30.0, description="A client that does not read for so long is cut off"
    )
    drain_timeout: DurationSeconds = Field(
        90.0, description="After SIGTERM, running requests have this"
    )
    max_logprobs: int = Field(
        20, ge=0, le=1000, description="Most alternatives a request may ask for"
    )
    max_choices: int = Field(128, ge=1, description="Largest n")

    @model_validator(mode="after")
    def _guarded(self) -> "ServerSettings":
        if self.host is None and self.uds is None:
            raise ValueError("host is null and uds is not set: there is nothing to listen at")
        if self.host is not None and self.keys_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is not loopback: server.keys_file must name a file of API "
                "keys (memd keys add)"
            )
        return self


class DebugSettings(Section):
    """What a daemon that serves people never has on."""

    faults: bool = Field(
        False, description="Let operators inject faults (memd debug); never where people are served"
    )


class Settings(Section):
    """Everything that can be set, with defaults."""

    model: ModelSettings = ModelSettings()
    memory: MemorySettings = MemorySettings()
    kv: KvSettings = KvSettings()
    engine: EngineSettings = EngineSettings()
    server: ServerSettings = ServerSettings()
    history: HistorySettings = HistorySettings()
    trace: TraceSettings = TraceSettings()
    alerts: AlertSettings = AlertSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    tenants: Tenants = Field(
        (),
        description="List of name, quota (20%, 2GB or null) and weight (1); keys name the tenant",
        json_schema_extra=LIVE,
    )
    debug: DebugSettings = DebugSettings()
    state_dir: Path | None = Field(None, description="Default: the XDG state directory")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe messages that are logged"
    )


def leaves(model: type[BaseModel] = Settings, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> pydantic FieldInfo of every single setting, in order."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= leaves(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


LIVE_KEYS = frozenset(
    key for key, field in leaves().items() if (field.json_schema_extra or {}).get("live")
)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys; mappings that name no section stay values."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as a nested mapping."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise SettingsError({key: f"{section!r} is a value, not a section"})
        node[leaf] = value
    return tree


def build(flat: Mapping[str, Any]) -> Settings:
    """Validate dotted keys as a whole.

    Raises:
        SettingsError: with a message for every key at fault.
    """
    _refuse_huge(flat)
    try:
        settings = Settings.model_validate(nest(flat))
        _refuse_huge(flatten(settings.model_dump()))
        check_kv_format(settings.kv, settings.memory.page_tokens)
        return settings
    except ValidationError as error:
        faults = error.errors(include_url=False)
        # Of the branches of "auto or a number" the second says what is wrong with a number.
        faults.sort(key=lambda fault: fault["type"] == "literal_error")
        problems: dict[str, str] = {}
        for fault in faults:
            key = _key_of(fault["loc"])
            if fault["type"] == "extra_forbidden":
                problems.setdefault(".".join(map(str, fault["loc"])), "unknown setting")
            elif fault["type"] == "value_error":
                problems.setdefault(key, requirement(fault["msg"]))
            else:
                problems.setdefault(key, f"{requirement(fault['msg'])}, not {fault['input']!r}")
        raise SettingsError(problems) from None


def _refuse_huge(values: Mapping[str, Any]) -> None:
    """Numbers travel to the engine in 64 bits. Raises SettingsError."""
    huge = [key for key, value in values.items() if type(value) is int and abs(value) >= 2**63]
    if huge:
        raise SettingsError(dict.fromkeys(huge, "the number does not fit into 64 bits"))


def _key_of(location: tuple[int | str, ...]) -> str:
    """The setting or section a pydantic error is about; pydantic appends the branch of a union."""
    key = ".".join(map(str, location))
    while key and not any(leaf == key or leaf.startswith(key + ".") for leaf in leaves()):
        key = key.rpartition(".")[0]
    return key or "settings"


def dump(settings: Settings) -> dict[str, Any]:
    """The whole tree as plain data, in base units; `build(flatten(dump(s))) == s`."""
    return settings.model_dump(mode="json")


def state_dir(settings: Settings) -> Path:
    """Where the daemon keeps its state."""
    if settings.state_dir is not None:
        return settings.state_dir.expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "memd"


def cache_dir() -> Path:
    """Where fetched models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "memd"
