"""A target in a few lines: the rows of each published table are a list in memory.

    python examples/list_target.py SOURCE_DSN SLOT PUBLICATION

A target of your own implements five methods of subscriber.Target. The apply loop decodes, orders and confirms;
the target changes rows, and keeps the position with them. subscriber.target_contract tests that it does so correctly.

Shows: the contract of targets; how rows are found; why a transaction and its position are stored together.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import subscriber
from subscriber import Lsn
from subscriber.targets import base

Row = list[bytes | None]
NOWHERE = Lsn(0)  # before all positions


@dataclass
class Storage:
    """The committed rows and their position. A database keeps them on disk."""

    tables: dict[str, list[Row]] = field(default_factory=dict)
    position: Lsn = NOWHERE


class ListTarget(subscriber.Target):
    """Applies changes to the lists of a Storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._open: dict[str, list[Row]] = {}  # the tables that the open transaction has changed

    @property
    def position(self) -> Lsn:
        return self._storage.position

    async def map_relation(self, remote: base.Relation) -> base.RelationMapping:
        return base.map_same_columns(remote)

    async def change(
        self,
        transaction: base.RemoteTransaction,
        mapping: base.RelationMapping,
        change: base.Insert | base.Update | base.Delete,
    ) -> None:
        rows = self._rows(transaction, mapping)
        if isinstance(change, base.Insert):
            rows.append(change.new.split()[1])
            return
        old = change.old if isinstance(change, base.Delete) or change.old is not None else change.new
        assert old is not None
        index = _find(rows, old.split()[1], mapping.search)
        if index is None:
            return  # a missing row is not an error
        before = rows.pop(index)
        if isinstance(change, base.Update):
            status, values = change.new.split()
            kept = [kind == base.UNCHANGED_VALUE for kind in status]
            rows.append([before[i] if keep else values[i] for i, keep in enumerate(kept)])

    async def truncate(
        self, transaction: base.RemoteTransaction, mappings: list[base.RelationMapping], truncate: base.Truncate
    ) -> None:
        for mapping in mappings:
            self._rows(transaction, mapping).clear()

    async def commit(self, transaction: base.RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        self._storage.tables.update(self._open)
        self._storage.position = end_lsn
        self._open.clear()
        on_committed()

    def _rows(self, transaction: base.RemoteTransaction, mapping: base.RelationMapping) -> list[Row]:
        transaction.is_open_on_target = True
        return self._open.setdefault(mapping.label, list(self._storage.tables.get(mapping.label, [])))


def _find(rows: list[Row], old: Row, key: tuple[int, ...] | None) -> int | None:
    columns = range(len(old)) if key is None else key
    return next((i for i, row in enumerate(rows) if all(row[c] == old[c] for c in columns)), None)


async def run(source: str, slot: str, publication: str, *, until: Lsn | None = None) -> Storage:
    """Apply changes until canceled, or up to `until`."""
    storage = Storage()
    await subscriber.apply_to(ListTarget(storage), source, slot=slot, publications=[publication], until=until)
    return storage


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:4]))
