"""Text to token ids and back to bytes, over the `tokenizers` library.

Used in the api process, `encode` on worker threads. Decoding is by bytes of single tokens, so that
a stream can be cut anywhere and joined again; the model's decoder only tells how it spells bytes.
"""

import logging
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from memd.errors import ModelError, RequestError
from memd.models import gguf_tokenizer
from memd.models.config import ModelConfig
from memd.models.gguf_file import open_gguf
from memd.models.hub import ModelFiles, naming, read_json

logger = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Composing can shorten UTF-8, at most Hangul: three letters of 3 bytes each become one of 3.
_MAX_COMPOSITION = 3
_LENGTH_KNOWN = {"Sequence", "Prepend", "Replace", "String", "NFC"}


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's spelling of bytes: printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_ALPHABET = _byte_alphabet()


class Tokenizer:
    """One model's tokenizer.

    Args:
        backend: Its post-processor is not used; truncation and padding are switched off.
        bos_token_id: Put before plain prompts if `adds_bos`.
        adds_bos: Whether the model was trained with BOS before plain text.
        eos_token_ids: Ids that end a generation.

    Raises:
        ModelError: the decoder is neither byte-level nor SentencePiece's.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_token_id: int | None,
        adds_bos: bool,
        eos_token_ids: Iterable[int],
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = _spelling(backend)
        self._prefix = [bos_token_id] if adds_bos and bos_token_id is not None else []
        self._added = backend.get_added_tokens_decoder()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.special_ids = frozenset(index for index, token in self._added.items() if token.special)
        self._bytes_by_id = _bytes_by_id(backend, self._spelling)
        self.vocab_size = max(self._bytes_by_id, default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens spelled out in it are recognised.

        Args:
            add_special_tokens: Put BOS in front if the model wants it and the text does not already
                begin with it. False for rendered chat templates, which print their own. EOS is
                never appended: a prompt is there to be continued.

        Raises:
            RequestError: the text has a lone surrogate, which is no character.

        Cost:
            Linear in the text. Releases the GIL, so long texts belong on a worker thread.
        """
        surrogate = _SURROGATE.search(text)
        if surrogate is not None:
            raise RequestError(
                f"text has a lone surrogate U+{ord(surrogate[0]):04X} "
                f"at character {surrogate.start()}"
            )
        # `encode` of the library holds the GIL: 1.2 s for 1.7 MB with tokenizers 0.23.
        ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special_tokens or ids[:1] == self._prefix:
            return ids
        return self._prefix + ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Joined bytes as text; bytes that are no UTF-8 become U+FFFD.

        The space that SentencePiece puts before a text is kept: where one begins is not known.
        """
        return b"".join(self.token_bytes(index, skip_special) for index in ids).decode(
            "utf-8", errors="replace"
        )

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """Bytes one token adds to the text; none for a skipped special token or an unused id."""
        if skip_special and token_id in self.special_ids:
            return b""
        return self._bytes_by_id.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """One token for display: special tokens by name, parts of characters as U+FFFD."""
        return self.token_bytes(token_id, skip_special=False).decode("utf-8", errors="replace")

    @cached_property
    def max_token_bytes(self) -> int:
        """Most bytes of input text that one token can stand for.

        A text of n bytes has at least n / max_token_bytes tokens, so those that are far too long
        can be refused without tokenising them.
        """
        normalizers = set(re.findall(r"(\w+)\(", str(self._backend.normalizer)))
        fuses_unknown = self._spelling == "sentencepiece" and not getattr(
            self._backend.model, "byte_fallback", False
        )
        swallows_space = any(token.lstrip or token.rstrip for token in self._added.values())
        if fuses_unknown or swallows_space or normalizers - _LENGTH_KNOWN:
            return sys.maxsize  # a run of any length may become one token
        longest = max(map(len, self._bytes_by_id.values()), default=1)
        return longest * (_MAX_COMPOSITION if "NFC" in normalizers else 1)


def _spelling(backend: tokenizers.Tokenizer) -> str:
    """How tokens spell bytes, told by the decoder."""
    decoder = backend.decoder
    described = "none" if decoder is None else str(decoder)
    if "ByteLevel" in described:
        return "byte-level"
    if "Metaspace" in described or "▁" in described:
        return "sentencepiece"
    raise ModelError(
        f"tokenizer decoder {described} is not supported: must be byte-level or Metaspace"
    )


def _bytes_by_id(backend: tokenizers.Tokenizer, spelling: str) -> dict[int, bytes]:
    spell = _byte_level_bytes if spelling == "byte-level" else _sentencepiece_bytes
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    return {index: spell(token) for token, index in vocabulary.items()} | {
        index: token.content.encode() for index, token in added.items()
    }


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token.replace("▁", " ").encode()


def load_tokenizer(files: ModelFiles, config: ModelConfig) -> Tokenizer | None:
    """The model's tokenizer, or None if a directory has none: then prompts must be token ids.

    Raises:
        ModelError: it is damaged or of a kind that is not supported.
    """
    if files.gguf is not None:
        file = open_gguf(files.gguf)
        if "tokenizer.ggml.model" not in file.metadata:
            return None
        with naming(files.gguf):
            return Tokenizer(
                gguf_tokenizer.build(file),
                config.bos_token_id,
                gguf_tokenizer.adds_bos(file),
                config.eos_token_ids,
            )
    path = files.require_directory() / "tokenizer.json"
    if not path.is_file():
        if (path.parent / "tokenizer.model").is_file():
            logger.warning("%s: tokenizer.model is not read, only tokenizer.json is", path.parent)
        return None
    with naming(path):
        return _from_json(path, config)


def _from_json(path: Path, config: ModelConfig) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"cannot be read: {error}") from None
    settings = read_json(path.parent / "tokenizer_config.json") or {}
    bos = _token_id(backend, settings.get("bos_token"))
    eos = _token_id(backend, settings.get("eos_token"))
    # A flag in tokenizer_config.json overrules the post-processor, as in transformers.
    adds_bos = settings.get("add_bos_token")
    if adds_bos is None:
        with_specials = backend.encode("a", add_special_tokens=True).ids
        adds_bos = bos is not None and with_specials[:1] == [bos]
    ends = config.eos_token_ids if eos is None else dict.fromkeys((*config.eos_token_ids, eos))
    return Tokenizer(backend, bos, bool(adds_bos), ends)


def special_token(value: str | Mapping[str, Any] | None) -> str | None:
    """The text of a special token in tokenizer_config.json, which is a string or an object."""
    return value.get("content") if isinstance(value, Mapping) else value


def _token_id(backend: tokenizers.Tokenizer, value: str | Mapping[str, Any] | None) -> int | None:
    text = special_token(value)
    return None if text is None else backend.token_to_id(text)
