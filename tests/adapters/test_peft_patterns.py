"""Patterns match exactly as Python's `re`, in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.adapters.patterns import Budget, Pattern
from jaxlora.errors import AdapterError


PATHS = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10, 11)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
] + ["q_proj", "lm_head", "model.language_model.layers.1.self_attn.q_proj"]

EXPRESSIONS = [
    "q_proj",
    "q_proj|o_proj",
    r"model\.layers\.1\..*",
    "model.layers.1.self_attn.q_proj",
    r".*\.(q_proj|v_proj)",
    r".*self_attn\.[qkvo]_proj$",
    r"^(?!.*mlp).*_proj",
    r"^(model(?=\.).*\.(o_proj|k_proj))$",
    r"(.*(language_model).*(down_proj|gate_proj|q_proj).*$|.*(custom_text_proj).*$)",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|o_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|gate_proj)))",
    r".*layers\.(?:[0-9]|1[01])\..*\Bproj",
    r".*(?<=attn\.)q_proj",
    r".*(?<!attn\.)[^q]\w*_proj\Z",
    r"[^.]+(\.[^.]+){2,4}?\.\S+",
    r"\D*1{2}\D*|[a-m]*",
    r"x*(?:)*\A.*",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("path", PATHS)
def test_a_whole_path_matches_as_in_re(expression, path):
    expected = re.fullmatch(expression, path) is not None
    assert Pattern(expression, "f", Budget()).matches(path) == expected


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("path", PATHS)
def test_a_suffix_matches_as_in_peft(expression, path):
    expected = re.match(rf"(.*\.)?({expression})$", path) is not None
    assert Pattern.suffix(expression, "f", Budget()).matches(path) == expected


_atoms = st.sampled_from(
    [
        "a",
        "b",
        ".",
        r"\.",
        "[ab]",
        "[^a]",
        r"\w",
        r"\d",
        "^",
        "$",
        r"\b",
        "(?=a)",
        "(?!b)",
        "(?<=a)",
    ]
)


def _larger(inner):
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+?", "?", "{2}", "{0,2}", "{1,}?"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        ),
    )


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.recursive(_atoms, _larger, max_leaves=8), st.text("ab.1", max_size=7))
def test_any_pattern_matches_as_in_re(expression, text):
    expected = re.fullmatch(expression, text) is not None
    assert Pattern(expression, "f", Budget()).matches(text) == expected


@pytest.mark.parametrize(
    "expression",
    [
        r"(.*)*x",
        r"((a|a)*)*b",
        r"(\w+\.?)+!",
        ".*" * 500 + "x",
        "(a|a)" * 500,
        "(" * 40 + "a*" + ")*" * 40,
        r"(?:(?=(.*)*!).*)*x",
        "a{4000000000}",
        "(?:){4000000000}",
        "[" + "ab" * 9_000 + "]*x",
        "(" + "|" * 19_000 + ")",
        "(" * 5_000 + ")" * 5_000,
    ],
    ids=lambda expression: expression[:20],
)
def test_no_pattern_takes_long(expression):
    start = time.monotonic()
    budget = Budget()
    path = "model.layers.10.self_attn." + "a" * 30
    try:
        pattern = Pattern.suffix(expression, "f", budget)
        for _ in range(50):
            pattern.matches(path)
    except AdapterError as error:
        assert "\n" not in str(error)
    assert time.monotonic() - start < 30  # seconds, not for ever; a loaded machine included


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(", "not a regular expression"),
        ("a)|(b", "not a regular expression"),
        ("*", "not a regular expression"),
        ("(?P<\ud800\n>a)", "not a regular expression"),
        ("\\", "not a regular expression"),
        ("a{1,99999999999999999}", "not a regular expression"),
        ("(?i)q_proj", "flags"),
        ("(?i:q_proj)", "flags"),
        (r"(a)\1", "groupref"),
        ("(?>a)b", "atomic_group"),
        ("a*+b", "possessive_repeat"),
        ("(?<=a*)b", "fixed width"),
        ("x" * 10_000_000, "longer than 20000 characters"),
    ],
)
def test_what_cannot_be_matched_safely_is_refused(expression, reason):
    with pytest.raises(AdapterError) as caught:
        Pattern(expression, "file.json: target_modules", Budget())
    message = str(caught.value)
    assert message.startswith("file.json: target_modules: the pattern ")
    assert reason in message and message.isascii() and message.isprintable()
    assert len(message) < 300
