"""What LoRA adds to a step: a chain of Qwen3-8B layers' base products, with and without deltas.

    python -m benchmarks.lora_layers --json lora_layers.json

Every layer has weights and factors of its own. Between the four products lie only a norm, the
activation and the residual; all seven modules are adapted at rank 16. The chain is one jitted
program with donated state, compiled with the options of an engine's step; "added" is its time with
deltas less its time without, over the number of layers. The floor is what the factors of the
distinct adapters take to be read.
"""

from __future__ import annotations

import functools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks.command import Parser, count, file_to_write
from benchmarks.lora_inputs import hashed, read_bandwidth, routing_of
from benchmarks.lora_table import SLOTS, W
from benchmarks.report import machine
from jaxlora.adapters.routing import AdapterStep, AdapterTables
from jaxlora.layers.linear import gated_linear, linear
from pallas_kernels.lora import FactorTables, Phase


HIDDEN, HEADS, KV, FFN = 4096, 4096, 1024, 12288
MODULES = (
    (HIDDEN, HEADS), (HIDDEN, KV), (HIDDEN, KV), (HEADS, HIDDEN),
    (HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN),
)  # fmt: skip
# The modules that share an input, in a layer's order: qkv, o, gate and up, down.
GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))
GATE_UP = 2
CASES = [("decode", t, a) for t in (1, 16, 64, 256) for a in (1, 8, 64) if a <= t]
CASES += [("prefill", 8192, a) for a in (1, 32)]
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


def make_weights(layers: int) -> list[list[Array]]:
    shapes = [(sum(MODULES[k][1] for k in g), MODULES[g[0]][0]) for g in GROUPS]
    make = jax.jit(lambda i, shape: hashed(shape, i) * 2**-1, static_argnums=1)
    return [[make(4 * i + j, shape) for j, shape in enumerate(shapes)] for i in range(layers)]


