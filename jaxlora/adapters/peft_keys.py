"""Names of tensors in adapter_model.safetensors -> the module and factor they are.

Files differ in how they spell a module: with or without peft's "base_model.model.", of a causal
model ("model.layers...") or its bare backbone ("layers..."), with the "language_model" that a
multimodal wrapper inserts, with an adapter's name after lora_A ("default"), with ".base_layer"
where another tuner was wrapped inside. All are one module here, so that the same factors have the
same identity whatever the spelling.
"""

from __future__ import annotations

import dataclasses
import re

from jaxlora.adapters.modules import ModuleTable
from jaxlora.adapters.strict_json import show
from jaxlora.adapters.support import tensor_row
from jaxlora.adapters.support_rows import Action
from jaxlora.errors import AdapterError


MAX_KEY_LENGTH = 512  # the longest real ones have about 120 characters


@dataclasses.dataclass(frozen=True)
class FactorKey:
    """What a tensor is: factor "A" or "B" of a module, by canonical name and as it was spelled."""

    layer: int
    module: str
    side: str
    prefix: str  # of the layers, as spelled: "model.layers"
    spelled: str  # the module's name as spelled, an alias perhaps

    @property
    def path(self) -> str:
        """The module's path when it was trained, which is what the config's patterns match."""
        return f"{self.prefix}.{self.layer}.{self.spelled}"


class KeyReader:
    """Reads tensor names against one base's module table."""

    def __init__(self, modules: ModuleTable, where: str) -> None:
        self._modules = modules
        self._where = where
        self._canonical = {
            name: module.name
            for module in modules.modules
            for name in (module.name, *module.aliases)
        }
        prefixes = "|".join(re.escape(prefix) for prefix in layer_prefixes(modules.layer_prefix))
        self._expression = re.compile(
            rf"(?:base_model\.model\.)?(?P<prefix>{prefixes})\.(?P<layer>0|[1-9][0-9]{{0,5}})\."
            r"(?P<module>[\w.]+?)(?:\.base_layer)?\.lora_(?P<side>[AB])(?:\.default)?\.weight",
            re.ASCII,
        )

    def read(self, key: str) -> FactorKey | None:
        """The factor that a tensor is, or None for one that matters to training only.

        Raises AdapterError for a tensor that is neither: nothing in a file is passed over.
        """
        where = f"{self._where}: {show(key, 160)}"
        row = tensor_row(key) if len(key) <= MAX_KEY_LENGTH else None
        if row is None:
            raise AdapterError(f"{where}: unknown kind of tensor: it can't be applied")
        if row.action is Action.REFUSED:
            raise AdapterError(f"{where}: {row.reason}")
        if row.action is Action.IGNORED:
            return None
        match = self._expression.fullmatch(key)
        if match is None or match["module"] not in self._canonical:
            raise AdapterError(
                f"{where}: matches no module of this base, which has "
                f"{self._modules.layer_prefix}.N.{{{', '.join(self._modules.kinds)}}}"
            )
        layer = int(match["layer"])
        if layer >= self._modules.num_layers:
            raise AdapterError(
                f"{where}: this base has {self._modules.num_layers} layers: an adapter of another"
            )
        module = match["module"]
        return FactorKey(layer, self._canonical[module], match["side"], match["prefix"], module)


def layer_prefixes(canonical: str) -> tuple[str, ...]:
    """The accepted spellings of a table's `layer_prefix`."""
    stem, _, last = canonical.rpartition(".")
    spellings = [canonical, last, f"language_model.{canonical}"]
    if stem:
        spellings += [f"language_model.{last}", f"{stem}.language_model.{last}"]
    return tuple(dict.fromkeys(spellings))
