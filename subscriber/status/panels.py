"""The status of subscriptions as panels on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from subscriber.catalog.store.workers import WorkerState
from subscriber.display import printable, printable_lines
from subscriber.status import table_states
from subscriber.status.model import SubscriptionStatus
from subscriber.status.report import HINT, describe, state_in_words
from subscriber.status.snapshot import StatusSnapshot

if TYPE_CHECKING:
    from rich.console import RenderableType


def escaped(label: str, text: str, indent: str) -> str:
    """Return a text that is safe for a terminal. The commands of a hint keep their own lines, so they can be copied."""
    return printable_lines(text, indent) if label == HINT else printable(text)


def to_rich(look: StatusSnapshot, statuses: Sequence[SubscriptionStatus]) -> RenderableType:
    """Format the status for a terminal."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    if not statuses:
        return Text("no subscriptions")
    panels = []
    for status in statuses:
        style = "red" if status.is_wrong else "green" if status.state == WorkerState.STREAMING else "yellow"
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        for label, text in describe(status, look.at):
            grid.add_row(label, Text(escaped(label, text, ""), style="red" if label == "last error" else ""))
        for table in status.not_ready:
            line = printable(f"{table.name}: {table_states.describe(table)}")
            grid.add_row("", Text(line, style="red" if table.error else "cyan"))
            if table.error_hint:
                grid.add_row(HINT, Text(escaped(HINT, table.error_hint, "")))
        title = Text.assemble((printable(status.name), "bold"), " ", (state_in_words(status), style))
        panels.append(Panel(grid, title=title, title_align="left", border_style=style))
    return Group(*panels)
