from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlora.adapters.modules import AdaptableModule, ParallelKind
from jaxlora.layers.linear import ColumnLinear, RowLinear
from pallas_kernels.lora import gate as gate_of
from tests.support.on_mesh import call


WIDTHS = {"q": 12, "k": 4, "v": 8}
MODULES = tuple(
    AdaptableModule(name, 6, width, ParallelKind.COLUMN) for name, width in WIDTHS.items()
)
DOWN = AdaptableModule("down", 8, 5, ParallelKind.ROW)


class Recorder:
    """An adapter step that adds `value` to the rows in `mask` and notes what it was given."""

    def __init__(self, mask: np.ndarray, value: float = 0.0) -> None:
        self.mask, self.value = mask, value
        self.calls: list[tuple] = []

    def add_delta(self, y, x, *, layer, modules, widths):
        self.calls.append((y.shape, y.dtype, x.shape, layer, modules, widths))
        return jnp.where(self.mask[:, None], y + jnp.asarray(self.value, y.dtype), y)

    def add_delta_gated(self, y, x, bias, **at):
        return gate_of(self.add_bias(self.add_delta(y, x, **at), bias, **at))

    def add_bias(self, y, bias, *, layer, modules, widths):
        return y if bias is None else y + bias[None]


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def merged(pieces: list[np.ndarray], tp: int) -> np.ndarray:
    """[q_0 | k_0 | v_0 | q_1 | ...]: each rank's cuts side by side."""
    return np.concatenate([np.split(piece, tp)[rank] for rank in range(tp) for piece in pieces])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_merged_columns_come_apart_as_each_module(tp: int, bias: bool) -> None:
    x, *weights = arrays((3, 6), *((width, 6) for width in WIDTHS.values()))
    biases = arrays(*((width,) for width in WIDTHS.values()))
    linear = ColumnLinear(0, "p", MODULES, bias, tp, jnp.float32)
    params = {"weight": merged(weights, tp)} | ({"bias": merged(biases, tp)} if bias else {})
    outs = call(linear, params, tp, lambda m, x: m(x, None), x, out_specs=[P(None, "tp")] * 3)
    for out, weight, b in zip(outs, weights, biases, strict=True):
        np.testing.assert_allclose(out, x @ weight.T + b * bias, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_are_gated_after_the_delta_and_the_bias(tp: int, bias: bool) -> None:
    modules = tuple(AdaptableModule(n, 6, 8, ParallelKind.COLUMN) for n in ("gate", "up"))
    x, *weights = arrays((3, 6), (8, 6), (8, 6))
    biases = arrays((8,), (8,))
    linear = ColumnLinear(7, "p", modules, bias, tp, jnp.float32)
    params = {"weight": merged(weights, tp)} | ({"bias": merged(biases, tp)} if bias else {})
    adapters = Recorder(np.array([False, True, False]), 1.0)

    def body(module, x):
        return module.gated(x, adapters), module.gated(x, None)

    out, base = call(linear, params, tp, body, x, out_specs=(P(None, "tp"),) * 2)
    assert adapters.calls == [
        ((3, 16 // tp), jnp.float32, (3, 6), 7, ("gate", "up"), (8 // tp,) * 2)
    ]
    moved = np.array([[0.0], [1.0], [0.0]])
    gate, up = (x @ w.T + b * bias for w, b in zip(weights, biases, strict=True))
    np.testing.assert_allclose(base, gate / (1 + np.exp(-gate)) * up, rtol=0, atol=1e-5)
    gate, up = gate + moved, up + moved
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(out[::2], base[::2])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_summed_over_ranks_and_the_bias_added_once(tp: int, bias: bool) -> None:
    x, weight, b = arrays((3, 8), (5, 8), (5,))
    linear = RowLinear(0, "p", DOWN, bias, tp, jnp.float32)
    params = {"weight": weight} | ({"bias": b} if bias else {})
    out = call(linear, params, tp, lambda m, x: m(x, None), x, in_specs=(P(None, "tp"),))
    np.testing.assert_allclose(out, x @ weight.T + b * bias, rtol=0, atol=1e-5)


def test_adapters_get_this_ranks_widths_and_the_layer() -> None:
    x, *weights = arrays((3, 6), *((width, 6) for width in WIDTHS.values()))
    adapters = Recorder(np.zeros(3, bool))
    linear = ColumnLinear(7, "p", MODULES, False, 2, jnp.float32)
    params = {"weight": merged(weights, 2)}
    call(linear, params, 2, lambda m, x: m(x, adapters), x, out_specs=[P(None, "tp")] * 3)
    assert adapters.calls == [((3, 12), jnp.float32, (3, 6), 7, ("q", "k", "v"), (6, 2, 4))]


@pytest.mark.parametrize(("tp", "dtype"), [(1, jnp.bfloat16), (2, jnp.float32)])
def test_a_row_parallel_delta_joins_a_float32_sum_only_where_a_psum_follows(tp, dtype) -> None:
    x, weight = arrays((3, 8), (5, 8))
    adapters = Recorder(np.array([False, True, False]), 1.0)
    linear = RowLinear(0, "p", DOWN, False, tp, jnp.bfloat16)
    params = {"weight": weight.astype(jnp.bfloat16)}

    def body(module, x):
        return module(x, adapters), module(x, None)

    x = x.astype(jnp.bfloat16)
    with_delta, without = call(linear, params, tp, body, x, in_specs=(P(None, "tp"),))
    assert adapters.calls == [((3, 5), dtype, (3, 8 // tp), 0, ("down",), (5,))]
    assert with_delta.dtype == jnp.bfloat16
    np.testing.assert_array_equal(with_delta[::2], without[::2])
    moved = np.asarray(with_delta[1], np.float32) - np.asarray(without[1], np.float32)
    np.testing.assert_allclose(moved, tp, rtol=0, atol=2**-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_without_an_adapter_keep_their_bits(tp: int) -> None:
    x, *weights = arrays((3, 6), *((width, 6) for width in WIDTHS.values()))
    adapters = Recorder(np.array([False, True, False]), 1.0)
    linear = ColumnLinear(0, "p", MODULES, False, tp, jnp.float32)
    params = {"weight": merged(weights, tp)}
    specs = [P(None, "tp")] * 3
    with_adapters = call(linear, params, tp, lambda m, x: m(x, adapters), x, out_specs=specs)
    without = call(linear, params, tp, lambda m, x: m(x, None), x, out_specs=specs)
    for changed, base in zip(with_adapters, without, strict=True):
        np.testing.assert_array_equal(changed[::2], base[::2])
        np.testing.assert_allclose(changed[1] - base[1], 1, rtol=0, atol=1e-5)


def test_without_adapters_the_program_holds_one_product_and_nothing_of_adapters() -> None:
    linear = ColumnLinear(0, "p", MODULES, False, 1, jnp.float32)

    def run(x):
        params = {"weight": jnp.zeros((24, 6))}
        return call(linear, params, 1, lambda m, x: m(x, None), x, out_specs=[P()] * 3)

    text = jax.jit(run).lower(jnp.zeros((1, 6))).as_text()
    assert text.count("stablehlo.dot_general") == 1
    assert "stablehlo.select" not in text
    assert "stablehlo.add" not in text
