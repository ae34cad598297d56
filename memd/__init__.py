"""memd: a daemon that owns a GPU's KV-cache memory and serves LLM generation from it."""

__version__ = "0.1.0"
