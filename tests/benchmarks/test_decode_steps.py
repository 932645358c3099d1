"""The benchmark of decode steps compiles what it times."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.decode_steps import timed_shapes
from serving.shapes import StepShapes


def test_only_the_timed_batches_and_contexts_are_compiled():
    shapes = StepShapes(2048, (1, 4, 16, 64, 256), (16, 64, 256, 1024), (512, 2048), None, None)
    options = SimpleNamespace(batches=[256, 1, 64, 64], prompt=600)
    timed = timed_shapes(shapes, options)
    assert timed.decode_rows == (1, 64, 256)
    assert timed.prefill_tokens == (1024,) and timed.contexts == (2048,)
    assert timed.max_num_seqs == 256 and timed.prefill_chunk == 1024
