"""The support table, as the reader asks it and as docs/adapters.md shows it.

`python -m jaxlora.adapters.support` prints the table. A row that is taken out changes what the
reader does: what no row covers is refused.
"""

from __future__ import annotations

from typing import Any

from jaxlora.adapters.support_rows import CONFIG_ROWS, FILE_ROWS, TENSOR_ROWS, Action, Place, Row


ROWS: tuple[Row, ...] = CONFIG_ROWS + TENSOR_ROWS + FILE_ROWS


def config_refusal(key: str, value: Any) -> str | None:
    """Why this value of a key of adapter_config.json is refused, or None where it is not."""
    rows = [row for row in CONFIG_ROWS if row.name == key]
    if not rows:
        if value is None or value is False or value == [] or value == {}:
            return None  # an option of some other version, not used
        return "unknown option: what it does to the adapter is not known"
    for row in rows:
        if row.matches(value):
            return row.reason if row.action is Action.REFUSED else None
    return f"not {' or '.join(row.values for row in rows if row.action is not Action.REFUSED)}"


def tensor_row(key: str) -> Row | None:
    """The row of a tensor's key, or None: refused as unknown."""
    return next((row for row in TENSOR_ROWS if row.matches(key)), None)


def file_row(name: str) -> Row:
    """The row of a file's name."""
    return next(row for row in FILE_ROWS if row.matches(name))


def markdown() -> str:
    """The table as docs/adapters.md holds it."""
    lines = []
    for place in Place:
        lines += [f"**{place.capitalize()}**", ""]
        lines += ["| name | values | what happens | why, and what to do |", "|---|---|---|---|"]
        for row in ROWS:
            if row.place is place:
                cells = (f"`{row.name}`", row.values, row.action, row.reason)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
