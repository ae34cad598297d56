"""Tokenizers against transformers, bytes against text, exactly one BOS (C078, C087, C101)."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from memd.errors import ModelError, RequestError
from memd.models.config import ModelConfig
from memd.models.hf_config import from_hf
from memd.models.hub import ModelFiles, read_config
from memd.models.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    "Hello, world! It's 1234567.89 o'clock; they've 3  4\t5\n\n\n   six\r\n",
    "def f(x):\n    return x  # ok\n",
    "Grüße aus Zürich, naïve façade, e\u0301 and \u00e9",
    "日本語のテキスト。中文字符、한국어 텍스트",
    "Привет, мир! שלום עולם مرحبا بالعالم",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "🤗👩‍👩‍👧‍👦🏳️‍🌈 👍🏽 \U0001f9ff",
    "½ ² Ⅷ ٣٤ १२",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>",
    "\x00\x01\x7f\u200b\ufeff\u2028 \u00a0 \u3000",
]
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
CONFIG: ModelConfig = from_hf(
    {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "eos_token_id": 1,
    }
)
SPECIAL = ["<s>", "</s>", "<|user|>"]


def byte_level(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """A byte-level BPE trained on the texts, with BOS 0 and EOS 1."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken("<think>")])
    return backend


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return backend


def saved(directory: Path, backend: tokenizers.Tokenizer, **config: Any) -> Tokenizer:
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(ModelFiles("m", directory=directory), CONFIG)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return saved(tmp_path_factory.mktemp("bytewise"), byte_level())


@pytest.mark.demo_model
def test_demo_ids_equal_transformers(demo_files: ModelFiles, demo_reference: Any) -> None:
    reference = demo_reference
    tokenizer = load_tokenizer(demo_files, read_config(demo_files))
    assert tokenizer is not None
    for text in [*TEXTS, " ".join(TEXTS)]:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.token_text(1) == "<|im_start|>"

    @settings(max_examples=100, deadline=None)
    @given(any_text)
    def agrees(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == reference(text)["input_ids"]
        # Not the text: this vocabulary lacks bytes such as 0xF1, which no known script uses.
        assert tokenizer.decode(ids, skip_special=False) == reference.decode(ids)

    agrees()


def test_byte_level_equals_transformers(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, with_bos(byte_level()))
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)

    @settings(max_examples=100, deadline=None)
    @given(any_text)
    def agrees(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == reference(text)["input_ids"]
        assert tokenizer.decode(ids) == text

    agrees()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference(text)["input_ids"]
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == text


def sentencepiece_metadata() -> dict[str, Any]:
    """A SentencePiece model as llama.cpp's converter writes it: scores, no merges."""
    words = ["▁", "▁t", "he", "▁the", "in", "▁in", "er", "o", "a", "t", "h", "e", "i", "n", "r"]
    words += ["▁▁", "▁▁▁▁", "日", "日本", "本", "é", "s", "th"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *words,
        "<think>",
    ]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words), 4]
    scores = [0.0] * 259 + [-float(index) for index in range(len(words))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def from_gguf(path: Path) -> Tokenizer:
    files = ModelFiles("m", gguf=path)
    tokenizer = load_tokenizer(files, read_config(files))
    assert tokenizer is not None
    return tokenizer


def test_sentencepiece(make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any) -> None:
    path = make_gguf(tiny_metadata | sentencepiece_metadata(), tiny_tensors)
    tokenizer = from_gguf(path)
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ["the thin  inner    note", "日本é🤗 x\n\t", "a", "then\n  in"]:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    assert tokenizer.max_token_bytes == len("<think>")
    ids = tokenizer.encode("in<think>é🤗")
    assert [tokenizer.token_text(index) for index in ids[:3]] == ["<s>", " in", "<think>"]
    assert b"\xf0" in [tokenizer.token_bytes(index) for index in ids]

    @settings(max_examples=100, deadline=None)
    @given(any_text.filter(lambda text: text and "▁" not in text))
    def joined_bytes_are_the_text(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == " " + text

    joined_bytes_are_the_text()


def test_sentencepiece_json_equals_gguf(
    make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any, tmp_path: Path
) -> None:
    built = from_gguf(make_gguf(tiny_metadata | sentencepiece_metadata(), tiny_tensors))
    loaded = saved(tmp_path, built._backend, add_bos_token=True)
    for text in TEXTS:
        ids = built.encode(text)
        assert loaded.encode(text) == ids
        assert [loaded.token_bytes(i) for i in ids] == [built.token_bytes(i) for i in ids]


@pytest.mark.parametrize(
    ("keys", "bos"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.pre": "qwen2"}, False),
        ({"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": True}, True),
        ({}, False),
    ],
)
def test_bos_of_gguf(
    keys: dict[str, Any], bos: bool, make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any
) -> None:
    vocabulary = byte_level().get_vocab()
    merges = json.loads(byte_level().to_str())["model"]["merges"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    metadata = {
        **tiny_metadata,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "[PAD401]"],
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 4), 4, 5],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        **keys,
    }
    tokenizer = from_gguf(make_gguf(metadata, tiny_tensors))
    assert tokenizer.encode("It's").count(0) == bos
    assert tokenizer.encode("<s>It's").count(0) == 1
    assert tokenizer.encode("It's", add_special_tokens=False).count(0) == 0
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.token_bytes(len(tokens)) == b""


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokenizer.ggml.pre", "unheard-of"), ("tokenizer.ggml.model", "bert")],
)
def test_unknown_gguf_tokenizers_are_refused(
    key: str, value: str, make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any
) -> None:
    metadata = {
        **tiny_metadata,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
        key: value,
    }
    with pytest.raises(ModelError, match=rf"model\.gguf: {key} '{value}' is not supported"):
        from_gguf(make_gguf(metadata, tiny_tensors))


