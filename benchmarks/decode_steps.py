"""Milliseconds of a decode step at several batch sizes, base and with many adapters.

The whole engine runs, without HTTP: requests of random tokens are prefilled, then every step
decodes all of them. Reported are the median interval between engine steps and the time of a step's
device programs alone, dispatched back to back with nothing read.

    python -m benchmarks.decode_steps --model benchmarks/models/qwen3-8b --json results.json
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.command import Parser, count, count_or_none
from benchmarks.kernel_profile import device_seconds, summary
from benchmarks.report import write_json
from benchmarks.synthetic import synthetic_adapters
from jaxlora.adapters.pool_shape import PoolShape
from jaxlora.errors import JaxloraError
from serving.build import Plan, build_engine, make_plan
from serving.config import EngineConfig
from serving.core import AdapterReference, Request, SamplingParams
from serving.engine import EngineCore
from serving.shapes import StepShapes


STEPS_BEFORE, STEPS_TIMED = 20, 100
REPEATS = 2
PROFILED_STEPS = 5


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if options.answer <= STEPS_BEFORE + STEPS_TIMED:
        parser.error(f"--answer: wanted more than {STEPS_BEFORE + STEPS_TIMED}, the steps timed")
    try:
        plan = _plan(options)
        started = time.perf_counter()
        engine = build_engine(plan)
    except JaxloraError as error:
        parser.error(str(error))
    rows = []
    print(f"start: {time.perf_counter() - started:.0f} s", flush=True)
    print(
        f"{'batch':>5} {'adapters':>8} {'step ms':>8} {'device ms':>9} {'tokens/s':>9}", flush=True
    )
    for batch in options.batches:
        for adapters in sorted({0, min(1, options.adapters), min(batch, options.adapters)}):
            row = measure(engine, batch, adapters, options)
            rows.append(row)
            print(
                f"{batch:5} {adapters:8} {row['step_ms']:8.2f} {row['device_ms']:9.2f}"
                f" {row['tokens_per_s']:9.0f}",
                flush=True,
            )
            if "kernels" in row:
                print(summary(row["kernels"], PROFILED_STEPS), flush=True)
            if options.json:
                _write(options, rows)  # what is measured is kept, however this ends
    if not options.json:
        _write(options, rows)


def _plan(options) -> Plan:
    plan = make_plan(
        EngineConfig(
            model=options.model,
            load_format="dummy",
            max_num_seqs=max(options.batches),
            max_model_len=options.prompt + options.answer + 1,
            prefill_chunk=options.prefill_chunk,
            kernel_backend=options.kernel_backend,
        )
    )
    plan = dataclasses.replace(plan, shapes=timed_shapes(plan.shapes, options))
    return _with_adapters(plan, options)


def timed_shapes(shapes: StepShapes, options) -> StepShapes:
    """The shapes that the timed steps and their prefill need, to start sooner."""
    return dataclasses.replace(
        shapes,
        decode_rows=tuple(sorted(set(options.batches))),
        prefill_tokens=shapes.prefill_tokens[-1:],
        contexts=tuple(context for context in shapes.contexts if context > options.prompt),
    )


def measure(engine: EngineCore, batch: int, adapters: int, options) -> dict:
    """Decode `batch` requests, the i-th with adapter i modulo `adapters` (0: all base)."""
    medians = []
    last: dict = {}
    for repeat in range(REPEATS):
        ids = _add_requests(engine, batch, adapters, options, repeat)
        while any(not s.decodes for s in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()
        times = []
        for _ in range(STEPS_BEFORE + STEPS_TIMED):
            engine.step()
            times.append(time.perf_counter())
        if sum(s.finish_reason is None for s in engine.scheduler.running) < batch:
            Parser().error(f"--answer {options.answer}: requests ended before the last timed step")
        medians.append(statistics.median(np.diff(times[STEPS_BEFORE:])))
        if repeat == REPEATS - 1:
            last = _device_times(engine, options.profile)
        for request_id in ids:
            engine.abort(request_id)
        while engine.busy:
            engine.step()
    step = min(medians)
    return {
        "batch": batch,
        "adapters": adapters,
        "step_ms": step * 1e3,
        "step_ms_repeats": [median * 1e3 for median in medians],
        "tokens_per_s": batch / step,
        **last,
    }


def _device_times(engine: EngineCore, profile: bool) -> dict:
    """One decode step's device programs alone: the same step dispatched again and again."""
    runner: Any = engine._runner
    sequences = tuple(s for s in engine.scheduler.running if s.decodes and s.finish_reason is None)

    def steps(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            sampled = runner._decode(sequences)
        jax.block_until_ready(sampled.tokens)
        return (time.perf_counter() - started) / count

    steps(3)
    times: dict[str, Any] = {"device_ms": steps(20) * 1e3}
    if profile:
        times["kernels"] = device_seconds(lambda: steps(PROFILED_STEPS) and None)
    return times


def _add_requests(engine: EngineCore, batch: int, adapters: int, options, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    names = list(engine.store.keys) if engine.store else []
    ids = []
    for index in range(batch):
        prompt = tuple(int(token) for token in rng.integers(0, 256, options.prompt))
        reference = None
        if adapters:
            name = names[index % adapters]
            reference = AdapterReference(name, engine.store.keys[name])
        ids.append(f"{batch}-{adapters}-{seed}-{index}")
        sampling = SamplingParams(max_tokens=options.answer, temperature=0.0, ignore_eos=True)
        engine.add(Request(ids[-1], prompt, sampling, reference))
    return ids


def _with_adapters(plan: Plan, options) -> Plan:
    if not options.adapters:
        return plan
    names = [module.name for module in plan.modules.modules]
    modules = [name for name in names if not options.qkvo or name.startswith("self_attn")]
    adapters = synthetic_adapters(
        plan.modules, options.adapters, options.rank, plan.dtype, modules, plan.model.fingerprint
    )
    shape = PoolShape.for_adapters(
        list(adapters), plan.modules, 1, plan.dtype.itemsize, memory=None, slots=None, max_rank=None
    )
    return dataclasses.replace(plan, adapters=adapters, pool=shape)


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("benchmarks/models/qwen3-8b"))
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--adapters", type=count_or_none, default=64)
    parser.add_argument("--rank", type=count, default=16)
    parser.add_argument("--qkvo", action="store_true", help="adapt attention only, not all seven")
    parser.add_argument("--prompt", type=count, default=128)
    parser.add_argument("--answer", type=count, default=383)
    parser.add_argument("--prefill-chunk", type=count, default=None)
    parser.add_argument("--kernel-backend", default=None)
    parser.add_argument("--profile", action="store_true", help="say which kernels take the time")
    parser.add_argument("--json", type=Path, default=None)
    return parser


def _write(options: argparse.Namespace, rows: list[dict]) -> None:
    write_json(options.json, {"options": _jsonable(options), "rows": rows})


def _jsonable(options: argparse.Namespace) -> dict:
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}


if __name__ == "__main__":
    main()
