"""LoRA kernels on one GPU: right, then how long, beside XLA's gather + einsum and the byte floor.

    python -m benchmarks.lora_kernels --json lora_kernels.json --peer vllm/lora/ops/triton_ops

First every shape and rank is checked against float64. Then each case is timed as a chain of LINKS
calls on distinct factors inside one jit with donated state (XLA captures it in command buffers);
the chain's own link, which makes each x depend on the y before it, is timed alone and subtracted.
`floor` is the bytes that must move (factors of the distinct adapters, x and y read, y written, h
written and read) over the read bandwidth measured in the same run. With few adapters the factors of
a chain fit the L2 cache, so such a case may read above the memory's bandwidth.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.command import Parser, file_to_write, folder
from benchmarks.lora_inputs import make_tables, random_pool, read_bandwidth, routing_of
from benchmarks.lora_plot import plot
from benchmarks.lora_table import (
    LINKS,
    PREFILL_LINKS,
    PREFILL_TOKENS,
    RANKS,
    SHAPES,
    TOKENS,
    Shape,
    W,
    case_name,
    cases,
)
from pallas_kernels.lora import (
    Backend,
    FactorTables,
    Phase,
    Routing,
    add_delta,
    decode_tiles,
    resolve,
)


PALLAS: tuple[Backend, ...] = ("triton", "mosaic")
NOISE_US = 0.4  # of a pair, between runs
ROUND_SECONDS = 0.012


def pallas_link(shape: Shape, phase: Phase, rank: int, backend: Backend, y, x, tables, *at):
    routing, layer = at
    return add_delta(
        y, x, tables, routing, layer=layer, kinds=shape.kinds, widths=shape.widths,
        max_rank=rank, phase=phase, backend=backend,
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


def chain(link, links: int, phase: Phase | None = None):
    """A program of `links` calls; with a phase, of the Triton kernels."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(y, x, tables, routing):
        if phase:
            routing = resolve(tables, routing, phase=phase, backend="triton")
        for i in range(links):
            # Apart, or XLA makes the einsum and what follows one kernel.
            y = lax.optimization_barrier(link(y, x, tables, routing, i))
            x = x + y[:, :1] * jnp.asarray(2**-20, x.dtype)
            y, x = lax.optimization_barrier((y, x))
        return y, x

    return run


def state(shape: Shape, tokens: int):
    key = jax.random.split(jax.random.key(1))
    y = jax.random.normal(key[0], (tokens, sum(shape.widths)), jnp.bfloat16)
    return y, jax.random.normal(key[1], (tokens, shape.d_in), jnp.bfloat16)


def seconds(compiled, y, x, tables, routing) -> float:
    """One run of the chain: the median of five rounds of about ROUND_SECONDS."""

    def one_of(repeats: int) -> float:
        nonlocal y, x
        jax.block_until_ready((y, x))
        start = time.perf_counter()
        for _ in range(repeats):
            y, x = compiled(y, x, tables, routing)
        jax.block_until_ready((y, x))
        return (time.perf_counter() - start) / repeats

    one_of(2)
    repeats = max(2, math.ceil(ROUND_SECONDS / one_of(5)))
    return float(np.median([one_of(repeats) for _ in range(5)]))


def floor_bytes(shape: Shape, rank: int, tokens: int, adapters: int) -> int:
    factors = adapters * sum(shape.blocks()) * W * rank * 2
    h = 2 * tokens * len(shape.widths) * rank * 4
    return factors + tokens * (shape.d_in + 2 * sum(shape.widths)) * 2 + h


def check(shape: Shape, rank: int, tables: FactorTables, phase: Phase) -> float:
    """Largest error against float64 over the sum of magnitudes; raises if it is not float32's."""
    slots = np.repeat(np.asarray([3, 0, 17, 64, 1], np.int32), 5)
    starts = (np.arange(5) * 5)[slots[::5] > 0]
    segments = np.stack([slots[starts], starts, np.full(4, 5)], axis=1, dtype=np.int32)
    routing = Routing(*map(jnp.asarray, (slots, segments, decode_tiles(slots))))
    y, x = state(shape, len(slots))
    y = y.astype(jnp.float32)
    link = functools.partial(pallas_link, shape, phase, rank, "triton")
    got = np.asarray(jax.jit(link, static_argnums=4)(y, x, tables, routing, 5))
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


def peer_figures(folder: Path) -> dict:
    """What benchmarks.lora_peer finds: a process a shape to compile, then one to time."""
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "peer.json"
        run = [sys.executable, "-m", "benchmarks.lora_peer", str(folder), "--json", str(found)]
        warming = [subprocess.Popen([*run, "--warm", str(i)]) for i in range(len(SHAPES))]
        if sum(process.wait() for process in warming):
            raise SystemExit("benchmarks.lora_peer failed")
        if subprocess.run(run).returncode:
            raise SystemExit("benchmarks.lora_peer failed")
        return json.loads(found.read_text())


