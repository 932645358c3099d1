"""A PEFT folder -> `Adapter`, or a refusal by name. The only door adapters come in by.

Everything in the folder's files is applied exactly as peft applies it, or the adapter is refused
with a reason: peft itself only warns where tensors are missing or left over, and then answers with
the base model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType

import numpy as np
from jaxtyping import Shaped

from jaxlora.adapters.adapter import Adapter, Factors, Site
from jaxlora.adapters.folder import AdapterFolder
from jaxlora.adapters.manifest import WEIGHTS_NAME, check_manifests
from jaxlora.adapters.modules import ModuleTable
from jaxlora.adapters.peft_config import CONFIG_NAME, PeftConfig, parse_peft_config
from jaxlora.adapters.peft_keys import FactorKey, KeyReader
from jaxlora.adapters.strict_json import show
from jaxlora.adapters.support import file_row
from jaxlora.adapters.tensor_file import TensorFile, parse_tensor_file
from jaxlora.errors import AdapterError


_log = logging.getLogger(__name__)

# A site's two tensors: side -> (what the key says, the key).
_Pair = dict[str, tuple[FactorKey, str]]


def read_adapter(
    folder: Path,
    *,
    name: str,
    modules: ModuleTable,
    base_fingerprint: str,
    base_name: str | None = None,
    strength: float = 1.0,
    max_rank: int | None = None,
) -> Adapter:
    """Read and check a PEFT folder in full against one base model.

    The factors are read-only arrays in the file's dtype; nothing else of the folder is kept. A base
    name that differs from `base_name` is a warning in the log, no more. Raises AdapterError, one
    line that names the file and the thing.
    """
    if not math.isfinite(strength) or strength == 0:
        raise AdapterError(f"adapter {name}: strength {strength}: not a finite number other than 0")
    files = AdapterFolder(folder)
    _refuse_missing_files(files)
    config = parse_peft_config(files.read_json_bytes(CONFIG_NAME), str(folder / CONFIG_NAME))
    weights = parse_tensor_file(files.read(WEIGHTS_NAME), str(folder / WEIGHTS_NAME))
    check_manifests(files, weights, base_fingerprint)

    _check_tokens(config, modules)
    pairs = _pair_tensors(weights, modules)
    _check_targets(pairs, config, modules, weights.where)
    factors = {
        site: _factors(site, pairs[site], weights, config, modules, max_rank)
        for site in sorted(pairs, key=lambda site: (site[0], modules.kinds[site[1]]))
    }
    _refuse_no_effect(factors.values(), strength, weights.where)
    _warn_of_other_base(config, base_name)
    return Adapter(
        name,
        str(folder),
        MappingProxyType(factors),
        base_fingerprint,
        strength,
        config.invocation_tokens,
    )


def _refuse_missing_files(files: AdapterFolder) -> None:
    if not files.has(WEIGHTS_NAME):
        for other in ("adapter_model.bin", "adapters.safetensors"):
            if files.has(other):
                raise AdapterError(f"{files.path / other}: {file_row(other).reason}")


def _pair_tensors(weights: TensorFile, modules: ModuleTable) -> dict[Site, _Pair]:
    """Every tensor of the file at its site; each site has an A and a B."""
    reader = KeyReader(modules, weights.where)
    pairs: dict[Site, _Pair] = {}
    prefixes: dict[str, str] = {}
    for key in weights.entries:
        factor = reader.read(key)
        if factor is None:
            continue
        prefixes[factor.prefix] = key
        pair = pairs.setdefault((factor.layer, factor.module), {})
        if factor.side in pair:
            raise AdapterError(
                f"{weights.where}: {show(key, 160)} and {show(pair[factor.side][1], 160)} are the "
                "same factor"
            )
        pair[factor.side] = factor, key
    if not pairs:
        raise AdapterError(f"{weights.where}: no factors: the adapter would change nothing")
    if len(prefixes) > 1:
        keys = " and ".join(show(key, 160) for key in list(prefixes.values())[:2])
        raise AdapterError(f"{weights.where}: names modules in two ways: {keys}")
    for pair in pairs.values():
        if len(pair) == 1:
            ((side, (factor, _)),) = pair.items()
            missing = "B" if side == "A" else "A"
            raise AdapterError(
                f"{weights.where}: {factor.path} has lora_{side} and no lora_{missing}"
            )
    return pairs


def _check_tokens(config: PeftConfig, modules: ModuleTable) -> None:
    if (token := max(config.invocation_tokens, default=0)) >= modules.vocab_size:
        raise AdapterError(
            f"{config.where}: alora_invocation_tokens has token {token}; this base has tokens 0 to "
            f"{modules.vocab_size - 1}: an adapter of another base"
        )


def _check_targets(
    pairs: dict[Site, _Pair], config: PeftConfig, modules: ModuleTable, where: str
) -> None:
    """The config must mean the modules that have tensors, and no others that this base has."""
    for layer in config.layers:
        if not 0 <= layer < modules.num_layers:
            raise AdapterError(
                f"{config.where}: layers_to_transform has {show(layer)}; "
                f"this base has layers 0 to {modules.num_layers - 1}"
            )
    for pair in pairs.values():
        path = pair["A"][0].path
        if not config.targets.means(path):
            raise AdapterError(
                f"{where}: has factors for {path}, which {CONFIG_NAME} does not target"
            )
    factor_keys = [pair["A"][0] for pair in pairs.values()]
    prefix = factor_keys[0].prefix
    spelled = {factor.module: factor.spelled for factor in factor_keys}
    for layer in range(modules.num_layers):
        for module in modules.modules:
            path = f"{prefix}.{layer}.{spelled.get(module.name, module.name)}"
            if (layer, module.name) not in pairs and config.targets.means(path):
                raise AdapterError(f"{where}: {CONFIG_NAME} targets {path}, which has no factors")
    _refuse_other_targets(prefix, config)


def _refuse_other_targets(prefix: str, config: PeftConfig) -> None:
    stem, dot, _ = prefix.rpartition(".")
    for path in ("lm_head", f"{stem}{dot}embed_tokens"):
        if config.targets.means(path, is_decoder_linear=False):
            raise AdapterError(
                f"{config.where}: target_modules targets {path}, which can't be adapted here: "
                "train without it"
            )


def _factors(
    site: Site,
    pair: _Pair,
    weights: TensorFile,
    config: PeftConfig,
    modules: ModuleTable,
    max_rank: int | None,
) -> Factors:
    module = modules.modules[modules.kinds[site[1]]]
    (factor, key_a), (_, key_b) = pair["A"], pair["B"]
    path, rank = factor.path, config.rank_of(factor.path)
    shape_a, shape_b = weights.entries[key_a].shape, weights.entries[key_b].shape
    for key, shape in ((key_a, shape_a), (key_b, shape_b)):
        if len(shape) != 2 or 0 in shape:
            raise AdapterError(
                f"{weights.where}: {show(key, 160)} has shape {list(shape)}: not a factor "
                "(DeepSpeed ZeRO-3 and FSDP must gather the parameters before they are saved)"
            )
    if (shape_a[1], shape_b[0]) != (module.d_in, module.d_out):
        raise AdapterError(
            f"{weights.where}: {path} takes {shape_a[1]} features to {shape_b[0]}; this base's "
            f"takes {module.d_in} to {module.d_out}: an adapter of another base"
        )
    if (shape_a[0], shape_b[1]) != (rank, rank):
        raise AdapterError(
            f"{weights.where}: {path} has rank {shape_a[0]} in A and {shape_b[1]} in B; "
            f"{CONFIG_NAME} says {rank}"
        )
    if max_rank is not None and rank > max_rank:
        raise AdapterError(
            f"{weights.where}: {path} has rank {rank}, over --max-adapter-rank {max_rank}"
        )
    a, b = weights.array(key_a), weights.array(key_b)
    for key, array in ((key_a, a), (key_b, b)):
        _refuse_non_finite(array, f"{weights.where}: {show(key, 160)}")
    return Factors(a, b, config.scale_of(path, rank))


def _refuse_non_finite(array: Shaped[np.ndarray, "rows columns"], where: str) -> None:
    if not np.isfinite(array).all():
        row, column = np.argwhere(~np.isfinite(array))[0]
        raise AdapterError(f"{where}: [{row}, {column}] is {array[row, column]}: not finite")


def _refuse_no_effect(factors: Collection[Factors], strength: float, where: str) -> None:
    """Refuse an adapter whose delta is zero for every input: it would be the base by a new name."""
    largest = max(abs(module.scale * strength) for module in factors)
    if largest > float(np.finfo(np.float32).max):
        raise AdapterError(f"{where}: a scale of {largest:g}, strength included, is too large")
    if not any(np.float32(m.scale * strength) != 0 and _has_effect(m) for m in factors):
        raise AdapterError(f"{where}: the delta is zero everywhere: it would change nothing")


def _has_effect(factors: Factors) -> bool:
    # One random input: B (A x) is exactly zero in float64 for a zero delta (also where rows of A
    # meet zero columns of B) and never for another.
    x = np.random.default_rng(0).uniform(0.5, 1.0, factors.a.shape[1])
    return bool(np.any(factors.b.astype(np.float64) @ (factors.a.astype(np.float64) @ x)))


def _warn_of_other_base(config: PeftConfig, base_name: str | None) -> None:
    def last_part(name: str) -> str:
        return name.rstrip("/").rpartition("/")[2].casefold()

    if config.base_name and base_name and last_part(config.base_name) != last_part(base_name):
        _log.warning(
            "%s: trained on base %s, served on %s", config.where, show(config.base_name), base_name
        )
