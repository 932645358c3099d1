"""Names of tensors in adapter_model.safetensors -> the module they belong to, and as what.

Files differ in how they spell a module: with or without peft's "base_model.model.", of a causal
model ("model.layers...") or its bare backbone ("layers..."), with the "language_model" that a
multimodal wrapper inserts, with an adapter's name after lora_A ("default"), with ".base_layer"
where another tuner was wrapped inside. All are one module here, so that the same factors have the
same identity whatever the spelling.
"""

from __future__ import annotations

import dataclasses
import enum
import re

from jaxlora.adapters.modules import EMBEDDING, HEAD, ModuleTable
from jaxlora.adapters.strict_json import show
from jaxlora.adapters.support import tensor_row
from jaxlora.adapters.support_rows import Action
from jaxlora.errors import AdapterError


MAX_KEY_LENGTH = 512  # the longest real ones have about 120 characters


class Role(enum.Enum):
    """What a tensor is to its module. The value is how a tensor's name ends in peft's files."""

    A = "lora_A.weight"
    B = "lora_B.weight"
    B_BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"  # DoRA's
    BIAS = "bias"  # in place of the base's
    TOKEN_ROWS = "token_adapter.trainable_tokens_delta"
    BASE_COPY = "base_layer.weight"  # peft saves the base's beside an adapted embedding or head


# What a name may end in, behind the module's path. The adapter's name is left out by peft, but not
# by everyone; DoRA's vector was a parameter with a name of its own before it was a module.
_ROLES: tuple[tuple[Role, str], ...] = (
    (Role.A, r"(?:\.base_layer)?\.lora_A(?:\.default)?\.weight"),
    (Role.B, r"(?:\.base_layer)?\.lora_B(?:\.default)?\.weight"),
    (Role.A, r"\.lora_embedding_A(?:\.default)?"),
    (Role.B, r"\.lora_embedding_B(?:\.default)?"),
    (Role.B_BIAS, r"(?:\.base_layer)?\.lora_B(?:\.default)?\.bias"),
    (Role.MAGNITUDE, r"(?:\.base_layer)?\.lora_magnitude_vector(?:\.default)?(?:\.weight)?"),
    (Role.TOKEN_ROWS, r"\.token_adapter\.trainable_tokens_delta(?:\.default)?"),
    (Role.BASE_COPY, r"\.base_layer\.weight"),
    (Role.BIAS, r"(?:\.base_layer)?\.bias"),
)


@dataclasses.dataclass(frozen=True)
class TensorKey:
    """What a tensor is: its role in a module, by canonical name and as it was spelled."""

    layer: int  # 0 for a module beside the layers
    module: str
    role: Role
    prefix: str | None  # of the layers, as spelled: "model.layers"; None: the name does not tell
    path: str  # the module's when it was trained, which is what the config's patterns match


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
        self._outer = outer_paths(modules)
        prefixes = "|".join(re.escape(prefix) for prefix in layer_prefixes(modules.layer_prefix))
        inner = rf"(?P<prefix>{prefixes})\.(?P<layer>0|[1-9][0-9]{{0,5}})\.(?P<module>[\w.]+?)"
        outer = "|".join(re.escape(path) for path in self._outer) or r"(?!)"
        self._expressions = [
            (
                role,
                re.compile(rf"(?:base_model\.model\.)?(?:{inner}|(?P<outer>{outer})){end}", re.A),
            )
            for role, end in _ROLES
        ]

    def read(self, key: str) -> TensorKey | None:
        """What a tensor is, or None for one that matters to training only.

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
        for role, expression in self._expressions:
            match = expression.fullmatch(key)
            if match and match["outer"] is not None:
                return self._read_outer(match["outer"], role, "lora_embedding_" in key, where)
            if match and match["module"] in self._canonical:
                break
        else:
            raise AdapterError(
                f"{where}: matches no module of this base, which has "
                f"{self._modules.layer_prefix}.N.{{{', '.join(self._canonical)}}}"
                f"{''.join(f' and {module.name}' for module in self._modules.outer)}"
            )
        layer, module, prefix = int(match["layer"]), match["module"], match["prefix"]
        if layer >= self._modules.num_layers:
            raise AdapterError(
                f"{where}: this base has {self._modules.num_layers} layers: an adapter of another"
            )
        if "lora_embedding_" in key or role in (Role.TOKEN_ROWS, Role.BASE_COPY):
            raise AdapterError(f"{where}: only an embedding or a head has such a tensor")
        path = f"{prefix}.{layer}.{module}"
        return TensorKey(layer, self._canonical[module], role, prefix, path)

    def _read_outer(self, path: str, role: Role, of_embedding: bool, where: str) -> TensorKey:
        module = self._outer[path]
        of_factors = (Role.A, Role.B)
        if role in of_factors and of_embedding != (module == EMBEDDING):
            kind = "an embedding" if module == EMBEDDING else "a linear module"
            raise AdapterError(f"{where}: factors of another kind of module: {path} is {kind}")
        if role is Role.BIAS or (role is Role.B_BIAS and module == EMBEDDING):
            raise AdapterError(f"{where}: {path} has no bias in this base")
        stem = path.rpartition("embed_tokens")[0]
        return TensorKey(0, module, role, f"{stem}layers" if module == EMBEDDING else None, path)


def layer_prefixes(canonical: str) -> tuple[str, ...]:
    """The accepted spellings of a table's `layer_prefix`."""
    stem, _, last = canonical.rpartition(".")
    spellings = [canonical, last, f"language_model.{canonical}"]
    if stem:
        spellings += [f"language_model.{last}", f"{stem}.language_model.{last}"]
    return tuple(dict.fromkeys(spellings))


def outer_paths(modules: ModuleTable) -> dict[str, str]:
    """The accepted spellings of the modules beside the layers -> their canonical names."""
    spellings = {}
    for module in modules.outer:
        if module.name == EMBEDDING:
            for prefix in layer_prefixes(modules.layer_prefix):
                spellings[f"{prefix.removesuffix('layers')}embed_tokens"] = module.name
        else:
            spellings |= dict.fromkeys((HEAD, f"language_model.{HEAD}"), module.name)
    return spellings
