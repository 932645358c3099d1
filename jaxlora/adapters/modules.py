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


@dataclasses.dataclass(frozen=True)
class AdaptableModule:
    """One linear module of a decoder layer, by its canonical (transformers) name."""

    name: str  # inside a layer, e.g. "self_attn.q_proj"
    d_in: int
    d_out: int
    parallel: ParallelKind
    aliases: tuple[str, ...] = ()  # other accepted names inside a layer

    def local_widths(self, tp: int) -> tuple[int, int]:
        """(d_in, d_out) of one rank's cut."""
        match self.parallel:
            case ParallelKind.COLUMN:
                return self.d_in, self.d_out // tp
            case ParallelKind.ROW:
                return self.d_in // tp, self.d_out
            case ParallelKind.REPLICATED:
                return self.d_in, self.d_out


@dataclasses.dataclass(frozen=True)
class ModuleTable:
    """Every adaptable module of a model. A module's index in `modules` is its *kind*.

    `vocab_size` is the number of tokens the model embeds: a token that an adapter's config names is
    one of them.
    """

    num_layers: int
    modules: tuple[AdaptableModule, ...]
    layer_prefix: str = "model.layers"
    vocab_size: int = dataclasses.field(kw_only=True)

    @functools.cached_property
    def kinds(self) -> dict[str, int]:
        """Canonical module name -> kind."""
        return {module.name: kind for kind, module in enumerate(self.modules)}

    def path(self, layer: int, name: str) -> str:
        """The module's canonical path, e.g. "model.layers.3.self_attn.q_proj"."""
        return f"{self.layer_prefix}.{layer}.{name}"
