import json
import re

import pytest

from jaxlora.errors import CheckpointError
from serving.chat_template import ChatTemplate, ChatTemplateError, load_chat_template


USER = [{"role": "user", "content": "hi"}]


def render(source, messages=USER, **kwargs):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **kwargs)


def test_messages_special_tokens_and_switches_are_visible():
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{% if think is defined %}!{% endif %}"
    )
    assert render(source) == "<s>[user]hi[assistant]"
    assert render(source, add_generation_prompt=False, think=True) == "<s>[user]hi!"


def test_a_named_token_the_model_lacks_renders_as_nothing():
    assert render("{{ eos_token }}.") == "."


def test_a_switch_may_override_a_special_token():
    assert render("{{ bos_token }}", bos_token="x") == "x"


def test_tools_and_documents_are_none_unless_given():
    source = "{{ tools is none }} {{ documents is none }}"
    assert render(source) == "True True"
    assert render(source, tools=[{"name": "f"}]) == "False True"


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
    assert render("{{ v | tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ v | tojson(indent=2) }}", v=value) == '{\n  "b": "<é>",\n  "a": 1\n}'


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
