"""What the routes share: the engine, the settings in force, the metrics, the served model."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from memd.alerting import Alerting
from memd.api.admission import Admission
from memd.api.block_maps import BlockMaps
from memd.api.engine_client import EngineClient
from memd.api.errors import ApiError
from memd.api.model import ServedModel
from memd.api.settings_effects import SettingsEffects
from memd.api.trace_recorder import TraceRecorder
from memd.config import ServerSettings
from memd.engine.messages import Ready
from memd.jobs import Jobs
from memd.keys import KeysFile
from memd.log_tail import LogTail
from memd.observe.metrics import Metrics
from memd.settings import LiveSettings
from memd.stacks import write_stacks
from memd.store.store import Store


@dataclass
class Service:
    """One per daemon; `model` is set once tokenizer and template are loaded. No keys: all may."""

    name: str  # of the served model
    engine: EngineClient
    live: LiveSettings
    metrics: Metrics
    store: Store
    keys: KeysFile | None = None
    model: ServedModel | None = None
    alerting: Alerting | None = None  # None: alerts are off
    jobs: Jobs | None = None  # None until they are started
    started_at: float = field(default_factory=time.monotonic)
    write_stacks: Callable[[], None] = write_stacks  # of all processes, to the log
    read_engine_stacks: Callable[[], str] = lambda: ""  # blocks
    log_tail: LogTail = field(default_factory=LogTail)
    admission: Admission = field(init=False)
    maps: BlockMaps = field(init=False)
    effects: SettingsEffects = field(init=False)
    traces: TraceRecorder = field(init=False)

    def __post_init__(self) -> None:
        self.traces = TraceRecorder(self.name, self.engine, self.live, self.store)
        self.engine.watcher = self.metrics.traces = self.traces
        self.admission = Admission(self.engine, self.live, self.metrics.rejections)
        history = self.live.current.history
        self.maps = BlockMaps(self.engine, history)
        self.effects = SettingsEffects(self.store, history.sample_every)

    @property
    def limits(self) -> ServerSettings:
        """Limits of the HTTP side."""
        return self.live.current.server

    def require_ready(self) -> tuple[ServedModel, Ready]:
        """Model and engine. Raises ApiError 503 unless both serve."""
        ready = self.engine.require_ready()
        if self.model is None:
            raise ApiError(503, "the model is loading: tokenizer", "loading")
        return self.model, ready

    def require_model(self, name: str | None) -> None:
        """Raises ApiError 404 unless `name` is the served model, or None."""
        if name is not None and name != self.name:
            raise ApiError(
                404, f"the model {name[:200]!r} does not exist here", "model_not_found", "model"
            )