def make_tables(layers: int, rank: int) -> FactorTables:
    """One adapter of one rank in every slot; a slot's factors of a layer lie together."""
    blocks = np.asarray([[d_in // W, d_out // W] for d_in, d_out in MODULES])
    starts = np.cumsum(blocks.ravel()) * rank - blocks.ravel() * rank
    per_slot = int(blocks.sum()) * rank
    at = (np.arange(layers)[:, None] * SLOTS + np.arange(SLOTS)) * per_slot
    first = np.zeros((len(MODULES), 2, layers, SLOTS + 1, 1), np.int32)
    first[..., 1:, 0] = starts.reshape(-1, 2, 1, 1) + at
    ranks = np.full((len(MODULES), layers, SLOTS + 1, 1), rank, np.int32)
    ranks[:, :, 0] = 0
    pool = jax.jit(hashed, static_argnums=0)((layers * SLOTS * per_slot, W), 7)
    scale = jnp.full(ranks.shape, 0.5, jnp.float32)
    return FactorTables(pool, jnp.asarray(first), jnp.asarray(ranks), scale)


def norm(x: Array) -> Array:
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, axis=1, keepdims=True)
    return (x32 * lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def forward(x: Array, weights, tables, routing, *, phase: Phase, rank: int, adapted: bool) -> Array:
    kinds = {str(kind): kind for kind in range(len(MODULES))}
    tables = AdapterTables(tables, None, None)
    step = AdapterStep(tables, routing, kinds, rank, phase, "triton") if adapted else None

    def product(x: Array, layer: int, group: int) -> Array:
        modules = tuple(map(str, GROUPS[group]))
        widths = tuple(MODULES[kind][1] for kind in GROUPS[group])
        weight = weights[layer][group]
        if group == GATE_UP:
            return gated_linear(x, weight, None, step, layer, modules, widths)
        return linear(x, weight, x.dtype, step, layer, modules, widths)

    for layer in range(len(weights)):
        heads = product(norm(x), layer, 0)[:, :HEADS]
        x = x + product(heads, layer, 1)
        x = x + product(product(norm(x), layer, GATE_UP), layer, 3)
    return norm(x)


def program(phase: Phase, rank: int, adapted: bool, options: dict | None = None):
    step = functools.partial(forward, phase=phase, rank=rank, adapted=adapted)
    return jax.jit(step, donate_argnums=0, compiler_options=options)


def seconds(runs: list, x, weights, tables, routing, repeats: int, rounds: int = 7) -> list[float]:
    """One run of each chain: the median round. The chains take turns, round by round.

    A card at its power limit runs faster or slower as the seconds go; turns share that out.
    """
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        x = run(x, weights, tables, routing)
    for _ in range(rounds):
        for run, of_run in zip(runs, times, strict=True):
            jax.block_until_ready(x)
            start = time.perf_counter()
            for _ in range(repeats):
                x = run(x, weights, tables, routing)
            jax.block_until_ready(x)
            of_run.append((time.perf_counter() - start) / repeats)
    return [float(np.median(of_run)) for of_run in times]


def start_state(tokens: int) -> Array:
    return jax.random.normal(jax.random.key(1), (tokens, HIDDEN), jnp.bfloat16)


def compile_all(cases, rank: int, weights, tables) -> dict:
    """(phase, tokens, adapted) -> compiled, several at a time."""
    keys = sorted({(phase, tokens, lora) for phase, tokens, _ in cases for lora in (0, 1)})

    def one(key):
        phase, tokens, adapted = key
        options = CONCURRENT if phase == "decode" and adapted else None
        run = program(phase, rank, bool(adapted), options)
        x = jax.eval_shape(functools.partial(start_state, tokens))
        return key, run.lower(x, weights, tables, routing_of(phase, tokens, 1)).compile()

    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(one, keys))


def measure(cases, rank: int, weights, tables, bandwidth: float):
    compiled = compile_all(cases, rank, weights, tables)
    layers = len(weights)
    for phase, tokens, adapters in cases:
        repeats = 20 if phase == "decode" else 2
        routing = routing_of(phase, tokens, adapters)
        runs = [compiled[phase, tokens, adapted] for adapted in (0, 1)]
        took = seconds(runs, start_state(tokens), weights, tables, routing, repeats)
        base, whole = (one / layers * 1e6 for one in took)
        factors = adapters * sum(a + b for a, b in MODULES) * rank * 2
        yield {
            "phase": phase, "tokens": tokens, "adapters": adapters, "rank": rank,
            "base_us": base, "added_us": whole - base, "factors_us": factors / bandwidth * 1e6,
        }  # fmt: skip


def table(rows: list[dict]) -> str:
    lines = ["| phase | tokens | adapters | base µs | added µs | % | factors' floor µs |"]
    lines.append("|---|---|---|---|---|---|---|")
    for r in rows:
        share = 100 * r["added_us"] / r["base_us"]
        lines.append(
            f"| {r['phase']} | {r['tokens']} | {r['adapters']} | {r['base_us']:.1f}"
            f" | {r['added_us']:.1f} | {share:.0f} | {r['factors_us']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="Times what LoRA adds to a step's layers.")
    parser.add_argument("--json", type=file_to_write, help="write the figures here")
    parser.add_argument("--layers", type=count, default=36)
    parser.add_argument("--rank", type=count, default=16)
    options = parser.parse_args()
    out = os.environ.get("OUT")
    path = options.json or (Path(out) / "lora_layers.json" if out else None)
    parser.need_gpu()
    weights, tables = make_weights(options.layers), make_tables(options.layers, options.rank)
    bandwidth = read_bandwidth()
    rows = list(measure(CASES, options.rank, weights, tables, bandwidth))
    result = {"machine": machine(), "read_bandwidth": bandwidth, "cases": rows}
    if path:
        path.write_text(json.dumps(result, indent=1))
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s, {options.layers} layers")
    print(table(rows))


if __name__ == "__main__":
    main()
