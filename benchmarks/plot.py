"""Curves as an SVG picture, one below the other: two axes from zero, a line for ours, a paler one to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .results import Curve, number

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 240, 70, 20, 40, 44
INK, OURS, OTHER, GRID = "#333333", "#1565c0", "#9e9e9e", "#e0e0e0"
STEPS = 4


def draw(curves: Sequence[Curve]) -> str:
    """Return the text of an SVG file with one panel for each curve."""
    panels = [f'<g transform="translate(0,{index * HEIGHT})">{panel(curve)}</g>' for index, curve in enumerate(curves)]
    size = f'width="{WIDTH}" height="{HEIGHT * len(curves)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" fill="{INK}">',
            '<rect width="100%" height="100%" fill="white"/>',
            *panels,
            "</svg>\n",
        ]
    )


def panel(curve: Curve) -> str:
    """One curve with its axes and its names."""
    most_x = max(curve.points)
    most_y = max([*curve.points.values(), *curve.compared.values()]) * 1.1 or 1.0
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (right - LEFT) * x / most_x, bottom - (bottom - TOP) * max(0.0, y) / most_y

    parts = [text(LEFT, 22, f"{curve.name}, {curve.unit}", OURS)]
    if curve.compared_with:
        parts.append(text(right, 22, curve.compared_with, OTHER, "end"))
    for step in range(STEPS + 1):
        _, height = at(0, most_y * step / STEPS)
        parts.append(f'<path d="M{LEFT} {height:.1f}H{right}" stroke="{GRID}"/>')
        parts.append(text(LEFT - 6, height + 4, number(most_y * step / STEPS), INK, "end"))
    free_from = 0.0
    for x in curve.points:
        if at(x, 0)[0] >= free_from:  # or the numbers would cover each other
            parts.append(text(at(x, 0)[0], bottom + 16, str(x), INK, "middle"))
            free_from = at(x, 0)[0] + 30
    parts.append(text((LEFT + right) / 2, bottom + 34, curve.x_name, INK, "middle"))
    for points, colour in ((curve.compared, OTHER), (curve.points, OURS)):
        places = [at(x, y) for x, y in points.items()]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return "".join(parts)


def text(x: float, y: float, words: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'
