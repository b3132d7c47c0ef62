"""The apply session on a PostgreSQL target: the reference path, one statement for one change.

Statements are pipelined: nothing here waits for an answer but introspection and sync(). The server
works through them in order, so a remote transaction is one local transaction, committed in commit order.
targets/postgres/session/progress.py explains why pipelining is safe, and targets/postgres/session/schema_check.py why
the shape of a table is checked inside each transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from subscriber.apply.batch.batch import Batch
from subscriber.apply.batch.table_batch import ChangeKind
from subscriber.apply.conflicts.delta import old_row_missing
from subscriber.apply.relation_map import RelationMapping
from subscriber.apply.touched_ranges import TouchedRanges
from subscriber.apply.transaction import RemoteTransaction
from subscriber.lsn import Lsn
from subscriber.ownership import OwnershipRules
from subscriber.protocol.messages import Delete, Insert, OldPart, Truncate, Update
from subscriber.protocol.tuple_data import UNCHANGED
from subscriber.targets.postgres.conflicts.detection import ConflictDetector
from subscriber.targets.postgres.conflicts.resolution import ConflictResolution
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.session.target_session import TargetSession
from subscriber.targets.postgres.session.touch_recorder import TouchRecorder
from subscriber.targets.postgres.sql import batch_statements, row_statements
from subscriber.targets.postgres.sql.owned_rows import owned_rows
from subscriber.targets.postgres.sql.parameters import NO_ROW, Row, bind, require_columns
from subscriber.targets.postgres.sql.row_statements import NEW, OLD, Plan

NO_OWNERSHIP = OwnershipRules()


def never() -> bool:
    """Return False."""
    return False


class RowApplier:
    """Applies changes in one session. Two tasks must not use it concurrently.

    Attributes:
        session: the session.
        progress: the progress record, which each commit moves.
        conflicts: detects conflicts that do not stop the stream.
        resolution: resolves conflicts. None: no change reads the target before it is applied.
    """

    def __init__(
        self,
        session: TargetSession,
        progress: ProgressRecord,
        conflicts: ConflictDetector,
        resolution: ConflictResolution | None = None,
        *,
        touched: TouchedRanges | None = None,
        ownership: OwnershipRules = NO_OWNERSHIP,
        others_in_progress: Callable[[], bool] = never,
    ) -> None:
        """Create an applier.

        Args:
            session: the session, whose origin is bound if the target has origins.
            progress: see the attribute.
            conflicts: see the attribute.
            resolution: see the attribute.
            touched: the ranges that the worker has recorded. None: the subscription has no track_ranges.
            ownership: the rows of each table that a TRUNCATE deletes.
            others_in_progress: returns True if other transactions of the subscription may be open on the target, which
                end later in the stream.
        """
        self.session: Final = session
        self.progress: Final = progress
        self.conflicts: Final = conflicts
        self.resolution: Final = resolution
        self._pipeline = session.pipeline
        self._roles = session.roles
        self._touched = None if touched is None else TouchRecorder(touched, progress)
        self._ownership = ownership
        self._others_in_progress = others_in_progress
        # OIDs of tables without a key in which the open transaction has made rows.
        self._tables_with_new_rows: set[int] = set()

    @property
    def position(self) -> Lsn:
        """The end of the last transaction that was committed, or whose COMMIT was sent."""
        return self.progress.position

    # --- changes --------------------------------------------------------------------------------

    async def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        if not transaction.is_open_on_target:
            self.begin(transaction)
        session, tables = self.session, (mapping,)
        if mapping.unsearchable is not None and not isinstance(change, Insert):
            await session.check_unsearchable(mapping)
        oid = mapping.local.oid
        if self._touched is not None:
            self._touched.touch_row(transaction, mapping, change)
        note = StatementContext(change.message_type, transaction, mapping, change)
        note.schema_unchecked = session.is_unchecked((oid,))
        note.prefer_own_rows = oid in self._tables_with_new_rows and self.shares_rows(transaction)
        session.prepare_to_write(tables, "ROW EXCLUSIVE", note)
        left: Insert | Update | Delete | None = change
        if self.resolution is not None and self.resolution.applies_to(mapping, change):
            left = await self.resolution.resolve(change, note)
            note = replace(note, change=left, conflict_checked=True)
        if isinstance(left, Insert):
            self._insert(mapping, left, note)
        elif isinstance(left, Update):
            self._update(mapping, left, note)
        elif isinstance(left, Delete):
            self._delete(mapping, left, note)
        if mapping.search is None and not isinstance(left, Delete):
            self._tables_with_new_rows.add(oid)
        session.finish_writing(tables, note)
        await self._pipeline.drain()

    def shares_rows(self, transaction: RemoteTransaction) -> bool:
        """Return True if another transaction of the subscription may need a row before this one has ended.

        Such a transaction finds only rows that were committed before it looks for them. So this one has to leave it as
        many as on the publisher.
        """
        return transaction.outlives_commit_order or self._others_in_progress()

    def _insert(self, mapping: RelationMapping, change: Insert, note: StatementContext) -> None:
        status, values = change.new.split()
        require_columns(mapping, status)
        self._run(row_statements.insert(mapping), (status, values), NO_ROW, note)

    def _update(self, mapping: RelationMapping, change: Update, note: StatementContext) -> None:
        new = change.new.split()
        old = change.old.split() if change.old is not None else NO_ROW
        require_columns(mapping, new[0])
        if change.old is not None:
            require_columns(mapping, old[0])
        if mapping.delta_types and change.old_part is not OldPart.ROW:
            raise old_row_missing(mapping)
        identity_changed = False
        for index, column in enumerate(mapping.attributes):
            if not column.identity_always or new[0][index] == UNCHANGED:
                continue
            in_key = mapping.search is None or index in mapping.search
            if change.old is None:
                if not in_key:
                    plan = row_statements.replace_if_changed(mapping, index, new[0])
                    replacing = StatementContext(
                        "UPDATE", note.transaction, mapping, schema_unchecked=note.schema_unchecked
                    )
                    self._run(plan, new, new, replacing)
            elif in_key or change.old_part is OldPart.ROW:
                identity_changed = identity_changed or old[1][index] != new[1][index]
            else:  # the old value was not sent, and the new key would find another row
                identity_changed = True
        row = NEW if change.old is None else OLD
        self._find(row, new, old, note)
        self.conflicts.query_row(row, new, old, note)
        self.conflicts.check_origin(row, new, old, note)
        self._run(row_statements.update(mapping, change.old_part, new[0], identity_changed), new, old, note)

    def _delete(self, mapping: RelationMapping, change: Delete, note: StatementContext) -> None:
        old = change.old.split()
        require_columns(mapping, old[0])
        self._find(OLD, NO_ROW, old, note)
        self.conflicts.query_row(OLD, NO_ROW, old, note)
        self.conflicts.check_origin(OLD, NO_ROW, old, note)
        self._run(row_statements.delete(mapping), NO_ROW, old, note)

    def _find(self, row: int, new: Row, old: Row, note: StatementContext) -> None:
        """Find the row of the next statement in a table without a key."""
        mapping = note.mapping
        if mapping is not None and mapping.search is None:
            plan = row_statements.find(mapping, row, (new, old)[row][0], own_first=note.prefer_own_rows)
            self._run(
                plan,
                new,
                old,
                StatementContext(note.message, note.transaction, mapping, schema_unchecked=note.schema_unchecked),
            )

    def _run(
        self,
        plan: Plan,
        new: Row,
        old: Row,
        note: StatementContext,
    ) -> None:
        note.plan = plan
        formats, parameters = bind(plan, new, old)
        self._pipeline.execute(
            plan.sql, formats, parameters, note=note, expect=plan.expect, on_result=self.conflicts.on_result
        )

    async def truncate(
        self, transaction: RemoteTransaction, mappings: list[RelationMapping], truncate: Truncate
    ) -> None:
        """Empty tables. Of a table with a rule of ownership, the rows of the subscription are deleted."""
        for mapping in mappings:
            if owned_rows(self._ownership, mapping.local) is not None:
                await self.delete_rows(transaction, mapping)
        mappings = [mapping for mapping in mappings if owned_rows(self._ownership, mapping.local) is None]
        if not mappings:
            return
        note = StatementContext(
            truncate.message_type, transaction, mappings[0] if len(mappings) == 1 else None, truncate
        )
        await self._prepare_to_empty(transaction, mappings, "TRUNCATE", "ACCESS EXCLUSIVE", note)
        sql = row_statements.truncate(mappings, restart_identity=truncate.restart_identity)
        self._pipeline.execute(sql, note=note)
        self.session.finish_writing(mappings, note)
        await self._pipeline.drain()

    async def delete_rows(
        self, transaction: RemoteTransaction, mapping: RelationMapping, condition: str = "true"
    ) -> None:
        """Delete the rows of a table that satisfy a condition in SQL, and belong to the subscription by its rule."""
        local = mapping.local
        if (owned := owned_rows(self._ownership, local)) is not None:
            condition = f"({condition}) AND {owned}"
        note = StatementContext("TRUNCATE", transaction, mapping)
        await self._prepare_to_empty(transaction, [mapping], "DELETE", "ROW EXCLUSIVE", note)
        self._pipeline.execute_once(f"DELETE FROM {local.only} WHERE {condition}", note=note)
        self.session.finish_writing([mapping], note)
        await self._pipeline.drain()

    async def _prepare_to_empty(
        self,
        transaction: RemoteTransaction,
        mappings: list[RelationMapping],
        privilege: str,
        mode: str,
        note: StatementContext,
    ) -> None:
        """Queue what precedes a statement that removes rows of tables, and needs a privilege and a lock."""
        if not transaction.is_open_on_target:
            self.begin(transaction)
        if self._touched is not None:
            for mapping in mappings:
                self._touched.touch_all(transaction, mapping)
        note.schema_unchecked = self.session.is_unchecked([mapping.local.oid for mapping in mappings])
        self.session.prepare_to_write(mappings, mode, note)
        await self._roles.name_tables([mapping.local for mapping in mappings], privilege, note)

    def apply_steps(self, batch: Batch, note: StatementContext, chunk_rows: int) -> None:
        """Queue the steps of a batch. in_flight_batches.py states when this is safe. `chunk_rows`: see copy_data()."""
        for table in batch.tables.values():
            if not table.steps:
                continue
            tables = (table.mapping,)
            if self._touched is not None:
                self._touched.touch_batch(batch.slices[0].transaction, table)
            if table.mapping.search is None:
                self._tables_with_new_rows.add(table.mapping.local.oid)
            self.session.prepare_to_write(tables, "ROW EXCLUSIVE", note)
            for step in table.steps:
                what = replace(note, message=step.kind.name, mapping=table.mapping)
                if step.kind is ChangeKind.INSERT:
                    data = batch_statements.copy_data(table, step, chunk_rows)
                    self._pipeline.copy(batch_statements.copy(table), data, note=what)
                else:
                    formats, parameters = batch_statements.arrays(table, step)
                    types = batch_statements.types(table, step)
                    self._pipeline.execute(
                        batch_statements.change(table, step), formats, parameters, note=what, types=types
                    )
            self.session.finish_writing(tables, note)
        self._roles.reset_role(note)

    # --- the transaction ------------------------------------------------------------------------

    def begin(self, transaction: RemoteTransaction) -> None:
        """Open the target's transaction for this remote one."""
        transaction.is_open_on_target = True
        self._tables_with_new_rows.clear()
        if self._touched is not None:
            self._touched.begin()
        self.session.begin(StatementContext("BEGIN", transaction))

    async def commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        """Queue the progress and COMMIT, as queue_commit() does."""
        self.queue_commit(transaction, end_lsn, on_committed)
        await self._pipeline.drain()

    def queue_commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        """Queue what commit() does, waiting for nothing."""
        note = StatementContext("COMMIT", transaction)
        self.session.foreign_code.run_deferred(note)
        self._roles.reset_role(note)
        self._store_touched(note)
        self.progress.advance(self._pipeline, end_lsn, transaction.commit_time, note)
        self._pipeline.execute("COMMIT", note=note)
        self._pipeline.queue_sync(on_committed)
        self.session.ended()

    def prepare(self, name: str, note: StatementContext) -> None:
        """Queue PREPARE TRANSACTION. What foreign code has put off precedes it, see ForeignCodeGuard.run_deferred()."""
        self.session.foreign_code.refuse_to_prepare()
        self._store_touched(note)
        self._pipeline.execute_once(f"PREPARE TRANSACTION '{name}'", note=note)
        self._pipeline.queue_sync()
        self.session.ended()

    def execute_at_end(self, transaction: RemoteTransaction, sql: str, *values: str) -> None:
        """Queue a statement of the catalog in the transaction, which shows the progress record and its fence.

        Args:
            transaction: the transaction. It is opened on the target if it is not open.
            sql: the statement. $1 and $2 are the record and its fence.
            values: the other parameters.
        """
        if not transaction.is_open_on_target:
            self.begin(transaction)
        note = StatementContext("COMMIT", transaction)
        self._roles.reset_role(note)
        self._pipeline.execute(sql, parameters=self._pipeline.texts((*self.progress.shown, *values)), note=note)

    def _store_touched(self, note: StatementContext) -> None:
        if self._touched is not None:
            self._touched.store(self._pipeline, note)

    # --- rolling back ---------------------------------------------------------------------------

    def savepoint(self, transaction: RemoteTransaction, name: str) -> None:
        """Queue the begin of a subtransaction; `name` needs no quotes."""
        if not transaction.is_open_on_target:
            self.begin(transaction)
        note = StatementContext("SAVEPOINT", transaction)
        self._roles.reset_role(note)
        self._pipeline.execute_once(f"SAVEPOINT {name}", note=note)

    def roll_back_to(self, transaction: RemoteTransaction, name: str) -> None:
        """Queue the undoing of everything since savepoint() of that name, which ends with it."""
        note = StatementContext("ROLLBACK TO SAVEPOINT", transaction)
        self._pipeline.execute_once(f"ROLLBACK TO SAVEPOINT {name}", note=note)
        self.forget_touched()
        self._pipeline.execute_once(f"RELEASE SAVEPOINT {name}", note=note)
        self.session.rolled_back_to_savepoint()

    def roll_back(self, transaction: RemoteTransaction) -> None:
        """Queue a rollback of the whole transaction."""
        self.forget_touched()
        if transaction.is_open_on_target:
            self._pipeline.execute("ROLLBACK", note=StatementContext("ROLLBACK", transaction))
            self._pipeline.queue_sync()
        self.session.ended()

    def forget_touched(self) -> None:
        """Forget which ranges are recorded, because records of unanswered transactions were rolled back."""
        if self._touched is not None:
            self._touched.forget()
