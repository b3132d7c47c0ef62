"""RowRepair: the repair of the rows that a comparison has listed, in batches.

**Invariants.**

- A batch needs a slot and a pause of the apply worker, so tables with few rows share one. A table with more rows than a
  batch may have shares none.
- Tables are repaired in the order in which the publisher lists them. Foreign keys are not checked in a session with the
  replica role, as in an apply worker. Without that role a violation is an error.
- Rows may exchange the values of another unique index. The rows of a batch are then deleted and inserted again in one
  transaction. Rows of different batches are merged into one batch at the end of the table.

**Failure cases.**

- One of several tables cannot be repaired: it has batches of its own, and so have the tables before it and after it.
- A row is locked: the batch is divided, until the row is alone. It is tried again, and left to a later repair.
- A row is refused, for example by a constraint or a trigger of the target: the batch is divided, until the row is
  alone. It is counted, with the first error. After MOST_REFUSED rows the other rows of the table are left alone.
- A connection is lost: the batch is repeated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import anyio

from subscriber import formatting, telemetry
from subscriber.apply.relation_map import RelationMapping
from subscriber.comparison.compared_table import ComparedTable
from subscriber.comparison.progress import ComparisonProgress, OnProgress
from subscriber.comparison.result import Key
from subscriber.display import shell_word
from subscriber.errors import ConnectionLost, SubscriberError, TableChanged
from subscriber.publisher.partitions import heaps
from subscriber.remedy import Remedy
from subscriber.repair.batch import Outcome, RepairedBatch, RepairSessions, TableRows
from subscriber.repair.changes import RowChanges, as_statements
from subscriber.repair.result import Repair
from subscriber.sqlstate import UNIQUE_VIOLATION

KEYS_IN_A_BATCH = 1000  # the apply worker is paused while a batch is repaired
HEAPS_IN_A_BATCH = 200  # on the target; its transaction locks each of them and their indexes
ATTEMPTS = 5  # of a batch whose connection is lost
MOST_REFUSED = 10  # rows of a table that are found one by one
RETRY_DELAY = 1.0  # seconds


class _TooManyRefused(Exception):
    """A table has MOST_REFUSED rows that are refused."""


class RowRepair:
    """The repair of the rows of some tables, which are compared at one position."""

    def __init__(
        self, sessions: RepairSessions, result: Repair, on_progress: OnProgress, attempts: int, *, dry_run: bool
    ) -> None:
        """Create a repair.

        Args:
            sessions: read and repair the rows of a batch.
            result: the result, to which rows, bytes and statements are added.
            on_progress: called before each batch.
            attempts: attempts for a row that is locked.
            dry_run: add the statements to the result, and change nothing.
        """
        self._sessions = sessions
        self._result = result
        self._tables = {table.name: table for table in result.tables}
        self._on_progress = on_progress
        self._attempts = attempts
        self._dry_run = dry_run
        self._listed: dict[str, tuple[RowChanges, RelationMapping]] = {}  # of a dry run, by table

    async def repair(self, tables: Sequence[TableRows]) -> None:
        """Repair the rows. A table that has changed is noted, and has to be compared again.

        Raises:
            SubscriberError: the apply worker cannot be paused, or the subscription was altered.
            ConnectionLost: the connection was lost in each of ATTEMPTS attempts.
        """
        for batch in _batches(tables):
            await self._repair_tables(batch)
        # Statements of all batches of a table together: rows of several batches may exchange unique values.
        for changes, mapping in self._listed.values():
            self._result.statements.extend(as_statements(changes, mapping))

    async def _repair_tables(self, parts: Sequence[TableRows]) -> None:
        """Repair the rows of several tables, which are few enough for a batch, or those of one table."""
        replaced: set[int] = set()
        while len(parts) > 1:
            rows = sum(len(part.keys) for part in parts)
            self._on_progress(ComparisonProgress(f"repairing {len(parts)} tables", 0, rows, unit="rows"))
            batch = await self._batch(parts, replaced)
            failed = batch.failed
            if batch.outcome is Outcome.DONE:
                return
            if failed is None:
                for part in parts:
                    await self._repair_table(part)
                return
            if batch.outcome is Outcome.NOT_UNIQUE and failed not in replaced:
                replaced.add(failed)
                continue
            await self._repair_tables(parts[:failed])
            await self._repair_table(parts[failed])
            parts, replaced = parts[failed + 1 :], set()
        for part in parts:
            await self._repair_table(part)

    async def _repair_table(self, part: TableRows) -> None:
        """Repair the rows of one table, in as many batches as they need."""
        table, keys = part
        not_unique: list[Key] = []
        try:
            for done in range(0, len(keys), KEYS_IN_A_BATCH):
                phase = f"repairing {table.found.name}"
                self._on_progress(ComparisonProgress(phase, done, len(keys), unit="rows"))
                await self._rows(table, keys[done : done + KEYS_IN_A_BATCH], not_unique)
            if not_unique:
                await self._merged(table, not_unique)
        except _TooManyRefused:
            pass  # the table's result has the number, and the reason
        except TableChanged as error:
            table.found.leave_out(error.message, is_changed=True)
            self._tables[table.found.name].leave_out(error.message)
            self._listed.pop(table.found.name, None)

    async def _merged(self, table: ComparedTable, keys: Sequence[Key]) -> None:
        """Repair rows in one batch that have unique values of one another."""
        result = self._tables[table.found.name]
        subscription, command = self._sessions.subscription.name, self._sessions.audit.command
        batch = await self._alone(table, keys, replace_rows=True)
        if batch.outcome is Outcome.NOT_UNIQUE:
            hint = Remedy("list the changes", f"subscriber repair {shell_word(subscription)} --dry-run")
            if result.extra and not result.doubtful:
                words = f"{command} {shell_word(subscription)} {shell_word(table.found.name)}"
                hint = Remedy("if no application needs the extra rows", f"subscriber {words} --delete-extra")
            result.refuse(
                len(keys),
                SubscriberError(
                    f"{formatting.count(len(keys), 'row')} of the publisher may have unique values that other rows of"
                    " the target have",
                    detail="These rows are equal on both sides, or are not the publisher's.",
                    hint=hint,
                    sqlstate=UNIQUE_VIOLATION,
                ),
            )
        elif batch.outcome is Outcome.REFUSED and batch.error is not None:
            result.refuse(len(keys), batch.error)
        elif batch.outcome is Outcome.LOCKED:
            result.lock_out(len(keys))

    async def _rows(self, table: ComparedTable, keys: Sequence[Key], not_unique: list[Key]) -> None:
        """Repair rows that are few enough for a batch. A row that is locked is tried again alone.

        Adds the keys of rows to `not_unique` that have unique values of rows of other batches.

        Raises:
            TableChanged: the table was dropped, rewritten, altered or locked on one side.
            _TooManyRefused: the table has too many rows that are refused.
        """
        batch = await self._alone(table, keys)
        if batch.outcome is Outcome.NOT_UNIQUE:
            batch = await self._alone(table, keys, replace_rows=True)
        if batch.outcome is Outcome.NOT_UNIQUE:
            not_unique += keys
        elif batch.outcome in (Outcome.LOCKED, Outcome.REFUSED) and len(keys) > 1:
            half = len(keys) // 2
            await self._rows(table, keys[:half], not_unique)
            await self._rows(table, keys[half:], not_unique)
        elif batch.outcome is Outcome.REFUSED and batch.error is not None:
            result = self._tables[table.found.name]
            result.refuse(len(keys), batch.error)
            if result.refused >= MOST_REFUSED:
                raise _TooManyRefused
        elif batch.outcome is Outcome.LOCKED:
            for _ in range(1, self._attempts):
                await anyio.sleep(RETRY_DELAY)
                if (await self._alone(table, keys)).outcome is Outcome.DONE:
                    return
            self._tables[table.found.name].lock_out(1)
            telemetry.log(
                telemetry.WARNING,
                f'a row of table "{table.found.name}" is not repaired, because another transaction has locked it',
                hint="Look into pg_prepared_xacts and pg_stat_activity of the target, then repair again.",
                event="repair.locked",
            )

    async def _alone(self, table: ComparedTable, keys: Sequence[Key], *, replace_rows: bool = False) -> RepairedBatch:
        """Repair a batch with rows of one table.

        Raises:
            TableChanged: the table was dropped, rewritten, altered or locked on one side.
        """
        batch = await self._batch([TableRows(table, keys)], {0} if replace_rows else ())
        if batch.outcome is Outcome.TABLE_CHANGED:
            raise TableChanged(batch.note)
        return batch

    async def _batch(self, parts: Sequence[TableRows], replaced: Collection[int]) -> RepairedBatch:
        """Repair a batch, and count its rows. A batch whose connection is lost is repeated."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if self._dry_run:
                    batch = await self._sessions.read(parts)
                else:
                    batch = await self._sessions.repair(parts, replaced=replaced)
                break
            except ConnectionLost:
                if attempt == ATTEMPTS:
                    raise
                await anyio.sleep(RETRY_DELAY)
        self._result.read(batch.bytes_read)
        if batch.outcome is Outcome.DONE:
            for part, (changes, mapping) in zip(parts, batch.changes, strict=True):
                self._count(part.table.found.name, changes, mapping)
        return batch

    def _count(self, name: str, changes: RowChanges, mapping: RelationMapping) -> None:
        self._tables[name].count_changes(changes)
        if self._dry_run:
            self._listed.setdefault(name, (RowChanges(), mapping))[0].add(changes)


def _batches(tables: Sequence[TableRows]) -> Iterator[list[TableRows]]:
    """Yield successive tables that share batches. A table with too many rows, or too many partitions, is alone."""
    batch: list[TableRows] = []
    keys = number = 0
    for part in tables:
        if not part.keys:
            continue
        partitions = len(heaps(part.table.parts[1]))
        if batch and (keys + len(part.keys) > KEYS_IN_A_BATCH or number + partitions > HEAPS_IN_A_BATCH):
            yield batch
            batch, keys, number = [], 0, 0
        batch.append(part)
        keys += len(part.keys)
        number += partitions
    if batch:
        yield batch
