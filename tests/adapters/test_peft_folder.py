"""An adapter's files are regular files of its folder, or the adapter is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxlora.adapters.folder import AdapterFolder
from jaxlora.errors import AdapterError
from tests.support.peft_folders import read, write_adapter


def refusal(folder: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        read(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    assert "no such folder" in refusal(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    assert "not a folder" in refusal(tmp_path / "file")
    assert "no such folder" in refusal(Path("nul\0byte"))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    (write_adapter(tmp_path) / name).unlink()
    assert f"{tmp_path / name}: no such file" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_or_folder_in_a_files_place_is_refused_without_waiting(tmp_path, name):
    (write_adapter(tmp_path) / name).unlink()
    os.mkfifo(tmp_path / name)
    assert "not a regular file" in refusal(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert name in refusal(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_link_out_of_the_folder_is_refused(tmp_path, name):
    elsewhere = write_adapter(tmp_path / "elsewhere")
    folder = write_adapter(tmp_path / "adapter")
    (folder / name).unlink()
    (folder / name).symlink_to(elsewhere / name)
    assert "leads out of the adapter's folder" in refusal(folder)


def test_links_that_lead_nowhere_are_refused(tmp_path):
    name = write_adapter(tmp_path) / "adapter_config.json"
    name.unlink()
    name.symlink_to("absent")
    assert "no such file" in refusal(tmp_path)
    name.unlink()
    name.symlink_to(name.name)
    assert "leads nowhere" in refusal(tmp_path)


def test_a_link_inside_the_folder_and_a_linked_folder_are_fine(tmp_path):
    folder = write_adapter(tmp_path / "adapter")
    (folder / "adapter_config.json").rename(folder / "config-v2.json")
    (folder / "adapter_config.json").symlink_to("config-v2.json")
    (tmp_path / "latest").symlink_to(folder)
    assert read(tmp_path / "latest").key == read(folder).key


def cache_layout(root: Path) -> tuple[Path, Path]:
    """A Hugging Face cache: (the revision's folder, the repository's blobs)."""
    repository = root / "models--someone--adapter"
    folder, blobs = write_adapter(repository / "snapshots" / "0123abcd"), repository / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number}")
        file.symlink_to(Path("..", "..", "blobs", f"{number}"))
    return folder, blobs


def test_the_hugging_face_cache_layout_is_fine(tmp_path):
    folder, _ = cache_layout(tmp_path)
    assert read(folder).key == read(write_adapter(tmp_path / "plain")).key


def test_a_cache_that_links_into_another_repositorys_blobs_is_refused(tmp_path):
    folder, _ = cache_layout(tmp_path / "one")
    _, other_blobs = cache_layout(tmp_path / "two")
    file = folder / "adapter_config.json"
    file.unlink()
    file.symlink_to(other_blobs / "0")
    assert "leads out of the adapter's folder" in refusal(folder)


def test_a_cache_whose_blobs_are_a_link_is_refused(tmp_path):
    folder, blobs = cache_layout(tmp_path)
    blobs.rename(tmp_path / "moved")
    blobs.symlink_to(tmp_path / "moved")
    assert "leads out of the adapter's folder" in refusal(folder)


def test_a_huge_config_is_refused_before_it_is_read(tmp_path):
    with open(write_adapter(tmp_path) / "adapter_config.json", "ab") as file:
        file.truncate(1 << 40)  # sparse
    assert "larger than 4194304 bytes" in refusal(tmp_path)


def test_reading_stops_at_the_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    assert AdapterFolder(tmp_path).read("file", limit=3) == b"0123"
    assert AdapterFolder(tmp_path).read("file") == b"0123456789"
