"""One Delta table of the lake: loaded once, then one commit for each batch, with the position that the table reaches.

**Invariants.** A commit records its position twice. As an application transaction, of which Delta keeps the newest, it
makes a repeated batch harmless. In the commit's metadata, it lets a reader find the version of a position.

**Failure cases.**

- Killed before the commit: nothing has happened.
- Killed after the commit: the repeated batch finds that the table has its position.
- Killed after the commit that adds columns, which comes first: that commit holds no rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction, write_deltalake

from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.quoting import identifier
from subscriber.spark.lake.stage import OP, origin, unchanged, value

APPLICATION = "subscriber"
POSITION = "subscriber.lsn"  # in a commit's metadata: all transactions that ended up to this position are included


def committed(position: Lsn) -> CommitProperties:
    return CommitProperties(
        custom_metadata={POSITION: str(position)}, app_transactions=[Transaction(APPLICATION, int(position))]
    )


def position_of(table: DeltaTable) -> Lsn:
    """Return the position of a table's newest commit; 0 if it has none."""
    return Lsn(table.transaction_version(APPLICATION) or 0)


def version_at(table: DeltaTable, position: Lsn) -> int | None:
    """Return the newest version without transactions after `position`; None if the table begins later."""
    for commit in table.history():
        text = commit.get(POSITION)
        if text is not None and Lsn.parse(text) <= position:
            return int(commit["version"])
    return None


def create(path: Path, schema: pa.Schema, position: Lsn, rows: Iterable[pa.RecordBatch] = ()) -> None:
    """Create a table with these rows, in one commit. An existing table is replaced."""
    reader = pa.RecordBatchReader.from_batches(schema, rows)
    write_deltalake(path, reader, mode="overwrite", schema_mode="overwrite", commit_properties=committed(position))


def apply(
    table: DeltaTable,
    staged: pa.Table,
    names: Sequence[str],
    key: Sequence[int] | None,
    position: Lsn,
    *,
    truncated: bool,
) -> None:
    """Bring a table to `position` with the staged rows of stage.py, in one commit.

    Does nothing if the table has reached the position.

    Args:
        table: the Delta table.
        staged: the staged rows.
        names: the names of the columns, which the staged rows have by number.
        key: indexes of `names`; None for a table without a key.
        position: all transactions up to this position are in the rows.
        truncated: all earlier rows are deleted.

    Raises:
        ApplyError: a changed row is not in the table.
    """
    if position_of(table) >= position:
        return
    _follow(table, _rows(staged, names).schema)
    if truncated:
        rows = _rows(staged.filter(pc.is_in(staged[OP], pa.array(["u", "+"]))), names)
        write_deltalake(table, _like(table, rows), mode="overwrite", commit_properties=committed(position))
    elif key is None:
        _apply_bag(table, staged, names, position)
    else:
        _merge(table, _filled(table, staged, names, key), names, key, position)


def _rows(staged: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return the staged rows with the columns of the table."""
    return pa.table([staged[value(index)] for index in range(len(names))], names=list(names))


def _follow(table: DeltaTable, schema: pa.Schema) -> None:
    """Add the columns that the table does not have yet."""
    known = {field.name for field in table.schema().fields}
    new = [field for field in Schema.from_arrow(schema).fields if field.name not in known]
    if new:
        table.alter.add_columns([Field(field.name, field.type, nullable=True) for field in new])


def _like(table: DeltaTable, rows: pa.Table) -> pa.Table:
    """Return `rows` with all columns of `table`; missing ones are NULL."""
    schema = pa.schema(table.schema().to_arrow())
    columns = [
        rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _apply_bag(table: DeltaTable, staged: pa.Table, names: Sequence[str], position: Lsn) -> None:
    more = _rows(staged.filter(pc.equal(staged[OP], "+")), names)
    fewer = _rows(staged.filter(pc.equal(staged[OP], "-")), names)
    if not len(fewer):
        write_deltalake(table, _like(table, more), mode="append", commit_properties=committed(position))
        return
    # Equal rows cannot be distinguished, so the whole table is written again.
    schema = pa.schema(table.schema().to_arrow())
    rows = Counter(_hashable(table.to_pyarrow_table().select(schema.names)))
    less = Counter(_hashable(_like(table, fewer)))
    if less - rows:
        raise ApplyError("a row was changed that is not in the lake")
    left = pa.Table.from_pylist([dict(row) for row in (rows - less).elements()], schema=schema)
    write_deltalake(
        table, pa.concat_tables([left, _like(table, more)]), mode="overwrite", commit_properties=committed(position)
    )


def _hashable(rows: pa.Table) -> list[tuple[tuple[str, object], ...]]:
    return [tuple(row.items()) for row in rows.to_pylist()]


def _filled(table: DeltaTable, staged: pa.Table, names: Sequence[str], key: Sequence[int]) -> pa.Table:
    """Return the staged rows. Unchanged values of rows with a new key are read from their old key."""
    moved = [index for index, op in enumerate(staged[OP].to_pylist()) if op == "m"]
    if not moved:
        return staged
    rows = staged.to_pylist()
    first = [rows[index][origin(key[0])] for index in moved]
    kind = staged.schema.field(value(key[0])).type
    condition = pc.is_in(pc.field(names[key[0]]), pa.array(first, kind))
    before = {
        tuple(row[names[column]] for column in key): row
        for row in table.to_pyarrow_dataset().scanner(filter=condition).to_table().to_pylist()
    }
    for index in moved:
        row = rows[index]
        old = before.get(tuple(row[origin(column)] for column in key))
        if old is None:
            raise ApplyError("a row was changed that is not in the lake")
        for column, name in enumerate(names):
            if row.get(unchanged(column)):
                row[value(column)], row[unchanged(column)] = old.get(name), False
    return pa.Table.from_pylist(rows, schema=staged.schema)


def _merge(table: DeltaTable, staged: pa.Table, names: Sequence[str], key: Sequence[int], position: Lsn) -> None:
    def source(index: int) -> str:
        return f"source.{value(index)}"

    def target(index: int) -> str:
        return f"target.{identifier(names[index])}"

    def update(index: int) -> str:
        if unchanged(index) not in staged.column_names:
            return source(index)
        return f"CASE WHEN source.{unchanged(index)} THEN {target(index)} ELSE {source(index)} END"

    matches = " AND ".join(f"{target(index)} = {source(index)}" for index in key)
    merge = table.merge(
        staged, matches, source_alias="source", target_alias="target", commit_properties=committed(position)
    )
    merge = merge.when_matched_delete(predicate=f"source.{OP} = 'd'")
    merge = merge.when_matched_update({identifier(name): update(index) for index, name in enumerate(names)})
    merge = merge.when_not_matched_insert(
        {identifier(name): source(index) for index, name in enumerate(names)}, predicate=f"source.{OP} <> 'd'"
    )
    merge.execute()
