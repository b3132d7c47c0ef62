"""ForeignKeyBuilder: adds the publisher's foreign keys to tables that are ready (copy_indexes = after).

Purpose. The rows of two tables are those of one position of the stream as soon as the apply worker has both. Then a
foreign key between them holds, as on the publisher. It is added without a check of rows (NOT VALID), which takes a
moment, and then validated, while changes of both tables are applied.

Invariants.

- A table has a mark in the catalog from state syncdone on until all its foreign keys are there. The transaction that
  stores syncdone sets it.
- A foreign key is added when both tables are ready. One table is processed at a time.
- No existing foreign key is dropped or changed. One that is not valid is validated if it is valid on the publisher.
- Both sides are compared each time, so nothing about single foreign keys is stored.

Failure cases.

- Worker, launcher or server ends at any point: the mark is there. The next worker finds the foreign keys that are
  there, and validates those that are not valid.
- A row violates the foreign key: the error names the constraint and has the next command. The table stays ready, the
  foreign key stays NOT VALID, and the builder retries.
- The referenced table is not part of the subscription: its rows are at no position of the stream. A warning has the
  statement that adds the foreign key, and the mark is removed.
- A table is refreshed at the same time: it keeps the mark, and is processed when it is ready again.
"""

from __future__ import annotations

from dataclasses import replace

import anyio

from subscriber import telemetry
from subscriber.catalog.connection import Connection
from subscriber.catalog.store.subscription_rel import remove_mark
from subscriber.catalog.store.workers import WorkerState
from subscriber.display import shell_word
from subscriber.errors import SubscriberError
from subscriber.exception_groups import root_cause
from subscriber.failpoints import Point, reached
from subscriber.publisher.connection import Publisher
from subscriber.publisher.published_foreign_keys import PublishedForeignKey, published_foreign_keys
from subscriber.publisher.subscriptions import connect_publisher
from subscriber.remedy import Remedy
from subscriber.retry import Reaction, reaction
from subscriber.subscription import CopyIndexes, Subscription
from subscriber.targets.postgres.index_builds import find_foreign_keys
from subscriber.worker.context import LauncherContext
from subscriber.worker.error_hints import add_hint
from subscriber.worker.owner_statements import BuiltTable, OwnerStatements
from subscriber.worker.recovery import Recovery
from subscriber.worker.status import TABLE_SYNC, Report
from subscriber.worker.table_states import TableStates


