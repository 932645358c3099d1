"""Activated LoRA on a tiny model: peft's answers, and the base's KV before it begins."""

from __future__ import annotations

import numpy as np
import pytest

from serving.engine import EngineCore
from serving.errors import InvocationTokensError
from tests.support.activated import (
    GOLDEN,
    INVOCATION,
    PROMPTS,
    ROWS,
    VOCAB_STRIDE,
    Answer,
    recording_engine,
    run,
)
from tests.tolerances import LOGITS_ATOL


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    """Its KV pool is too small for all of ROWS: some are preempted and computed again."""
    return recording_engine(tmp_path_factory.mktemp("model"), GOLDEN, kv_blocks=9)


@pytest.fixture(scope="module")
def mixed(engine: EngineCore) -> list[Answer]:
    return run(engine, ROWS)


def test_a_mixed_batch_has_pefts_tokens_and_logits_through_preemption(engine, mixed):
    assert engine.scheduler.preemptions > 0
    with np.load(GOLDEN / "answers.npz") as golden:
        for i, (row, (tokens, logits)) in enumerate(zip(ROWS, mixed, strict=True)):
            assert tokens == golden[f"tokens_{i}"].tolist(), row
            wanted = golden[f"logits_{i}"]
            np.testing.assert_allclose(
                logits[:, ::VOCAB_STRIDE], wanted, rtol=0, atol=LOGITS_ATOL, err_msg=str(row)
            )


def test_each_alone_has_its_tokens_of_the_mixed_batch(engine, mixed):
    for row, (tokens, _) in zip(ROWS, mixed, strict=True):
        ((alone, _),) = run(engine, (row,))
        assert alone == tokens, row


def test_before_it_begins_the_bits_are_the_bases(engine):
    start = len(PROMPTS["middle"]) - 6 - len(INVOCATION)
    assert start % 16, "the chunk and the block in which it begins have base tokens too"
    ((_, activated),) = run(engine, (("activated", "middle"),))
    ((_, base),) = run(engine, ((None, "middle"),))
    same = (activated.view(np.uint32) == base.view(np.uint32)).all(axis=1)
    assert same[:start].all() and not same[start:].any()


def test_a_prompt_in_which_it_would_not_begin_is_refused_and_holds_nothing(engine):
    with pytest.raises(InvocationTokensError, match=r"'activated' begins at .* \[7, 30, 7\]"):
        run(engine, (("activated", "absent"),))
    assert not engine.busy
    engine.check_integrity()
