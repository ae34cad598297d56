"""Chat templates: the same ids as transformers, and a sandbox that holds (C101)."""

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from memd.errors import ModelError, RequestError
from memd.models import chat_template
from memd.models.chat_template import ChatTemplate, load_chat_template
from memd.models.hf_config import from_hf
from memd.models.hub import ModelFiles, read_config
from memd.models.tokenizer import load_tokenizer

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start|>' + message['role'] + '<|end|>\n\n'"
    "+ message['content'] | trim + '<|eot|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
QWEN = """{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- generation %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {{- '<|start|>assistant\n' + content + '<|eot|>\n' }}
        {%- endgeneration %}
    {%- elif loop.index0 <= ns.last %}
        {{- '<|start|>' + message.role + '\n' + message.content + '<|eot|>' + '\n' }}
    {%- else %}
        {%- continue %}
    {%- endif %}
    {%- if message.extra is defined %}{{ message.extra | tojson }}{% endif %}
{%- endfor %}
{%- if tools is not none %}{{ tools }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
TEMPLATES = {"llama3": LLAMA3, "mistral": MISTRAL, "qwen": QWEN}
ONE = [{"role": "user", "content": "  Grüße, 日本 🤗 <b>&'\"</b>\n"}]
MANY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2 ", "name": None},
    {"role": "user", "content": "Sure?"},
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A byte-level tokenizer whose post-processor would add a second BOS."""
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(ALPHABET))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|start|>", "<|end|>", "<|eot|>"]
    backend.add_tokens([AddedToken(token, special=True) for token in special])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


ALPHABET = pre_tokenizers.ByteLevel.alphabet()
CONFIG = from_hf(
    {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
)


@pytest.mark.parametrize("messages", [ONE, MANY], ids=["one", "many"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generate", [True, False])
def test_ids_equal_transformers(
    name: str, messages: list[dict[str, Any]], generate: bool, directory: Path
) -> None:
    (directory / "chat_template.jinja").write_text(TEMPLATES[name])
    files = ModelFiles("m", directory=directory)
    template = load_chat_template(files)
    tokenizer = load_tokenizer(files, CONFIG)
    assert template is not None
    assert tokenizer is not None
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    variables = {"enable_thinking": False}
    text = template.render(messages, add_generation_prompt=generate, variables=variables)
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=generate, tokenize=True, return_dict=False, **variables
    )
    assert ids == expected
    assert ids.count(tokenizer.bos_token_id or -1) == (0 if name == "qwen" else 1)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["The answer is", "The answer is  "])
def test_continuing_equals_transformers(name: str, content: str, directory: Path) -> None:
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    messages = [*ONE, {"role": "assistant", "content": content}]
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == reference.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
    )
    assert text.rstrip().endswith("The answer is")


def test_continuing_the_last_part_of_a_list() -> None:
    template = ChatTemplate("{{ messages[0].content[0].text }}</end>", {})
    message = {"role": "assistant", "content": [{"type": "text", "text": "so"}]}
    assert template.render([message], False, True) == "so"
    silent = ChatTemplate("nothing", {})
    with pytest.raises(RequestError, match="does not print the last message"):
        silent.render([message], False, True)


@pytest.mark.demo_model
def test_demo_model_equals_transformers(demo_files: ModelFiles, demo_reference: Any) -> None:
    template = load_chat_template(demo_files)
    tokenizer = load_tokenizer(demo_files, read_config(demo_files))
    assert template is not None
    assert tokenizer is not None
    for messages in (ONE, MANY):
        ids = tokenizer.encode(template.render(messages), add_special_tokens=False)
        expected = demo_reference.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert ids == expected


def test_refusals_of_the_template_reach_the_caller() -> None:
    template = ChatTemplate(MISTRAL, {"bos_token": "<s>"})
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.render([MANY[1], MANY[1]])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="messages is empty"):
        template.render([])
    with pytest.raises(RequestError, match="chat template refuses these messages") as caught:
        template.render([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    assert caught.value.param == "messages"


def test_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ mood }}{{ now }}", {"bos_token": "<s>"})
    assert template.render(ONE, variables={"mood": "glad"}) == "<s>glad"
    with pytest.raises(RequestError, match="may not hold messages") as caught:
        template.render(ONE, variables={"messages": []})
    assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(RequestError, match="exclude each other"):
        template.render(ONE, add_generation_prompt=True, continue_final_message=True)
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(ONE).isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ '{0.__class__.__mro__}'.format(1) ~ ''.__class__ }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ lipsum(n=100000) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    before = json.dumps(ONE)
    with pytest.raises(RequestError):
        ChatTemplate(source, {}).render(ONE)
    assert json.dumps(ONE) == before


BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "captured": "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endset %}",
    "macro": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([x]) ~ loop([x]) }}{% endfor %}",
    "range": "{{ range(10 ** 9) }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "repeat": "{{ 'x' * 10 ** 9 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_soon(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARACTERS", 10**6)
    template = ChatTemplate(BOMBS[name], {})
    start = time.monotonic()
    with pytest.raises(RequestError, match="chat template refuses these messages"):
        template.render(ONE)
    assert time.monotonic() - start < 2
    assert ChatTemplate("{{ messages[0].role }}", {}).render(ONE) == "user"


def test_threads_have_their_own_deadline() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    texts: list[str] = []

    def work(content: str) -> None:
        texts.append(template.render([{"role": "user", "content": content}]))

    threads = [threading.Thread(target=work, args=(str(index),)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [str(index) for index in range(8)]


def write(directory: Path, config: Mapping[str, Any]) -> ModelFiles:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelFiles("m", directory=directory)


def render(files: ModelFiles, override: Path | None = None) -> str:
    template = load_chat_template(files, override)
    assert template is not None
    return template.render(ONE)


def test_sources_in_order(tmp_path: Path) -> None:
    assert load_chat_template(ModelFiles("m", directory=tmp_path)) is None
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": None}
    files = write(tmp_path, {**tokens, "chat_template": "config {{ bos_token }}{{ eos_token }}"})
    assert render(files) == "config <s>"
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "plain"}]
    files = write(tmp_path, {**tokens, "chat_template": named})
    assert render(files) == "plain"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert render(files) == "file <s>"
    override = tmp_path / "mine.jinja"
    with pytest.raises(ModelError, match=r"model\.chat_template .*mine\.jinja"):
        load_chat_template(files, override)
    override.write_text("mine {{ bos_token }}")
    assert render(files, override) == "mine <s>"
    override.write_text("one\n{% if %}")
    with pytest.raises(ModelError, match="chat template, line 2"):
        load_chat_template(files, override)
