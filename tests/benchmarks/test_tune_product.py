"""Tuning goes on past choices that do not fit, and shares what compiles alike."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks import tune_product
from benchmarks.tune_product import best_everywhere, candidates, programs, timed
from pallas_kernels.lora.tilings import ProductChoice


A, B, C = (ProductChoice(64, depth, 128, 4, 3) for depth in (64, 128, 256))


def test_a_choice_that_does_not_divide_the_shape_has_no_program():
    assert set(programs([A, B, C], 16, 128, 384)) == {A, B}
    assert programs([A], 16, 100, 128) == {}


@pytest.mark.parametrize("rows", [16, 64])
def test_choices_that_cut_alike_share_a_program(rows):
    of_choice = programs(candidates(rows), rows, 24576, 4096)
    assert len(of_choice) == len(candidates(rows)) > len(set(of_choice.values()))


def test_the_choice_for_other_shapes_ran_on_every_shape():
    assert best_everywhere([{A: 1.0, B: 3.0, C: 2.0}, {B: 3.0, C: 2.0}]) == C
    assert best_everywhere([{A: 1.0}, {B: 1.0}]) is None


def test_a_product_that_does_not_compile_is_said_and_passed_over(capsys):
    def too_large(x, weight):
        raise ValueError("out of shared memory")

    x = functools.partial(jnp.ones, (2, 8), jnp.float32)
    weights = [jnp.ones((4, 8))]
    found = timed({"bad": too_large, "good": lambda x, w: x @ w.T}, x, weights)
    assert set(found) == {"good"} and found["good"] > 0
    assert "bad: 'out of shared memory'" in capsys.readouterr().out


def test_tuning_ends_where_nothing_of_ours_runs(monkeypatch, capsys):
    """As on a CPU, which compiles no kernel of ours."""
    monkeypatch.setattr(tune_product, "SHAPES", [(128, 256)])
    monkeypatch.setattr(tune_product, "candidates", lambda rows: [A])
    weight = jax.random.normal(jax.random.key(0), (128, 256), jnp.bfloat16)
    if jax.default_backend() == "cpu":
        assert tune_product.tune(16, [[weight]]) == {}
        assert "none of ours ran" in capsys.readouterr().out
