"""Render a model's own chat template (Jinja, as Hugging Face writes them) safely."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxlora.errors import CheckpointError


TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja

# What a template is given by other ways than by its own switches.
_RESERVED = (
    *("messages", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message"),
)
_FINAL_MARK = "\ue000final message ends here\ue001 "  # ends in a space: is the message trimmed?
_PROBE = "\ue000probe\ue001"


class ChatTemplateError(ValueError):
    """Messages can't be rendered: there is no template, or the template refuses them."""


class ChatTemplate:
    """A compiled template. Rendering changes nothing, so threads may share one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: what the template may use by name, such as bos_token.

        Raises jinja2.TemplateSyntaxError.
        """
        self.source = source
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)
        self._reads_parts = self._keeps([{"type": "text", "text": _PROBE}])
        self._reads_text = self._keeps(_PROBE)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of `messages`, as transformers' `apply_chat_template` makes it.

        With continue_final_message the prompt ends where the last message's text does, trimmed if
        the template trims it, so that the answer goes on with it. `chat_template_kwargs` are the
        template's own switches; it sees `tools` and `documents` as None.

        Message keys whose value is None are left out, as templates test for presence. Content may
        be a list of {"type": "text", "text": ...} parts. A template that doesn't read such lists
        gets the texts joined by newlines, and one that reads nothing else gets a text as one part.

        Raises ChatTemplateError with the template's message where it refuses the messages, and for
        a final message that can't be continued.
        """
        if not messages:
            raise ChatTemplateError("messages must not be empty")
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt can't both be true: one continues"
                " the last message, the other begins a new one"
            )
        switches = chat_template_kwargs or {}
        for name in _RESERVED:
            if name in switches:
                raise ChatTemplateError(f"chat_template_kwargs can't set {name!r}")
        prepared = [self._prepared(message) for message in messages]
        if not continue_final_message:
            return self._render(prepared, add_generation_prompt, switches)
        text, prepared[-1] = self._marked(prepared[-1])
        rendered = self._render(prepared, add_generation_prompt, switches)
        return _up_to_mark(rendered, text)

    def _render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, switches: Mapping
    ) -> str:
        variables = {"tools": None, "documents": None, **self._special_tokens, **switches}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        # The template is a program of the model's author: it may raise anything.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(f"the chat template refused the messages: {reason}") from error

    def _keeps(self, content: str | list[dict[str, str]]) -> bool:
        """Whether content of this form shows up in the prompt as text, not as its JSON."""
        try:
            text = self._render([{"role": "user", "content": content}], False, {})
        except ChatTemplateError:
            return False
        return _PROBE in text and not any(quote + _PROBE in text for quote in "\"'")

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a message in the form that the template reads."""
        result = {key: value for key, value in message.items() if value is not None}
        content = result.get("content", "")
        if isinstance(content, str):
            if self._reads_parts and not self._reads_text and "content" in result:
                result["content"] = [{"type": "text", "text": content}]
        elif not isinstance(content, list) or not all(map(_is_text_part, content)):
            raise ChatTemplateError("a message's content must be a text or a list of text parts")
        elif not self._reads_parts:
            result["content"] = "\n".join(part["text"] for part in content)
        return result

    def _marked(self, message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The text that is to be continued, and its message with a mark behind it."""
        content = message.get("content")
        if content is None or "content" not in self.source:
            raise ChatTemplateError(
                "continue_final_message: the last message has no content that the chat template"
                " reads"
            )
        if isinstance(content, str):
            return content, message | {"content": content + _FINAL_MARK}
        if not content:
            raise ChatTemplateError("continue_final_message: the last message has no text")
        *before, last = content
        marked = {**last, "text": last["text"] + _FINAL_MARK}
        return last["text"], message | {"content": [*before, marked]}


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def _up_to_mark(rendered: str, text: str) -> str:
    """What comes before the mark, without the space before it if the template trimmed the mark."""
    end = rendered.rfind(_FINAL_MARK.strip())
    if end < 0 or text.strip() not in rendered:
        raise ChatTemplateError(
            "continue_final_message: the chat template leaves out a part of the last message, so it"
            " can't be continued"
        )
    kept = rendered.startswith(_FINAL_MARK, end)
    return rendered[:end] if kept else rendered[:end].rstrip()


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The default template of a model folder, or None where it has none.

    Template files come first: chat_template.jinja is the default, and beside named ones in
    additional_chat_templates/ there is no other. Without files it is tokenizer_config.json's
    `chat_template`: a string, or a list of {name, template}, of which "default" is taken. A named
    template ("tool_use", say) is never chosen. Raises CheckpointError, naming the file.
    """
    path = folder / TEMPLATE_FILE
    try:
        source = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if any((folder / NAMED_TEMPLATES).glob("*.jinja")):
            return None
        path = folder / "tokenizer_config.json"
        source = _from_config(path, tokenizer_config.get("chat_template"))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"{path}: the chat template is not valid Jinja, line {error.lineno}: {error.message}"
        ) from error


def _from_config(path: Path, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        try:
            named = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError):
            named = {}
        if named and all(isinstance(template, str) for template in named.values()):
            return named.get("default")
    raise CheckpointError(
        f"{path}: chat_template must be a string or a list of {{name, template}} objects"
    )


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that published templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only is a scope."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
