"""What an adapter's vectors are once the base's weights are known, and checks that need them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from jaxlora.adapters.adapter import Adapter, Site, Vector
from jaxlora.adapters.base_weights import BaseWeights
from jaxlora.errors import AdapterError


def compute_vectors(adapter: Adapter, base: BaseWeights) -> list[Float[np.ndarray, "d_out"]]:
    """`adapter.vectors` in float32, in their order.

    Raises AdapterError where one is not finite: the base has an output whose weights are zero, or
    a scale is too large.
    """
    of = {Vector.GAIN: _gain, Vector.BIAS: _bias}
    return [of[which](adapter, site, base) for site, which in adapter.vectors]


def check_with_weights(
    adapter: Adapter, vectors: list[Float[np.ndarray, "d_out"]], base: BaseWeights
) -> None:
    """What the reader could not check without the base's weights.

    Raises AdapterError for a copy of the base's weights that is another's, and for an adapter that
    would change nothing.
    """
    check_copies(adapter, base)
    if not adapter.factors_change and not (
        _vectors_change(adapter, vectors, base) or _rows_change(adapter, base)
    ):
        raise AdapterError(
            f"{adapter.source}: the delta is zero everywhere, and its other tensors are the base's:"
            " it would change nothing"
        )


def check_copies(adapter: Adapter, base: BaseWeights) -> None:
    """Raises AdapterError for a copy of the base's weights that is another's."""
    for name, copy in adapter.base_copies.items():
        if not base.holds(name, copy):
            raise AdapterError(
                f"{adapter.source}: {name}.base_layer.weight is not this base's weight: an adapter "
                "of another base, or of one whose embeddings were resized or trained"
            )


def _gain(adapter: Adapter, site: Site, base: BaseWeights) -> Float[np.ndarray, "d_out"]:
    factors = adapter.factors[site]
    assert factors.magnitude is not None
    norms = base.norms(*site, factors, factors.scale * adapter.strength)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = factors.magnitude.astype(np.float32) / norms
    wrong = ~(np.isfinite(gain) & np.isfinite(norms))
    if wrong.any():
        output = int(np.flatnonzero(wrong)[0])
        raise AdapterError(
            f"{adapter.source}: {base.modules.path(*site)}: DoRA divides by the norm of output "
            f"{output}'s weights, which is {norms[output]:g}"
        )
    return gain


def _bias(adapter: Adapter, site: Site, base: BaseWeights) -> Float[np.ndarray, "d_out"]:
    own = adapter.biases.get(site)
    bias = base.bias(*site) if own is None else own.astype(np.float32)
    factors = adapter.factors.get(site)
    if factors is None or factors.b_bias is None:
        assert bias is not None
        return bias
    with np.errstate(over="ignore"):
        added = np.float32(factors.scale * adapter.strength) * factors.b_bias.astype(np.float32)
        whole = added if bias is None else bias + added
    if not np.isfinite(whole).all():
        raise AdapterError(
            f"{adapter.source}: {base.modules.path(*site)}: its lora_bias times the scale of "
            f"{factors.scale * adapter.strength:g}, strength included, is too large"
        )
    return whole


def _vectors_change(adapter: Adapter, vectors: list[np.ndarray], base: BaseWeights) -> bool:
    for (site, which), vector in zip(adapter.vectors, vectors, strict=True):
        if which is Vector.GAIN:
            # What rounding leaves of m / ||W|| where training has not moved either.
            unmoved = np.abs(vector - 1).max() < 1e-5
        else:
            bias = base.bias(*site)
            unmoved = not vector.any() if bias is None else np.array_equal(vector, bias)
        if not unmoved:
            return True
    return False


def _rows_change(adapter: Adapter, base: BaseWeights) -> bool:
    for name, tokens in adapter.token_rows.items():
        rows = base.rows(name, np.asarray(tokens.ids))
        if not np.array_equal(tokens.rows.astype(rows.dtype), rows):
            return True
    return False
