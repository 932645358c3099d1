"""What an adapter puts in place of the base's: biases, and rows of the embedding and the head.

Source: peft 0.21, `TrainableTokensLayer`, `LoraModel` and `get_peft_model_state_dict`.
"""

from __future__ import annotations

import numpy as np

from jaxlora.adapters.adapter import Site, TokenRows
from jaxlora.adapters.modules import EMBEDDING, HEAD, ModuleTable
from jaxlora.adapters.peft_config import CONFIG_NAME, PeftConfig
from jaxlora.adapters.peft_keys import Role
from jaxlora.adapters.peft_tensors import AdapterTensors
from jaxlora.adapters.strict_json import show
from jaxlora.errors import AdapterError


def read_biases(
    tensors: AdapterTensors, config: PeftConfig, modules: ModuleTable
) -> dict[Site, np.ndarray]:
    """The biases that `bias` of the config means, all of them and no others. AdapterError."""
    where, found = tensors.weights.where, dict.fromkeys(tensors.sites(Role.BIAS))
    for site in found:
        path = tensors.path(site)
        if not modules.module(site[1]).bias:
            raise AdapterError(
                f"{where}: {path} has no bias in this base: one can't take its place"
            )
        if config.bias == "none" or (config.bias == "lora_only" and Role.A not in tensors.at[site]):
            raise AdapterError(
                f"{where}: has a bias of {path}; bias is {config.bias!r} in {CONFIG_NAME}"
            )
    for layer in range(modules.num_layers):
        for module in modules.modules:
            site = (layer, module.name)
            has_factors = Role.A in tensors.at.get(site, {})
            wanted = config.bias == "all" or (config.bias == "lora_only" and has_factors)
            if wanted and module.bias and site not in found:
                older = " (peft 0.18 did not save these)" if config.bias == "lora_only" else ""
                raise AdapterError(
                    f"{where}: bias is {config.bias!r} in {CONFIG_NAME} and there is none of "
                    f"{modules.path(*site)}{older}: half of what was trained: save it again with a "
                    "newer peft"
                )
    return {
        site: tensors.vector(site, Role.BIAS, modules.module(site[1]).d_out)
        for site in sorted(found)
    }


def read_token_rows(
    tensors: AdapterTensors, config: PeftConfig, modules: ModuleTable
) -> dict[str, TokenRows]:
    """Rows by canonical module; a tied head shares the embedding's. Raises AdapterError."""
    where, found, named = tensors.weights.where, {}, set()
    for site in tensors.sites(Role.TOKEN_ROWS):
        path = tensors.path(site)
        name = next((n for n in config.token_ids if path == n or path.endswith(f".{n}")), None)
        if name is None:
            raise AdapterError(
                f"{where}: has token rows of {path}; trainable_token_indices in {CONFIG_NAME} "
                "does not name it"
            )
        named.add(name)
        found[site[1]] = _token_rows(site, config.token_ids[name], tensors, modules)
    tied_ids = _check_tied_rows(found, config, where) if modules.tied else ()
    if missing := config.token_ids.keys() - named - set(tied_ids):
        raise AdapterError(
            f"{where}: trainable_token_indices in {CONFIG_NAME} names {show(min(missing))}, which "
            "has no token rows"
        )
    for name in found:
        if Role.A in tensors.at.get((0, name), {}):
            raise AdapterError(f"{where}: {name} has factors and token rows, unknown to peft")
    if modules.tied and EMBEDDING in found and HEAD not in found:
        found[HEAD] = found[EMBEDDING]
        if Role.MAGNITUDE in tensors.at.get((0, HEAD), {}):
            raise AdapterError(
                f"{where}: use_dora on lm_head with trainable_token_indices of the tied embedding "
                "is not served: train without one of them, or merge"
            )
    return found


