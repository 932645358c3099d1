import json
import re

import pytest

from jaxlora.errors import CheckpointError
from serving.chat_template import ChatTemplate, ChatTemplateError, load_chat_template


USER = [{"role": "user", "content": "hi"}]


def render(source, messages=USER, **arguments):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **arguments)


def test_messages_special_tokens_and_switches_are_visible():
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{% if think is defined %}!{% endif %}"
    )
    assert render(source) == "<s>[user]hi[assistant]"
    assert (
        render(source, add_generation_prompt=False, chat_template_kwargs={"think": True})
        == "<s>[user]hi!"
    )


def test_a_named_token_the_model_lacks_renders_as_nothing():
    assert render("{{ eos_token }}.") == "."


def test_a_switch_may_override_a_special_token():
    assert render("{{ bos_token }}", chat_template_kwargs={"bos_token": "x"}) == "x"


def test_tools_and_documents_are_none():
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


@pytest.mark.parametrize(
    "name",
    [
        *("messages", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message"),
    ],
)
def test_a_switch_may_not_stand_for_an_argument(name):
    with pytest.raises(ChatTemplateError, match=f"chat_template_kwargs can't set '{name}'"):
        render("x", chat_template_kwargs={name: None})


PARTS = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]}]
READS_TEXT = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
READS_PARTS = (
    "{% for m in messages %}[{% for c in m.content %}<{{ c['text'] }}>{% endfor %}]{% endfor %}"
)
READS_BOTH = (
    "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]{% else %}"
    "[{% for c in m.content %}<{{ c.text }}>{% endfor %}]{% endif %}{% endfor %}"
)
TRIMS = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [
        (READS_TEXT, "[hi]", "[one\ntwo]"),
        (READS_PARTS, "[<hi>]", "[<one><two>]"),
        (READS_BOTH, "[hi]", "[<one><two>]"),
        (TRIMS, "[hi]", "[one\ntwo]"),
        ("{{ messages[0].content | tojson }}", '"hi"', '"one\\ntwo"'),
    ],
)
def test_content_comes_in_the_form_that_the_template_reads(source, text, parts):
    assert render(source) == text
    assert render(source, PARTS) == parts


@pytest.mark.parametrize(
    "content",
    [3, ["a"], [{"type": "image_url", "text": "a"}], [{"type": "text"}], {"type": "text"}],
)
def test_content_that_is_no_text_is_refused(content):
    with pytest.raises(ChatTemplateError, match="content must be a text or a list of text parts"):
        render(READS_BOTH, [{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("source", "content", "prompt"),
    [
        (READS_TEXT, "The sum is ", "[hi][The sum is "),
        (READS_TEXT, "", "[hi]["),
        (READS_TEXT, [{"type": "text", "text": t} for t in ("a", "b ")], "[hi][a\nb "),
        (READS_PARTS, "x", "[<hi>][<x"),
        (READS_BOTH, [{"type": "text", "text": t} for t in ("a", "b ")], "[hi][<a><b "),
        (TRIMS, " The sum is ", "[hi][The sum is"),
    ],
)
def test_a_continued_message_ends_the_prompt(source, content, prompt):
    messages = [*USER, {"role": "assistant", "content": content}]
    rendered = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == prompt


@pytest.mark.parametrize(
    ("source", "message", "generation", "reason"),
    [
        (READS_TEXT, {"content": "a"}, True, "can't both be true"),
        (READS_TEXT, {"content": None}, False, "no content"),
        (READS_BOTH, {"content": []}, False, "no text"),
        ("{{ messages | length }}", {"content": "a"}, False, "no content that the chat template"),
        ("{{ messages[0].content[:2] }}", {"content": "abc"}, False, "leaves out a part"),
        ("{{ messages[0].content[2:] }}", {"content": "abc"}, False, "leaves out a part"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(source, message, generation, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        render(source, [message], add_generation_prompt=generation, continue_final_message=True)


def test_keys_that_are_none_are_absent():
    assert render("{{ 'name' in messages[0] }}", [{"role": "user", "name": None}]) == "False"


def test_blocks_leave_no_blank_lines():
    assert render("{% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_loop_controls_work():
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )


def test_generation_blocks_are_rendered_and_keep_their_variables():
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}a{{ x }}{% endgeneration %}b{{ x }}"
    assert render(source) == "a2b1"


def test_tojson_neither_escapes_html_nor_sorts():
    value = {"b": "<é>", "a": 1}
    assert render("{{ v | tojson }}", chat_template_kwargs={"v": value}) == json.dumps(
        value, ensure_ascii=False
    )
    indented = render("{{ v | tojson(indent=2) }}", chat_template_kwargs={"v": value})
    assert indented == '{\n  "b": "<é>",\n  "a": 1\n}'


def test_strftime_now_gives_the_date():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ nothing.there }}", "'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
    ],
)
def test_whatever_a_template_raises_is_a_one_line_refusal(source, reason):
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_messages_is_a_refusal():
    with pytest.raises(ChatTemplateError, match="must not be empty"):
        render("x", [])


def load(folder, config=None):
    template = load_chat_template(folder, config or {}, {})
    return template and template.render(USER)


def test_the_template_file_wins_over_the_config(tmp_path):
    config = {"chat_template": "config"}
    assert load(tmp_path, config) == "config"
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert load(tmp_path, config) == "file"


def test_of_several_named_templates_default_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert load(tmp_path, {"chat_template": named}) == "plain"
    assert load(tmp_path, {"chat_template": named[:1]}) is None


def test_named_template_files_leave_no_default_in_the_config(tmp_path):
    named = tmp_path / "additional_chat_templates"
    named.mkdir()
    assert load(tmp_path, {"chat_template": "config"}) == "config"
    (named / "tool_use.jinja").write_text("tools", encoding="utf-8")
    assert load(tmp_path, {"chat_template": "config"}) is None
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert load(tmp_path, {"chat_template": "config"}) == "file"


def test_a_folder_may_have_no_template(tmp_path):
    assert load(tmp_path) is None


@pytest.mark.parametrize(
    "value", [3, {}, ["a"], [{"name": "default"}], [{"name": 1, "template": 2}]]
)
def test_a_malformed_config_entry_is_refused_by_file(tmp_path, value):
    with pytest.raises(CheckpointError, match="tokenizer_config.json: chat_template must be"):
        load(tmp_path, {"chat_template": value})


def test_a_template_that_does_not_parse_is_refused_by_file_and_line(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: .* line 2: "):
        load(tmp_path)


def test_a_template_that_is_not_text_is_refused_by_file(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="chat_template.jinja: can't be read"):
        load(tmp_path)
