"""The record of repaired rows in `subscriber.repairs`, which the transaction of the repair writes. Pure.

**Failure cases.** The transaction rolls back: it has changed no row, and there is no record. The answer to COMMIT is
lost: the batch is repeated, finds no differences in the committed rows, and records them no second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from subscriber.apply.relation_map import RelationMapping
from subscriber.display import jsonb_text
from subscriber.lsn import Lsn
from subscriber.repair.changes import Row, RowChanges

RECORD_SIZE = 4 * 1024 * 1024  # characters of values in one row of the table; jsonb has a limit of 255 MiB


@dataclass(frozen=True, slots=True)
class RepairAudit:
    """The record of a repair.

    Attributes:
        command: repair, reseed or resync.
        role: the role that has run the command.
        record_rows: record the rows before and after the repair, in addition to their keys.
    """

    command: str
    role: str
    record_rows: bool = False

    def records(self, changes: RowChanges, mapping: RelationMapping, lsn: Lsn) -> Iterator[str]:
        """Yield rows of `repair_transaction` as JSON, for RECORD_REPAIR."""
        described = list[object]()
        size = 0
        for action, before, after in _actions(changes):
            row = before if before is not None else after
            assert row is not None
            described.append(
                {
                    "action": action,
                    "key": None if mapping.search is None else _values(row, mapping, mapping.search),
                    "row_before": self._row(before, mapping),
                    "row_after": self._row(after, mapping),
                }
            )
            size += sum(len(value or "") for version in (before, after) if version is not None for value in version)
            if size >= RECORD_SIZE:
                yield self._record(described, mapping, lsn)
                described, size = [], 0
        if described:
            yield self._record(described, mapping, lsn)

    def _row(self, row: Row | None, mapping: RelationMapping) -> dict[str, str | None] | None:
        if row is None or not self.record_rows:
            return None
        return _values(row, mapping, range(len(row)))

    def _record(self, described: list[object], mapping: RelationMapping, lsn: Lsn) -> str:
        return jsonb_text(
            {
                "role": self.role,
                "command": self.command,
                "relation": f"{mapping.local.schema}.{mapping.local.name}",
                "lsn": str(lsn),
                "changes": described,
            }
        )


def _actions(changes: RowChanges) -> Iterator[tuple[str, Row | None, Row | None]]:
    """Yield the action of each change, and its row before and after."""
    yield from (("delete", row, None) for row in changes.deletes)
    yield from (("update", before, after) for before, after in changes.updates)
    yield from (("insert", None, row) for row in changes.inserts)


def _values(row: Row, mapping: RelationMapping, numbers: Iterable[int]) -> dict[str, str | None]:
    return {mapping.attributes[number].name: row[number] for number in numbers}
