"""Chat templates: messages to prompt text, as transformers' `apply_chat_template` renders them.

A template is code that came with the model, so it runs in jinja's immutable sandbox; requests bring
data only. Its cost is bounded by a deadline, checked at every turn of a loop and call of a macro,
by jinja's limit on `range` (100,000), by the operands of `*` and `**`, and by the length of the
output. Single expressions made to eat memory, such as huge format widths, are not caught.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from memd.errors import ModelError, RequestError
from memd.models.gguf_file import open_gguf
from memd.models.hub import ModelFiles, read_json
from memd.models.tokenizer import special_token

MAX_RENDER_SECONDS = 2.0
MAX_OUTPUT_CHARACTERS = 16 * 2**20
_MAX_OPERAND = 10**6
_END_MARK = "\ue000end of the final message\ue000 "
_RESERVED = {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"}


class _GenerationTag(Extension):
    """`{% generation %}` marks text for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja's declaration

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox with a deadline and bounds on the operators that multiply sizes."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.clock = threading.local()
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def tick(self) -> str:
        """Called by the compiled template; renders as nothing."""
        if time.monotonic() > self.clock.deadline:
            raise SecurityError(f"the template ran for more than {MAX_RENDER_SECONDS:g} s")
        return ""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value in (left, right):
            size = len(value) if isinstance(value, (str, bytes, list, tuple)) else abs(value)
            if size > _MAX_OPERAND or (operator == "**" and size > 1000):
                raise SecurityError(f"an operand of {operator} is too large")
        return super().call_binop(context, operator, left, right)

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile with a `tick` at the head of every loop and macro body."""
        tree = self.parse(source)
        repeated: tuple[type[Any], ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
        node: Any
        for node in tree.find_all(repeated):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.Output([tick], lineno=node.lineno))
        tree.set_environment(self)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """A compiled template. Rendering is safe from several threads.

    Args:
        source: Jinja source.
        special_tokens: Names the template may print, such as `{"bos_token": "<s>"}`.

    Raises:
        ModelError: the source is not valid jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._sandbox = _Sandbox()
        try:
            self._template = self._sandbox.compile_bounded(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; encode it with `add_special_tokens=False`.

        Args:
            messages: Objects with `role` and `content`; keys whose value is None count as absent.
            add_generation_prompt: End with the header of an assistant message.
            continue_final_message: End inside the last message, so that generation continues it.
            variables: `chat_template_kwargs`: further names, which may replace special tokens.

        Raises:
            RequestError: the template refuses the messages, fails on them or costs too much.
        """
        if not messages:
            raise RequestError("messages is empty; at least one message is needed", "messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        variables = variables or {}
        if reserved := _RESERVED & variables.keys():
            raise RequestError(
                f"chat_template_kwargs may not hold {', '.join(sorted(reserved))}",
                "chat_template_kwargs",
            )
        present = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        if continue_final_message:
            present[-1] = _marked(present[-1])
        text = self._render(present, add_generation_prompt, variables)
        return _up_to_mark(text) if continue_final_message else text

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        names = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        self._sandbox.clock.deadline = time.monotonic() + MAX_RENDER_SECONDS
        chunks: list[str] = []
        length = 0
        try:
            for chunk in self._template.generate(names):
                length += len(chunk)
                if length > MAX_OUTPUT_CHARACTERS:
                    raise SecurityError(f"the text exceeds {MAX_OUTPUT_CHARACTERS} characters")
                chunks.append(chunk)
        # Whatever foreign code raises on the caller's data is an answer to the caller.
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise RequestError(
                f"the chat template refuses these messages: {reason}", "messages"
            ) from None
        return "".join(chunks)


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a mark behind its text, to find where the template would close it."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _END_MARK}
    if isinstance(content, list):
        for index in reversed(range(len(content))):
            if "text" in content[index]:
                part = {**content[index], "text": content[index]["text"] + _END_MARK}
                return {**message, "content": [*content[:index], part, *content[index + 1 :]]}
    raise RequestError("continue_final_message needs text in the last message", "messages")


def _up_to_mark(text: str) -> str:
    """Cut at the mark; a template that trims messages has lost the mark's last space."""
    head, mark, tail = text.rpartition(_END_MARK.strip())
    if not mark:
        raise RequestError(
            "continue_final_message: the chat template does not print the last message", "messages"
        )
    return head if tail.startswith(" ") else head.rstrip()


def load_chat_template(files: ModelFiles, override: Path | None = None) -> ChatTemplate | None:
    """The template of a file given by the operator, else the model's; None if there is neither.

    Raises:
        ModelError: a file cannot be read or the template is not valid jinja.
    """
    source, special_tokens = _from_model(files)
    if override is not None:
        try:
            source = override.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"model.chat_template {override}: {error}") from None
    return None if source is None else ChatTemplate(source, special_tokens)


def _from_model(files: ModelFiles) -> tuple[str | None, dict[str, str]]:
    if files.gguf is not None:
        metadata = open_gguf(files.gguf).metadata
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        ids = {
            f"{name}_token": metadata.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
        }
        special = {name: tokens[index] for name, index in ids.items() if index is not None}
        return metadata.get("tokenizer.chat_template"), special
    directory = files.require_directory()
    settings = read_json(directory / "tokenizer_config.json") or {}
    special = {
        name: text
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, (str, Mapping))
        if (text := special_token(value)) is not None
    }
    separate = directory / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8"), special
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source, special
