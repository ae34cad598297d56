"""Builds a `tokenizers.Tokenizer` from GGUF metadata, like that of the model's tokenizer.json.

Source:
    Pre-tokenizer names, their expressions and their defaults for the first token: llama.cpp,
    src/llama-vocab.cpp. SentencePiece models become BPE by score, as in transformers'
    LlamaConverter.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from memd.errors import ModelError
from memd.models.gguf_file import GgufFile

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Families of pre-tokenizers by the names that llama.cpp's converter writes for them.
_WHOLE_WORDS_FIRST = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    "tekken": _TEKKEN,
}
_SPLITS = {
    **_WHOLE_WORDS_FIRST,
    **dict.fromkeys(("smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
}
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "codeshell", "command-r", "minerva-7b")
_GPT2 = ("gpt-2", "gpt2", "default", "olmo")


def build(file: GgufFile) -> Tokenizer:
    """The tokenizer that a GGUF file describes, without a post-processor.

    Raises:
        ModelError: the tokenizer model or pre-tokenizer is not known, or a list is missing.
    """
    kind = file.require("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"tokenizer.ggml.model {kind!r} is not supported; supported are gpt2, llama"
        )
    try:
        tokenizer = _byte_level(file) if kind == "gpt2" else _sentencepiece(file)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception, for lists that do not fit
        raise ModelError(f"tokenizer.ggml lists contradict each other: {error}") from None
    tokens = file.require("tokenizer.ggml.tokens")
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    # Both are found in text before anything else; decoded text leaves out control tokens only.
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=token_type == _CONTROL)
            for token, token_type in zip(tokens, types, strict=False)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def adds_bos(file: GgufFile) -> bool:
    """Whether a plain prompt begins with BOS; older files leave the flag out."""
    default = (
        file.metadata.get("tokenizer.ggml.model") == "llama"
        or file.metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    )
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", default))


def _vocabulary(file: GgufFile) -> dict[str, int]:
    """Token -> id, without the placeholders that pad the output layer."""
    tokens = file.require("tokenizer.ggml.tokens")
    types = file.metadata.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    return {
        token: index
        for index, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type != _UNUSED
    }


def _byte_level(file: GgufFile) -> Tokenizer:
    vocabulary = _vocabulary(file)
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges")]
    # The library panics, past any `except Exception`, over a pair whose joint token is not there.
    unfit = next((pair for pair in merges if "".join(pair) not in vocabulary), None)
    if unfit is not None:
        raise ModelError(f"tokenizer.ggml.merges holds {unfit}, which makes no token")
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    words_first = name in _WHOLE_WORDS_FIRST
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=words_first))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in _SPLITS)
    if name in _SPLITS:
        first: Any = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
    elif name in _SINGLE_DIGITS:
        first = pre_tokenizers.Digits(individual_digits=True)
    elif name in _GPT2:
        first = None
    else:
        known = ", ".join(sorted([*_SPLITS, *_SINGLE_DIGITS, *_GPT2]))
        raise ModelError(f"tokenizer.ggml.pre {name!r} is not supported; supported are {known}")
    tokenizer.pre_tokenizer = (
        byte_level if first is None else pre_tokenizers.Sequence([first, byte_level])
    )
    if _SPLITS.get(name) == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile) -> Tokenizer:
    vocabulary = _vocabulary(file)
    scores = file.require("tokenizer.ggml.scores")
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_by_score(vocabulary, scores),
            unk_token=file.require("tokenizer.ggml.tokens")[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to split a token in two known ones, best token first: what SentencePiece tries."""
    splits = (
        (-scores[index], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    )
    return [(left, right) for *_, left, right in sorted(splits)]
