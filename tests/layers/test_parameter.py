from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxlora.config import ModelConfig
from jaxlora.layers.parameter import Piece, WeightSpec, bind, param_specs, weight_specs
from jaxlora.models import build
from tests.support.families import CASES, GOLDEN


def test_merged_pieces_are_cut_each_and_padded_at_their_end() -> None:
    spec = WeightSpec((Piece("a", (7, 3)), Piece("b", (4, 3))), cut=0, tp=2)
    assert [spec.local_shape(piece) for piece in spec.pieces] == [(4, 3), (2, 3)]
    assert spec.shape == (12, 3)
    assert spec.partition == P("tp")


def test_a_cut_along_d_in_keeps_the_rows() -> None:
    spec = WeightSpec((Piece("a", (7, 4)),), cut=1, tp=2)
    assert (spec.shape, spec.partition) == ((7, 4), P(None, "tp"))


def test_a_whole_copy_is_not_cut() -> None:
    spec = WeightSpec((Piece("a", (7,)),), cut=None, tp=2)
    assert (spec.shape, spec.partition) == ((7,), P())


@pytest.mark.parametrize("name", CASES)
def test_the_weights_table_names_every_tensor_once(name: str) -> None:
    model = build(ModelConfig.from_folder(GOLDEN / name), 2, jnp.float32)
    specs = weight_specs(model)
    names = [piece.name for spec in specs.values() for piece in spec.pieces]
    assert len(names) == len(set(names))
    assert param_specs(model).keys() == specs.keys()


def test_bind_fills_a_part_and_leaves_the_rest_abstract() -> None:
    model = build(ModelConfig.from_folder(GOLDEN / "llama"), 1, jnp.float32)
    bound = bind(model, {"norm.weight": jnp.ones(48)})
    np.testing.assert_array_equal(bound.norm.weight[...], np.ones(48))
    assert model.norm.weight.get_value().shape == (48,)
    assert not isinstance(model.norm.weight.get_value(), jnp.ndarray)
