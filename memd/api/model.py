"""The served model as the api process knows it: names, tokenizer and template, no weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What the api needs of `memd.models.tokenizer.Tokenizer`. Called from several threads."""

    @property
    def max_token_bytes(self) -> int:
        """Most bytes of text that one token can stand for."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The bytes of one token on its own."""

    def token_text(self, token_id: int) -> str:
        """A display string."""


class ChatTemplate(Protocol):
    """What the api needs of `memd.models.chat_template.ChatTemplate`."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises RequestError."""


@dataclass(frozen=True)
class ServedModel:
    """One per daemon, complete before the engine is told to start.

    Args:
        name: Served to clients; the only value of the metrics label `model`.
        tokenizer: None: only prompts of token ids can be served.
        template: None: no chat completions.
        vocab_size: Ids at or above it are refused and never sampled.
        fingerprint: Of model and version; answers with equal ones come from equal code and weights.
        created: Unix time at which the daemon started.
    """

    name: str
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    vocab_size: int
    fingerprint: str
    created: int
