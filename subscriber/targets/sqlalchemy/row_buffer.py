"""RowBuffer: the changes of rows in one transaction of a database that SQLAlchemy speaks to.

Rows are written by key: an inserted or changed row exists afterwards, whether it existed before or not. Consecutive
rows that need the same statement are sent together.
"""

from __future__ import annotations

from sqlalchemy import delete

from subscriber.targets.sqlalchemy.table import Key, TargetTable, Texts
from subscriber.targets.sqlalchemy.transaction import SqlTransaction

ROWS = 1000  # sent together at most


class RowBuffer:
    """The changes of one transaction of the target that have not been sent yet."""

    def __init__(self, transaction: SqlTransaction) -> None:
        self._transaction = transaction
        self._table: TargetTable | None = None
        self._columns: tuple[str, ...] | None = None  # None: rows to be deleted
        self._rows: dict[Key, Texts] = {}  # by key, the last one of each: the others would be replaced by it

    async def upsert(self, table: TargetTable, row: Texts) -> None:
        """The row is there afterwards."""
        await self._add(table, tuple(row), row)

    async def delete(self, table: TargetTable, row: Texts) -> None:
        """Delete the row with the key of `row`. The other values are ignored."""
        await self._add(table, None, row)

    async def update(self, table: TargetTable, key: Texts, row: Texts) -> bool:
        """Change a row whose key may change, or with unknown columns. Returns False if it does not exist."""
        await self.flush()
        values = {f"new_{name}": value for name, value in table.values(row).items()}
        done = await self._transaction.execute(table.update(row.keys()), table.key_parameters(key) | values)
        return bool(done.rowcount)

    async def truncate(self, table: TargetTable) -> None:
        """No row is there afterwards."""
        await self.flush()
        await self._transaction.execute(delete(table.table))

    async def _add(self, table: TargetTable, columns: tuple[str, ...] | None, row: Texts) -> None:
        if table is not self._table or columns != self._columns or len(self._rows) >= ROWS:
            await self.flush()
            self._table, self._columns = table, columns
        self._rows[table.key_of(row)] = row

    async def flush(self) -> None:
        """Send the appended rows."""
        table, rows = self._table, list(self._rows.values())
        if table is None or not rows:
            return
        self._rows.clear()
        if self._columns is not None:
            statements = table.upsert(self._columns)
        elif table.delete_all is not None:
            await self._transaction.execute(table.delete_all, {"keys": table.keys(rows)})
            return
        else:
            statements = [table.delete]
        for statement in statements:
            parameters = table.key_parameters if statement is table.delete else table.values
            await self._transaction.execute(statement, [parameters(row) for row in rows])
