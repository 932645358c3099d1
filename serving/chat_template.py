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


class ChatTemplateError(ValueError):
    """Messages can't be rendered: there is no template, or the template refuses them."""


class ChatTemplate:
    """A compiled template. Rendering changes nothing, so threads may share one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: what the template may use by name, such as bos_token.

        Raises jinja2.TemplateSyntaxError.
        """
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt of `messages`; `kwargs` are the template's own switches.

        Message keys whose value is None are left out, as templates test for presence.
        Raises ChatTemplateError with the template's message where it refuses the messages.
        """
        if not messages:
            raise ChatTemplateError("messages must not be empty")
        variables = {"tools": None, "documents": None} | self._special_tokens | kwargs
        variables["messages"] = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(variables)
        # The template is a program of the model's author: it may raise anything.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(f"the chat template refused the messages: {reason}") from error


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a model folder, or None where it has none.

    Looks at chat_template.jinja, then at tokenizer_config.json's `chat_template`: a string, or a
    list of {name, template}, of which "default" is taken. Raises CheckpointError, naming the file.
    """
    path = folder / TEMPLATE_FILE
    try:
        source = path.read_text(encoding="utf-8")
    except FileNotFoundError:
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
