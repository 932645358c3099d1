"""JSON of an adapter's folder is read exactly, or refused in one line."""

from __future__ import annotations

import pytest

from jaxlora.adapters.strict_json import parse_object, show
from jaxlora.errors import AdapterError


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8 text"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' is given twice"),
        (b'{"a": {"b": 1, "b": 2}}', "the key 'b' is given twice"),
        (b'{"a": NaN}', "'a' holds a number that is not finite"),
        (b'{"a": [{"b": -Infinity}]}', "'a' holds a number that is not finite"),
        (b'{"a": 1e999}', "'a' holds a number that is not finite"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b'{"a": ' + b"[" * 200_000, "nested too deep"),
        (b'{"a":' * 200_000, "nested too deep"),
    ],
)
def test_what_is_not_a_plain_object_is_refused(data, reason):
    with pytest.raises(AdapterError) as caught:
        parse_object(data, "file.json")
    message = str(caught.value)
    assert message.startswith("file.json: ") and reason in message and "\n" not in message


def test_key_order_is_the_files():
    assert list(parse_object(b'{"b": 1, "a": {"d": 1, "c": 2}}', "f")) == ["b", "a"]


@pytest.mark.parametrize("value", ["a\nb", "\ud800", "\x1b[31m", "x" * 1000, ["é"] * 100])
def test_values_are_shown_on_one_short_printable_line(value):
    text = show(value)
    assert text.isascii() and text.isprintable() and len(text) <= 80
