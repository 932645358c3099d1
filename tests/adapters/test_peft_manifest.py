"""A manifest beside an adapter must agree with its files, or the adapter is refused."""

from __future__ import annotations

import hashlib
import json

import pytest

from jaxlora.adapters.manifest import MANIFEST_NAMES
from jaxlora.errors import AdapterError
from tests.support.peft_folders import FINGERPRINT, read, write_adapter


WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize("name", MANIFEST_NAMES)
def test_a_manifest_that_agrees_is_accepted_and_changes_nothing(tmp_path, name):
    folder = write_adapter(tmp_path)
    plain = read(folder).key
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    manifest = {
        "files": {WEIGHTS: {"sha256": digest}},
        "base": {"name": "tiny", "fingerprint": FINGERPRINT},
        "provenance": {"trained_by": "someone", "steps": 10},
        "description": "text",
    }
    (folder / name).write_text(json.dumps(manifest))
    assert read(folder).key == plain
    (folder / name).write_text("{}")
    assert read(folder).key == plain


@pytest.mark.parametrize("name", MANIFEST_NAMES)
@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ({"files": {WEIGHTS: {"sha256": "0" * 64}}}, f"{WEIGHTS} should have sha256 000"),
        ({"base": {"fingerprint": "0" * 64}}, "made for a base of fingerprint 000"),
        ({"files": {WEIGHTS: {"sha256": "XYZ"}}}, "sha256 is not 64"),
        ({"files": {WEIGHTS: {"sha256": None}}}, "sha256 is not 64"),
        ({"files": {WEIGHTS: {"sha256": 5}}}, "sha256 is not 64"),
        ({"base": {"fingerprint": ["0" * 64]}}, "fingerprint is not 64"),
        ({"files": []}, "files is not an object"),
        ({"files": None}, "files is not an object"),
        ({"files": {WEIGHTS: "0" * 64}}, f"{WEIGHTS} is not an object"),
        ({"files": {"other.bin": {}}}, "files names 'other.bin'"),
        ({"base": "tiny"}, "base is not an object"),
        ({"base": {"name": 1}}, "name is not a string"),
        ({"provenance": "someone"}, "provenance is not an object"),
        ({"description": 1}, "description is not a string"),
        ({"strength": 2.0}, "unknown key 'strength'"),
        ([], "not a JSON object"),
    ],
)
def test_a_manifest_that_does_not_agree_is_refused(tmp_path, name, manifest, reason):
    folder = write_adapter(tmp_path)
    (folder / name).write_text(json.dumps(manifest))
    with pytest.raises(AdapterError) as caught:
        read(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder / name}: ") and reason in message and "\n" not in message


def test_one_changed_byte_of_the_weights_is_noticed(tmp_path):
    folder = write_adapter(tmp_path)
    data = bytearray((folder / WEIGHTS).read_bytes())
    digest = hashlib.sha256(data).hexdigest()
    (folder / MANIFEST_NAMES[0]).write_text(json.dumps({"files": {WEIGHTS: {"sha256": digest}}}))
    assert read(folder)
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(data)
    with pytest.raises(AdapterError, match="should have sha256"):
        read(folder)


def test_a_manifest_that_links_out_of_the_folder_is_refused(tmp_path):
    folder = write_adapter(tmp_path / "adapter")
    (tmp_path / "manifest.json").write_text("{}")
    (folder / MANIFEST_NAMES[0]).symlink_to(tmp_path / "manifest.json")
    with pytest.raises(AdapterError, match="leads out of the adapter's folder"):
        read(folder)
