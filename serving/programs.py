"""The compiled programs of a step: embed, a span of layers (one or several times), head.

A span is the run of layers that one program computes. On a GPU it is all of them, so that a step's
launches follow one another without the host. A CPU compiler takes long over every kernel, and a
dispatch costs it nothing beside a layer: there a span is one layer, and layers of the same kind
share one program, which is told which layer it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from jaxlora.adapters.pool import FactorPool
from jaxlora.adapters.routing import AdapterStep, AdapterTables, local_tables
from jaxlora.checkpoints import LoadedModel
from jaxlora.compat import shard_map
from jaxlora.config import ModelConfig
from jaxlora.layers.kv_cache import AttentionInputs, KVCache, kv_specs
from jaxlora.layers.parameter import Params, bind
from jaxlora.models.decoder import Decoder
from pallas_kernels.lora import Backend, Phase
from pallas_kernels.lora.tables import Routing


Specs = dict[str, P]  # parameter path -> how it is cut

# Lets a layer's LoRA kernels run beside its base products. Only decode gains by it.
OVERLAP = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


class LayerInputs(NamedTuple):
    """What the layers of one step are told beside their hidden states."""

    attention: AttentionInputs
    tables: AdapterTables | None  # None: no row has an adapter, nothing of them is in the program
    routing: Routing | None


class Span:
    """Consecutive layers, and the parameters and program that compute them."""

    def __init__(self, layers: range, like: range, params: Params) -> None:
        self.layers = layers
        self.like = like  # the layers whose program this span shares: `layers` itself or earlier
        self.offset = layers.start - like.start
        prefixes = {f"layers.{i}.": f"layers.{i - self.offset}." for i in layers}
        self.params = {
            new + path.removeprefix(old): value
            for old, new in prefixes.items()
            for path, value in params.items()
            if path.startswith(old)
        }


def make_spans(config: ModelConfig, layers_per_program: int, params: Params) -> list[Span]:
    """All layers in spans of `layers_per_program`, sharing programs where their kinds agree."""
    first_like: dict[tuple, range] = {}
    spans = []
    for start in range(0, config.num_layers, layers_per_program):
        layers = range(start, min(start + layers_per_program, config.num_layers))
        kind = tuple(config.windows[layer] for layer in layers)
        spans.append(Span(layers, first_like.setdefault(kind, layers), params))
    return spans


class StepPrograms:
    """The forward pass of a step, as jitted functions over the mesh. Holds no state."""

    def __init__(
        self,
        config: ModelConfig,
        loaded: LoadedModel,
        mesh: Mesh,
        *,
        layers_per_program: int,
        adapters: FactorPool | None,
        backend: Backend | None,
    ) -> None:
        params, specs = loaded.params, loaded.specs
        self._embed_params = _part(params, "embedding.")
        head = "embedding." if config.tie_word_embeddings else "head."
        self._head_params = _part(params, "norm.", head)
        make_step = _StepMaker(adapters, backend)
        embed_specs = _specs_of(self._embed_params, specs)
        self._embed = _embed_program(loaded.model, embed_specs, mesh, make_step)
        head_specs = _specs_of(self._head_params, specs)
        self._head = _head_program(loaded.model, head_specs, mesh, make_step)
        self._adapts_embedding = adapters is not None and adapters.shape.embedding
        self._may_overlap = adapters is not None and mesh.devices.flat[0].platform == "gpu"
        self._spans = make_spans(config, layers_per_program, params)
        self._layers = {
            (span.like, overlap): _layers_program(
                loaded.model,
                span,
                _specs_of(span.params, specs),
                mesh,
                make_step,
                shared=len(self._spans) > 1,
                overlap=overlap,
            )
            for span in self._spans
            if span.like == span.layers
            for overlap in ((False, True) if self._may_overlap else (False,))
        }

    def run(
        self,
        tokens: Int[Array, "tokens"],
        last_token: Int[Array, "lanes"] | None,
        kv: KVCache,
        inputs: LayerInputs,
        *,
        phase: Phase,
    ) -> tuple[KVCache, Float[Array, "tokens hidden"]]:
        """Dispatch a forward pass up to the head. `kv` is donated: use the one returned.

        With `last_token`, `tokens` are lanes whose last tokens are meant.
        """
        adapted = self._adapts_embedding and inputs.tables is not None
        lora = (inputs.tables, inputs.routing) if adapted else (None, None)
        x = self._embed(self._embed_params, tokens, last_token, *lora, phase=phase)
        written: KVCache = ()
        overlap = self._may_overlap and phase == "decode" and inputs.tables is not None
        for span in self._spans:
            span_kv = kv[span.layers.start : span.layers.stop]
            program = self._layers[span.like, overlap]
            x, span_kv = program(span.params, x, span_kv, inputs, span.offset, phase=phase)
            written += span_kv
        return written, x

    def logits(
        self,
        hidden: Float[Array, "tokens hidden"],
        rows: Int[Array, "rows"],
        tables: AdapterTables | None = None,
        routing: Routing | None = None,
    ) -> Float[Array, "rows vocab"]:
        """Dispatch the head over `rows` of `run`'s hidden states: float32, alike on every rank.

        `routing` is that of `rows`, for the decode kernels; None where no adapter's head is wanted.
        """
        return self._head(self._head_params, hidden, rows, tables, routing)


class _StepMaker:
    """Makes the `AdapterStep` of a program's trace, inside shard_map."""

    def __init__(self, adapters: FactorPool | None, backend: Backend | None) -> None:
        self._pool = adapters
        self._backend: Backend | None = backend

    def __call__(
        self,
        tables: AdapterTables | None,
        routing: Routing | None,
        phase: Phase,
        first_layer: int | Int[Array, ""] = 0,
    ) -> AdapterStep | None:
        if tables is None or routing is None:
            return None
        assert self._pool is not None
        shape = self._pool.shape
        return AdapterStep(
            local_tables(tables),
            routing,
            self._pool.modules.kinds,
            shape.max_rank,
            phase,
            self._backend,
            first_layer,
            shape.max_token_rows,
            shape.vector_kinds,
        )

    def specs(self, tables: AdapterTables | None) -> AdapterTables | None:
        """in_specs for a program's tables."""
        return None if tables is None or self._pool is None else self._pool.table_specs


