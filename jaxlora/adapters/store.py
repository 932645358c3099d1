"""`AdapterStore`: identity keys -> adapters and their slots, and who uses them.

Plain Python. The store decides; a `Loader` (the factor pool on a device, a fake in tests) carries
out. Every adapter given is resident from the start; running out of room is an error, not a wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

from jaxlora.adapters.adapter import Adapter
from jaxlora.errors import AdapterError


class Loader(Protocol):
    """Where factors are kept for the step: `FactorPool`, or a fake."""

    def load(self, adapter: Adapter) -> int:
        """Make the adapter resident; returns its slot. Raises CapacityError, changing nothing."""
        ...

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError for what the identity key of a resident adapter leaves unsaid."""
        ...

    def free(self, slot: int) -> None: ...


@dataclasses.dataclass
class _Resident:
    adapter: Adapter
    slot: int
    pins: int = 0


class AdapterStore:
    """The resident adapters. Two names of the same bytes and strength share one slot."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._by_key: dict[str, _Resident] = {}
        self._key_of: dict[str, str] = {}  # name -> identity key

    @property
    def keys(self) -> dict[str, str]:
        """Name -> identity key, in the order they were added."""
        return dict(self._key_of)

    def add(self, adapter: Adapter) -> None:
        """Make an adapter resident under its name.

        Raises AdapterError where the name is taken or it does not suit the base's weights,
        CapacityError where there is no room.
        """
        if adapter.name in self._key_of:
            raise AdapterError(f"adapter name {adapter.name!r} is given twice")
        if adapter.key in self._by_key:
            self._loader.check(adapter)
        else:
            self._by_key[adapter.key] = _Resident(adapter, self._loader.load(adapter))
        self._key_of[adapter.name] = adapter.key

    def adapter(self, key: str) -> Adapter:
        """The resident adapter of an identity key. Raises KeyError for an unknown key."""
        return self._by_key[key].adapter

    def pin(self, key: str) -> int:
        """Hold an adapter for one request; returns its slot. Raises KeyError for an unknown key."""
        resident = self._by_key[key]
        resident.pins += 1
        return resident.slot

    def unpin(self, key: str) -> None:
        """End one hold. Each `pin` is undone by exactly one `unpin`."""
        resident = self._by_key[key]
        if not resident.pins:
            raise RuntimeError(
                f"adapter {resident.adapter.name!r} is unpinned more often than pinned"
            )
        resident.pins -= 1

    def check_integrity(self, expected_pins: Iterable[str] = ()) -> None:
        """Slots are distinct, names point at resident adapters, pins equal `expected_pins`."""
        slots = [resident.slot for resident in self._by_key.values()]
        assert len(set(slots)) == len(slots), f"slots used twice: {sorted(slots)}"
        assert set(self._key_of.values()) == set(self._by_key), "a name without its adapter"
        expected: dict[str, int] = dict.fromkeys(self._by_key, 0)
        for key in expected_pins:
            expected[key] += 1
        pins = {key: resident.pins for key, resident in self._by_key.items()}
        assert pins == expected, f"pins {pins}, live requests hold {expected}"
