"""A PEFT folder -> `Adapter`, or a refusal by name. The only door adapters come in by.

Everything in the folder's files is applied exactly as peft applies it, or the adapter is refused
with a reason: peft itself only warns where tensors are missing or left over, and then answers with
the base model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import numpy as np

from jaxlora.adapters.adapter import Adapter, Site
from jaxlora.adapters.folder import AdapterFolder
from jaxlora.adapters.manifest import WEIGHTS_NAME, check_manifests
from jaxlora.adapters.modules import EMBEDDING, HEAD, ModuleTable
from jaxlora.adapters.peft_config import CONFIG_NAME, PeftConfig, parse_peft_config
from jaxlora.adapters.peft_factors import read_factors
from jaxlora.adapters.peft_keys import Role
from jaxlora.adapters.peft_replaced import (
    check_weight_tying,
    read_base_copies,
    read_biases,
    read_token_rows,
)
from jaxlora.adapters.peft_tensors import AdapterTensors, group_tensors
from jaxlora.adapters.strict_json import show
from jaxlora.adapters.support import file_row
from jaxlora.adapters.tensor_file import parse_tensor_file
from jaxlora.errors import AdapterError


_log = logging.getLogger(__name__)


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

    The arrays are read-only, in the file's dtype; nothing else of the folder is kept. A base name
    that differs from `base_name` is a warning in the log, no more. Raises AdapterError, one line
    that names the file and the thing.
    """
    if not math.isfinite(strength) or strength == 0:
        raise AdapterError(f"adapter {name}: strength {strength}: not a finite number other than 0")
    files = AdapterFolder(folder)
    _refuse_missing_files(files)
    config = parse_peft_config(files.read_json_bytes(CONFIG_NAME), str(folder / CONFIG_NAME))
    weights = parse_tensor_file(files.read(WEIGHTS_NAME), str(folder / WEIGHTS_NAME))
    check_manifests(files, weights, base_fingerprint)

    _check_tokens(config, modules)
    tensors = group_tensors(weights, modules)
    head_is_tied = check_weight_tying(tensors, config, modules)
    _check_targets(tensors, config, modules, head_is_tied)
    adapter = Adapter(
        name,
        str(folder),
        MappingProxyType(read_factors(tensors, config, modules, max_rank)),
        base_fingerprint,
        strength,
        config.invocation_tokens,
        biases=MappingProxyType(read_biases(tensors, config, modules)),
        token_rows=MappingProxyType(read_token_rows(tensors, config, modules)),
        base_copies=MappingProxyType(read_base_copies(tensors, modules)),
    )
    _refuse_no_effect(adapter, weights.where)
    _warn_of_other_base(config, base_name)
    return adapter


def _refuse_missing_files(files: AdapterFolder) -> None:
    if not files.has(WEIGHTS_NAME):
        for other in ("adapter_model.bin", "adapters.safetensors"):
            if files.has(other):
                raise AdapterError(f"{files.path / other}: {file_row(other).reason}")


def _check_tokens(config: PeftConfig, modules: ModuleTable) -> None:
    if (token := max(config.invocation_tokens, default=0)) >= modules.vocab_size:
        raise AdapterError(
            f"{config.where}: alora_invocation_tokens has token {show(token)}; this base "
            f"has tokens 0 to {modules.vocab_size - 1}: an adapter of another base"
        )


def _check_targets(
    tensors: AdapterTensors, config: PeftConfig, modules: ModuleTable, head_is_tied: bool
) -> None:
    """The config must mean the modules that have factors, and no others that this base has."""
    where = tensors.weights.where
    for layer in config.layers:
        if not 0 <= layer < modules.num_layers:
            raise AdapterError(
                f"{config.where}: layers_to_transform has {show(layer)}; "
                f"this base has layers 0 to {modules.num_layers - 1}"
            )
    adapted = dict.fromkeys(tensors.sites(Role.A))  # in order: messages repeat
    for site in adapted:
        if head_is_tied and site[1] == HEAD:
            continue  # with the embedding; the saved config does not name it
        path, outer = tensors.path(site), modules.is_outer(site[1])
        if not config.targets.means(path, is_decoder_linear=not outer):
            raise AdapterError(
                f"{where}: has factors for {path}, which {CONFIG_NAME} does not target"
            )
        if config.invocation_tokens and site[1] == EMBEDDING:
            raise AdapterError(f"{where}: an activated adapter of {path} is unknown to peft")
    for site, path in _paths(tensors, modules):
        outer = modules.is_outer(site[1])
        if site not in adapted and config.targets.means(path, is_decoder_linear=not outer):
            raise AdapterError(f"{where}: {CONFIG_NAME} targets {path}, which has no factors")


def _paths(tensors: AdapterTensors, modules: ModuleTable) -> Iterator[tuple[Site, str]]:
    """Every module of the base, by the path that it had when this adapter was trained."""
    keys = [key for roles in tensors.at.values() for key, _ in roles.values()]
    prefix = next((key.prefix for key in keys if key.prefix), modules.layer_prefix)
    inner = [key for key in keys if not modules.is_outer(key.module)]
    spelled = {key.module: key.path.removeprefix(f"{key.prefix}.{key.layer}.") for key in inner}
    for layer in range(modules.num_layers):
        for module in modules.modules:
            name = spelled.get(module.name, module.name)
            yield (layer, module.name), f"{prefix}.{layer}.{name}"
    outer = {
        EMBEDDING: f"{prefix.removesuffix('layers')}embed_tokens",
        # Of a text model that is whole inside another the head lies in there too.
        HEAD: f"language_model.{HEAD}" if prefix.startswith("language_model.") else HEAD,
    }
    for name in outer:
        # Also where the table has no such module: then the config must not mean it.
        yield (0, name), outer[name]


def _refuse_no_effect(adapter: Adapter, where: str) -> None:
    """Refuse an adapter whose delta is zero for every input: it would be the base by a new name.

    Where other tensors may change something, that waits for the base's weights.
    """
    factors = adapter.factors.values()
    largest = max(abs(module.scale * adapter.strength) for module in factors)
    if largest > float(np.finfo(np.float32).max):
        raise AdapterError(f"{where}: a scale of {largest:g}, strength included, is too large")
    if not adapter.factors_change and not adapter.may_be_the_base:
        raise AdapterError(f"{where}: the delta is zero everywhere: it would change nothing")


def _warn_of_other_base(config: PeftConfig, base_name: str | None) -> None:
    def last_part(name: str) -> str:
        return name.rstrip("/").rpartition("/")[2].casefold()

    if config.base_name and base_name and last_part(config.base_name) != last_part(base_name):
        _log.warning(
            "%s: trained on base %s, served on %s", config.where, show(config.base_name), base_name
        )
