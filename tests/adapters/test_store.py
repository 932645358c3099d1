"""The store: names, identity keys and pins."""

from __future__ import annotations

import pytest

from jaxlora.adapters.store import AdapterStore
from jaxlora.errors import AdapterError, CapacityError
from tests.support.adapters import CountingLoader, tiny_adapter


def test_a_name_is_taken_once():
    store = AdapterStore(CountingLoader())
    store.add(tiny_adapter("a"))
    with pytest.raises(AdapterError, match="'a' is given twice"):
        store.add(tiny_adapter("a", seed=1))


def test_two_names_of_the_same_bytes_share_a_slot_and_another_strength_does_not():
    store = AdapterStore(CountingLoader())
    for adapter in (tiny_adapter("a"), tiny_adapter("b"), tiny_adapter("c", strength=0.5)):
        store.add(adapter)
    slots = [store.pin(store.keys[name]) for name in "abc"]
    assert slots[0] == slots[1] != slots[2]
    store.check_integrity([store.keys[name] for name in "abc"])


def test_no_room_is_an_error_that_changes_nothing():
    store = AdapterStore(CountingLoader(slots=1))
    store.add(tiny_adapter("a"))
    with pytest.raises(CapacityError):
        store.add(tiny_adapter("b", seed=1))
    assert list(store.keys) == ["a"]
    store.check_integrity()


def test_each_pin_is_undone_exactly_once():
    store = AdapterStore(CountingLoader())
    store.add(tiny_adapter("a"))
    key = store.keys["a"]
    store.pin(key)
    with pytest.raises(AssertionError, match="live requests"):
        store.check_integrity()
    store.unpin(key)
    store.check_integrity()
    with pytest.raises(RuntimeError, match="unpinned more often"):
        store.unpin(key)
