"""Bar charts as SVG: one text and one rectangle for each value do not justify a library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_ROW, _LEFT, _WIDTH, _RIGHT, _TOP = 24, 230, 400, 60, 48
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.title{font-weight:600}.bar{fill:#4a7ab5}.over{fill:#c98a3d}"
    ".mark{stroke:#333;stroke-dasharray:4 3}"
)


def bars(title: str, values: Sequence[tuple[str, float]], *, mark: float) -> str:
    """Return a horizontal bar for each (name, value), and a line at `mark`. Higher values have another color."""
    scale = _WIDTH / max(mark * 1.2, *(value for _, value in values))
    height = _TOP + _ROW * len(values) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" height="{height}">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="title" x="12" y="22">{escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(values):
        top = _TOP + _ROW * number
        kind = "bar over" if value > mark else "bar"
        parts += [
            f'<text x="{_LEFT - 10}" y="{top + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{_LEFT}" y="{top + 2}" width="{value * scale:.1f}" height="{_ROW - 8}"/>',
            f'<text x="{_LEFT + value * scale + 6:.1f}" y="{top + 14}">{value:.2f}</text>',
        ]
    at = _LEFT + mark * scale
    parts += [f'<line class="mark" x1="{at:.1f}" y1="{_TOP - 8}" x2="{at:.1f}" y2="{height - 12}"/>', "</svg>"]
    return "\n".join(parts) + "\n"
