"""Base rows of mixed batches get the floats of a server without adapters, at every step shape.

On a GPU the model is one that every kernel takes, in bfloat16; on a CPU a tiny one in float32.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxlora.adapters.pool import PoolShape
from serving.build import build_engine
from serving.core import AdapterReference, Request, SamplingParams
from serving.engine import EngineCore
from tests.support.adapters import tiny_adapter
from tests.support.tiny_models import tiny_plan


GPU = jax.default_backend() == "gpu"
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
}
ROWS = (1, 3, 16, 50, 64) if GPU else (1, 3)
ASKED = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
ADAPTERS = 5


def plan_of(folder):
    return tiny_plan(folder, MODEL if GPU else None, max_num_seqs=max(ROWS))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> EngineCore:
    return build_engine(plan_of(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> EngineCore:
    plan = plan_of(tmp_path_factory.mktemp("mixed"))
    adapters = [
        tiny_adapter(f"adapter-{i}", seed=i, rank=1 + 6 * i, modules=plan.modules, size=0.1)
        for i in range(ADAPTERS)
    ]
    shape = PoolShape.for_adapters(
        adapters, plan.modules, 1, plan.dtype.itemsize, memory=None, slots=None, max_rank=None
    )
    return build_engine(dataclasses.replace(plan, adapters=tuple(adapters), pool=shape))


def answers(engine: EngineCore, names: list[str | None]) -> list[list]:
    """Each row's tokens with the logprobs of its candidates, all asked at once."""
    rng = np.random.default_rng(len(names))
    got: dict[str, list] = {}
    for i, name in enumerate(names):
        prompt = tuple(int(t) for t in rng.integers(0, 256, 12))
        reference = None
        if name is not None:
            assert engine.store is not None
            reference = AdapterReference(name, engine.store.keys[name])
        got[f"r{i}"] = []
        engine.add(Request(f"r{i}", prompt, ASKED, reference))
    while engine.busy:
        for output in engine.step():
            got[output.request_id] += output.logprobs or ()
    return list(got.values())


@pytest.mark.pallas
@pytest.mark.parametrize("rows", ROWS)
def test_base_rows_keep_their_floats_beside_adapters(plain, mixed, rows):
    names = [f"adapter-{i % ADAPTERS}" if i % 3 else None for i in range(rows)]
    together = answers(mixed, names)
    alone = answers(plain, [None] * rows)
    for name, mine, base in zip(names, together, alone, strict=True):
        assert len(base) == ASKED.max_tokens
        assert (mine == base) == (name is None)
