"""The kernel api's refusals, and what can be seen of a GPU's kernels without one."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lora import (
    TILE,
    FactorTables,
    add_delta,
    add_delta_to_parts,
    decode_tiles,
    default_backend,
    expand_add,
    mosaic_gpu,
    pallas_triton,
    product_parts,
    tilings,
)
from pallas_kernels.lora._triton_common import MAX_SPLITS, tiling
from pallas_kernels.lora._triton_product import cut_of
from tests.pallas_kernels.lora import world as wd


HOW = {"layer": 0, "kinds": (0, 1, 2), "max_rank": wd.MAX_RANK, "phase": "decode"}


def gpu_context():
    """Lets JAX lower for an H200 on a machine without a GPU."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    sharding = jax.sharding
    device = sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device))


def lowered(function, *args) -> str:
    with gpu_context():
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def triton_add(y, x, tables, routing, layer, phase, widths, max_rank):
    kinds = tuple(range(len(widths)))
    how = {"kinds": kinds, "phase": phase, "interpret": False}
    args = (tables, routing, layer)
    h = pallas_triton.shrink(x, *args, max_rank=max_rank, **how)
    return pallas_triton.expand_add(y, h, *args, widths=widths, **how)


def call(y=None, x=None, tables=None, slots=(0, 1), tiles=None, **changes):
    default_x, default_y = wd.inputs(len(slots))
    routing = wd.routing(slots)
    return add_delta(
        default_y if y is None else y,
        default_x if x is None else x,
        tables or wd.world().tables,
        routing if tiles is None else routing._replace(tiles=tiles),
        **{**HOW, "widths": wd.WIDTHS, **changes},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase": "train"}, "phase: wanted"),
        ({"kinds": (0, 1, 3)}, "kinds: wanted some of 0 to 2"),
        ({"kinds": ()}, "kinds: wanted"),
        ({"widths": (150, 40)}, "widths: wanted one a kind summing to 318"),
        ({"max_rank": 0}, "max_rank: wanted"),
        ({"tiles": jnp.zeros((2, 8), jnp.int32)}, r"routing.tiles: wanted \[n, 17\]"),
        ({"x": jnp.ones((3, wd.D_IN))}, "x: wanted 2 tokens"),
        ({"y": jnp.ones((3, sum(wd.WIDTHS)))}, r"routing.slots: wanted shape \(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_h_of_another_shape_is_refused():
    _, y = wd.inputs(2)
    with pytest.raises(ValueError, match="h: wanted shape"):
        expand_add(
            y, jnp.ones((3, 1, 2, 8)), wd.world().tables, wd.routing((0, 1)),
            widths=wd.WIDTHS, **HOW,
        )  # fmt: skip


def test_an_unknown_backend_is_refused():
    with pytest.raises(NotImplementedError, match="no LoRA backend 'cuda'"):
        call(backend="cuda")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_a_named_backend_is_never_replaced(backend):
    with pytest.raises(NotImplementedError, match=f"{backend}: needs a GPU"):
        call(backend=backend)


def test_triton_refuses_a_pool_it_cannot_read():
    with pytest.raises(NotImplementedError, match="power of two"):
        call(tables=wd.world(w=96).tables, backend="triton", interpret=True)
    tables = wd.world().tables
    with pytest.raises(NotImplementedError, match="float32 or bfloat16"):
        tables = tables._replace(pool=tables.pool.astype(jnp.float16))
        call(tables=tables, backend="triton", interpret=True)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="mosaic needs jax 0.11")
def test_mosaic_refuses_a_pool_it_cannot_read():
    with pytest.raises(NotImplementedError, match="multiple of 128"):
        mosaic_gpu.check(wd.world(w=64).tables)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="mosaic needs jax 0.11")
def test_mosaic_refuses_a_card_before_hopper():
    card = mock.Mock(compute_capability="8.0")
    refusal = pytest.raises(NotImplementedError, match="compute capability 9.0, this has 8.0")
    with mock.patch("jax.devices", lambda: [card]), refusal:
        mosaic_gpu.check(wd.world().tables)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="mosaic needs jax 0.11")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mosaic_lowers_for_a_gpu(dtype):
    def program(y, x, tables, routing):
        args = (tables, routing, jnp.int32(1))
        h = mosaic_gpu.shrink(x, *args, kinds=(0, 1), max_rank=512)
        return mosaic_gpu.expand_add(y, h, *args, kinds=(0, 1), widths=(4096, 1000))

    text = lowered(program, *shapes(5, 4096, (4096, 1000), 256, dtype, dtype, parts=2))
    assert text.count("mosaic_gpu_v2") >= 2


def test_default_backends():
    assert default_backend("cpu") == "xla"
    assert default_backend("gpu") == "triton"


