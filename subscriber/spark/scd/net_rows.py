"""The net effect of a micro-batch on a table, as rows to merge. Runs on executors, on Arrow tables.

**Purpose.** A target with SCD type 1 has one row for each key. With SCD type 2 it has one row for each version of a
row: a version holds from `__START_AT` to before `__END_AT`, which are values of `_seq`. net_rows() computes what a
micro-batch changes in such a target.

    op      SCD   row
    put     1     the row of this key becomes this row
    delete  1     the row of this key is removed
    close   2     the current version of this key ends
    add     2     a version
    empty   both  all rows of the target are removed (1), or all current versions end (2). Comes first

**Invariants.**

- Each value of a row is taken from the change that sent it, so values are never converted. Only keys and names are
  Python objects.
- A value that the publisher did not send, because it did not change, is that of the row before. If the micro-batch does
  not have it, `unsent` names it, and the row of the target with the key `from` has it.
- Versions of a key follow each other without gap or overlap, except where the row did not exist.
- A change of a row that cannot exist raises ApplyError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.errors import ApplyError

Key: TypeAlias = tuple[Any, ...]
_DELETED = None


def value(index: int) -> str:
    """Return the name of a staged column with values of a column of the table."""
    return f"value{index}"


def key(index: int) -> str:
    """Return the name of a staged column with values of a column of the key."""
    return f"key{index}"


def old_key(index: int) -> str:
    """Return the name of a column with values of a column of the key before the change."""
    return f"old{index}"


def origin(index: int) -> str:
    """Return the name of a staged column with the key of the row that has the values that were not sent."""
    return f"from{index}"


@dataclass(slots=True)
class _Version:
    """A row: the change that sent it, and its values from other changes. None: the row of the target at `origin`."""

    change: int
    start: int  # the change from which on the version holds
    others: dict[int, int | None] = field(default_factory=dict)  # by the index of a column
    origin: Key | None = None


class _Staged(NamedTuple):
    op: str
    version: _Version | None
    key_change: int  # the change that has the key
    is_old_key: bool  # it is the key before that change
    start: int | None
    end: int | None


class NetRows:
    """Adds changes in the order of `_seq`, and returns the rows to merge."""

    def __init__(self, columns: Sequence[str], *, history: bool) -> None:
        """Start with a target of unknown rows.

        Args:
            columns: the names of the table's columns.
            history: SCD type 2.
        """
        self._places = {name: index for index, name in enumerate(columns)}
        self._history = history
        self._rows: dict[Key, _Version | None] = {}  # _DELETED: the row does not exist
        self._removed: dict[Key, tuple[int, bool]] = {}  # the change by which the target's row ends, and as _Staged
        self._ended: list[_Staged] = []
        self._emptied: int | None = None

    def truncate(self, change: int) -> None:
        """Add a TRUNCATE."""
        for row in self._rows.values():
            self._end(row, change)
        self._rows.clear()
        self._emptied = change if self._emptied is None else self._emptied

    def delete(self, key: Key, change: int) -> None:
        """Add a DELETE."""
        self._take(key, change, is_old=True)
        self._rows[key] = _DELETED

    def put(self, key: Key, change: int) -> None:
        """Add an INSERT, or a row of a snapshot."""
        self._take(key, change, is_old=False)
        self._rows[key] = _Version(change, change)

    def update(self, before: Key, after: Key, change: int, unsent: Sequence[str]) -> None:
        """Add an UPDATE. `unsent` names the columns whose values were not sent."""
        is_known, row = before in self._rows, self._rows.get(before)
        if row is _DELETED and (is_known or self._emptied is not None):
            raise ApplyError("a row was changed that does not exist")
        version = _Version(change, change)
        if unsent:
            version.origin = before if row is None else row.origin
            for place in map(self._places.__getitem__, unsent):
                version.others[place] = None if row is None else row.others.get(place, row.change)
        self._take(before, change, is_old=True)
        if before != after:
            self._rows[before] = _DELETED
            self._take(after, change, is_old=False)
        self._rows[after] = version

    def _take(self, key: Key, change: int, *, is_old: bool) -> None:
        if key in self._rows:
            self._end(self._rows[key], change)
        elif self._emptied is None:
            self._removed[key] = change, is_old

    def _end(self, row: _Version | None, change: int) -> None:
        if self._history and row is not None:
            self._ended.append(_Staged("add", row, row.change, False, row.start, change))

    def staged(self) -> Iterator[_Staged]:
        """Yield the rows to merge."""
        if self._emptied is not None:
            yield _Staged("empty", None, self._emptied, True, self._emptied, self._emptied)
        is_merged = self._emptied is None or self._history
        for key, (change, is_old) in self._removed.items() if is_merged else ():
            if self._history:
                yield _Staged("close", None, change, is_old, None, change)
            elif self._rows.get(key) is _DELETED:
                yield _Staged("delete", None, change, is_old, None, None)
        yield from self._ended
        for row in self._rows.values():
            if row is not None:
                yield _Staged("add" if self._history else "put", row, row.change, False, row.start, None)


def net_rows(changes: pa.Table, columns: Sequence[str], keys: Sequence[int], *, history: bool) -> pa.Table:
    """Compute the rows to merge.

    Args:
        changes: the columns op, seq, time, unsent, and of each column of the table its value, and of each column of the
            key its former value.
        columns: the names of the table's columns.
        keys: the indexes of the key in `columns`.
        history: SCD type 2.

    Returns:
        The columns op, start, end, start_time, end_time, unsent, and those of value(), key() and origin().

    Raises:
        ApplyError: a change is of a row that cannot exist.
    """
    changes = changes.take(pc.sort_indices(changes["seq"])).combine_chunks()
    net = NetRows(columns, history=history)
    for place, column in enumerate(keys):
        # An old key that was sent completes a new one whose large value did not change.
        known = pc.coalesce(changes[value(column)], changes[old_key(place)])
        changes = changes.set_column(changes.schema.get_field_index(value(column)), value(column), known)
    after = list(zip(*(changes[value(i)].to_pylist() for i in keys), strict=True))
    before = list(zip(*(changes[old_key(i)].to_pylist() for i in range(len(keys))), strict=True))
    named = {columns[i] for i in keys}
    unsent = [[name for name in names or () if name not in named] for names in changes["unsent"].to_pylist()]
    for index, op in enumerate(changes["op"].to_pylist()):
        if op == "t":
            net.truncate(index)
        elif None in after[index]:
            raise _no_key()
        elif op == "d":
            net.delete(before[index], index)
        elif op == "u":
            old = after[index] if None in before[index] else before[index]
            net.update(old, after[index], index, unsent[index])
        else:
            net.put(after[index], index)
    return _table(changes, list(net.staged()), len(columns), keys)


def _no_key() -> ApplyError:
    return ApplyError(
        "a change has no value of a column of the key",
        detail="The publisher identifies rows by other columns.",
        hint="Take a new snapshot with subscriber.spark.write_snapshot(), and apply it to a new table. Leave out the "
        "argument keys, or name the columns of the replica identity.",
    )


def _table(changes: pa.Table, rows: list[_Staged], width: int, keys: Sequence[int]) -> pa.Table:
    def taken(name: str, indexes: Sequence[int | None]) -> pa.ChunkedArray:
        return changes[name].take(pa.array(indexes, pa.int64()))

    starts, ends = [row.start for row in rows], [row.end for row in rows]
    versions = [row.version for row in rows]
    table: dict[str, Any] = {
        "op": pa.array([row.op for row in rows], pa.string()),
        "start": taken("seq", starts),
        "end": taken("seq", ends),
        "start_time": taken("time", starts),
        "end_time": taken("time", ends),
        "unsent": pa.array([_unsent(version) for version in versions], pa.list_(pa.int32())),
    }
    is_old = pa.array([row.is_old_key for row in rows], pa.bool_())
    named = [row.key_change for row in rows]
    for index, column in enumerate(keys):
        new, old = taken(value(column), named), taken(old_key(index), named)
        table[key(index)] = pc.if_else(pc.and_(is_old, pc.is_valid(old)), old, new)
        origins = [None if v is None or v.origin is None or not _unsent(v) else v.origin[index] for v in versions]
        table[origin(index)] = pa.array(origins, changes[value(column)].type)
    for column in range(width):
        sources = [None if v is None else v.others.get(column, v.change) for v in versions]
        table[value(column)] = taken(value(column), sources)
    return pa.table(table)


def _unsent(version: _Version | None) -> list[int] | None:
    if version is None or not version.others:
        return None
    return [place for place, source in version.others.items() if source is None] or None
