"""Kernels are counted as what they are."""

from __future__ import annotations

import pytest

from benchmarks.kernel_profile import OTHER, kind_of


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("product", "matrix products"),
        ("product_3", "matrix products"),
        ("nvjet_tst_128x64_64x8_2x1_v_bz_TNT", "matrix products"),
        ("gemm_fusion_dot_12", "matrix products"),
        ("gate", "gate"),
        ("lora_decode_gate", "lora"),
        ("lora_prefill_gate", "lora"),
        ("lora_decode_shrink", "lora"),
        ("MemcpyD2D", "copies"),
        ("loop_add_fusion", OTHER),
    ],
)
def test_kind_of_a_kernel(kernel, kind):
    assert kind_of(kernel) == kind
