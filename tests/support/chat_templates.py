"""Chat templates in the styles that models are published with, written for the tests."""

from __future__ import annotations


# ChatML: SmolLM2, Qwen 2.5. A system message of the template's own unless one is given.
CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Llama 2: the system message goes into the first user message; roles must alternate.
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}
{% for message in rest %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}
{% endif %}
{% if loop.index0 == 0 and system %}
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}
"""

# Llama 3: headers, trimmed contents, bos before the first message only.
LLAMA3 = """\
{%- for message in messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
        + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}{%- set content = bos_token + content %}{%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Mistral 0.3 and later: system before the last user message, texts or parts, a macro.
MISTRAL = """\
{%- macro text_of(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}
        {%- for part in content if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set state = namespace(system='') -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- set state.system = text_of(message.content) -%}
    {%- elif message.role == 'user' -%}
        {{- '[INST]' -}}
        {%- if loop.last and state.system -%}{{- state.system + '\\n\\n' -}}{%- endif -%}
        {{- text_of(message.content) + '[/INST]' -}}
    {%- elif message.role == 'assistant' -%}{{- text_of(message.content) + eos_token -}}
    {%- else -%}{{- raise_exception('unknown role ' + message.role) -}}
    {%- endif -%}
{%- endfor -%}
"""

# Qwen 3: what was thought before the last question is left out; enable_thinking is a switch.
QWEN3 = """\
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.last_query < 0 and message.role == 'user' %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Gemma: the assistant is called model, there is no system role.
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

# Zephyr, TinyLlama: blocks on their own lines, the generation prompt inside the loop.
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

# SmolLM3, for training: `generation` marks the assistant's words; content only in parts.
PARTS = """\
{%- for message in messages -%}
    {{- '<|' ~ message.role ~ '|>' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}
        {%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{{- '<|end|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'text' -%}{{- part.text -}}{%- else -%}{%- break -%}{%- endif -%}
        {%- endfor -%}
        {{- '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "zephyr": ZEPHYR,
    "parts": PARTS,
}
READ_TEXT = tuple(name for name in TEMPLATES if name != "parts")
READ_PARTS = ("mistral", "parts")
