"""Find the Triton LoRA kernels' tile choices on this card and keep them in tilings.json.

    python -m benchmarks.tune_lora [--dry-run]

Every candidate of a kernel runs over module groups of Qwen3-8B layers at rank 16 ("wide": 64), call
after call; what counts is the geometric mean of a layer's time over the cases of its phase. One
choice serves a phase, whatever the batch: a row's bits must not depend on its neighbours. The
shrink beside a product is not tuned here: it must cut d_in as the one alone does, and what counts
for it is benchmarks.lora_layers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command import Parser
from benchmarks.lora_inputs import routing_of
from benchmarks.lora_layers import GROUPS, MODULES, make_tables
from benchmarks.lora_table import W
from pallas_kernels.lora import Phase, gate, pallas_triton, resolve, tilings
from pallas_kernels.lora.tilings import Choice


LAYERS, RANK, WIDE_RANK = 24, 16, 64
EXPANDED = (GROUPS[0], GROUPS[2])  # the others are alike
TRIED = {
    "shrink": (GROUPS[0], GROUPS[3]),
    "expand": EXPANDED,
    "delta": EXPANDED,
    "gate": (GROUPS[2],),
}
CASES = {
    "decode": [(1, 1), (64, 1), (64, 64)],
    "prefill": [(8192, 1), (8192, 32)],
}


def candidates(kernel: str) -> list[Choice]:
    """Choices worth a try on a card of Hopper's kind."""
    if kernel == "decode_shrink":
        cuts = [(128, 256, 3), (128, 512, 2), (128, 512, 3), (128, 512, 4), (128, 1024, 4)]
        cuts += [(256, 512, 2), (64, 512, 5)]
        out = [Choice(16, 64, r, c, span, 2, s) for c, span, s in cuts for r in (16, 32)]
        return [*out, Choice(16, 64, 16, 128, 512, 1, 3), Choice(16, 64, 16, 128, 512, 4, 4)]
    if kernel.startswith(("decode_expand", "decode_delta")):
        cuts = [(256, 256, 4, 1), (128, 256, 4, 1), (128, 128, 4, 1), (128, 128, 2, 1)]
        cuts += [(64, 64, 2, 1), (128, 256, 2, 1), (256, 512, 4, 1), (128, 256, 4, 3)]
        return [Choice(16, 64, 64, c, span, w, s) for c, span, w, s in cuts]
    if kernel == "prefill_shrink":
        cuts = [(64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 4), (64, 64, 4, 5), (32, 128, 4, 3)]
        return [Choice(t, 0, 64, c, 2048, w, s) for t, c, w, s in cuts]
    if kernel == "prefill_gate":
        cuts = [(32, 128, 4), (16, 128, 4), (16, 256, 4), (32, 64, 4), (32, 128, 8), (64, 128, 8)]
        return [Choice(t, 0, 64, c, c, w, 1) for t, c, w in cuts]
    if kernel == "gate":
        cuts = [(4, 256), (8, 256), (16, 256), (4, 512), (2, 1024), (4, 1024)]
        return [Choice(t, 0, 0, c, c, 4, 1) for t, c in cuts]
    cuts = [(32, 128, 4), (16, 128, 2), (16, 256, 2), (16, 256, 4), (16, 512, 4), (16, 512, 8)]
    return [Choice(t, 0, 64, min(c, 256), c, w, 1) for t, c, w in cuts]


def phase_of(kernel: str) -> Phase:
    return "decode" if kernel.startswith("decode") else "prefill"