def _embed_program(model: Decoder, specs: Specs, mesh: Mesh, make_step: _StepMaker) -> Callable:
    """(params, tokens, last_token, tables, routing, phase) -> x."""

    @functools.partial(jax.jit, static_argnames="phase")
    def program(params, tokens, last_token, tables, routing, *, phase: Phase):
        def embed(params, tokens, last_token, tables, routing):
            tokens = tokens if last_token is None else last_token[tokens]
            return bind(model, params).embed(tokens, make_step(tables, routing, phase))

        in_specs = (specs, P(), P(), make_step.specs(tables), P())
        return shard_map(embed, mesh, in_specs=in_specs, out_specs=P())(
            params, tokens, last_token, tables, routing
        )

    return program


def _head_program(model: Decoder, specs: Specs, mesh: Mesh, make_step: _StepMaker) -> Callable:
    """(params, x, rows, tables, routing of the rows) -> logits."""

    @jax.jit
    def program(params, x, rows, tables, routing):
        def head(params, x, rows, tables, routing):
            # One kind of kernel for all rows: a row's bits don't hang on how many there are.
            step = make_step(tables, routing, "decode")
            return bind(model, params).logits(x[rows], step)

        in_specs = (specs, P(), P(), make_step.specs(tables), P())
        return shard_map(head, mesh, in_specs=in_specs, out_specs=P())(
            params, x, rows, tables, routing
        )

    return program


def _layers_program(
    model: Decoder,
    span: Span,
    specs: Specs,
    mesh: Mesh,
    make_step: _StepMaker,
    *,
    shared: bool,
    overlap: bool,
) -> Callable:
    """(params, x, kv, inputs, offset, phase) -> (x, kv); x and kv are donated.

    `shared`: several spans may run it, each with its own offset.
    """
    kv_spec = kv_specs(model.config)[span.layers.start : span.layers.stop]

    def layers(params, x, kv, inputs: LayerInputs, offset, *, phase: Phase):
        first_layer = offset if shared else 0
        step = make_step(inputs.tables, inputs.routing, phase, first_layer)
        return bind(model, params).run_layers(span.layers, x, kv, inputs.attention, step)

    @functools.partial(
        jax.jit,
        donate_argnums=(1, 2),
        static_argnames="phase",
        compiler_options=OVERLAP if overlap else None,
    )
    def program(params, x, kv, inputs: LayerInputs, offset, *, phase: Phase):
        input_specs = LayerInputs._make((P(), make_step.specs(inputs.tables), P()))
        return shard_map(
            functools.partial(layers, phase=phase),
            mesh,
            in_specs=(specs, P(), kv_spec, input_specs, P()),
            out_specs=(P(), kv_spec),
        )(params, x, kv, inputs, offset)

    return program


def _part(params: Params, *prefixes: str) -> Params:
    return {path: value for path, value in params.items() if path.startswith(prefixes)}


def _specs_of(params: Params, specs: Specs) -> Specs:
    return {path: specs[path] for path in params}