def shapes(tokens, d_in, widths, w, dtype, y_dtype, parts=1, layers=3, slots=9):
    kinds = len(widths)
    struct = jax.ShapeDtypeStruct
    table = (kinds, layers, slots, parts)
    tables = FactorTables(
        struct((4096, w), dtype),
        struct((kinds, 2, *table[1:]), jnp.int32),
        struct(table, jnp.int32),
        struct(table, jnp.float32),
    )
    routing = wd.Routing(
        struct((tokens,), jnp.int32),
        struct((5, 3), jnp.int32),
        struct((tokens, 1 + TILE), jnp.int32),
    )
    return struct((tokens, sum(widths)), y_dtype), struct((tokens, d_in), y_dtype), tables, routing


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("d_in", "widths", "w", "dtype", "parts"),
    [
        (4096, (4096, 1024, 1024), 256, "bfloat16", 2),
        (12288, (4096,), 256, "bfloat16", 1),
        (1536, (576,), 64, "float32", 1),
    ],
)
def test_pallas_kernels_lower_for_a_gpu(phase, d_in, widths, w, dtype, parts):
    args = shapes(70, d_in, widths, w, dtype, dtype, parts)
    text = lowered(lambda *a: triton_add(*a, 1, phase, widths, 512), *args)
    assert text.count("__gpu$xla.gpu.triton") == (4 if phase == "decode" else 2)
    assert "output_operand_alias" in text


def test_the_delta_beside_a_product_lowers_for_a_gpu():
    y, x, tables, routing = shapes(5, 4096, (4096, 1024), 256, "bfloat16", "bfloat16")
    weight = jax.ShapeDtypeStruct((5120, 4096), jnp.bfloat16)
    choice = tilings.ProductChoice(64, 128, 192, 4, 3)
    cut = cut_of(16, *weight.shape, choice)

    def program(x, weight, tables, routing):
        parts = product_parts(x, weight, dtype=x.dtype, cut=cut, choice=choice)
        how = {"layer": 0, "kinds": (0, 1), "max_rank": 64, "phase": "decode"}
        with mock.patch("jax.default_backend", lambda: "gpu"):
            return add_delta_to_parts(
                parts, x, tables, routing, dtype=x.dtype, widths=(4096, 1024), **how
            )

    text = lowered(program, x, weight, tables, routing)
    assert text.count("__gpu$xla.gpu.triton") == 5
    assert "output_operand_alias" not in text


def test_all_layers_share_one_lowered_pallas_kernel():
    widths = (256, 256)

    def program(y, x, tables, routing):
        entries = pallas_triton.resolve(tables, routing, interpret=False)
        routing = routing._replace(entries=entries)
        for layer in range(3):
            y = triton_add(y, x, tables, routing, layer, "decode", widths, 64)
        return y

    text = lowered(program, *shapes(4, 256, widths, 256, "float32", "float32"))
    assert text.count("__gpu$xla.gpu.triton") == 3


@pytest.mark.parametrize("card", ["a card never tuned", "NVIDIA H200"])
def test_partials_are_few_and_tiles_lie_inside_a_column_block(card):
    for kernel, choice in tilings.choices(card).items():
        for d, w in ((576, 64), (4096, 256), (12288, 256), (53248, 64)):
            cut = tiling(d, w, choice, MAX_SPLITS if kernel.endswith("shrink") else None)
            assert not kernel.endswith("shrink") or cut.programs <= MAX_SPLITS
            assert cut.programs * cut.span >= d
            assert w % cut.columns == 0


@pytest.mark.parametrize("card", ["a card never tuned", "NVIDIA H200"])
def test_a_shrink_beside_a_product_sums_as_the_one_alone_does(card):
    of_card = tilings.choices(card)
    alone, beside = (of_card[f"decode_shrink{how}"] for how in ("", " beside"))
    assert (beside.columns, beside.span) == (alone.columns, alone.span)


@pytest.mark.parametrize("slots", [(), (0,), (3,), (2, 0, 4, 1, 4, 0, 5), (7,) * 40, (0, 9) * 30])
def test_decode_tiles_hold_every_token_with_an_adapter_once(slots):
    slots = np.asarray(slots, np.int32)
    tiles = decode_tiles(slots)
    assert tiles.shape == (len(slots), 1 + TILE)
    seen = []
    for slot, *tokens in tiles:
        real = [t for t in tokens if t < len(slots)]
        assert slot == 0 or real
        assert all(slots[t] == slot for t in real)
        seen += real
    assert sorted(seen) == list(np.flatnonzero(slots))
    used = np.count_nonzero(tiles[:, 0])
    assert (tiles[:used, 0] > 0).all()
    assert used == sum(-(-n // TILE) for n in np.bincount(slots)[1:])


def test_tables_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="tables.scale: wanted"):
        call(tables=wd.world().tables._replace(scale=jnp.ones(3)))
