"""Compare a report with the databases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from subscriber.migration.report.collect import collect_report
from subscriber.migration.report.document import Entry, damaged, of_kind


async def disagreements(entries: Sequence[Entry], source: str, target: str) -> list[str]:
    """Return a sentence for each difference between a report and the present state of both servers.

    A move that has continued since the report has further steps, and a server in use has other rows. The first kind is
    no difference, because all steps of the report are still recorded. The second one is, because it is not known who
    has changed the rows.

    Args:
        entries: of the report.
        source: the connection string of the source.
        target: the connection string of the target.
    """
    number = damaged(entries)
    if number is not None:
        return [f"the file was changed: the hash of entry {number + 1} of {len(entries)} is wrong"]
    tables = of_kind(entries, "table")
    now = await collect_report(source, target, entries[0]["name"], checksums=bool(tables))
    return [*_servers(entries, now), *_steps(entries, now), *_tables(entries, now)]


def _servers(entries: Sequence[Entry], now: Sequence[Entry]) -> Iterator[str]:
    present = {entry["side"]: entry for entry in of_kind(now, "server")}
    for entry in of_kind(entries, "server"):
        for name in ("system", "database"):
            if entry[name] != present[entry["side"]][name]:
                values = f"{entry[name]} in the report, {present[entry['side']][name]} now"
                yield f"the {entry['side']} is another one: its {name} is {values}"


def _steps(entries: Sequence[Entry], now: Sequence[Entry]) -> Iterator[str]:
    present = {(entry["side"], entry["id"]): _content(entry) for entry in of_kind(now, "step")}
    for entry in of_kind(entries, "step"):
        recorded = present.get((entry["side"], entry["id"]))
        what = f"step {entry['step']} of {entry['command']} at {entry['began']}"
        if recorded is None:
            yield f"the {entry['side']} has no record of {what}"
        elif recorded != _content(entry) and entry["ended"] is not None:
            yield f"the record of {what} on the {entry['side']} is different"


def _content(entry: Entry) -> Entry:
    return {name: value for name, value in entry.items() if name != "hash"}


def _tables(entries: Sequence[Entry], now: Sequence[Entry]) -> Iterator[str]:
    present = {entry["name"]: entry for entry in of_kind(now, "table")}
    for entry in of_kind(entries, "table"):
        counted = present.get(entry["name"], {})
        for side in ("source", "target"):
            there, here = entry[side], counted.get(side)
            if there != here:
                yield f"table {entry['name']} of the {side} has {_rows(here)}; the report has {_rows(there)}"


def _rows(side: Entry | None) -> str:
    return "no such table" if side is None else f"{side['rows']} rows with checksum {side['checksum']}"
