"""Find the tiles of the products of few rows on this card and keep them in tilings.json.

    python -m benchmarks.tune_product [--dry-run]

Every candidate multiplies Qwen3-8B's four products' weights, call after call on distinct ones, with
the adding of its parts as a program with deltas does it. Each shape gets its best choice, other
shapes the one that is best in the geometric mean. XLA's own product is timed beside them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.command import Parser
from benchmarks.lora_layers import GROUPS, MODULES, make_weights
from jaxlora.layers.product import product
from pallas_kernels.lora import product_parts, sum_parts, tilings
from pallas_kernels.lora._triton_product import Cut, cut_of
from pallas_kernels.lora.tilings import ProductChoice


LAYERS = 12
SHAPES = [(sum(MODULES[k][1] for k in group), MODULES[group[0]][0]) for group in GROUPS]
Multiply = Callable[[Array, Array], Array]
Key = TypeVar("Key")


def candidates(rows: int) -> list[ProductChoice]:
    """Choices worth a try on a card of Hopper's kind."""
    if rows == 16:
        cuts = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 3)]
    else:
        cuts = [(64, 128, 4, 4), (64, 128, 4, 3), (64, 64, 4, 6), (128, 64, 4, 4), (128, 64, 8, 5)]
    return [ProductChoice(c, d, n, w, s) for c, d, w, s in cuts for n in (96, 128, 192, 256)]


class Program(NamedTuple):
    """What of a choice a shape's program depends on."""

    cut: Cut
    warps: int
    stages: int


def programs(
    choices: list[ProductChoice], rows: int, d_out: int, d_in: int
) -> dict[ProductChoice, Program]:
    """The program of each choice that divides the shape."""
    cuts = {choice: cut_of(rows, d_out, d_in, choice) for choice in choices}
    return {c: Program(cut, c.warps, c.stages) for c, cut in cuts.items() if cut is not None}


def parts_summed(choice: ProductChoice, cut: Cut) -> Multiply:
    def multiply(x: Array, weight: Array) -> Array:
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


def best_everywhere(times: list[dict[ProductChoice, float]]) -> ProductChoice | None:
    """The choice of least geometric mean among those that every shape could be timed with."""
    common = [choice for choice in times[0] if all(choice in of_shape for of_shape in times)]
    means = [np.mean([np.log(of_shape[choice]) for of_shape in times]) for choice in common]
    return common[int(np.argmin(means))] if common else None


def timed(multiplies: dict[Key, Multiply], x: Callable[[], Array], weights) -> dict[Key, float]:
    """Microseconds of each product; what fails to compile or run is said and left out."""

    def compiled(item: tuple[Key, Multiply]):
        try:
            return chain(item[1]).lower(jax.eval_shape(x), weights).compile()
        except Exception as error:
            return error

    found = {}
    with ThreadPoolExecutor(12) as pool:
        for name, run in zip(multiplies, pool.map(compiled, multiplies.items()), strict=True):
            try:
                if isinstance(run, Exception):
                    raise run
                found[name] = 1e6 * seconds(run, x(), weights)
            except Exception as error:
                print(f"  passed over: {name}: {str(error).strip()[:200]!r}", flush=True)
    return found


def tune(rows: int, weights: list[list[Array]]) -> dict[str, ProductChoice]:
    """Print every shape's times; the names in tilings.json and their choices."""
    found, times = {}, []
    for group, (d_out, d_in) in enumerate(SHAPES):
        of_group = [layer[group] for layer in weights]
        x = functools.partial(jax.random.normal, jax.random.key(1), (rows, d_in), jnp.bfloat16)
        program_of = programs(candidates(rows), rows, d_out, d_in)
        multiplies: dict[Program | str, Multiply] = {
            program: parts_summed(choice, program.cut) for choice, program in program_of.items()
        }
        multiplies["xla"] = lambda x, weight: product(x, weight, x.dtype)
        us = timed(multiplies, x, of_group)
        times.append({c: us[program] for c, program in program_of.items() if program in us})
        shape = f"{rows} rows, {d_out}x{d_in}: xla {us.get('xla', float('nan')):.1f} us"
        if not times[-1]:
            print(f"{shape}, none of ours ran", flush=True)
            continue
        best = min(times[-1], key=times[-1].__getitem__)
        found[f"product_{rows} {d_out}x{d_in}"] = best
        print(f"{shape}, {times[-1][best]:.1f} us with {best}", flush=True)
    everywhere = best_everywhere(times)
    return found if everywhere is None else {**found, f"product_{rows}": everywhere}


def main() -> None:
    parser = Parser(description="Tunes the products of few rows on this card.")
    parser.add_argument("--dry-run", action="store_true", help="print, but keep nothing")
    options = parser.parse_args()
    parser.need_gpu()
    weights = make_weights(LAYERS)
    for rows in (16, 64):
        found = tune(rows, weights)
        if not options.dry_run:
            values = {name: choice._asdict() for name, choice in found.items()}
            tilings.keep(jax.devices()[0].device_kind, values)


if __name__ == "__main__":
    main()
