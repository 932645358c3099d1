"""What fixes every array that adapters take on the device, and the bytes of it."""

from __future__ import annotations

import dataclasses

from jaxlora.adapters.adapter import Adapter, Vector
from jaxlora.adapters.modules import EMBEDDING, HEAD, ModuleTable
from jaxlora.adapters.placement import adapter_row_lengths, row_width, vector_row_lengths
from jaxlora.errors import CapacityError


VECTOR_ITEM_SIZE = 4  # gains and biases are float32 whatever the model's dtype


@dataclasses.dataclass(frozen=True)
class Rows:
    """What adapters take on each rank."""

    factors: int
    vectors: int
    tokens: int

    @classmethod
    def of(cls, adapter: Adapter, modules: ModuleTable, tp: int) -> Rows:
        w = row_width(modules, tp)
        return cls(
            sum(adapter_row_lengths(adapter, modules, tp, w)),
            sum(vector_row_lengths(adapter, modules, tp, w)),
            sum(len(rows.ids) for rows in adapter.stored_token_rows),
        )

    def bytes_beside_factors(self, modules: ModuleTable, tp: int, itemsize: int) -> int:
        tokens = self.tokens and self.tokens * modules.module(EMBEDDING).d_out * itemsize
        return self.vectors * row_width(modules, tp) * VECTOR_ITEM_SIZE + tokens

    def bytes(self, modules: ModuleTable, tp: int, itemsize: int) -> int:
        """All of it, where factors and token rows have `itemsize` bytes an element."""
        factors = self.factors * row_width(modules, tp) * itemsize
        return factors + self.bytes_beside_factors(modules, tp, itemsize)


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """What fixes every array of a pool. `slots` counts the base model's slot 0.

    What no adapter given at start has (vectors, token rows, factors of the embedding or the head)
    has no array, and nothing of it is in the step's programs.
    """

    rows: int
    slots: int
    max_rank: int
    parts: int = 1
    vector_rows: int = 0
    vector_kinds: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())  # by `Vector`
    token_rows: int = 0
    max_token_rows: int = 0  # of one adapter's embedding or head
    embedding: bool = False
    head: bool = False

    @classmethod
    def for_adapters(
        cls,
        adapters: list[Adapter],
        modules: ModuleTable,
        tp: int,
        itemsize: int,
        *,
        memory: int | None,
        slots: int | None,
        max_rank: int | None,
    ) -> PoolShape:
        """The shape that the options ask for, or the smallest that holds `adapters`.

        `memory` is bytes a device; what vectors and token rows take of it, factors don't get.
        Raises CapacityError, naming the option, where the adapters don't fit in what was asked for.
        """
        each = [Rows.of(adapter, modules, tp) for adapter in adapters]
        needed = Rows(*(sum(getattr(r, f.name) for r in each) for f in dataclasses.fields(Rows)))
        rows = needed.factors
        if memory is not None:
            left = memory - needed.bytes_beside_factors(modules, tp, itemsize)
            rows = left // (row_width(modules, tp) * itemsize)
        if needed.factors > rows:
            raise CapacityError(
                f"the adapters need {needed.bytes(modules, tp, itemsize)} bytes a device,"
                f" --adapter-memory gives {memory}"
            )
        if slots is not None and len(adapters) > slots:
            raise CapacityError(f"{len(adapters)} adapters were given, --adapter-slots is {slots}")
        largest = max((adapter.max_rank for adapter in adapters), default=1)
        if max_rank is not None and largest > max_rank:
            raise CapacityError(f"an adapter has rank {largest}, --max-adapter-rank is {max_rank}")
        used = {name for adapter in adapters for name in _outer_modules(adapter, modules)}
        return cls(
            rows,
            1 + (slots if slots is not None else len(adapters)),
            max_rank or largest,
            vector_rows=needed.vectors,
            vector_kinds=_vector_kinds(adapters, modules),
            token_rows=needed.tokens,
            max_token_rows=max(
                (len(rows.ids) for a in adapters for rows in a.token_rows.values()), default=0
            ),
            embedding=EMBEDDING in used,
            head=HEAD in used,
        )

    def lacks(self, adapter: Adapter, modules: ModuleTable) -> str | None:
        """What the adapter needs that these arrays and programs don't have, in words."""
        used = _outer_modules(adapter, modules)
        kinds = _vector_kinds([adapter], modules)
        most = max((len(rows.ids) for rows in adapter.token_rows.values()), default=0)
        if adapter.max_rank > self.max_rank:
            return f"rank {adapter.max_rank}"
        if any(not new <= known for new, known in zip(kinds, self.vector_kinds, strict=True)):
            return "gains or biases"
        if most > self.max_token_rows:
            return f"{most} token rows"
        if EMBEDDING in used and not self.embedding:
            return "an adapted embedding"
        return "an adapted head" if HEAD in used and not self.head else None


def _outer_modules(adapter: Adapter, modules: ModuleTable) -> set[str]:
    sites = {name for _, name in [*adapter.factors, *adapter.biases]}
    return {name for name in sites if modules.is_outer(name)} | set(adapter.token_rows)


def _vector_kinds(
    adapters: list[Adapter], modules: ModuleTable
) -> tuple[frozenset[int], frozenset[int]]:
    gains, biases = (
        frozenset(
            modules.kinds[name]
            for adapter in adapters
            for (_, name), kind in adapter.vectors
            if kind is which
        )
        for which in Vector
    )
    return gains, biases
