"""A plot of the LoRA kernels' time over the byte floor, as SVG."""

from __future__ import annotations

import math


WIDTH, HEIGHT, LEFT, TOP, PANEL, GAP = 900, 300, 60, 40, 180, 30
SERIES = (("triton", "#1f77b4"), ("mosaic", "#2ca02c"), ("einsum", "#999999"), ("peer", "#d62728"))
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def _times(row: dict) -> dict[str, float]:
    peer = row["peer_us"]
    found = {name: row[f"{name}_us"] for name in ("triton", "mosaic", "einsum")}
    found["peer"] = peer["default"] if peer else None
    return {name: us for name, us in found.items() if us is not None}


def _y(ratio: float) -> float:
    share = math.log10(min(max(ratio, 1), 1000)) / 3
    return TOP + HEIGHT * (1 - share)


def plot(cases: list[dict]) -> str:
    """Time over floor of the decode cases of rank 16, a panel a shape, logarithmic."""
    rows = [r for r in cases if r["phase"] == "decode" and r["rank"] == 16]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{TOP + HEIGHT + 70}"'
        ' font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for tick in TICKS:
        y = _y(tick)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{tick}x</text>')
    for n, shape in enumerate(shapes):
        out += _panel(LEFT + n * (PANEL + GAP), shape, [r for r in rows if r["shape"] == shape])
    for n, (name, color) in enumerate(SERIES):
        x = LEFT + n * 90
        out.append(f'<circle cx="{x}" cy="{TOP + HEIGHT + 58}" r="4" fill="{color}"/>')
        out.append(f'<text x="{x + 8}" y="{TOP + HEIGHT + 62}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])


def _panel(left: float, shape: str, rows: list[dict]) -> list[str]:
    step = PANEL / max(len(rows), 1)
    out = [
        f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{shape.replace(">", "&gt;")}</text>'
    ]
    for i, row in enumerate(rows):
        x = left + (i + 0.5) * step
        label = f"{row['tokens']}/{row['adapters']}"
        at = f'x="{x:.1f}" y="{TOP + HEIGHT + 12}"'
        turned = f'transform="rotate(60 {x:.1f} {TOP + HEIGHT + 12})"'
        out.append(f"<text {at} {turned}>{label}</text>")
        times = _times(row)
        for name, color in SERIES:
            if name in times:
                y = _y(times[name] / row["floor_us"])
                out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')
    return out
