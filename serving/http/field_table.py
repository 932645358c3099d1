"""The table of fields as docs/api.md holds it: `python -m serving.http.field_table` prints it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from serving.http.field_rows import Effect, Field, Routes, rows_of
from serving.http.schemas import ChatRequest, CompletionRequest


REQUESTS: dict[Routes, type[msgspec.Struct]] = {
    Routes.COMPLETIONS: CompletionRequest,
    Routes.CHAT: ChatRequest,
}
_TITLES = {
    Routes.COMPLETIONS: "POST /v1/completions",
    Routes.CHAT: "POST /v1/chat/completions",
}


def markdown() -> str:
    """A table for each route: the fields that are honoured, without effect, and refused."""
    lines = []
    for routes, request in REQUESTS.items():
        _, components = msgspec.json.schema_components((request,), ref_template="{name}")
        properties = components[request.__name__]["properties"]
        lines += [f"**`{_TITLES[routes]}`**", ""]
        lines += ["| field | type | effect | |", "|---|---|---|---|"]
        for row in sorted(rows_of(routes), key=lambda row: list(Effect).index(row.effect)):
            cells = (f"`{row.name}`", _type(row, properties), row.effect, row.note)
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _type(row: Field, properties: dict[str, Any]) -> str:
    if row.effect is Effect.REFUSED:
        return ", ".join(f"`{json.dumps(value)}`" for value in (None, *row.off)) + " only"
    return type_text(properties[row.name])


def type_text(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words: "integer 0 to 20", "string or list of string"."""
    if "anyOf" in schema:
        kinds = [type_text(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(kinds)
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    match schema.get("type"):
        case "array":
            return f"list{_most(schema, 'maxItems', '')} of {type_text(schema['items'])}"
        case "string":
            return "string" + _most(schema, "maxLength", " characters")
        case "integer" | "number" as kind:
            return kind + _range(schema)
        case kind:
            return (kind or "object") + _most(schema, "maxProperties", " entries")


def _most(schema: dict[str, Any], key: str, unit: str) -> str:
    return f" up to {schema[key]}{unit}" if key in schema else ""


def _range(schema: dict[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']}, at most {most}"
    if most is not None and abs(most) >= 2**31 - 1:
        return " of 64 bits" if most > 2**31 else f" from {least}"
    if least is None:
        return ""
    return f" from {least}" if most is None else f" {least} to {most}"


if __name__ == "__main__":
    print(markdown(), end="")
