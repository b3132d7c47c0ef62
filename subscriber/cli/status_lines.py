"""The status of a target's subscriptions, as a line of JSON, as plain lines, and as panels on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from subscriber.display import json_text, printable
from subscriber.status import table_states
from subscriber.status.model import SubscriptionStatus
from subscriber.status.panels import escaped, to_rich
from subscriber.status.report import HINT, as_json, describe, state_in_words
from subscriber.status.snapshot import StatusSnapshot


def to_json(look: StatusSnapshot, statuses: Sequence[SubscriptionStatus]) -> str:
    """Format the status as one line of JSON."""
    document: dict[str, Any] = {
        "time": look.at.isoformat(timespec="milliseconds"),
        "launcher_pid": look.launcher_pid,
        "subscriptions": [as_json(status, look.at) for status in statuses],
    }
    return json_text(document)


def to_text(look: StatusSnapshot, statuses: Sequence[SubscriptionStatus]) -> str:
    """Format the status as plain lines, for a pipe."""
    if not statuses:
        return "no subscriptions"
    lines = []
    for status in statuses:
        lines.append(printable(f"{status.name}: {state_in_words(status)}"))
        lines += [f"  {label:<13} {escaped(label, text, ' ' * 16)}" for label, text in describe(status, look.at)]
        for table in status.not_ready:
            lines.append(printable(f"    {table.name}: {table_states.describe(table)}"))
            if table.error_hint:
                lines.append(f"      {HINT}: {escaped(HINT, table.error_hint, ' ' * 12)}")
    return "\n".join(lines)


def print_status(look: StatusSnapshot, statuses: Sequence[SubscriptionStatus]) -> None:
    """Print the status for people, in colours on a terminal."""
    if not sys.stdout.isatty():
        print(to_text(look, statuses))
        return
    from rich.console import Console

    Console(highlight=False).print(to_rich(look, statuses))
