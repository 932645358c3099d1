"""What a model says of each parameter: its shape on the mesh, and the checkpoint tensors it is.

Building a model makes abstract parameters (`jax.ShapeDtypeStruct`) that carry a `WeightSpec`. The
loader reads the specs; the compiled step gets the arrays as a flat dict by parameter path, which
crosses the jit boundary quickly, and `bind` puts them back into modules there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxlora.parallel.mesh import TP_AXIS


@dataclasses.dataclass(frozen=True)
class Piece:
    """One checkpoint tensor."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """How checkpoint tensors make up one parameter.

    `cut` is the axis cut over the ranks, None for a whole copy on every rank. Several pieces are
    laid one after the other along axis 0 *within each rank's cut*: [q_r | k_r | v_r]. A piece whose
    cut axis `tp` does not divide is padded with zeros at its end.
    """

    pieces: tuple[Piece, ...]
    cut: int | None
    tp: int
    init: str = "normal"  # of dummy weights: "normal" or "ones"

    def local_shape(self, piece: Piece) -> tuple[int, ...]:
        """The shape of one rank's cut of a piece, padding included."""
        if self.cut is None:
            return piece.shape
        local = list(piece.shape)
        local[self.cut] = -(-local[self.cut] // self.tp)
        return tuple(local)

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        local = [self.local_shape(piece) for piece in self.pieces]
        shape = [sum(rows for rows, *_ in local), *local[0][1:]]
        if self.cut is not None:
            shape[self.cut] *= self.tp
        return tuple(shape)

    @property
    def partition(self) -> PartitionSpec:
        if self.cut is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * self.cut, TP_AXIS)


Params = dict[str, Array]

ModelT = TypeVar("ModelT", bound=nnx.Module)


def parameter(
    pieces: Mapping[str, tuple[int, ...]],
    cut: int | None,
    tp: int,
    dtype: DTypeLike,
    init: str = "normal",
) -> nnx.Param:
    """An abstract parameter made of checkpoint tensors (name -> shape)."""
    spec = WeightSpec(tuple(Piece(*piece) for piece in pieces.items()), cut, tp, init)
    return nnx.Param(jax.ShapeDtypeStruct(spec.shape, dtype), spec=spec)


def weight_specs(model: nnx.Module) -> dict[str, WeightSpec]:
    """Parameter path -> how it is read and cut: the model's weights table."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {_join(path): variable.get_metadata()["spec"] for path, variable in flat}


def param_specs(model: nnx.Module) -> dict[str, PartitionSpec]:
    """Parameter path -> PartitionSpec, for shard_map's in_specs."""
    return {path: spec.partition for path, spec in weight_specs(model).items()}


def bind(model: ModelT, params: Mapping[str, Any]) -> ModelT:
    """A copy of an abstract model with these parameters in place; others stay abstract.

    Inside shard_map they are one rank's cuts. A program that runs a part of a model binds that
    part's parameters alone.
    """
    graphdef, state = nnx.split(model)
    flat = [(path, params.get(_join(path), leaf)) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _join(path: tuple) -> str:
    return ".".join(map(str, path))
