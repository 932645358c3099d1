"""Whatever the bytes of a folder, it reads or it is an AdapterError: no traceback, no hang."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlora.adapters import support
from jaxlora.adapters.support_rows import Place
from jaxlora.adapters.tensor_file import parse_tensor_file
from jaxlora.errors import AdapterError
from tests.support.peft_folders import (
    CONFIG,
    random_factors,
    read,
    safetensors_bytes,
    with_header,
    write_adapter,
)


SETTINGS = settings(max_examples=120, deadline=None, derandomize=True)
WEIGHTS = safetensors_bytes(random_factors())
CONFIG_BYTES = json.dumps(CONFIG).encode()
HEADER_END = 8 + int.from_bytes(WEIGHTS[:8], "little")


def reads_or_is_refused(weights: bytes = WEIGHTS, config: bytes = CONFIG_BYTES) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder), weights, config)
        try:
            read(Path(folder))
        except AdapterError as error:
            message = str(error)
            assert message.isascii() and message.isprintable() and len(message) < 2000
            return False
    return True


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 20),
    st.integers(),
    st.floats(),
    st.sampled_from(["q_proj", "o_proj", "all-linear", ".*", "(a|b)*", "none", "layers", "LORA"]),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.text(max_size=6), st.sampled_from(["q_proj", "o_proj"])), inner
        ),
    ),
    max_leaves=8,
)
keys = st.sampled_from(sorted({row.name for row in support.ROWS if row.place is Place.CONFIG}))


@SETTINGS
@given(st.dictionaries(st.one_of(keys, st.text(max_size=6)), values, max_size=3))
def test_any_config_reads_or_is_refused(changes):
    reads_or_is_refused(config=json.dumps(CONFIG | changes).encode())


@SETTINGS
@given(values)
def test_any_json_in_the_configs_place_reads_or_is_refused(value: Any):
    reads_or_is_refused(config=json.dumps(value).encode())


@SETTINGS
@given(st.integers(0, len(CONFIG_BYTES) - 1), st.integers(0, 255))
def test_a_changed_byte_of_the_config_reads_or_is_refused(position, byte):
    reads_or_is_refused(config=replaced(CONFIG_BYTES, position, byte))


@SETTINGS
@given(st.integers(0, len(WEIGHTS) - 1), st.integers(0, 255))
def test_a_changed_byte_of_the_weights_reads_or_is_refused(position, byte):
    reads_or_is_refused(replaced(WEIGHTS, position, byte))


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), max_size=4))
def test_changed_bytes_of_the_header_read_or_are_refused(changes):
    weights = WEIGHTS
    for position, byte in changes:
        weights = replaced(weights, position, byte)
    reads_or_is_refused(weights)


@SETTINGS
@given(st.integers(0, len(WEIGHTS)), st.binary(max_size=16))
def test_a_file_of_another_length_is_refused(length, tail):
    if length + len(tail) != len(WEIGHTS):
        assert not reads_or_is_refused(WEIGHTS[:length] + tail)


entries = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "F16", "BF16", "I8", "U64"]), scalars),
        "shape": st.one_of(st.lists(st.integers(0, 4), max_size=3), values),
        "data_offsets": st.one_of(st.lists(st.integers(0, 64), min_size=2, max_size=2), values),
    }
)


@SETTINGS
@given(
    st.dictionaries(st.text(max_size=4), st.one_of(entries, values), max_size=3),
    st.binary(max_size=64),
)
def test_any_header_is_refused_or_its_tensors_lie_in_the_file(header, data):
    file = with_header(json.dumps(header).encode(), data)
    try:
        parsed = parse_tensor_file(file, "f")
    except AdapterError as error:
        assert "\n" not in str(error)
        return
    assert sum(entry.size for entry in parsed.entries.values()) == len(data)
    for entry in parsed.entries.values():
        assert len(file) - len(data) <= entry.begin <= entry.begin + entry.size <= len(file)


def replaced(data: bytes, position: int, byte: int) -> bytes:
    return data[:position] + bytes([byte]) + data[position + 1 :]
