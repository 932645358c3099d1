"""Gather-GEMM kernels that add the LoRA deltas of many adapters to one batch."""

from pallas_kernels.lora.api import (
    Backend,
    Phase,
    add_delta,
    add_delta_gated,
    add_delta_to_parts,
    default_backend,
    expand_add,
    resolve,
    shrink,
    supported_backends,
)
from pallas_kernels.lora.gated import gate
from pallas_kernels.lora.lookup import look_up
from pallas_kernels.lora.product import product_cut, product_parts, sum_parts
from pallas_kernels.lora.tables import SIDE_A, SIDE_B, TILE, FactorTables, Routing, decode_tiles


__all__ = [
    "SIDE_A",
    "SIDE_B",
    "TILE",
    "Backend",
    "FactorTables",
    "Phase",
    "Routing",
    "add_delta",
    "add_delta_gated",
    "add_delta_to_parts",
    "decode_tiles",
    "default_backend",
    "expand_add",
    "gate",
    "look_up",
    "product_cut",
    "product_parts",
    "resolve",
    "shrink",
    "sum_parts",
    "supported_backends",
]
