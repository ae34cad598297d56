"""What the layers of a model see of a text: as the model asks, and as the settings narrow it."""

from dataclasses import replace

from memd.models.config import ModelConfig, Span


def narrowed(model: ModelConfig, window: int | None, sinks: int) -> ModelConfig:
    """The model with a sliding window in every layer that sees more.

    A layer whose own window is no larger keeps it, without sinks: so it has been trained.

    Args:
        window: Tokens that a token sees, itself included; None: as the model asks.
        sinks: Leading tokens that are seen besides.
    """
    if window is None:
        return model
    spans = [
        Span(own, 0) if own is not None and own <= window else Span(window, sinks)
        for own in model.windows
    ]
    return replace(
        model,
        windows=tuple(span.window for span in spans),
        sinks=tuple(span.sinks for span in spans),
    )


def widest(model: ModelConfig) -> Span:
    """What some layer sees; without a window where a layer sees all."""
    spans = [model.span(layer) for layer in range(model.num_layers)]
    windows = [span.window for span in spans if span.window is not None]
    if len(windows) < len(spans):
        return Span(None, 0)
    return Span(max(windows), max(span.sinks for span in spans))