def test_lists_that_do_not_fit_are_refused(
    make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any
) -> None:
    metadata = {
        **tiny_metadata,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": ["a b"],
    }
    with pytest.raises(ModelError, match=r"merges holds \('a', 'b'\), which makes no token"):
        from_gguf(make_gguf(metadata, tiny_tensors))
    types = {"tokenizer.ggml.token_type": [1]}
    with pytest.raises(ModelError, match=r"model\.gguf: tokenizer\.ggml lists contradict"):
        from_gguf(make_gguf(metadata | types, tiny_tensors))


def test_llama3_digits_and_qwen_normal_form(
    make_gguf: Any, tiny_metadata: Any, tiny_tensors: Any
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        **tiny_metadata,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*alphabet, "12", "34", "123"],
        "tokenizer.ggml.merges": ["1 2", "3 4", "12 3"],
    }

    def pieces(pre: str, text: str) -> list[str]:
        tokenizer = from_gguf(make_gguf(metadata | {"tokenizer.ggml.pre": pre}, tiny_tensors))
        return [tokenizer.token_text(index) for index in tokenizer.encode(text)]

    assert pieces("llama-bpe", "1234") == ["123", "4"]
    assert pieces("qwen2", "1234") == pieces("smollm", "1234") == list("1234")
    assert pieces("gpt-2", "1234") == ["12", "34"]
    assert len(pieces("qwen2", "e\u0301")) == 2


@pytest.mark.parametrize(
    ("processor", "config", "count"),
    [
        (True, {}, 1),
        (True, {"add_bos_token": False}, 0),
        (False, {}, 0),
        (False, {"add_bos_token": True}, 1),
        (False, {"add_bos_token": True, "bos_token": None}, 0),
    ],
)
def test_one_bos_or_none(
    processor: bool, config: dict[str, Any], count: int, tmp_path: Path
) -> None:
    backend = with_bos(byte_level()) if processor else byte_level()
    tokenizer = saved(tmp_path, backend, **config)
    assert tokenizer.encode("hello").count(0) == count
    assert tokenizer.encode("").count(0) == count
    assert tokenizer.encode("<s>hello").count(0) == 1
    assert tokenizer.encode("<s>hello", add_special_tokens=False).count(0) == 1
    assert tokenizer.eos_token_ids == {1}


def test_truncation_and_padding_in_the_file_have_no_effect(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    tokenizer = saved(tmp_path, backend)
    assert tokenizer.decode(tokenizer.encode(TEXTS[1])) == TEXTS[1]


def test_special_and_unused_ids(bytewise: Tokenizer) -> None:
    assert bytewise.special_ids == {0, 1, 2}
    assert bytewise.token_bytes(1) == b""
    assert bytewise.token_bytes(1, skip_special=False) == b"</s>"
    think = bytewise.encode("<think>")
    assert think == [bytewise.vocab_size - 1]
    assert bytewise.token_bytes(think[0]) == b"<think>"
    # Rows of the output layer beyond the tokenizer.
    assert bytewise.vocab_size < CONFIG.vocab_size
    assert bytewise.token_bytes(CONFIG.vocab_size - 1) == b""
    assert bytewise.decode([*bytewise.encode("ok"), 505, 1]) == "ok"


def test_cut_characters_are_replaced(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("\U0001f9ff")
    assert len(ids) > 1
    assert bytewise.decode(ids[:-1]) == "\ufffd"
    assert bytewise.decode(ids) == "\U0001f9ff"


@pytest.mark.parametrize("text", ["a\ud800b", "end \udfff"])
def test_lone_surrogates_are_the_callers_fault(text: str, bytewise: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D[8F][0-9A-F]{2} at character \d"):
        bytewise.encode(text)
    assert bytewise.decode(bytewise.encode("\x00 \U0001f917")) == "\x00 \U0001f917"


def test_longest_token_bounds_the_token_count(bytewise: Tokenizer, tmp_path: Path) -> None:
    for text in TEXTS:
        assert len(bytewise.encode(text)) * bytewise.max_token_bytes >= len(text.encode())
    padded = byte_level()
    padded.add_tokens([AddedToken("<pad>", rstrip=True)])
    swallowing = saved(tmp_path, padded)
    assert len(swallowing.encode("<pad>" + " " * 1000)) == 1
    assert swallowing.max_token_bytes > 1000


def test_directories_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(ModelFiles("m", directory=tmp_path), CONFIG) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(ModelFiles("m", directory=tmp_path), CONFIG)
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"WordPiece.* is not supported"):
        saved(tmp_path, backend)