def programs_of(shape: Shape) -> dict:
    """(what, phase, tokens, rank) -> chain; rank 0 where it does not matter."""
    out = {}
    for tokens in TOKENS:
        out["chain", "decode", tokens, 0] = chain(no_link, LINKS)
        for rank in RANKS:
            for name in PALLAS:
                link = functools.partial(pallas_link, shape, "decode", rank, name)
                out[name, "decode", tokens, rank] = chain(link, LINKS, "decode")
            link = functools.partial(einsum_link, shape, rank)
            out["einsum", "decode", tokens, rank] = chain(link, LINKS)
    out["chain", "prefill", PREFILL_TOKENS, 0] = chain(no_link, PREFILL_LINKS)
    for rank in RANKS:
        link = functools.partial(pallas_link, shape, "prefill", rank, "triton")
        out["triton", "prefill", PREFILL_TOKENS, rank] = chain(link, PREFILL_LINKS, "prefill")
    return out


def compile_all(programs: dict, shape: Shape, tables: FactorTables) -> dict:
    """Compile a shape's programs, several at a time."""

    def one(item):
        key, program = item
        _, phase, tokens, _ = key
        y, x = jax.eval_shape(functools.partial(state, shape, tokens))
        return key, program.lower(y, x, tables, routing_of(phase, tokens, 1)).compile()

    with ThreadPoolExecutor(14) as pool:
        return dict(pool.map(one, programs.items()))


def measure(
    shape: Shape, rank: int, tables: FactorTables, compiled: dict, bandwidth: float, peer: dict
):
    chains: dict[int, float] = {}  # the chain's own cost does not depend on the adapters
    for phase, tokens, adapters in cases():
        decode = phase == "decode"
        routing = routing_of(phase, tokens, adapters)
        links = LINKS if decode else PREFILL_LINKS
        took = {"chain": chains[tokens]} if tokens in chains else {}
        for what in ("chain", *PALLAS, "einsum"):
            key = (what, phase, tokens, 0 if what == "chain" else rank)
            if what not in took and key in compiled:
                one = seconds(compiled[key], *state(shape, tokens), tables, routing)
                took[what] = one / links * 1e6
        chains[tokens] = took["chain"]
        floor = floor_bytes(shape, rank, tokens, adapters) / bandwidth * 1e6
        yield {
            "shape": shape.name, "phase": phase, "rank": rank, "tokens": tokens,
            "adapters": adapters, "floor_us": floor, "chain_us": took["chain"],
            **{
                f"{what}_us": took[what] - took["chain"] if what in took else None
                for what in (*PALLAS, "einsum")
            },
            "peer_us": peer.get(case_name(shape, rank, (phase, tokens, adapters))),
        }  # fmt: skip


def table(rows: list[dict]) -> str:
    head = "| shape | r | tokens | adapters | floor | pair | x floor | mosaic | einsum | peer"
    lines = [f"{head} | its best |", "|---|---|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        others = " | ".join(
            "" if r[f"{what}_us"] is None else f"{r[f'{what}_us']:.1f}"
            for what in ("mosaic", "einsum")
        )
        peer = r["peer_us"] or {}
        grids = " | ".join(
            f"{peer[g]:.1f}" if g in peer else "" for g in ("default", "specialised")
        )
        lines.append(
            f"| {r['shape']} | {r['rank']} | {r['tokens']} | {r['adapters']} | {r['floor_us']:.2f}"
            f" | {r['triton_us']:.1f} | {r['triton_us'] / r['floor_us']:.1f} | {others} | {grids} |"
        )
    decode = [r for r in rows if r["phase"] == "decode"]
    ours = np.asarray([r["triton_us"] for r in decode])
    others = {what: [r[f"{what}_us"] for r in decode] for what in ("mosaic", "einsum")}
    if all(r["peer_us"] for r in decode):
        for grid in ("default", "specialised"):
            others[f"peer, {grid} grid"] = [r["peer_us"][grid] for r in decode]
    for name, us in others.items():
        mean = np.exp(np.mean(np.log(np.asarray(us) / ours)))
        faster = int((np.asarray(us) < ours - NOISE_US).sum())
        lines.append(f"{name}: {mean:.2f} x ours, faster in {faster} of {len(ours)} cases")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="Times the LoRA kernels.")
    parser.add_argument(
        "--json", type=file_to_write, help="write the figures here, and a plot beside them"
    )
    parser.add_argument("--peer", type=folder, help="vllm/lora/ops/triton_ops, to be timed as well")
    options, out = parser.parse_args(), os.environ.get("OUT")
    path = options.json or (Path(out) / "lora_kernels.json" if out else None)
    parser.need_gpu()
    begun = time.perf_counter()
    peer = peer_figures(options.peer) if options.peer else {}
    print(f"peer timed at {time.perf_counter() - begun:.0f} s", flush=True)
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
        compiled = compile_all(programs_of(shape), shape, tables_of[RANKS[0]])
        print(f"{shape.name}: compiled at {time.perf_counter() - begun:.0f} s", flush=True)
        for rank in RANKS:
            result["cases"] += measure(shape, rank, tables_of[rank], compiled, bandwidth, peer)
        del pool, tables_of  # the next shape's pool needs the room
        if path:
            path.write_text(json.dumps(result, indent=1))
            path.with_suffix(".svg").write_text(plot(result["cases"]))
    print(f"{result['device']}, jax {result['jax']}, read bandwidth {bandwidth / 1e12:.2f} TB/s")
    print(table(result["cases"]))
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
