"""What adapters have to ask of the base's own weights: norms, biases, whether rows are equal."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from jaxlora.adapters.adapter import Factors
from jaxlora.adapters.modules import EMBEDDING, HEAD, AdaptableModule, ModuleTable, ParallelKind
from jaxlora.adapters.placement import cut
from jaxlora.checkpoints import LoadedModel
from jaxlora.compat import shard_map
from jaxlora.layers.parameter import Piece, WeightSpec, weight_specs
from jaxlora.parallel.mesh import TP_AXIS


# Rows of a weight that are taken to float32 at a time.
CHUNK = 512


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a checkpoint tensor lies: a parameter, and its first row in each rank's cut of it."""

    path: str
    spec: WeightSpec
    piece: Piece
    start: int


class BaseWeights:
    """The loaded weights by canonical module. Everything is computed where the weights are."""

    def __init__(self, loaded: LoadedModel, mesh: Mesh) -> None:
        self.modules: ModuleTable = loaded.model.modules
        self._params, self._mesh = loaded.params, mesh
        self._places: dict[str, _Place] = {}
        for path, spec in weight_specs(loaded.model).items():
            start = 0
            for piece in spec.pieces:
                self._places[piece.name] = _Place(path, spec, piece, start)
                start += spec.local_shape(piece)[0]

    def bias(self, layer: int, name: str) -> Float[np.ndarray, "d_out"] | None:
        """The base's own bias in float32, or None where it has none."""
        place = self._places.get(f"{self.modules.path(layer, name)}.bias")
        if place is None:
            return None
        whole = np.asarray(self._params[place.path], np.float32)
        (width,) = place.spec.local_shape(place.piece)
        ranks = place.spec.tp if place.spec.cut is not None else 1
        return whole.reshape(ranks, -1)[:, place.start : place.start + width].ravel()

    def norms(
        self, layer: int, name: str, factors: Factors, scale: float
    ) -> Float[np.ndarray, "d_out"]:
        """||W + scale B A|| over each output's inputs, float32 as in peft's DoRA layers."""
        place, module = self._weight(layer, name), self.modules.module(name)
        pairs = cut(factors, module, self._mesh.shape[TP_AXIS])
        sharding = NamedSharding(self._mesh, P(TP_AXIS))
        a, b = (
            jax.device_put(np.stack([pair[side] for pair in pairs]).astype(np.float32), sharding)
            for side in (0, 1)
        )
        norms = _norms(
            self._params[place.path],
            a,
            b,
            np.float32(scale),
            mesh=self._mesh,
            spec=place.spec,
            start=place.start,
            rows=place.spec.local_shape(place.piece)[0],
            module=module,
        )
        return np.asarray(norms)[: module.d_out]

    def rows(self, name: str, ids: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n hidden"]:
        """Rows of the embedding's or head's weight, in its own dtype."""
        return np.asarray(self._params[self._weight(0, name).path][ids])

    def holds(self, name: str, copy: np.ndarray) -> bool:
        """Whether a copy of the embedding's or head's weight is the weight, in its dtype."""
        weight = self._params[self._weight(0, name).path]
        for first in range(0, len(copy), CHUNK):
            part = copy[first : first + CHUNK]
            ids = np.minimum(np.arange(first, first + CHUNK), len(copy) - 1)
            padded = np.resize(part, (CHUNK, part.shape[1])) if len(part) < CHUNK else part
            same = np.asarray(_rows_equal(weight, ids, padded.astype(weight.dtype)))
            if not same[: len(part)].all():
                return False
        return True

    def _weight(self, layer: int, name: str) -> _Place:
        tied_head = name == HEAD and self.modules.tied
        return self._places[f"{self.modules.path(layer, EMBEDDING if tied_head else name)}.weight"]


@jax.jit
def _rows_equal(
    weight: Array, ids: Int[Array, "chunk"], copy: Float[Array, "chunk hidden"]
) -> Bool[Array, "chunk"]:
    return (weight[ids] == copy).all(axis=1)


@functools.partial(jax.jit, static_argnames=("mesh", "spec", "start", "rows", "module"))
def _norms(
    weight: Array,
    a: Float[Array, "tp rank d_in"],
    b: Float[Array, "tp rank d_out"],
    scale: Float[Array, ""],
    *,
    mesh: Mesh,
    spec: WeightSpec,
    start: int,
    rows: int,
    module: AdaptableModule,
) -> Float[Array, "d_out"]:
    embedding = module.name == EMBEDDING  # its weight is stored [d_in, d_out]

    def local(weight: Array, a: Array, b: Array, scale: Array) -> Array:
        left, right = (a[0], b[0]) if embedding else (b[0], a[0])
        squares = _squares(weight[start : start + rows], left, right * scale, embedding)
        if module.parallel is ParallelKind.ROW:
            squares = lax.psum(squares, TP_AXIS)
        return jnp.sqrt(squares)

    return shard_map(
        local,
        mesh,
        in_specs=(spec.partition, P(TP_AXIS), P(TP_AXIS), P()),
        out_specs=P(TP_AXIS) if module.parallel is ParallelKind.COLUMN else P(),
    )(weight, a, b, scale)


def _squares(
    weight: Float[Array, "rows columns"],
    left: Float[Array, "rank rows"],
    right: Float[Array, "rank columns"],
    of_columns: bool,
) -> Array:
    """Sums of squares of each row (or column) of weight + left^T right, a chunk of rows a time."""
    rows, columns = weight.shape
    chunk = min(CHUNK, rows)

    def body(i: Array, sums: Array) -> Array:
        first = jnp.minimum(i * chunk, rows - chunk)
        part = lax.dynamic_slice(weight, (first, 0), (chunk, columns)).astype(jnp.float32)
        delta = jnp.matmul(
            lax.dynamic_slice(left, (0, first), (left.shape[0], chunk)).T,
            right,
            precision=lax.Precision.HIGHEST,
        )
        squares = jnp.square(part + delta)
        if of_columns:  # the last chunk begins early: rows that were counted are not again
            new = first + jnp.arange(chunk) >= i * chunk
            return sums + jnp.where(new[:, None], squares, 0).sum(axis=0)
        return lax.dynamic_update_slice(sums, squares.sum(axis=1), (first,))

    sums = jnp.zeros(columns if of_columns else rows, jnp.float32)
    return lax.fori_loop(0, -(-rows // chunk), body, sums)
