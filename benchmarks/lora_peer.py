"""The peer in lora_kernels' table: vLLM's Triton LoRA kernels, default and specialised grid.

    python -m benchmarks.lora_peer FOLDER --json peer.json

FOLDER is `vllm/lora/ops/triton_ops` out of vLLM 0.25.0's wheel; of the rest of vLLM the few names
that it imports are put in its place. Needs torch 2.11 with Triton. A case is a CUDA graph of LINKS
pairs of shrink and expand on distinct weights, replayed; the median of 5.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

from benchmarks.command import Parser, file_to_write, folder
from benchmarks.lora_table import (
    LINKS,
    PREFILL_LINKS,
    PREFILL_TOKENS,
    RANKS,
    SHAPES,
    SLOTS,
    Shape,
    case_name,
    cases,
)


try:
    import torch
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    Parser().error(f"needs torch with Triton: {error}")


def load(folder: Path):
    """(shrink, expand, LoRAKernelMeta) without the rest of vLLM."""

    def module(name: str, **names) -> None:
        made = types.ModuleType(name)
        made.__path__ = []
        vars(made).update(names)
        sys.modules[name] = made

    class Hopper:
        is_cuda = staticmethod(lambda: True)
        has_device_capability = staticmethod(lambda _: True)

    flags = {"VLLM_BATCH_INVARIANT": False, "VLLM_TUNED_CONFIG_FOLDER": None}
    flags |= {"VLLM_LORA_ENABLE_DUAL_STREAM": False, "VLLM_LORA_DISABLE_PDL": False}
    envs = types.SimpleNamespace(**flags)
    module("vllm", envs=envs)
    for package in ("vllm.lora", "vllm.lora.ops", "vllm.utils"):
        module(package)
    module("vllm.lora.ops.triton_ops", __path__=[str(folder)])
    module("vllm.triton_utils", tl=tl, triton=triton)
    module("vllm.logger", init_logger=lambda _: types.SimpleNamespace(warning=print, info=print,
           warning_once=print, info_once=print))  # fmt: skip
    module("vllm.platforms", current_platform=Hopper)
    module("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2)

    def refuse(**_):
        raise AttributeError("no custom ops: the module falls back to the plain function")

    def to_device(values, dtype, device, **_):
        return torch.tensor(values, dtype=dtype, device=device)

    module("vllm.utils.torch_utils", direct_register_custom_op=refuse, async_tensor_h2d=to_device)
    base = "vllm.lora.ops.triton_ops."
    return (
        importlib.import_module(base + "lora_shrink_op").lora_shrink,
        importlib.import_module(base + "lora_expand_op").lora_expand,
        importlib.import_module(base + "lora_kernel_metadata").LoRAKernelMeta,
    )


def weights(shape: Shape, rank: int, links: int):
    def make(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device="cuda") / 16

    return [
        (
            [make(SLOTS, 1, rank, shape.d_in) for _ in shape.widths],
            [make(SLOTS, 1, width, rank) for width in shape.widths],
        )
        for _ in range(links)
    ]


def measure(peer, shape: Shape, rank: int, layers, case, *, warm: bool) -> dict[str, float]:
    """µs a pair: "default" and "specialised"."""
    shrink, expand, meta_class = peer
    _, tokens, adapters = case
    links = PREFILL_LINKS if tokens == PREFILL_TOKENS else LINKS
    x = torch.randn(tokens, shape.d_in, dtype=torch.bfloat16, device="cuda")
    y = torch.zeros(tokens, sum(shape.widths), dtype=torch.bfloat16, device="cuda")
    h = torch.empty(len(shape.widths), tokens, rank, dtype=torch.float32, device="cuda")
    of_token = torch.arange(tokens, dtype=torch.int32, device="cuda")
    of_token = of_token // (tokens // adapters) if case[0] == "prefill" else of_token % adapters
    meta = meta_class.make(SLOTS, tokens, "cuda")
    meta.prepare_tensors(of_token)
    out = {}
    for name, specialised in (("default", False), ("specialised", True)):
        args = meta.meta_args(tokens, specialised)

        def pair(a, b, args=args):
            shrink(x, a, h, *args, 0.5)
            expand(h, b, y, *args, add_inputs=True)

        for a, b in layers[:links]:
            pair(a, b)
        torch.cuda.synchronize()
        if warm:
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for a, b in layers[:links]:
                pair(a, b)
        graph.replay()
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / links * 1e3)
        out[name] = sorted(times)[2]
        right(x, y, layers[:links], of_token, shape, rank, pair)
    return out


def right(x, y, layers, of_token, shape: Shape, rank: int, pair) -> None:
    """Raise unless a pair adds what float32 says, for the first token."""
    a, b = layers[0]
    y.zero_()
    pair(a, b)
    slot = int(of_token[0])
    want = torch.cat(
        [
            b_n[slot, 0].float() @ (a_n[slot, 0].float() @ x[0].float()) * 0.5
            for a_n, b_n in zip(a, b, strict=True)
        ]
    )
    error = (y[0].float() - want).norm() / want.norm()
    if not error < 2e-2:
        raise SystemExit(f"peer wrong: {shape.name} rank {rank}: {float(error):.1e}")


def main() -> None:
    parser = Parser(description="Times vLLM's LoRA kernels.")
    parser.add_argument("folder", type=folder, help="vllm/lora/ops/triton_ops of vLLM 0.25.0")
    parser.add_argument("--json", type=file_to_write, required=True, help="write the figures here")
    parser.add_argument(
        "--warm", type=int, choices=range(len(SHAPES)), help="only compile, for this shape"
    )
    options = parser.parse_args()
    if not (options.folder / "lora_shrink_op.py").is_file():
        parser.error(f"{str(options.folder)!r} does not hold vLLM's lora_shrink_op.py")
    if not torch.cuda.is_available():
        parser.error("needs a GPU, torch sees none")
    peer, found = load(options.folder), {}
    shapes = SHAPES if options.warm is None else SHAPES[options.warm : options.warm + 1]
    for shape in shapes:
        for rank in RANKS:
            layers = weights(shape, rank, 1 if options.warm is not None else LINKS)
            for case in cases():
                warm = options.warm is not None
                found[case_name(shape, rank, case)] = measure(
                    peer, shape, rank, layers, case, warm=warm
                )
            del layers
            torch.cuda.empty_cache()
            utils = sys.modules["vllm.lora.ops.triton_ops.utils"]
            for known in (utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT):
                known.clear()  # by address, which other weights may get now
    if options.warm is None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
