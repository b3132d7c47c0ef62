"""TableIndexes: builds the publisher's indexes after the copy of a table (copy_indexes = after).

Purpose. An index that is filled row by row costs a copy more than one that is built from all rows. So the tables of the
target can be created without indexes. The synchronization worker builds them before the table catches up. With
copy_engine = ranges, it builds them when the ranges stand at a common position. If the apply worker has to apply a
change of a copied range before that, it builds the index of the key first (worker/apply/range_changes.py).

Invariants.

- targets/postgres/index_builds.py has those of the statements.
- The missing indexes are found by a comparison of both sides, so nothing about them is stored.

Failure cases.

- Worker, launcher or server ends: the table is not ready. The next worker builds the indexes that are still missing.
- Index cannot be built: the other indexes of the table are built. Then the worker reports the error with the statement,
  and is retried. The table is not ready until the index exists, or the subscription has copy_indexes = none.
- Table locked: a build waits for `index_lock_timeout`, and the worker is retried.
"""

from __future__ import annotations

import anyio

from subscriber import telemetry
from subscriber.catalog.connection import Connection
from subscriber.catalog.store.workers import WorkerState
from subscriber.errors import SubscriberError
from subscriber.failpoints import Point, reached
from subscriber.publisher.connection import Publisher
from subscriber.publisher.published_indexes import PublishedIndex, published_indexes
from subscriber.subscription import CopyIndexes, Subscription
from subscriber.targets.postgres.index_builds import MissingIndexes, find_missing
from subscriber.worker.context import LauncherContext
from subscriber.worker.owner_statements import BuiltTable, OwnerStatements
from subscriber.worker.published_definitions import read_definition
from subscriber.worker.status import Report


class TableIndexes:
    """Builds indexes for one synchronization worker."""

    def __init__(self, subscription: Subscription, context: LauncherContext, report: Report) -> None:
        """Create the builder.

        Args:
            subscription: the subscription. Nothing is built unless it has copy_indexes = after.
            context: the launcher's context.
            report: the status of the worker, which shows the progress.
        """
        self._subscription = subscription
        self._statements = OwnerStatements(subscription, context)
        self._limiter = context.index_builds
        self._report = report

    async def build(
        self,
        publisher: Publisher,
        relid: int,
        table: tuple[str, str],
        published_table: tuple[str, str],
        *,
        key_only: bool = False,
    ) -> None:
        """Build the published indexes and constraints that a table of the target lacks.

        Args:
            publisher: a session on the publisher.
            relid: OID of the table on the target.
            table: schema and name of the table on the target.
            published_table: schema and name of the published table.
            key_only: build only the index of the published key.

        Raises:
            SubscriberError: an index could not be built, or a server cannot be reached.

        Cancellation: the builds roll back.
        """
        if self._subscription.copy_indexes is not CopyIndexes.AFTER:
            return
        published = await _read(publisher, published_table)
        if key_only:
            published = [index for index in published if index.is_key]
        async with self._statements.connection() as connection:
            missing = await find_missing(connection, relid, *table, published)
            with self._report.back_afterwards():
                await self._build_indexes(missing)
                await self._add_constraints(connection, missing)

    async def prepare_key(
        self, publisher: Publisher, relid: int, table: tuple[str, str], published_table: tuple[str, str]
    ) -> bool:
        """Complete a key whose index an earlier worker has built without its constraint.

        Args:
            publisher: a session on the publisher.
            relid: OID of the table on the target.
            table: schema and name of the table on the target.
            published_table: schema and name of the published table.

        Returns:
            True if the table lacks an index on its key, and build() is going to build it.

        Raises:
            SubscriberError: the constraint could not be added, or a server cannot be reached.
        """
        if self._subscription.copy_indexes is not CopyIndexes.AFTER:
            return False
        published = await _read(publisher, published_table)
        async with self._statements.connection() as connection:
            missing = await find_missing(connection, relid, *table, [index for index in published if index.is_key])
            if not missing.indexes:
                await self._add_constraints(connection, missing)
        is_primary = any(key.constraint == "PRIMARY KEY" and not key.deferral for key in missing.constraints)
        return bool(missing.indexes) and (is_primary or missing.identity is not None)

    async def _add_constraints(self, connection: Connection, missing: MissingIndexes) -> None:
        for statement in missing.last_statements:
            self._report.enter(WorkerState.ADDING_CONSTRAINTS)
            await self._run(connection, missing, statement)

    async def _build_indexes(self, missing: MissingIndexes) -> None:
        """Build several indexes at a time, the largest first. Raises the first error when the others are built."""
        waiting = list(missing.indexes)
        errors: list[SubscriberError] = []
        done, total = list[str](), len(waiting)  # names of indexes

        async def build_next() -> None:
            async with self._statements.connection() as connection:
                while waiting:
                    async with self._limiter:  # released after each index, so that tables take turns
                        if not waiting:
                            break
                        index = waiting.pop(0)
                        self._report.enter(WorkerState.BUILDING_INDEXES, f", {len(done)} of {total} done")
                        try:
                            await self._run(connection, missing, index.create(missing.schema, missing.name), index.name)
                        except SubscriberError as error:
                            if connection.is_closed():
                                raise
                            errors.append(error)
                        done.append(index.name)

        async with anyio.create_task_group() as tasks:
            for _ in range(min(total, int(self._limiter.total_tokens))):
                tasks.start_soon(build_next)
        if errors:
            raise errors[0]

    async def _run(self, connection: Connection, missing: MissingIndexes, statement: str, index: str = "") -> None:
        table = BuiltTable(missing.schema, missing.name, missing.owner)
        await self._statements.run(connection, table, statement, f'index "{index}"' if index else "a constraint")
        await reached(Point.INDEX_BUILT)
        if index:
            label = f"{missing.schema}.{missing.name}"
            telemetry.log(
                telemetry.LOG, f'index "{index}" of table "{label}" is built', event="index.built", relation=label
            )


async def _read(publisher: Publisher, table: tuple[str, str]) -> list[PublishedIndex]:
    """Return the indexes of a published table."""
    return await read_definition(publisher, ".".join(table), lambda: published_indexes(publisher.session, *table))