def _check_tied_rows(
    found: dict[str, TokenRows], config: PeftConfig, where: str
) -> tuple[str, ...]:
    """Names in the config that need no rows, because a tied head is trained with the embedding.

    Raises AdapterError where the head of the same tokens has other rows, or `ensure_weight_tying`
    is true and it has other tokens: peft ties them, or loads no such adapter.
    """
    embedding = next(
        (ids for name, ids in config.token_ids.items() if name.endswith("embed_tokens")), None
    )
    head = config.token_ids.get(HEAD)
    if embedding is None or head is None:
        return ()
    if head != embedding:
        if config.ensure_weight_tying:
            raise AdapterError(
                f"{config.where}: ensure_weight_tying is true and trainable_token_indices has "
                "other tokens of lm_head than of embed_tokens: peft loads no such adapter"
            )
        return ()
    if HEAD in found and EMBEDDING in found:
        if not np.array_equal(found[HEAD].rows, found[EMBEDDING].rows):
            raise AdapterError(
                f"{where}: lm_head has other token rows than embed_tokens for the same tokens of a "
                "base that ties the two: peft would drop one of them"
            )
        del found[HEAD]  # the embedding's are the head's
    return (HEAD,)


def _token_rows(
    site: Site, ids: tuple[int, ...], tensors: AdapterTensors, modules: ModuleTable
) -> TokenRows:
    where, shape = tensors.weights.where, tensors.shape(site, Role.TOKEN_ROWS)
    if max(ids) >= modules.vocab_size:
        raise AdapterError(
            f"{where}: trainable_token_indices has token {show(max(ids))}; this base has tokens "
            f"0 to {modules.vocab_size - 1}: an adapter of another base"
        )
    wanted = (len(ids), modules.module(EMBEDDING).d_out)
    if shape != wanted:
        raise AdapterError(
            f"{where}: the token rows of {tensors.path(site)} have shape {list(shape)}; "
            f"trainable_token_indices and this base make that {list(wanted)}"
        )
    order = np.argsort(ids)
    return TokenRows(tuple(sorted(ids)), tensors.array(site, Role.TOKEN_ROWS)[order])


def read_base_copies(tensors: AdapterTensors, modules: ModuleTable) -> dict[str, np.ndarray]:
    """peft's copies of the base's weights, of the right shape. Raises AdapterError."""
    copies = {}
    for site in tensors.sites(Role.BASE_COPY):
        shape = tensors.shape(site, Role.BASE_COPY)
        wanted = (modules.vocab_size, modules.module(EMBEDDING).d_out)
        if shape != wanted:
            raise AdapterError(
                f"{tensors.weights.where}: {show(tensors.name(site, Role.BASE_COPY), 160)} has "
                f"shape {list(shape)}, the base's has {list(wanted)}: its vocabulary was resized, "
                "which is not served: merge"
            )
        copies[site[1]] = tensors.array(site, Role.BASE_COPY)
    return copies


def check_weight_tying(tensors: AdapterTensors, config: PeftConfig, modules: ModuleTable) -> bool:
    """Whether lm_head has the embedding's factors because the config ties them.

    Raises AdapterError where it ties them and the file does not have both alike: versions of peft
    differ in what they make of that.
    """
    sites = {site for site in tensors.sites(Role.A) if modules.is_outer(site[1])}
    if not (config.ensure_weight_tying and modules.tied and sites):
        return False
    embedding, head = (0, EMBEDDING), (0, HEAD)
    alike = sites == {embedding, head} and all(
        np.array_equal(tensors.array(embedding, one).T, tensors.array(head, other))
        for one, other in ((Role.A, Role.B), (Role.B, Role.A))
    )
    if not alike:
        raise AdapterError(
            f"{tensors.weights.where}: ensure_weight_tying is true in {CONFIG_NAME} and the factors"
            " of embed_tokens and lm_head are not the same, turned round: save it again with a"
            " newer peft, or train with ensure_weight_tying=False"
        )
    return True
