"""LoRA kernels on one GPU: right, then how long, beside XLA's gather + einsum and the byte floor.

    python -m benchmarks.lora_kernels --json lora_kernels.json

First every shape and rank is checked against float64. Then each case is timed as a chain of LINKS
calls on distinct factors inside one jit with donated state (XLA captures it in command buffers);
the chain's own link, which makes each x depend on the y before it, is timed alone and subtracted.
`floor` is the bytes that must move (factors of the distinct adapters, x and y read, y written, h
written and read) over the read bandwidth measured in the same run. With few adapters the factors of
a chain fit the L2 cache, so such a case may read above the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.lora import FactorTables, Phase, Routing, add_delta


W, SLOTS, LAYERS, LINKS, ROUTINGS, MAX_RANK = 256, 64, 16, 32, 8, 512
RANKS, TOKENS, ADAPTERS = (16, 64), (1, 16, 64, 256), (1, 8, 64)
PREFILL_TOKENS, PREFILL_ADAPTERS, PREFILL_LINKS = 8192, (1, 32), 8


class Shape(NamedTuple):
    name: str
    d_in: int
    widths: tuple[int, ...]

    @property
    def kinds(self) -> tuple[int, ...]:
        return tuple(range(len(self.widths)))

    def blocks(self) -> list[int]:
        """Column blocks of A and B of each kind, in the pool's order."""
        return [d // W for width in self.widths for d in (self.d_in, width)]


SHAPES = (
    Shape("4096->4096", 4096, (4096,)),
    Shape("4096->(4096,1024,1024)", 4096, (4096, 1024, 1024)),
    Shape("4096->(12288,12288)", 4096, (12288, 12288)),
    Shape("12288->4096", 12288, (4096,)),
)


def random_pool(shape: Shape) -> jax.Array:
    """Room for the largest rank, so that a program serves all ranks."""
    rows = LAYERS * SLOTS * sum(shape.blocks()) * max(RANKS)

    @jax.jit
    def make():
        row, column = (lax.broadcasted_iota(jnp.uint32, (rows, W), axis) for axis in (0, 1))
        hashed = (row * W + column) * jnp.uint32(2654435761) >> 24
        return (hashed.astype(jnp.float32) - 127.5).astype(jnp.bfloat16) * (1 / 2048)

    return make()


def make_tables(shape: Shape, rank: int, pool: jax.Array) -> FactorTables:
    """Every slot of every layer at one rank; a slot's factors lie one after the other."""
    blocks = np.asarray(shape.blocks())
    kinds, per_slot = len(shape.widths), int(blocks.sum()) * rank
    starts = ((np.cumsum(blocks) - blocks) * rank).reshape(kinds, 2)
    at = np.arange(LAYERS)[:, None] * SLOTS + np.arange(SLOTS)
    first = np.zeros((kinds, 2, LAYERS, SLOTS + 1, 1), np.int32)
    first[..., 1:, 0] = starts[:, :, None, None] + at * per_slot
    ranks = np.full((kinds, LAYERS, SLOTS + 1, 1), rank, np.int32)
    ranks[:, :, 0] = 0

    scale = jnp.full(ranks.shape, 0.5, jnp.float32)
    return FactorTables(pool, jnp.asarray(first), jnp.asarray(ranks), scale)


def decode_routings(tokens: int, adapters: int) -> list[Routing]:
    """Interleaved adapters, others in every routing."""
    slots = [1 + (np.arange(tokens) % adapters + i * adapters) % SLOTS for i in range(ROUTINGS)]
    none = jnp.zeros((1, 3), jnp.int32)
    return [Routing(jnp.asarray(s, jnp.int32), none) for s in slots]


def prefill_routings(tokens: int, adapters: int) -> list[Routing]:
    out, length = [], tokens // adapters
    for i in range(ROUTINGS):
        slots = 1 + (np.arange(adapters) + i * adapters) % SLOTS
        segments = np.zeros((SLOTS, 3), np.int32)
        segments[:adapters] = np.stack(
            [slots, np.arange(adapters) * length, np.full(adapters, length)], axis=1
        )
        out.append(Routing(jnp.asarray(np.repeat(slots, length), jnp.int32), jnp.asarray(segments)))
    return out


def pallas_link(shape: Shape, phase: Phase, y, x, tables, routing, layer: int):
    return add_delta(
        y, x, tables, routing, layer=layer, kinds=shape.kinds, widths=shape.widths,
        max_rank=MAX_RANK, phase=phase, backend="triton",
    )  # fmt: skip


def einsum_link(shape: Shape, rank: int, y, x, tables, routing, layer: int):
    """What XLA makes of gathering each token's factors."""

    def factors(kind: int, side: int, blocks: int) -> jax.Array:
        rows = tables.first_row[kind, side, layer, routing.slots, 0]
        size = (blocks * rank, W)
        gathered = jax.vmap(lambda row: lax.dynamic_slice(tables.pool, (row, 0), size))(rows)
        return gathered.reshape(-1, blocks, rank, W).astype(jnp.float32)

    deltas = []
    x4 = x.reshape(x.shape[0], -1, W).astype(jnp.float32)
    for kind, width in enumerate(shape.widths):
        scale = tables.scale[kind, layer, routing.slots, 0]
        h = jnp.einsum("tcw,tcrw->tr", x4, factors(kind, 0, shape.d_in // W))
        b = factors(kind, 1, width // W)
        deltas.append(jnp.einsum("tr,tcrw->tcw", h * scale[:, None], b).reshape(-1, width))
    return (y.astype(jnp.float32) + jnp.concatenate(deltas, axis=1)).astype(y.dtype)


def no_link(y, x, tables, routing, layer: int):
    return y


def chain(link, links: int):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(y, x, tables, routings):
        for i in range(links):
            y = link(y, x, tables, routings[i % ROUTINGS], i % LAYERS)
            x = x + y[:, :1] * jnp.asarray(2**-20, x.dtype)
            y, x = lax.optimization_barrier((y, x))
        return y, x

    return run


def state(shape: Shape, tokens: int):
    key = jax.random.split(jax.random.key(1))
    y = jax.random.normal(key[0], (tokens, sum(shape.widths)), jnp.bfloat16)
    return y, jax.random.normal(key[1], (tokens, shape.d_in), jnp.bfloat16)


def seconds(compiled, y, x, tables, routings, repeats: int = 20, rounds: int = 3) -> float:
    """One run of the chain: the median round."""
    for _ in range(3):
        y, x = compiled(y, x, tables, routings)
    times = []
    for _ in range(rounds):
        jax.block_until_ready((y, x))
        start = time.perf_counter()
        for _ in range(repeats):
            y, x = compiled(y, x, tables, routings)
        jax.block_until_ready((y, x))
        times.append((time.perf_counter() - start) / repeats)
    return float(np.median(times))


def read_bandwidth() -> float:
    """Bytes a second of summing 4 GB."""
    a = jnp.ones((2**31,), jnp.bfloat16)
    total = jax.jit(lambda a: a.astype(jnp.float32).sum())
    total(a).block_until_ready()
    best = np.inf
    for _ in range(10):
        start = time.perf_counter()
        total(a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return a.nbytes / best


def floor_bytes(shape: Shape, rank: int, tokens: int, adapters: int) -> int:
    factors = adapters * sum(shape.blocks()) * W * rank * 2
    h = 2 * tokens * len(shape.widths) * rank * 4
    return factors + tokens * (shape.d_in + 2 * sum(shape.widths)) * 2 + h


def check(shape: Shape, rank: int, tables: FactorTables, phase: Phase) -> float:
    """Largest error against float64 over the sum of magnitudes; raises if it is not float32's."""
    slots = np.repeat([3, 0, 17, 64, 1], 5)
    starts = (np.arange(5) * 5)[slots[::5] > 0]
    segments = np.stack([slots[starts], starts, np.full(4, 5)], axis=1)
    routing = Routing(jnp.asarray(slots, jnp.int32), jnp.asarray(segments, jnp.int32))
    y, x = state(shape, len(slots))
    y = y.astype(jnp.float32)
    got = np.asarray(jax.jit(functools.partial(pallas_link, shape, phase), static_argnums=4)(
        y, x, tables, routing, 5))  # fmt: skip
    first = np.asarray(tables.first_row)
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    want, size, end = y.copy(), np.abs(y), 0
    for kind, width in enumerate(shape.widths):
        at, end = slice(end, end + width), end + width
        for t, slot in enumerate(slots):
            if slot == 0:
                continue
            a, b = (
                np.asarray(lax.dynamic_slice_in_dim(tables.pool, row, d // W * rank), np.float64)
                .reshape(-1, rank, W).swapaxes(0, 1).reshape(rank, d)
                for row, d in zip(first[kind, :, 5, slot, 0], (shape.d_in, width), strict=True)
            )  # fmt: skip
            want[t, at] += 0.5 * (a @ x[t]) @ b
            size[t, at] += 0.5 * (np.abs(a) @ np.abs(x[t])) @ np.abs(b)
    error = float((np.abs(got - want) / size).max())
    if not error <= 1e-6 or not (got[slots == 0] == y[slots == 0]).all():
        raise SystemExit(f"wrong: {shape.name} rank {rank} {phase}: error {error:.2e}")
    return error


def programs_of(shape: Shape) -> dict:
    """(what, phase, tokens, rank or None) -> chain; the Pallas kernels take any rank."""
    out = {}
    for tokens in TOKENS:
        out["chain", "decode", tokens, None] = chain(no_link, LINKS)
        link = functools.partial(pallas_link, shape, "decode")
        out["triton", "decode", tokens, None] = chain(link, LINKS)
        for rank in RANKS:
            link = functools.partial(einsum_link, shape, rank)
            out["einsum", "decode", tokens, rank] = chain(link, LINKS)
    out["chain", "prefill", PREFILL_TOKENS, None] = chain(no_link, PREFILL_LINKS)
    link = functools.partial(pallas_link, shape, "prefill")
    out["triton", "prefill", PREFILL_TOKENS, None] = chain(link, PREFILL_LINKS)
    return out


def compile_all(shape: Shape, tables: FactorTables) -> dict:
    """Compile a shape's programs, several at a time."""

    def one(item):
        (what, phase, tokens, rank), program = item
        make = decode_routings if phase == "decode" else prefill_routings
        y, x = jax.eval_shape(functools.partial(state, shape, tokens))
        compiled = program.lower(y, x, tables, make(tokens, 1)).compile()
        return {(what, phase, tokens, r): compiled for r in (RANKS if rank is None else (rank,))}

    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(one, programs_of(shape).items())
        return {key: compiled for part in parts for key, compiled in part.items()}


def measure(shape: Shape, rank: int, tables: FactorTables, compiled: dict, bandwidth: float):
    cases = [("decode", t, a) for t in TOKENS for a in ADAPTERS if a <= t]
    cases += [("prefill", PREFILL_TOKENS, a) for a in PREFILL_ADAPTERS]
    chains: dict[int, float] = {}  # the chain's own cost does not depend on the adapters
    for phase, tokens, adapters in cases:
        decode = phase == "decode"
        routings = (decode_routings if decode else prefill_routings)(tokens, adapters)
        links, how = (LINKS, {}) if decode else (PREFILL_LINKS, {"repeats": 5})
        took = {"chain": chains[tokens]} if tokens in chains else {}
        for what in ("chain", "triton", "einsum"):
            if what not in took and (what, phase, tokens, rank) in compiled:
                program = compiled[what, phase, tokens, rank]
                one = seconds(program, *state(shape, tokens), tables, routings, **how)
                took[what] = one / links * 1e6
        chains[tokens] = took["chain"]
        floor = floor_bytes(shape, rank, tokens, adapters) / bandwidth * 1e6
        yield {
            "shape": shape.name, "phase": phase, "rank": rank, "tokens": tokens,
            "adapters": adapters, "floor_us": floor, "chain_us": took["chain"],
            "triton_us": took["triton"] - took["chain"],
            "einsum_us": took["einsum"] - took["chain"] if "einsum" in took else None,
        }  # fmt: skip


def table(rows: list[dict]) -> str:
    lines = ["| shape | rank | tokens | adapters | floor µs | triton µs | x floor | einsum µs |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for r in rows:
        einsum = "" if r["einsum_us"] is None else f"{r['einsum_us']:.1f}"
        lines.append(
            f"| {r['shape']} | {r['rank']} | {r['tokens']} | {r['adapters']} | {r['floor_us']:.2f}"
            f" | {r['triton_us']:.1f} | {r['triton_us'] / r['floor_us']:.1f} | {einsum} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the LoRA kernels.")
    parser.add_argument("--json", type=Path, help="write the figures here")
    out = os.environ.get("OUT")
    path = parser.parse_args().json or (Path(out) / "lora_kernels.json" if out else None)
    if jax.default_backend() != "gpu":
        raise SystemExit("benchmarks.lora_kernels: needs a GPU")
    begun = time.perf_counter()
    bandwidth = read_bandwidth()
    result = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "read_bandwidth": bandwidth, "errors": [], "cases": [],
    }  # fmt: skip
    for shape in SHAPES:
        pool = random_pool(shape)
        tables_of = {rank: make_tables(shape, rank, pool) for rank in RANKS}
        for rank in RANKS:
            for phase in ("decode", "prefill"):
                error = check(shape, rank, tables_of[rank], phase)
                case = {"shape": shape.name, "rank": rank, "phase": phase, "error": error}
                result["errors"].append(case)
                print(f"right: {shape.name} rank {rank} {phase}: error {error:.1e}", flush=True)
        compiled = compile_all(shape, tables_of[RANKS[0]])
        print(f"{shape.name}: compiled at {time.perf_counter() - begun:.0f} s", flush=True)
        for rank in RANKS:
            result["cases"] += measure(shape, rank, tables_of[rank], compiled, bandwidth)
        del pool, tables_of  # the next shape's pool needs the room
        if path:
            path.write_text(json.dumps(result, indent=1))
    print(f"{result['device']}, jax {result['jax']}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(table(result["cases"]))
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
