"""The adaptable modules of a model: what an adapter may edit, and how each is cut over ranks.

A model family exposes one `ModuleTable`. Validation, placement, the slot tables' sizes, the check
tool and the docs all read it; nothing else says what can be adapted.
"""

from __future__ import annotations

import dataclasses
import enum
import functools


class ParallelKind(enum.StrEnum):
    """How a linear module's weight is cut over the tensor-parallel ranks."""

    COLUMN = "column"  # d_out is cut; A whole, B cut
    ROW = "row"  # d_in is cut; A cut, B whole; the delta joins the partial sum before the psum
    REPLICATED = "replicated"


# The modules beside the layers, by their canonical paths.
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclasses.dataclass(frozen=True)
class AdaptableModule:
    """One linear module of a decoder layer, by its canonical (transformers) name.

    The embedding is one too: it takes a one-hot token, so d_in is the vocabulary.
    """

    name: str  # inside a layer, e.g. "self_attn.q_proj"; the whole path of an outer module
    d_in: int
    d_out: int
    parallel: ParallelKind
    aliases: tuple[str, ...] = ()  # other accepted names inside a layer
    bias: bool = False  # whether the base model has a bias there

    def local_widths(self, tp: int) -> tuple[int, int]:
        """(d_in, d_out) of one rank's cut; a vocabulary that `tp` does not divide is padded."""
        match self.parallel:
            case ParallelKind.COLUMN:
                return self.d_in, -(-self.d_out // tp)
            case ParallelKind.ROW:
                return -(-self.d_in // tp), self.d_out
            case ParallelKind.REPLICATED:
                return self.d_in, self.d_out


@dataclasses.dataclass(frozen=True)
class ModuleTable:
    """Every adaptable module of a model: those of each layer, then the outer ones.

    A module's place in that order is its *kind*. An outer module is there once, at layer 0.
    `vocab_size` is the number of tokens the model embeds: a token that an adapter's config names is
    one of them. `tied`: the head's weight is the embedding's.
    """

    num_layers: int
    modules: tuple[AdaptableModule, ...]
    layer_prefix: str = "model.layers"
    outer: tuple[AdaptableModule, ...] = ()
    vocab_size: int = dataclasses.field(kw_only=True)
    tied: bool = dataclasses.field(default=False, kw_only=True)

    @functools.cached_property
    def kinds(self) -> dict[str, int]:
        """Canonical module name -> kind."""
        return {module.name: kind for kind, module in enumerate(self.modules + self.outer)}

    def module(self, name: str) -> AdaptableModule:
        """The module of a canonical name. Raises KeyError."""
        return (self.modules + self.outer)[self.kinds[name]]

    def is_outer(self, name: str) -> bool:
        return all(module.name != name for module in self.modules)

    def path(self, layer: int, name: str) -> str:
        """The module's canonical path, e.g. "model.layers.3.self_attn.q_proj"."""
        return name if self.is_outer(name) else f"{self.layer_prefix}.{layer}.{name}"
