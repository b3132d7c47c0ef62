"""The picture of docs/moving.md: transactions over time, from the log that `pgbench --log` writes.

    python -m tools.docs.pause LOG SECONDS_OF_THE_SWITCH PICTURE

The log has no names of servers, so the time of the switch, as seconds since 1970, says where each transaction was.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT = 700, 150  # pixels of the chart
_LEFT, _TOP, _BOTTOM, _RIGHT = 40, 40, 30, 16
BEFORE, AFTER = 2.0, 2.0  # seconds of the picture, before and after the switch
INTERVAL = 0.02  # seconds of a bar
_STYLE = "text{font:13px system-ui,sans-serif;fill:#333}.title{font-weight:600}.old{fill:#4a7ab5}.new{fill:#3d9a6b}"


def transactions(log: str) -> list[float]:
    """Return the end of each transaction, in seconds since 1970. A line that is cut off is left out."""
    fields = (line.split() for line in log.splitlines())
    return [int(found[4]) + int(found[5]) / 1e6 for found in fields if len(found) >= 6]


def picture(ends: Sequence[float], switch: float) -> str:
    """Return the transactions around a switch as SVG: a bar for each INTERVAL, in another color after the switch."""
    start = switch - BEFORE
    count = round((BEFORE + AFTER) / INTERVAL)
    bars = [0] * count
    for end in ends:
        number = int((end - start) / INTERVAL)
        if 0 <= number < count and end >= start:
            bars[number] += 1
    most = max(bars)
    width = WIDTH / count
    last = max(end for end in ends if end < switch)
    first = min(end for end in ends if end >= switch)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + WIDTH + _RIGHT}" height="{_TOP + HEIGHT + _BOTTOM}">',
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="title" x="{_LEFT}" y="22">orders in each 20 ms; no order for {first - last:.2f} s</text>',
        f'<text x="{_LEFT - 8}" y="{_TOP + 10}" text-anchor="end">{most}</text>',
        f'<text x="{_LEFT - 8}" y="{_TOP + HEIGHT}" text-anchor="end">0</text>',
    ]
    for number, value in enumerate(bars):
        if value:
            height = HEIGHT * value / most
            kind = "old" if start + (number + 0.5) * INTERVAL < switch else "new"
            parts.append(
                f'<rect class="{kind}" x="{_LEFT + number * width:.1f}" y="{_TOP + HEIGHT - height:.1f}"'
                f' width="{width:.2f}" height="{height:.1f}"/>'
            )
    for number in range(int(BEFORE + AFTER) + 1):
        x = _LEFT + WIDTH * number / (BEFORE + AFTER)
        anchor = "start" if number == 0 else "middle"
        parts.append(f'<text x="{x:.0f}" y="{_TOP + HEIGHT + 20}" text-anchor="{anchor}">{number} s</text>')
    legend = (("old", "old server", _LEFT + WIDTH - 190), ("new", "new server", _LEFT + WIDTH - 90))
    for kind, name, x in legend:
        parts.append(
            f'<rect class="{kind}" x="{x}" y="12" width="11" height="11"/><text x="{x + 16}" y="22">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(log: str, switch: str, output: str) -> None:
    Path(output).write_text(picture(transactions(Path(log).read_text()), float(switch)))


if __name__ == "__main__":
    main(*sys.argv[1:])
