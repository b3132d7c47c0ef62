"""The part of `subscriber status` about tables that are not ready. No I/O here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from subscriber import formatting
from subscriber.remedy import Remedy, command_of, hint_of, json_of


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A table that is not ready."""

    name: str  # schema.table
    state: str  # a value of TABLE_STATES, or SYNC_FAILED
    activity: str | None  # current activity of its table sync worker; None without a worker
    copy_rows: int
    copy_bytes: int
    copy_total_bytes: int  # estimate: bytes on the publisher's disk
    copy_seconds: float | None  # since the copy began; None: not known
    error: str | None
    error_remedy: Remedy | None

    @property
    def error_hint(self) -> str | None:
        """Return the text of `error_remedy`."""
        return hint_of(self.error_remedy)

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated remaining seconds of the copy at its present rate; None if there is no estimate yet."""
        if self.percent is None or not self.copy_bytes or self.copy_seconds is None:
            return None
        return self.copy_seconds * max(0, self.copy_total_bytes - self.copy_bytes) / self.copy_bytes

    @property
    def percent(self) -> int | None:
        """Return the copied percentage; None before the size is known. At most 99, because the size is an estimate."""
        if not self.copy_total_bytes or self.state != "copying":
            return None
        return min(99, self.copy_bytes * 100 // self.copy_total_bytes)


def describe(table: TableStatus) -> str:
    """Describe the progress of a table that is not ready, without the hint of its error."""
    if table.error:
        return f"failed: {table.error}"
    words = table.activity or table.state
    if not table.copy_rows and not table.copy_bytes:
        return words
    copied = f"{table.copy_rows:,} rows, {formatting.in_bytes(table.copy_bytes)}"
    if table.percent is not None:
        copied += f" of about {formatting.in_bytes(table.copy_total_bytes)}, {table.percent} %"
    if table.seconds_left:
        copied += f", about {formatting.in_seconds(max(1, round(table.seconds_left)))} left"
    return f"{words} ({copied})"


def as_json(table: TableStatus) -> dict[str, Any]:
    """Return the table's progress as a JSON value: sizes in bytes, times in seconds."""
    return {
        "table": table.name,
        "state": table.state,
        "activity": table.activity,
        "copy_rows": table.copy_rows,
        "copy_bytes": table.copy_bytes,
        "copy_total_bytes": table.copy_total_bytes,
        "percent": table.percent,
        "seconds_left": None if table.seconds_left is None else round(table.seconds_left, 1),
        "error": table.error,
        "error_hint": table.error_hint,
        "error_command": command_of(table.error_remedy),
        "error_remedy": json_of(table.error_remedy),
    }
