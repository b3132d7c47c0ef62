"""The output of the demo: events in sequence, and on a terminal the current status below them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from subscriber import formatting
from subscriber.demo.compare import TableResult
from subscriber.status.model import SubscriptionStatus
from subscriber.status.panels import to_rich
from subscriber.status.report import state_in_words
from subscriber.status.snapshot import StatusSnapshot

if TYPE_CHECKING:
    from rich.live import Live

PLAIN_INTERVAL = 2.0  # seconds between two status lines if stdout is not a terminal


class View(Protocol):
    def event(self, text: str, *, style: str = "") -> None:
        """Print an event."""

    def show(self, look: StatusSnapshot, statuses: Sequence[SubscriptionStatus], header: str) -> None:
        """Show the current status."""

    def progress(self, text: str) -> None:
        """Show how far a command is."""

    def compared(self, result: TableResult) -> None:
        """Print the comparison of a table."""


class PlainView:
    """Prints lines, each with the seconds since the start."""

    def __init__(self) -> None:
        self._start = monotonic()
        self._shown = 0.0

    def event(self, text: str, *, style: str = "") -> None:
        print(f"{monotonic() - self._start:6.1f} s  {text}", flush=True)

    def show(self, look: StatusSnapshot, statuses: Sequence[SubscriptionStatus], header: str) -> None:
        if monotonic() - self._shown < PLAIN_INTERVAL:
            return
        self._shown = monotonic()
        for status in statuses:
            self.event(f"{summary(status)}; {header}")

    def progress(self, text: str) -> None:
        if monotonic() - self._shown >= PLAIN_INTERVAL:
            self._shown = monotonic()
            self.event(text)

    def compared(self, result: TableResult) -> None:
        self.event(describe_result(result))


class LiveView:
    """Prints events on a terminal, with the status in a panel at the bottom."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._start = monotonic()

    def event(self, text: str, *, style: str = "") -> None:
        from rich.text import Text

        moment = f"{monotonic() - self._start:6.1f} s  "
        self._live.console.print(Text.assemble((moment, "dim"), (text, style)))

    def show(self, look: StatusSnapshot, statuses: Sequence[SubscriptionStatus], header: str) -> None:
        from rich.console import Group
        from rich.text import Text

        self._live.update(Group(to_rich(look, statuses), Text(header, style="dim")), refresh=True)

    def progress(self, text: str) -> None:
        from rich.text import Text

        self._live.update(Text(text, style="dim"), refresh=True)

    def compared(self, result: TableResult) -> None:
        from rich.text import Text

        self._live.update(Text(""), refresh=True)
        self.event(describe_result(result), style="bold red" if result.differs else "green")


@contextmanager
def open_view() -> Iterator[View]:
    """Return a LiveView on a terminal, a PlainView elsewhere."""
    if not sys.stdout.isatty():
        yield PlainView()
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(Text(""), console=Console(highlight=False), auto_refresh=False) as live:
        yield LiveView(live)


def summary(status: SubscriptionStatus) -> str:
    """Format the status as one line."""
    parts = [state_in_words(status)]
    if status.lag_bytes is not None:
        parts.append(f"lag {formatting.in_bytes(status.lag_bytes)}")
    if status.rates is not None:
        parts.append(f"{status.rates.transactions:,.0f} transactions/s")
        parts.append(f"{status.rates.changes:,.0f} changes/s")
    if status.tables:
        parts.append("tables: " + ", ".join(f"{number} {state}" for state, number in status.tables.items()))
    failed = [f"{table.name}: {table.error}" for table in status.not_ready if table.error]
    parts += failed[:1]
    if status.error:
        parts.append(status.error)
    return "; ".join(parts)


def describe_result(result: TableResult) -> str:
    """Format the comparison of a table."""
    name = f"{result.schema}.{result.name}"
    if result.note:
        return f"DIFFERENT  {name}: {result.note}"
    if result.differs:
        only = f"{result.only_source:,} rows only on the publisher, {result.only_target:,} only on the target"
        return f"DIFFERENT  {name}: {only}"
    return f"same  {name}: {formatting.count(result.same, 'row')}"
