"""Find the tiles of the products of few rows on this card and keep them in tilings.json.

    python -m benchmarks.tune_product [--dry-run]

Every candidate multiplies Qwen3-8B's four products' weights, call after call on distinct ones, with
the adding of its parts as a program with deltas does it. Each shape gets its best choice, other
shapes the one that is best in the geometric mean. XLA's own product is timed beside them.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.lora_layers import GROUPS, MODULES, make_weights
from jaxlora.layers.product import product
from pallas_kernels.lora import product_parts, sum_parts, tilings
from pallas_kernels.lora._triton_product import cut_of
from pallas_kernels.lora.tilings import ProductChoice


LAYERS = 12
SHAPES = [(sum(MODULES[k][1] for k in group), MODULES[group[0]][0]) for group in GROUPS]
Multiply = Callable[[Array, Array], Array]


def candidates(rows: int) -> list[ProductChoice]:
    """Choices worth a try on a card of Hopper's kind."""
    if rows == 16:
        cuts = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 3)]
    else:
        cuts = [(64, 128, 4, 4), (64, 128, 4, 3), (64, 64, 4, 6), (128, 64, 4, 4), (128, 64, 8, 5)]
    return [ProductChoice(c, d, n, w, s) for c, d, w, s in cuts for n in (96, 128, 192, 256)]


def parts_summed(choice: ProductChoice, rows: int) -> Multiply:
    def multiply(x: Array, weight: Array) -> Array:
        d_out, d_in = weight.shape
        cut = cut_of(rows, d_out, d_in, choice)
        assert cut is not None
        parts = product_parts(x, weight, dtype=jnp.float32, cut=cut, choice=choice)
        return sum_parts(lax.optimization_barrier(parts), x.dtype)

    return multiply


def chain(multiply: Multiply):
    def run(x: Array, weights: list[Array]) -> Array:
        for weight in weights:
            y = lax.optimization_barrier(multiply(x, weight))
            x = lax.optimization_barrier(x + y[:, :1] * jnp.asarray(2**-20, x.dtype))
        return x

    return jax.jit(run, donate_argnums=0)


def seconds(compiled, x: Array, weights: list[Array]) -> float:
    x, times = compiled(x, weights), []
    for _ in range(3):
        jax.block_until_ready(x)
        start = time.perf_counter()
        for _ in range(20):
            x = compiled(x, weights)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - start) / 20)
    return float(np.median(times)) / len(weights)


def tune(rows: int, weights: list[list[Array]]) -> dict[str, ProductChoice]:
    """Print every shape's times; the names in tilings.json and their choices."""
    tried: dict[str, Multiply] = {
        str(i): parts_summed(c, rows) for i, c in enumerate(candidates(rows))
    }
    tried["xla"] = lambda x, weight: product(x, weight, x.dtype)
    found, logs = {}, []
    for group, (d_out, d_in) in enumerate(SHAPES):
        of_group = [layer[group] for layer in weights]
        start = functools.partial(jax.random.normal, jax.random.key(1), (rows, d_in), jnp.bfloat16)

        def compiled(item, of_group=of_group, start=start):
            return item[0], chain(item[1]).lower(jax.eval_shape(start), of_group).compile()

        with ThreadPoolExecutor(12) as pool:
            runs = dict(pool.map(compiled, tried.items()))
        us = {name: 1e6 * seconds(run, start(), of_group) for name, run in runs.items()}
        own = [us[str(i)] for i in range(len(tried) - 1)]
        best = int(np.argmin(own))
        found[f"product_{rows} {d_out}x{d_in}"] = candidates(rows)[best]
        logs.append(np.log(own))
        print(f"{rows} rows, {d_out}x{d_in}: xla {us['xla']:.1f} us, {own[best]:.1f} us with"
              f" {candidates(rows)[best]}", flush=True)  # fmt: skip
    found[f"product_{rows}"] = candidates(rows)[int(np.argmin(np.mean(logs, axis=0)))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Tunes the products of few rows on this card.")
    parser.add_argument("--dry-run", action="store_true", help="print, but keep nothing")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("benchmarks.tune_product: needs a GPU")
    weights = make_weights(LAYERS)
    for rows in (16, 64):
        found = tune(rows, weights)
        if not options.dry_run:
            values = {name: choice._asdict() for name, choice in found.items()}
            tilings.keep(jax.devices()[0].device_kind, values)


if __name__ == "__main__":
    main()
