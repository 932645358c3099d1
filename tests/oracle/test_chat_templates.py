"""Chat templates against transformers' `apply_chat_template`, over random conversations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.chat_template import ChatTemplate, ChatTemplateError, load_chat_template
from tests.serving.tiny_tokenizers import byte_level_backend
from tests.support.chat_templates import READ_PARTS, READ_TEXT, TEMPLATES


transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
ROLES = ("system", "user", "assistant", "assistant", "user")

texts = st.text(
    alphabet=st.sampled_from("ab é日😀\n\t '\"<>{}%") | st.characters(codec="utf-8"), max_size=12
) | st.sampled_from(["", " ", "<think>\nso\n</think>\n\nyes", "a</think>", "ends in space \n"])
part_lists = st.lists(st.builds(lambda t: {"type": "text", "text": t}, texts), max_size=3)


def conversations(content: Any) -> Any:
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(ROLES), "content": content | st.none()},
        optional={"name": st.none() | st.just("x")},
    )
    alternating = st.lists(content, min_size=1, max_size=5).map(
        lambda contents: [
            {"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)
        ]
    )
    system = st.lists(st.builds(lambda c: {"role": "system", "content": c}, content), max_size=1)
    orderly = st.builds(lambda first, rest: first + rest, system, alternating)
    return orderly | st.lists(message, min_size=1, max_size=4)


def theirs(name: str, messages: list, arguments: dict, switches: dict) -> str | None:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), chat_template=TEMPLATES[name], **SPECIALS
    )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments, **switches)
    except Exception:  # jinja2's, ValueError, TypeError: whatever a template may do
        return None


def ours(name: str, messages: list, arguments: dict, switches: dict) -> str | None:
    template = ChatTemplate(TEMPLATES[name], SPECIALS)
    try:
        return template.render(messages, chat_template_kwargs=switches, **arguments)
    except ChatTemplateError:
        return None


arguments_of = st.sampled_from([(True, False), (False, False), (False, True), (True, True)]).map(
    lambda pair: {"add_generation_prompt": pair[0], "continue_final_message": pair[1]}
)
switches_of = st.dictionaries(st.sampled_from(["enable_thinking", "bos_token"]), st.booleans())


@pytest.mark.parametrize("name", READ_TEXT)
@settings(derandomize=True, max_examples=150, deadline=None)
@given(messages=conversations(texts), arguments=arguments_of, switches=switches_of)
def test_texts_are_rendered_as_transformers_does(name, messages, arguments, switches):
    wanted = theirs(name, messages, arguments, switches)
    assert ours(name, messages, arguments, switches) == wanted


@pytest.mark.parametrize("name", READ_PARTS)
@settings(derandomize=True, max_examples=150, deadline=None)
@given(messages=conversations(part_lists), arguments=arguments_of)
def test_parts_are_rendered_as_transformers_does(name, messages, arguments):
    assert ours(name, messages, arguments, {}) == theirs(name, messages, arguments, {})


@pytest.mark.parametrize("name", READ_TEXT)
def test_a_conversation_of_every_style_is_served(name):
    messages = [{"role": role, "content": f"{role} says"} for role in ("user", "assistant", "user")]
    wanted = theirs(name, messages, {"add_generation_prompt": True}, {})
    assert wanted is not None and "assistant says" in wanted
    assert ours(name, messages, {"add_generation_prompt": True}, {}) == wanted


@pytest.mark.parametrize("files", ["list", "list_without_default", "files", "files_no_default"])
def test_of_several_templates_transformers_takes_the_same(tmp_path, files):
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    named = {"tool_use": "tools", "default": "plain"}
    if files.endswith("default"):
        del named["default"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), chat_template=named
    )
    tokenizer.save_pretrained(tmp_path, save_jinja_files=files.startswith("files"))
    if files.startswith("files"):
        config["chat_template"] = "config"
        assert (tmp_path / "additional_chat_templates").exists()
    else:
        config["chat_template"] = [{"name": k, "template": v} for k, v in named.items()]
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    try:
        wanted = loaded.get_chat_template()
    except ValueError:
        wanted = None
    template = load_chat_template(tmp_path, config, {})
    assert (template and template.source) == wanted
