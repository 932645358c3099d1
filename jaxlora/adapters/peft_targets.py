"""Which modules an adapter_config.json targets: peft's rules, to the letter.

Source: `check_target_module_exists` and `LoraConfig.__post_init__` of peft 0.21.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxlora.adapters.patterns import Budget, Pattern
from jaxlora.adapters.strict_json import show
from jaxlora.errors import AdapterError


# peft compares in lower case, and leaves the output layer and embeddings out.
ALL_LINEAR = "all-linear"


class NameList:
    """A list of names, each a whole path or the end of one after a dot."""

    def __init__(self, names: list[str]) -> None:
        self._names = frozenset(names)

    def has_exactly(self, path: str) -> bool:
        return path in self._names

    def matches(self, path: str) -> bool:
        # The ends of the path are few, the names may be many.
        ends = [path]
        while "." in ends[-1]:
            ends.append(ends[-1].partition(".")[2])
        return not self._names.isdisjoint(ends)


@dataclasses.dataclass(frozen=True)
class LayerFilter:
    """layers_to_transform and layers_pattern: does the path lie in one of these layers?"""

    layers: frozenset[int]
    expressions: tuple[re.Pattern[str], ...]

    def accepts(self, path: str) -> bool:
        for expression in self.expressions:
            if match := expression.match(path):
                return int(match["idx"]) in self.layers
        return False


@dataclasses.dataclass(frozen=True)
class Targets:
    """The modules that a config means. Paths are as the adapter was trained, without
    "base_model.model."."""

    target: NameList | Pattern | None  # None: all-linear
    exclude: NameList | Pattern | None
    layers: LayerFilter | None

    def means(self, path: str, *, is_decoder_linear: bool = True) -> bool:
        """Whether peft would adapt the module at `path`. Raises AdapterError (a slow pattern)."""
        if self.exclude is not None and self.exclude.matches(path):
            return False
        if self.target is None:
            return is_decoder_linear
        if isinstance(self.target, Pattern):
            return self.target.matches(path)
        if self.target.has_exactly(path):
            return True  # peft doesn't look at the layer of a module named in full
        return self.target.matches(path) and (self.layers is None or self.layers.accepts(path))


def parse_targets(config: dict[str, Any], where: str, budget: Budget) -> Targets:
    """The target keys of a config whose types are checked. Raises AdapterError."""
    target = config["target_modules"]
    layers = config.get("layers_to_transform")
    pattern = config.get("layers_pattern")
    if isinstance(target, str) and (layers is not None or pattern is not None):
        raise AdapterError(
            f"{where}: layers_to_transform and layers_pattern need a list in target_modules, not "
            f"{show(target)}: write the layers into the regex"
        )
    if pattern and layers is None:
        raise AdapterError(f"{where}: layers_pattern is given without layers_to_transform")
    if target in ([], ""):
        raise AdapterError(f"{where}: target_modules is empty: the adapter edits nothing")
    exclude = config.get("exclude_modules") or None
    return Targets(
        None
        if isinstance(target, str) and target.lower() == ALL_LINEAR
        else _names_or_pattern(target, f"{where}: target_modules", budget),
        None
        if exclude is None
        else _names_or_pattern(exclude, f"{where}: exclude_modules", budget),
        None if layers is None or layers == [] else _layer_filter(layers, pattern, where),
    )


def _names_or_pattern(value: str | list[str], where: str, budget: Budget) -> NameList | Pattern:
    return NameList(value) if isinstance(value, list) else Pattern(value, where, budget)


def _layer_filter(layers: int | list[int], pattern: Any, where: str) -> LayerFilter:
    if not pattern:
        expressions = [r".*?\.[^.]*\.(?P<idx>\d+)\."]
    else:
        names = [pattern] if isinstance(pattern, str) else pattern
        for name in names:
            # A regex in peft. A plain name is all that is ever written, and takes no time to match.
            if not re.fullmatch(r"[\w.]+", name):
                raise AdapterError(
                    f"{where}: layers_pattern {show(name)} is not a plain name like 'layers'"
                )
        expressions = [rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\." for name in names[:16]]
        if len(names) > 16:
            raise AdapterError(f"{where}: layers_pattern has {len(names)} names (at most 16)")
    numbers = frozenset([layers] if isinstance(layers, int) else layers)
    return LayerFilter(numbers, tuple(re.compile(expression) for expression in expressions))
