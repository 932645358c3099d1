"""`ModelCatalog`: which names a server answers to, and what each one means. Plain data."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from jaxlora.errors import ConfigError
from serving.core import AdapterReference
from serving.errors import InvalidRequestError, ModelNotFoundError


NAME_PATTERN = re.compile(r"[A-Za-z0-9._/-]{1,128}")


def check_name(name: str, what: str) -> None:
    """Raise ConfigError where `name` can't name a model; `what` says what it was to name."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{what} {name!r} must be 1 to 128 of the characters A-Z a-z 0-9 . _ / -")


@dataclasses.dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter as clients see it: what a request is routed by, and the folder it came from."""

    reference: AdapterReference
    root: str


@dataclasses.dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models. `parent` is the base's name for an adapter, None for the base."""

    id: str
    root: str
    parent: str | None


@dataclasses.dataclass(frozen=True)
class ModelCatalog:
    """The base model under its name and aliases, and the adapters on it.

    Raises ConfigError where a name breaks the rule of names or is given twice.
    """

    base: str
    base_root: str
    max_model_len: int
    aliases: tuple[str, ...] = ()
    adapters: Mapping[str, ServedAdapter] = dataclasses.field(default_factory=dict)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapters", MappingProxyType(dict(self.adapters)))
        check_names(self.base, self.aliases, tuple(self.adapters))

    def resolve(
        self, model: str | None, adapter: str | None = None, lora_name: str | None = None
    ) -> AdapterReference | None:
        """The adapter that a request's fields name, or None where they name the base model alone.

        `model` is an adapter's name, or the base's name or alias, or either of these with `:name`
        behind it. Naming one adapter several times is fine; naming two is InvalidRequestError, as
        is a missing `model`. ModelNotFoundError where a name is unknown.
        """
        if model is None:
            raise InvalidRequestError("you must provide a model parameter", param="model")
        named = {"model": self._adapter_in_model(model), "adapter": adapter, "lora_name": lora_name}
        found = {}
        for param, name in named.items():
            if name is not None:
                found[param] = self._adapter(name, param, model)
        if len({reference.name for reference in found.values()}) > 1:
            given = " and ".join(f"{param} {found[param].name!r}" for param in found)
            raise InvalidRequestError(
                f"the request names different adapters: {given}", param=list(found)[-1]
            )
        return next(iter(found.values()), None)

    def cards(self) -> Iterator[ModelCard]:
        """Every name that /v1/models lists: the base, its aliases, then the adapters."""
        for name in (self.base, *self.aliases):
            yield ModelCard(id=name, root=self.base_root, parent=None)
        for name, served in self.adapters.items():
            yield ModelCard(id=name, root=served.root, parent=self.base)

    def card(self, model: str) -> ModelCard:
        """The card of what `model` names, `base:name` included. Raises ModelNotFoundError."""
        reference = self.resolve(model)
        wanted = reference.name if reference else model
        return next(card for card in self.cards() if card.id == wanted)

    def _adapter_in_model(self, model: str) -> str | None:
        if model in self.adapters:
            return model
        base, colon, name = model.partition(":")
        if base != self.base and base not in self.aliases:
            raise _unknown(model, "model")
        return name if colon else None

    def _adapter(self, name: str, param: str, model: str) -> AdapterReference:
        served = self.adapters.get(name)
        if served is None:
            raise _unknown(model if param == "model" else name, param)
        return served.reference


def check_names(base: str, aliases: tuple[str, ...], adapters: tuple[str, ...]) -> None:
    """Raise ConfigError where a served name breaks the rule of names or is given twice."""
    taken: dict[str, str] = {}
    named = [("model name", base)]
    named += [("alias", name) for name in aliases]
    named += [("adapter name", name) for name in adapters]
    for what, name in named:
        check_name(name, what)
        if name in taken:
            raise ConfigError(f"{what} {name!r} is already used as {taken[name]}")
        taken[name] = what


def _unknown(name: str, param: str) -> ModelNotFoundError:
    what = "model" if param == "model" else "adapter"
    return ModelNotFoundError(f"the {what} {name!r} does not exist", param=param)
