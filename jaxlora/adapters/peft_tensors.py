"""The tensors of an adapter's file, by the module and role that each has there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Float, Shaped

from jaxlora.adapters.adapter import Site
from jaxlora.adapters.modules import ModuleTable
from jaxlora.adapters.peft_keys import KeyReader, Role, TensorKey
from jaxlora.adapters.strict_json import show
from jaxlora.adapters.tensor_file import TensorFile
from jaxlora.errors import AdapterError


@dataclasses.dataclass(frozen=True)
class AdapterTensors:
    """Every tensor that is applied or checked, each at its site in its role."""

    weights: TensorFile
    at: Mapping[Site, Mapping[Role, tuple[TensorKey, str]]]  # the key is the file's name for it

    def sites(self, role: Role) -> Iterator[Site]:
        return (site for site, roles in self.at.items() if role in roles)

    def path(self, site: Site) -> str:
        """The module's path when it was trained."""
        return next(iter(self.at[site].values()))[0].path

    def name(self, site: Site, role: Role) -> str:
        return self.at[site][role][1]

    def shape(self, site: Site, role: Role) -> tuple[int, ...]:
        return self.weights.entries[self.name(site, role)].shape

    def array(self, site: Site, role: Role) -> Shaped[np.ndarray, "..."]:
        """The tensor, read-only. Raises AdapterError for a NaN or an infinity, or another dtype."""
        name = self.name(site, role)
        array = self.weights.array(name)
        if not np.isfinite(array).all():
            place = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
            raise AdapterError(
                f"{self.weights.where}: {show(name, 160)}: {list(place)} is {array[place]}: not "
                "finite"
            )
        return array

    def vector(self, site: Site, role: Role, d_out: int) -> Float[np.ndarray, "d_out"]:
        """A tensor over the module's outputs. Raises AdapterError for one of another shape."""
        if self.shape(site, role) != (d_out,):
            raise AdapterError(
                f"{self.weights.where}: {show(self.name(site, role), 160)} has shape "
                f"{list(self.shape(site, role))}; {self.path(site)} has {d_out} outputs in this "
                "base"
            )
        return self.array(site, role)


def group_tensors(weights: TensorFile, modules: ModuleTable) -> AdapterTensors:
    """Raises AdapterError for what belongs nowhere, is there twice, or is half of a pair."""
    reader = KeyReader(modules, weights.where)
    at: dict[Site, dict[Role, tuple[TensorKey, str]]] = {}
    prefixes: dict[str, str] = {}
    for name in weights.entries:
        key = reader.read(name)
        if key is None:
            continue
        if key.prefix is not None:
            prefixes[key.prefix] = name
        roles = at.setdefault((key.layer, key.module), {})
        if key.role in roles:
            raise AdapterError(
                f"{weights.where}: {show(name, 160)} and {show(roles[key.role][1], 160)} are the "
                "same tensor"
            )
        roles[key.role] = key, name
    if not any(Role.A in roles or Role.B in roles for roles in at.values()):
        raise AdapterError(f"{weights.where}: no factors: the adapter would change nothing")
    if len(prefixes) > 1:
        names = " and ".join(show(name, 160) for name in list(prefixes.values())[:2])
        raise AdapterError(f"{weights.where}: names modules in two ways: {names}")
    tensors = AdapterTensors(weights, at)
    _refuse_halves(tensors)
    return tensors


def _refuse_halves(tensors: AdapterTensors) -> None:
    for site, roles in tensors.at.items():
        for have, missing in ((Role.A, Role.B), (Role.B, Role.A)):
            if have in roles and missing not in roles:
                raise AdapterError(
                    f"{tensors.weights.where}: {tensors.path(site)} has lora_{have.name} and no "
                    f"lora_{missing.name}"
                )
        for role in (Role.B_BIAS, Role.MAGNITUDE):
            if role in roles and Role.A not in roles:
                raise AdapterError(
                    f"{tensors.weights.where}: {tensors.path(site)} has {role.value} and no factors"
                )
