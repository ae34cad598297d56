"""What bounds the pages of each sequence: windows of the model or the settings, or a budget."""

from memd.config_kv import KvSettings
from memd.errors import SettingsError
from memd.models.config import ModelConfig
from memd.models.spans import widest
from memd.pool.budget import Budget
from memd.pool.pool import Pool


def bound_sequences(pool: Pool, model: ModelConfig, kv: KvSettings) -> None:
    """Have the pool hold no more of a sequence than model and settings say.

    Raises:
        SettingsError: a budget is too small, or the model has windows of its own.
    """
    pool.retention.window, pool.retention.sinks = widest(model)
    if kv.budget is None:
        return
    windows = [window for window in model.windows if window is not None]
    if windows:
        raise SettingsError(
            {"kv.budget": f"has to be null: layers of this model have windows of {max(windows)}"}
        )
    page_tokens, sink_pages = pool.layout.page_tokens, pool.layout.pages_for(kv.sinks)
    try:
        budget = Budget(kv.budget // page_tokens, sink_pages, kv.drop_policy, page_tokens)
    except ValueError as error:
        raise SettingsError({"kv.budget": str(error)}) from None
    pool.retention.budget, pool.retention.sinks = budget, kv.sinks