@dataclasses.dataclass(frozen=True)
class Trial:
    kernel: str
    choice: Choice
    tokens: int

    @property
    def phase(self) -> Phase:
        return phase_of(self.kernel)

    @property
    def what(self) -> str:
        return self.kernel.split("_")[-1].removesuffix(" wide")

    @property
    def rank(self) -> int:
        return WIDE_RANK if self.kernel.endswith(" wide") else RANK

    def inputs(self):
        """A group's x, or its y and h, for every group."""
        key, out = jax.random.key(0), []
        for group in TRIED[self.what]:
            d_in, d_out = MODULES[group[0]][0], sum(MODULES[k][1] for k in group)
            x = jax.random.normal(key, (self.tokens, d_in), jnp.bfloat16)
            if self.what == "shrink":
                out.append(x)
            else:
                splits = pallas_triton.splits(d_in, W, self.phase, self.rank)
                h = jnp.ones((len(group), splits, self.tokens, self.rank), jnp.float32) / 64
                out.append((jax.random.normal(key, (self.tokens, d_out), jnp.bfloat16), h))
        return out

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def chain(self, state, tables, routing):
        how = {"phase": self.phase, "interpret": False, "cut_by": self.choice}
        routing = resolve(tables, routing, phase=self.phase, backend="triton")
        made = []  # kept, so that no call is left out; they run one after the other all the same
        for layer in range(LAYERS):
            at = (tables, routing, layer)
            for i, kinds in enumerate(TRIED[self.what]):
                if self.what == "shrink":
                    x = state[i]
                    made.append(
                        pallas_triton.shrink(x, *at, kinds=kinds, max_rank=self.rank, **how)
                    )
                    continue
                y, h = state[i]
                if self.kernel == "gate":
                    made.append(gate(y, cut_by=self.choice))
                    continue
                if self.what == "gate":
                    of = {"kinds": kinds, "interpret": False, "cut_by": self.choice}
                    made.append(pallas_triton.prefill_gate(y, h, *at, **of))
                    continue
                widths = tuple(MODULES[k][1] for k in kinds)
                if self.what == "delta":
                    delta = functools.partial(pallas_triton.decode_delta, dtype=y.dtype)
                    of = {"interpret": False, "cut_by": self.choice}
                    made.append(delta(h, *at, kinds=kinds, widths=widths, **of))
                else:
                    y = pallas_triton.expand_add(y, h, *at, kinds=kinds, widths=widths, **how)
                    state[i] = (y, h)
        return state, made

    def compile(self, tables):
        state = jax.eval_shape(self.inputs)
        routing = routing_of(self.phase, self.tokens, 1)
        return self.chain.lower(self, state, tables, routing).compile()


def seconds(compiled, state, tables, routing, repeats: int) -> float:
    state, _ = compiled(state, tables, routing)
    times = []
    for _ in range(3):
        jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(repeats):
            state, _ = compiled(state, tables, routing)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / repeats)
    return float(np.median(times)) / LAYERS


def tune(kernel: str, tables) -> list[dict]:
    """Every candidate's µs a layer, the best first; those that do not compile are said and left."""
    phase = phase_of(kernel)
    cases = CASES[phase]
    trials = [Trial(kernel, c, t) for c in candidates(kernel) for t in {t for t, _ in cases}]

    def compiled_or_none(trial: Trial):
        try:
            return trial.compile(tables)
        except Exception as error:  # the compiler's, of many types
            print(f"  passed over: {trial.choice}: {str(error).strip()[:200]!r}", flush=True)

    with ThreadPoolExecutor(12) as pool:
        compiled = dict(zip(trials, pool.map(compiled_or_none, trials), strict=True))
    rows = []
    for choice in candidates(kernel):
        if any(trial.choice == choice and run is None for trial, run in compiled.items()):
            continue
        us = []
        for tokens, adapters in cases:
            trial = Trial(kernel, choice, tokens)
            routing = routing_of(phase, tokens, adapters)
            repeats = 10 if phase == "decode" else 2
            us.append(1e6 * seconds(compiled[trial], trial.inputs(), tables, routing, repeats))
        rows.append(
            {"choice": choice._asdict(), "us": us, "score": float(np.exp(np.log(us).mean()))}
        )
    if not rows:
        raise SystemExit(f"benchmarks.tune_lora: no candidate of {kernel} runs on this card")
    return sorted(rows, key=lambda row: row["score"])


def main() -> None:
    parser = Parser(description="Tunes the LoRA kernels on this card.")
    alone = [name for name in tilings.choices("") if not name.endswith(" beside")]
    parser.add_argument("--kernels", nargs="+", choices=alone, default=alone)
    parser.add_argument("--dry-run", action="store_true", help="print, but keep nothing")
    options = parser.parse_args()
    parser.need_gpu()
    card, log = jax.devices()[0].device_kind, {}
    tables_of = functools.cache(functools.partial(make_tables, LAYERS))
    for kernel in options.kernels:
        log[kernel] = tune(kernel, tables_of(WIDE_RANK if kernel.endswith(" wide") else RANK))
        if not options.dry_run:
            tilings.keep(card, {kernel: log[kernel][0]["choice"]})
        print(f"{kernel}: us a layer at {CASES[phase_of(kernel)]} (tokens, adapters)")
        for row in log[kernel]:
            us = " ".join(f"{us:7.1f}" for us in row["us"])
            print("  ", us, *(f"{k} {v}" for k, v in row["choice"].items()), flush=True)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "tune_lora.json").write_text(json.dumps(log, indent=1))


if __name__ == "__main__":
    main()
