from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxlora.checkpoints.safetensors_files import open_folder
from jaxlora.errors import CheckpointError


TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "none": np.zeros((0, 3), np.float32),
}


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_read_as_saved(tmp_path: Path) -> None:
    bfloat16 = np.arange(5).astype(ml_dtypes.bfloat16)
    raw = {
        "x": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]},
        "__metadata__": {"f": "pt"},
    }
    header = json.dumps(raw).encode()
    data = len(header).to_bytes(8, "little") + header + bfloat16.tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    assert open_folder(tmp_path).keys() == {"x"}
    np.testing.assert_array_equal(open_folder(tmp_path)["x"].array(), bfloat16)
    save_file(TENSORS, tmp_path / "model.safetensors")
    stored = open_folder(tmp_path)
    assert stored.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(stored[name].array(), value)
        assert not stored[name].array().flags.writeable or value.size == 0


def test_an_index_joins_its_files(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "1.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "2.safetensors")
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    stored = open_folder(tmp_path)
    np.testing.assert_array_equal(stored["a"].array(), TENSORS["a"])
    np.testing.assert_array_equal(stored["b"].array(), TENSORS["b"])


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a": "absent.safetensors"}, "index.json: names absent.safetensors, which is not"),
        ({"a": "../1.safetensors"}, "index.json: names the file '../1.safetensors' outside"),
        ({"a": "1.safetensors", "z": "1.safetensors"}, "1.safetensors: has no tensor z"),
        ({"a": 3}, "weight_map.a: wants a string, got 3"),
        ([], "weight_map: wants an object"),
    ],
)
def test_an_index_that_does_not_hold_is_refused(tmp_path: Path, weight_map, problem: str) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "1.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError) as error:
        open_folder(tmp_path)
    assert problem in str(error.value)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model.safetensors: cannot be read: No such file"):
        open_folder(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="model.safetensors: "):
            open_folder(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]},
        {"dtype": 3, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
    ],
)
def test_broken_header_entries_are_refused(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"x": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="model.safetensors: x: "):
        open_folder(tmp_path)
