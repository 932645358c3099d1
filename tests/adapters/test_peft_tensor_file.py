"""A safetensors file is held to its format before a tensor is looked at."""

from __future__ import annotations

import hashlib
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxlora.adapters.tensor_file import parse_tensor_file
from jaxlora.errors import AdapterError
from tests.support.peft_folders import safetensors_bytes, with_header


TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16).reshape(4, 1),
    "c": np.arange(5, dtype=ml_dtypes.bfloat16),
    "scalar": np.array(7, np.float32),
}


def refusal(data: bytes) -> str:
    with pytest.raises(AdapterError) as caught:
        parse_tensor_file(data, "w.safetensors")
    message = str(caught.value)
    assert message.startswith("w.safetensors: ") and "\n" not in message
    return message


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def file_of(header, data=b"\0" * 4) -> bytes:
    return with_header(json.dumps(header).encode(), data)


def test_arrays_are_read_only_views_of_the_files_values():
    file = parse_tensor_file(safetensors_bytes(TENSORS), "f")
    assert list(file.entries) == list(TENSORS)
    for name, expected in TENSORS.items():
        array = file.array(name)
        assert array.dtype == expected.dtype and not array.flags.writeable and array.flags.aligned
        np.testing.assert_array_equal(array, expected)


def test_what_the_library_writes_is_read_the_same():
    data = safetensors.numpy.save(TENSORS, {"format": "pt"})
    file = parse_tensor_file(data, "f")
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(file.array(name), expected)
    assert file.sha256() == hashlib.sha256(data).hexdigest()


def test_a_header_that_ends_on_an_odd_byte_is_read():
    header = json.dumps({"a": entry()}).encode()
    header += b" " * (1 - len(header) % 2 + 2)  # trailing spaces are the format's padding
    assert (8 + len(header)) % 2 == 1
    array = parse_tensor_file(with_header(header, np.float32([5]).tobytes()), "f").array("a")
    assert array.flags.aligned and not array.flags.writeable and array[0] == 5


@pytest.mark.parametrize("cut", [0, 3, 8, 40, -1])
def test_a_truncated_file_is_refused(cut):
    refusal(safetensors_bytes(TENSORS)[:cut])


def test_bytes_after_the_last_tensor_are_refused():
    assert "bytes that belong to no tensor" in refusal(safetensors_bytes(TENSORS) + b"\0")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**9, 65])
def test_a_header_length_beyond_the_file_is_refused(length):
    assert "the header is said to be" in refusal(length.to_bytes(8, "little") + b"{}" + b" " * 62)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b" {}", "not a JSON object"),
        (b"{" * 9, "not valid JSON"),
        (b'{"a": ' * 100_000, "nested too deep"),
        (b'{"\xff": 1}', "not UTF-8"),
        (b'{"a": {}, "a": {}}', "given twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "given twice"),
    ],
)
def test_a_header_that_is_no_json_object_is_refused(header, reason):
    assert reason in refusal(with_header(header, b""))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (None, "not an object of dtype, shape and data_offsets"),
        ([], "not an object of dtype, shape and data_offsets"),
        ({"dtype": "F32", "shape": [1]}, "not an object of dtype, shape and data_offsets"),
        (entry() | {"extra": 1}, "not an object of dtype, shape and data_offsets"),
        (entry(dtype="F31"), "unknown dtype"),
        (entry(dtype=None), "unknown dtype"),
        (entry() | {"dtype": ["F32"]}, "unknown dtype"),
        (entry() | {"shape": 1}, "not a list of sizes"),
        (entry(shape=(-1,)), "not a list of sizes"),
        (entry(shape=(True,)), "not a list of sizes"),
        (entry(shape=(1.0,)), "not a list of sizes"),
        (entry(shape=("1",)), "not a list of sizes"),
        (entry(shape=(10**30,)), "not a list of sizes"),
        (entry(shape=(1,) * 9), "not a list of sizes"),
        (entry(offsets=(0,)), "not [begin, end]"),
        (entry(offsets=(4, 0)), "not [begin, end]"),
        (entry(offsets=(-4, 0)), "not [begin, end]"),
        (entry(offsets=(0, 4.0)), "not [begin, end]"),
        (entry(offsets=(0, False)), "not [begin, end]"),
        (entry() | {"data_offsets": {"begin": 0}}, "not [begin, end]"),
        (entry(shape=(2,)), "takes 8 bytes, its data_offsets span 4"),
        (entry(shape=(2**47, 2**47)), "its data_offsets span 4"),
        (entry(offsets=(4, 8)), "leaves a hole"),
        (entry(shape=(2,), offsets=(0, 8)), "truncated"),
        (entry() | {"shape": [float("inf")]}, "not finite"),
    ],
)
def test_a_wrong_entry_is_refused(fields, reason):
    assert reason in refusal(file_of({"a": fields}))


def test_overlaps_and_holes_are_refused():
    data = b"\0" * 8
    assert "overlaps" in refusal(file_of({"a": entry(), "b": entry()}, data))
    assert "overlaps" in refusal(
        file_of({"a": entry(shape=(2,), offsets=(0, 8)), "b": entry(offsets=(4, 8))}, data)
    )
    assert "leaves a hole" in refusal(
        file_of({"a": entry(), "b": entry(offsets=(8, 12))}, b"\0" * 12)
    )


@pytest.mark.parametrize("metadata", [None, [], "x", {"format": 1}, {"a": {"b": "c"}}])
def test_metadata_that_is_not_strings_is_refused(metadata):
    assert "__metadata__" in refusal(file_of({"__metadata__": metadata, "a": entry()}))


def test_tensor_names_are_shown_on_one_line():
    assert "\\n" in refusal(file_of({"a\nb\ud800": None}))
