from __future__ import annotations

import pytest

from jaxlora.errors import ConfigError
from serving.catalog import ModelCatalog, ServedAdapter
from serving.core import AdapterReference
from serving.errors import InvalidRequestError, ModelNotFoundError


def catalog(base: str = "base", aliases=("alias",), adapters=("a", "b/c")) -> ModelCatalog:
    served = {
        name: ServedAdapter(AdapterReference(name, f"key {name}"), f"dir/{name}")
        for name in adapters
    }
    return ModelCatalog(base, "models/base", 128, tuple(aliases), served)


@pytest.mark.parametrize(
    ("named", "adapter"),
    [
        (("base",), None),
        (("alias",), None),
        (("a",), "a"),
        (("b/c",), "b/c"),
        (("base:b/c",), "b/c"),
        (("alias:a",), "a"),
        (("base", "a"), "a"),
        (("base", None, "a"), "a"),
        (("alias", "a", "a"), "a"),
        (("base:a", "a"), "a"),
    ],
)
def test_resolves_to_the_adapter_named(named, adapter):
    reference = catalog().resolve(*named)
    assert reference == (AdapterReference(adapter, f"key {adapter}") if adapter else None)


@pytest.mark.parametrize("named", [("a", "b/c"), ("base:a", None, "b/c"), ("base", "a", "b/c")])
def test_two_different_adapters_are_refused(named):
    with pytest.raises(InvalidRequestError, match="different adapters"):
        catalog().resolve(*named)


def test_missing_model_is_refused():
    with pytest.raises(InvalidRequestError, match="model"):
        catalog().resolve(None, "a")


@pytest.mark.parametrize(
    ("named", "param"),
    [
        (("",), "model"),
        (("nobody",), "model"),
        (("base:",), "model"),
        (("base:nobody",), "model"),
        (("base:a:b/c",), "model"),
        (("nobody:a",), "model"),
        (("a:a",), "model"),
        (("nobody", "a"), "model"),
        (("base", ""), "adapter"),
        (("base", "base"), "adapter"),
        (("a", "nobody"), "adapter"),
        (("a", None, "nobody"), "lora_name"),
    ],
)
def test_unknown_names_are_not_found_and_never_the_base(named, param):
    with pytest.raises(ModelNotFoundError) as caught:
        catalog().resolve(*named)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "names",
    [
        {"adapters": ("base",)},
        {"adapters": ("alias",)},
        {"aliases": ("base",)},
        {"aliases": ("x", "x")},
    ],
)
def test_a_name_given_twice_is_refused(names):
    with pytest.raises(ConfigError, match="already used"):
        catalog(**names)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\n", "é", "x" * 129, "a=b", "a,b", "a\x00"])
@pytest.mark.parametrize("place", ["base", "aliases", "adapters"])
def test_a_name_against_the_rule_is_refused(name, place):
    with pytest.raises(ConfigError, match="128 of the characters"):
        catalog(**{place: name if place == "base" else (name,)})


def test_longest_and_oddest_names_are_fine():
    catalog(base="x" * 128, aliases=(".", "/"), adapters=("A-Z_0.9/", "-"))


def test_cards_say_where_each_model_comes_from():
    cards = {card.id: card for card in catalog().cards()}
    assert list(cards) == ["base", "alias", "a", "b/c"]
    assert (cards["alias"].root, cards["alias"].parent) == ("models/base", None)
    assert (cards["b/c"].root, cards["b/c"].parent) == ("dir/b/c", "base")


def test_catalog_does_not_change_with_what_it_was_made_from():
    adapters = {"a": ServedAdapter(AdapterReference("a", "k"), "dir/a")}
    made = ModelCatalog("base", "models/base", 128, (), adapters)
    adapters.clear()
    assert made.resolve("a") == AdapterReference("a", "k")
