"""The entries of a report and their hashes. Pure.

An entry is a JSON object with `kind` and `hash`. A report is a list of entries, whose first one has the kind `report`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from subscriber.errors import SubscriberError
from subscriber.sqlstate import DATA_CORRUPTED

FORMAT = "subscriber migrate report 1"
EMBEDDED = re.compile(r'<script type="application/json" id="report">(.*?)</script>', re.DOTALL)

Entry = Mapping[str, Any]


def chained(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries with their hashes."""
    linked: list[Entry] = []
    previous = ""
    for entry in entries:
        previous = _hash(previous, entry)
        linked.append({**entry, "hash": previous})
    return linked


def damaged(entries: Sequence[Entry]) -> int | None:
    """Return the index of the first entry whose hash is wrong. None: there is no such entry."""
    previous = ""
    for number, entry in enumerate(entries):
        previous = _hash(previous, {name: value for name, value in entry.items() if name != "hash"})
        if entry.get("hash") != previous:
            return number
    return None


def _hash(previous: str, entry: Entry) -> str:
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()


def as_json(entries: Sequence[Entry]) -> str:
    """Return a report as JSON, one entry on each line."""
    lines = ",\n".join(json.dumps(entry, ensure_ascii=True) for entry in entries)
    return f"[\n{lines}\n]\n"


def parse(text: str) -> list[Entry]:
    """Read a report from JSON or from the page.

    Raises:
        SubscriberError: the text is no report.
    """
    embedded = EMBEDDED.search(text)
    try:
        entries = json.loads(embedded[1] if embedded else text)
        if entries[0]["format"] != FORMAT or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(entries[0]["format"])
    except (ValueError, LookupError, TypeError) as error:
        raise SubscriberError(
            "the file is not a report of subscriber migrate",
            detail=f"A report has the format {FORMAT!r}.",
            hint="Create one with: subscriber migrate report --output FILE",
            sqlstate=DATA_CORRUPTED,
        ) from error
    return list(entries)


def of_kind(entries: Iterable[Entry], kind: str) -> list[Entry]:
    """Return the entries of a kind, in their order."""
    return [entry for entry in entries if entry["kind"] == kind]
