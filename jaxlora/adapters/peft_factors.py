"""The factors of each module out of an adapter's tensors, with B's bias and DoRA's magnitude."""

from __future__ import annotations

from jaxlora.adapters.adapter import Factors, Site
from jaxlora.adapters.modules import EMBEDDING, ModuleTable
from jaxlora.adapters.peft_config import CONFIG_NAME, PeftConfig
from jaxlora.adapters.peft_keys import Role
from jaxlora.adapters.peft_tensors import AdapterTensors
from jaxlora.adapters.strict_json import show
from jaxlora.errors import AdapterError


def read_factors(
    tensors: AdapterTensors, config: PeftConfig, modules: ModuleTable, max_rank: int | None
) -> dict[Site, Factors]:
    """Raises AdapterError where a factor's widths, rank or values are not to be served."""
    _check_optional_tensors(tensors, config)
    return {
        site: _factors(site, tensors, config, modules, max_rank)
        for site in sorted(tensors.sites(Role.A), key=lambda s: (s[0], modules.kinds[s[1]]))
    }


def _check_optional_tensors(tensors: AdapterTensors, config: PeftConfig) -> None:
    """Each module with factors has the tensors that the config's options mean, and no others."""
    where = tensors.weights.where
    options = (
        ("lora_bias", config.lora_bias, Role.B_BIAS),
        ("use_dora", config.use_dora, Role.MAGNITUDE),
    )
    for site in tensors.sites(Role.A):
        for option, is_on, role in options:
            if site[1] == EMBEDDING and is_on and role is Role.B_BIAS:
                raise AdapterError(
                    f"{where}: lora_bias with factors of embed_tokens, unknown to peft"
                )
            if is_on != (role in tensors.at[site]):
                raise AdapterError(
                    f"{where}: {tensors.path(site)} has {'no' if is_on else 'a'} {role.value}; "
                    f"{option} is {is_on} in {CONFIG_NAME}"
                )


def _factors(
    site: Site,
    tensors: AdapterTensors,
    config: PeftConfig,
    modules: ModuleTable,
    max_rank: int | None,
) -> Factors:
    module, where = modules.module(site[1]), tensors.weights.where
    path = tensors.path(site)
    rank = config.rank_of(path)
    shape_a, shape_b = tensors.shape(site, Role.A), tensors.shape(site, Role.B)
    for role, shape in ((Role.A, shape_a), (Role.B, shape_b)):
        if len(shape) != 2 or 0 in shape:
            raise AdapterError(
                f"{where}: {show(tensors.name(site, role), 160)} has shape {list(shape)}: not a "
                "factor (DeepSpeed ZeRO-3 and FSDP must gather the parameters before they are "
                "saved)"
            )
    if (shape_a[1], shape_b[0]) != (module.d_in, module.d_out):
        raise AdapterError(
            f"{where}: {path} takes {shape_a[1]} features to {shape_b[0]}; this base's "
            f"takes {module.d_in} to {module.d_out}: an adapter of another base"
        )
    if (shape_a[0], shape_b[1]) != (rank, rank):
        raise AdapterError(
            f"{where}: {path} has rank {shape_a[0]} in A and {shape_b[1]} in B; "
            f"{CONFIG_NAME} says {rank}"
        )
    if max_rank is not None and rank > max_rank:
        raise AdapterError(f"{where}: {path} has rank {rank}, over --max-adapter-rank {max_rank}")
    vectors = {
        role: tensors.vector(site, role, module.d_out)
        for role in (Role.B_BIAS, Role.MAGNITUDE)
        if role in tensors.at[site]
    }
    return Factors(
        tensors.array(site, Role.A),
        tensors.array(site, Role.B),
        config.scale_of(path, rank),
        vectors.get(Role.B_BIAS),
        vectors.get(Role.MAGNITUDE),
    )