class ForeignKeyBuilder:
    """Adds the foreign keys of one subscription's tables until it is canceled."""

    def __init__(self, subscription: Subscription, context: LauncherContext, tables: TableStates) -> None:
        """Create the builder.

        Args:
            subscription: the subscription. Nothing is added unless it has copy_indexes = after.
            context: the launcher's context.
            tables: the states of the subscription's tables.
        """
        self._subscription = subscription
        self._context = context
        self._tables = tables
        self._reports: dict[int, Report] = {}  # of tables that are processed or have failed, by OID
        self._warned: set[tuple[int, str]] = set()  # foreign keys that are left out

    def update(self, subscription: Subscription) -> None:
        """Take over a change of the subscription."""
        self._subscription = subscription
        self._tables.notify()

    async def run(self) -> None:
        """Add foreign keys whenever tables become ready, until canceled."""
        try:
            while True:
                seen = self._seen()
                failed = await self._add_all()
                with anyio.move_on_after(self._context.settings.retry_interval if failed else None):
                    await self._tables.wait_until(lambda seen=seen: self._seen() != seen)  # type: ignore[misc]
        finally:
            for relid in list(self._reports):
                self._remove_report(relid)

    def _seen(self) -> tuple[Subscription, frozenset[int], frozenset[int]]:
        """Return everything on which the next attempt depends."""
        waiting = frozenset(self._tables.without_foreign_keys)
        return self._subscription, waiting, frozenset(self._tables.unready) if waiting else frozenset()

    async def _add_all(self) -> bool:
        """Process the tables that are ready. Returns True if one has failed."""
        tables = self._tables
        for relid in self._reports.keys() - tables.without_foreign_keys:
            self._remove_report(relid)
        if self._subscription.copy_indexes is not CopyIndexes.AFTER:
            return False
        failed = False
        for relid in sorted(tables.without_foreign_keys - tables.unready.keys()):
            keys = telemetry.LogKeys(worker="tablesync", relation=".".join(tables.names[relid]))
            with telemetry.bound(**keys):
                try:
                    await self._process(relid)
                except Exception as error:
                    self._failed(relid, root_cause(error))
                    failed = True
        return failed

    async def _process(self, relid: int) -> None:
        """Add the foreign keys of one table, as far as the tables that it references are ready."""
        catalog, tables = self._context.catalog, self._tables
        self._report(relid).enter(WorkerState.ADDING_FOREIGN_KEYS)
        name = f"{self._subscription.name} {tables.names[relid][1]}"
        async with await connect_publisher(
            self._subscription, name, "table synchronization worker", catalog.encoding
        ) as publisher:
            is_complete = await self._add(relid, publisher)
        self._remove_report(relid)
        if is_complete:
            async with catalog.use() as connection:
                await remove_mark(connection, self._subscription.oid, relid)
            tables.without_foreign_keys.discard(relid)

    async def _add(self, relid: int, publisher: Publisher) -> bool:
        """Add missing foreign keys. Returns False if a referenced table is not ready."""
        tables, is_complete = self._tables, True
        errors: list[SubscriberError] = []
        relids = {tables.sources.get(oid, tables.names[oid]): oid for oid in tables.relids}
        schema, name = tables.names[relid]
        source = tables.sources.get(relid, (schema, name))
        published = await published_foreign_keys(publisher.session, *source)
        if not published:
            return True
        statements = OwnerStatements(self._subscription, self._context)
        async with statements.connection() as connection:
            foreign_keys = await find_foreign_keys(connection, relid, schema, name)
            table = BuiltTable(schema, name, foreign_keys.owner)
            for key in published:
                referenced = relids.get((key.schema, key.table))
                if referenced is None:
                    self._leave_out(relid, key)
                elif referenced in tables.unready:
                    is_complete = False
                else:
                    wanted = replace(key, schema=tables.names[referenced][0], table=tables.names[referenced][1])
                    there = next((known for known in foreign_keys.keys if known.is_same(wanted)), None)
                    try:
                        await self._build(statements, connection, table, wanted, there, self._correction(source, key))
                    except SubscriberError as error:
                        if connection.is_closed():
                            raise
                        errors.append(error)
        if errors:
            raise errors[0]
        return is_complete

    async def _build(
        self,
        statements: OwnerStatements,
        connection: Connection,
        table: BuiltTable,
        wanted: PublishedForeignKey,
        there: PublishedForeignKey | None,
        correction: Remedy,
    ) -> None:
        """Add a foreign key unless it is there, and validate it if it is valid on the publisher.

        `correction` is for a row that violates it.
        """
        schema, name, _ = table
        if there is None:
            await statements.run(connection, table, wanted.add(schema, name), f'foreign key "{wanted.name}"')
            await reached(Point.FOREIGN_KEY_ADDED)
        there = there or replace(wanted, is_validated=False)
        if not wanted.is_validated or there.is_validated:
            return
        await statements.run(connection, table, there.validate(schema, name), f'foreign key "{there.name}"', correction)
        telemetry.log(
            telemetry.LOG,
            f'foreign key "{there.name}" of table "{schema}.{name}" is validated',
            event="foreign_key.validated",
        )
        await reached(Point.FOREIGN_KEY_VALIDATED)

    def _correction(self, source: tuple[str, str], key: PublishedForeignKey) -> Remedy:
        name, *tables = map(shell_word, (self._subscription.name, ".".join(source), f"{key.schema}.{key.table}"))
        repair = f"subscriber repair {name} {' '.join(dict.fromkeys(tables))}"
        return Remedy("list the rows that differ", f"subscriber verify {name}", then=Remedy("correct them", repair))

    def _leave_out(self, relid: int, key: PublishedForeignKey) -> None:
        if (relid, key.name) in self._warned:
            return
        self._warned.add((relid, key.name))
        schema, name = self._tables.names[relid]
        telemetry.log(
            telemetry.WARNING,
            f'foreign key "{key.name}" of table "{schema}.{name}" is not added, because table'
            f' "{key.schema}.{key.table}" is not part of the subscription',
            hint=Remedy("to add it on the target", f"{key.add(schema, name)};"),
            event="foreign_key.left_out",
        )

    def _failed(self, relid: int, error: BaseException) -> None:
        """Report an error of a table, which is retried."""
        add_hint(error)
        how = reaction(error)
        report = self._report(relid)
        if how not in (Reaction.IMMEDIATE, Reaction.SHORT_DELAY):
            telemetry.log_error(error)
        report.recovery.failed(error, None, how)
        report.wait(self._context.settings.retry_interval)
        self._context.board.publish()

    def _report(self, relid: int) -> Report:
        """Return the report of a table. A new one replaces that of an earlier launcher."""
        if relid not in self._reports:
            recovery, board = Recovery(self._context.settings), self._context.board
            self._reports[relid] = board.add(self._subscription.oid, relid, TABLE_SYNC, recovery)
        return self._reports[relid]

    def _remove_report(self, relid: int) -> None:
        if (report := self._reports.pop(relid, None)) is not None:
            self._context.board.remove(report)
