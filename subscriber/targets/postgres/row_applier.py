"""The apply session on a PostgreSQL target: the reference path, one statement for one change.

Statements are pipelined: nothing here waits for an answer but introspection and sync(). The server
works through them in order, so a remote transaction is one local transaction, committed in commit order.
targets/postgres/session/progress.py explains why pipelining is safe, and targets/postgres/session/schema_check.py why
the shape of a table is checked inside each transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from subscriber.apply.batch.batch import Batch
from subscriber.apply.batch.table_batch import ChangeKind
from subscriber.apply.conflicts.delta import delta_types, old_row_missing
from subscriber.apply.conflicts.policy import Policies
from subscriber.apply.relation_map import LocalRelation, RelationMapping, map_relation
from subscriber.apply.touched_ranges import RangesToRecord, TouchedRanges, TouchedTable, as_parameter
from subscriber.apply.transaction import RemoteTransaction
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import MappingError, StaleMapping, SubscriberError
from subscriber.lsn import Lsn
from subscriber.ownership import OwnershipRules
from subscriber.protocol.messages import Delete, Insert, OldPart, Relation, Truncate, Update
from subscriber.protocol.tuple_data import UNCHANGED
from subscriber.sqlstate import TARGET_TABLE_CHANGED
from subscriber.targets.postgres.conflicts.deleted_rows import DeletedRows
from subscriber.targets.postgres.conflicts.detection import ConflictDetector
from subscriber.targets.postgres.conflicts.history import History
from subscriber.targets.postgres.conflicts.resolution import ConflictResolution
from subscriber.targets.postgres.session import introspection, schema_check
from subscriber.targets.postgres.session.apply_settings import apply_settings
from subscriber.targets.postgres.session.capabilities import TargetCapabilities
from subscriber.targets.postgres.session.error_context import explain
from subscriber.targets.postgres.session.foreign_code import ForeignCodeGuard
from subscriber.targets.postgres.session.known_tables import KnownTables
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.roles import RoleSwitcher
from subscriber.targets.postgres.session.statement_context import OnConflict, StatementContext
from subscriber.targets.postgres.sql import batch_statements, row_statements
from subscriber.targets.postgres.sql.owned_rows import owned_rows
from subscriber.targets.postgres.sql.parameters import NO_ROW, Row, bind, require_columns
from subscriber.targets.postgres.sql.row_statements import NEW, OLD, Plan

_CLEAR_SKIP_LSN = "SELECT subscriber.clear_skip($1, $2, $3)"
_PARK = "SELECT subscriber.park($1, $2, $3)"
_PARK_CONTENT = "SELECT subscriber.park_content($1, $2, $3, $4, $5)"
_TOUCH = "SELECT subscriber.touch($1, $2, $3)"
_UNPARK = "SELECT subscriber.unpark($1, $2, $3, $4)"
_NOTE_EMPTIED = "SELECT subscriber.note_emptied($1, $2)"
_RECORD_REPAIR = "SELECT subscriber.record_repair($1, $2, $3)"


class RowApplier:
    """One session on the target. Two tasks must not use it concurrently."""

    def __init__(self, pipeline: Pipeline, origin: str, on_conflict: OnConflict) -> None:
        """`on_conflict` is called for rows that are missing, and for those that another origin wrote last.

        `pipeline`: of a session that nothing else uses.
        """
        self.pipeline = pipeline
        self.origin = origin
        self.capabilities = TargetCapabilities()
        self.roles = RoleSwitcher(self.pipeline)
        self.known_tables = KnownTables()
        self.conflicts = ConflictDetector(self.pipeline, self.asking, on_conflict, origin)
        self.policies = Policies({}, {})
        self.history: History | None = None  # None: no conflict is recorded
        self.resolution: ConflictResolution | None = None  # None: no change reads the target before it is applied
        self.retains_dead_tuples = False  # the target remembers deleted rows for the subscription
        # Whether other transactions of the subscription may be open on the target now, which end later in the stream.
        self.others_in_progress: Callable[[], bool] = lambda: False
        self.ownership = OwnershipRules()  # the rows of each table that a TRUNCATE deletes
        self.touched: TouchedRanges | None = None  # None: the subscription has no track_ranges
        self._own_touched: TouchedRanges | None = None  # of a transaction that others do not wait for
        self._to_record = RangesToRecord()  # by the open transaction
        self.progress: ProgressRecord
        self._schema = schema_check.SchemaChecker(self.pipeline)
        self.foreign_code = ForeignCodeGuard(self.pipeline, self.roles, self._schema)
        self.has_run_foreign_code = False
        self._is_open = False  # the target's transaction has begun, and its end was not queued
        self._schema_checked: set[int] = set()  # local relations whose shape this transaction has checked
        self.mapped_in_transaction: frozenset[int] = frozenset()  # local relations that were mapped in this transaction
        # Local relations without a key in which this transaction has made rows.
        self._tables_with_new_rows: set[int] = set()

    @property
    def position(self) -> Lsn:
        return self.progress.position

    def resume(self, progress: ProgressRecord, origin_id: int | None = None) -> None:
        """Continue from this progress record; before the first commit().

        `origin_id`: report rows that were written through another origin than this one, or none. For targets
        with track_commit_timestamp, at the price of one more statement for each UPDATE and DELETE.
        """
        self.progress = progress
        self.conflicts.origin_id = origin_id
        deleted = DeletedRows(progress, self.origin) if self.retains_dead_tuples else None
        self.conflicts.deleted = deleted
        if self.resolution is not None:
            self.resolution.deleted = deleted
            self.resolution.looking.timed = origin_id is not None
            self.resolution.progress = progress

    async def configure(self, synchronous_commit: str) -> None:
        """Make the session what an apply worker's is."""
        self.foreign_code.settings = apply_settings(self.pipeline.session, self.capabilities, synchronous_commit)
        for statement in self.foreign_code.settings:
            self.pipeline.execute(statement, note=StatementContext("SET"))
        await self.pipeline.sync()

    async def map_relation(self, remote: Relation) -> RelationMapping:
        known = self.known_tables.find(remote.schema, remote.name, self.roles.terms)
        if known is not None:
            with suppress(MappingError):  # it may have been altered since
                return self._mapped(remote, known)
        self.roles.reset_role(StatementContext("RELATION"))
        local = await introspection.introspect(self.pipeline, remote.schema, remote.name, self.roles.terms)
        self.mapped_in_transaction |= {local.oid}
        self.known_tables.add(local, self.roles.terms)
        return self._mapped(remote, local)

    def _mapped(self, remote: Relation, local: LocalRelation) -> RelationMapping:
        mapping = map_relation(remote, self._with_policy(local), self.pipeline.codec)
        mapping.delta_types = delta_types(mapping, self.policies.delta_columns((local.schema, local.name)))
        return mapping

    def _with_policy(self, local: LocalRelation) -> LocalRelation:
        """Exclude a table from batches if a policy concerns it: each of its changes reads the target first."""
        if self.resolution is None or local.batch_exclusion is not None or not self.resolution.concerns(local):
            return local
        return replace(local, batch_exclusion="conflict policy")

    async def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        if not transaction.is_open_on_target:
            self.begin(transaction)
        if mapping.unsearchable is not None and not isinstance(change, Insert):
            await self._check_unsearchable(mapping)
        oid = mapping.local.oid
        if self.touched is not None:
            self._record_touched(self._known_to(transaction).touch_row(mapping, change))
        note = StatementContext(change.message_type, transaction, mapping, change)
        note.schema_unchecked = oid not in self._schema_checked and oid not in self.mapped_in_transaction
        note.prefer_own_rows = oid in self._tables_with_new_rows and self.shares_rows(transaction)
        self._guard(mapping.local, "ROW EXCLUSIVE", note)
        self.roles.switch_for_tables([mapping.local], note)
        if mapping.runs_foreign_code:
            self.foreign_code.begin(mapping)
            self.has_run_foreign_code = True
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
        if mapping.runs_foreign_code:
            self.foreign_code.set_again(note)
        if oid not in self._schema_checked:
            self._check_shape(mapping, note)
        await self.pipeline.drain()

    def shares_rows(self, transaction: RemoteTransaction) -> bool:
        """Return True if another transaction of the subscription may need a row before this one has ended.

        Such a transaction finds only rows that were committed before it looks for them. So this one has to leave it as
        many as on the publisher.
        """
        return transaction.outlives_commit_order or self.others_in_progress()

    async def _check_unsearchable(self, mapping: RelationMapping) -> None:
        """Raise StaleMapping if the table has an index by now that identifies its rows."""
        self.roles.reset_role(StatementContext("RELATION"))
        local = await introspection.introspect(
            self.pipeline, mapping.remote.schema, mapping.remote.name, self.roles.terms
        )
        if self._mapped(mapping.remote, local).unsearchable is None:
            self.known_tables.forget()
            raise StaleMapping("the target table has changed its shape", sqlstate=TARGET_TABLE_CHANGED)

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
        self.pipeline.execute(
            plan.sql, formats, parameters, note=note, expect=plan.expect, on_result=self.conflicts.on_result
        )

    def _guard(self, local: LocalRelation, mode: str, note: StatementContext) -> None:
        """Before a guarded table is first touched in this transaction: see targets/postgres/session/foreign_code.py."""
        if local.guarded and local.oid not in self._schema_checked:
            self._schema_checked.add(local.oid)
            self.foreign_code.guard(local, mode, note)

    @contextmanager
    def asking(self, mapping: RelationMapping, note: object, *, as_owner: bool = True) -> Iterator[None]:
        """Within the block a question about rows of the table is queued, inside of a transaction or between two.

        `as_owner`: as the role that applies the table's changes; otherwise the question does not read the table.
        """
        guarded, alone = mapping.local.guarded and as_owner, not self._is_open
        if alone:
            self.pipeline.execute("BEGIN", note=note)
        role = self.roles.reset_role(note)
        if guarded and (alone or mapping.local.oid not in self._schema_checked):
            self.foreign_code.guard(mapping.local, "ACCESS SHARE", note)
        if as_owner:
            self.roles.switch_for_tables([mapping.local], note)
        yield
        if alone:
            self.pipeline.execute("COMMIT", note=note)
            self.roles.on_begin()
        else:
            self.roles.restore_role(role, note)

    def _check_shape(self, mapping: RelationMapping, note: StatementContext) -> None:
        local = mapping.local
        self._schema_checked.add(local.oid)
        self.roles.reset_role(note)
        self._schema.check(local, self.roles.owner, note)

    async def check_some_shapes(self) -> bool:
        """Compare the shapes of some known tables, if the session has nothing to do; whether any were compared."""
        note = StatementContext("RELATION")
        if not self.pipeline.idle or self._is_open or not self._schema.check_some(self.roles.owner, note):
            return False
        await self.pipeline.sync()
        return True

    def check_ahead(self, tables: Iterable[LocalRelation]) -> None:
        """Have check_some_shapes() compare these tables, so that their first changes need not."""
        self._schema.check_later(tables)

    async def truncate(
        self, transaction: RemoteTransaction, mappings: list[RelationMapping], truncate: Truncate
    ) -> None:
        """Empty tables. Of a table with a rule of ownership, the rows of the subscription are deleted."""
        for mapping in mappings:
            if owned_rows(self.ownership, mapping.local) is not None:
                await self.delete_rows(transaction, mapping)
        mappings = [mapping for mapping in mappings if owned_rows(self.ownership, mapping.local) is None]
        if not mappings:
            return
        if not transaction.is_open_on_target:
            self.begin(transaction)
        for mapping in mappings:
            self._touch_all(transaction, mapping)
        note = StatementContext(
            truncate.message_type, transaction, mappings[0] if len(mappings) == 1 else None, truncate
        )
        oids = {mapping.local.oid for mapping in mappings}
        note.schema_unchecked = not oids <= self._schema_checked | self.mapped_in_transaction
        for mapping in mappings:
            self._guard(mapping.local, "ACCESS EXCLUSIVE", note)
        foreign = [mapping for mapping in mappings if mapping.runs_foreign_code]  # perhaps a trigger for TRUNCATE
        for mapping in foreign:
            self.foreign_code.begin(mapping)
            self.has_run_foreign_code = True
        self.roles.switch_for_tables([mapping.local for mapping in mappings], note)
        await self.roles.name_tables([mapping.local for mapping in mappings], "TRUNCATE", note)
        sql = row_statements.truncate(mappings, restart_identity=truncate.restart_identity)
        self.pipeline.execute(sql, note=note)
        if foreign:
            self.foreign_code.set_again(note)
        for mapping in mappings:
            if mapping.local.oid not in self._schema_checked:
                self._check_shape(mapping, note)
        await self.pipeline.drain()

    async def delete_rows(
        self, transaction: RemoteTransaction, mapping: RelationMapping, condition: str = "true"
    ) -> None:
        """Delete the rows of a table that satisfy a condition in SQL, and belong to the subscription by its rule."""
        if (owned := owned_rows(self.ownership, mapping.local)) is not None:
            condition = f"({condition}) AND {owned}"
        if not transaction.is_open_on_target:
            self.begin(transaction)
        self._touch_all(transaction, mapping)
        local = mapping.local
        note = StatementContext("TRUNCATE", transaction, mapping)
        self._guard(local, "ROW EXCLUSIVE", note)
        if mapping.runs_foreign_code:
            self.foreign_code.begin(mapping)
            self.has_run_foreign_code = True
        self.roles.switch_for_tables([local], note)
        await self.roles.name_tables([local], "DELETE", note)
        self.pipeline.execute_once(f"DELETE FROM {local.only} WHERE {condition}", note=note)
        if mapping.runs_foreign_code:
            self.foreign_code.set_again(note)
        if local.oid not in self._schema_checked:
            self._check_shape(mapping, note)
        await self.pipeline.drain()

    def apply_steps(self, batch: Batch, note: StatementContext, chunk_rows: int) -> None:
        """Queue the steps of a batch. batch_applier.py states when this is safe. `chunk_rows`: see copy_data()."""
        for table in batch.tables.values():
            if not table.steps:
                continue
            local = table.mapping.local
            if self.touched is not None:
                known = self._known_to(batch.portions[0].transaction)
                self._record_touched(known.touch(table.mapping, table.touched_keys, table.form))
            if table.mapping.search is None:
                self._tables_with_new_rows.add(local.oid)
            self._guard(local, "ROW EXCLUSIVE", note)
            self.roles.switch_for_tables([local], note)
            for step in table.steps:
                what = replace(note, message=step.kind.name, mapping=table.mapping)
                if step.kind is ChangeKind.INSERT:
                    data = batch_statements.copy_data(table, step, chunk_rows)
                    self.pipeline.copy(batch_statements.copy(table), data, note=what)
                else:
                    formats, parameters = batch_statements.arrays(table, step)
                    types = batch_statements.types(table, step)
                    self.pipeline.execute(
                        batch_statements.change(table, step), formats, parameters, note=what, types=types
                    )
            if local.oid not in self._schema_checked:
                self._check_shape(table.mapping, note)
        self.roles.reset_role(note)

    def begin(self, transaction: RemoteTransaction) -> None:
        """Open the target's transaction for this remote one."""
        transaction.is_open_on_target = self._is_open = True
        self._schema_checked.clear()
        self._tables_with_new_rows.clear()
        self._own_touched = None
        self._to_record.clear()
        self.roles.on_begin()
        self.foreign_code.began()
        self.pipeline.execute("BEGIN", note=StatementContext("BEGIN", transaction))

    async def commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        self.queue_commit(transaction, end_lsn, on_committed)
        await self.pipeline.drain()

    def queue_commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        """Queue what commit() does, waiting for nothing."""
        note = StatementContext("COMMIT", transaction)
        self.foreign_code.run_deferred(note)
        self.roles.reset_role(note)
        self._store_touched(note)
        self.progress.advance(self.pipeline, end_lsn, transaction.commit_time, note)
        self.pipeline.execute("COMMIT", note=note)
        self.pipeline.queue_sync(on_committed)
        self._ended()

    def prepare(self, name: str, note: StatementContext) -> None:
        """Queue PREPARE TRANSACTION. Statements that belong to it precede it, see run_deferred()."""
        self.foreign_code.refuse_to_prepare()
        self._store_touched(note)
        self.pipeline.execute_once(f"PREPARE TRANSACTION '{name}'", note=note)
        self.pipeline.queue_sync()
        self._ended()

    def rolled_back(self) -> None:
        """Record that the target's transaction was rolled back completely (session_group.py)."""
        self._is_open = False

    def run_deferred(self, note: StatementContext) -> None:
        """Queue what foreign code has put off to the end of the transaction."""
        self.foreign_code.run_deferred(note)

    def _ended(self) -> None:
        """The end of the target's transaction was queued."""
        self._is_open = False
        self.foreign_code.clean()
        self.mapped_in_transaction = frozenset()

    # --- ranges that the transaction touches ----------------------------------------------------

    def _known_to(self, transaction: RemoteTransaction) -> TouchedRanges:
        """Return the ranges that need no record in the transaction.

        A transaction that others do not wait for may be rolled back after them. So they do not rely on its records, and
        it records everything itself, because a comparison may have read earlier records when it commits. A transaction
        does so up to its end: of a streamed one, the last changes are applied when its end is known.
        """
        assert self.touched is not None
        if self._own_touched is None and transaction.outlives_commit_order:
            self._own_touched = self.touched.empty()
        return self.touched if self._own_touched is None else self._own_touched

    def _touch_all(self, transaction: RemoteTransaction, mapping: RelationMapping) -> None:
        if self.touched is not None:
            self._record_touched(self._known_to(transaction).touch_all(mapping))

    def _record_touched(self, touched: TouchedTable | None) -> None:
        if touched is not None:
            self._to_record.add(touched)

    def _store_touched(self, note: StatementContext) -> None:
        """Queue the statement that records the ranges. The role is the session's own."""
        if ranges := self._to_record.take():
            values = (*self.progress.shown, as_parameter(ranges))
            self.pipeline.execute(_TOUCH, parameters=self.pipeline.texts(values), note=note)

    def forget_touched(self) -> None:
        """Forget which ranges are recorded, because records of unanswered transactions were rolled back."""
        self._to_record.keep()
        for known in (self.touched, self._own_touched):
            if known is not None:
                known.forget()

    def set_origin(self, lsn: Lsn, time: int, note: StatementContext) -> None:
        """Set the publisher's position and time, which PREPARE TRANSACTION and COMMIT PREPARED record."""
        self.progress.set_origin(self.pipeline, lsn, time, note)

    def copy_progress_to(self, other: RowApplier) -> None:
        """Let `other`, a session of the same worker, make the next commit. This session has nothing in flight."""
        other.progress = self.progress.copy()

    def set_progress_position(self, position: Lsn) -> None:
        """The progress record is at `position` when this session moves it next: another one of this worker has."""
        self.progress.position = position

    def savepoint(self, transaction: RemoteTransaction, name: str) -> None:
        """Queue the begin of a subtransaction; `name` needs no quotes."""
        if not transaction.is_open_on_target:
            self.begin(transaction)
        note = StatementContext("SAVEPOINT", transaction)
        self.roles.reset_role(note)
        self.pipeline.execute_once(f"SAVEPOINT {name}", note=note)

    def roll_back_to(self, transaction: RemoteTransaction, name: str) -> None:
        """Queue the undoing of everything since savepoint() of that name, which ends with it."""
        note = StatementContext("ROLLBACK TO SAVEPOINT", transaction)
        self.pipeline.execute_once(f"ROLLBACK TO SAVEPOINT {name}", note=note)
        self.forget_touched()
        self.pipeline.execute_once(f"RELEASE SAVEPOINT {name}", note=note)
        self.roles.on_begin()  # the role went back with it, and so did the locks that keep the tables' shapes
        self._schema_checked.clear()
        self._schema.forget()

    def roll_back(self, transaction: RemoteTransaction) -> None:
        """Queue a rollback of the whole transaction."""
        self.forget_touched()
        if transaction.is_open_on_target:
            self.pipeline.execute("ROLLBACK", note=StatementContext("ROLLBACK", transaction))
            self.pipeline.queue_sync()
        self._ended()

    def park(self, transaction: RemoteTransaction, description: str) -> None:
        """Put the transaction in quarantine instead of applying it. `description`: a row of the table, as JSON."""
        self._execute_at_end(transaction, _PARK, description)

    async def park_content(self, transaction: RemoteTransaction, place: int, records: bytes) -> None:
        """Add messages of the transaction that park() has put in quarantine, at an offset."""
        self._execute_at_end(transaction, _PARK_CONTENT, str(transaction.finish_lsn), str(place), rf"\x{records.hex()}")
        await self.pipeline.drain()

    def unpark(self, transaction: RemoteTransaction, edits: int) -> None:
        """Remove the transaction from quarantine, because this transaction applies it."""
        self._execute_at_end(transaction, _UNPARK, str(transaction.finish_lsn), str(edits))

    def record_repair(self, transaction: RemoteTransaction, description: str) -> None:
        """Record the rows that the transaction repairs. `description`: a row of `repair_transaction`, as JSON."""
        self._execute_at_end(transaction, _RECORD_REPAIR, description)

    def note_emptied(self, transaction: RemoteTransaction) -> None:
        """Record that the transaction has emptied the table of the progress record, which is then copied."""
        self._execute_at_end(transaction, _NOTE_EMPTIED)

    def _execute_at_end(self, transaction: RemoteTransaction, sql: str, *values: str) -> None:
        """Queue a statement that shows the progress record and its fence, in the transaction."""
        if not transaction.is_open_on_target:
            self.begin(transaction)
        note = StatementContext("COMMIT", transaction)
        self.roles.reset_role(note)
        self.pipeline.execute(sql, parameters=self.pipeline.texts((*self.progress.shown, *values)), note=note)

    def clear_skip_lsn(self, transaction: RemoteTransaction, skip_lsn: Lsn) -> None:
        """Clear the position to skip in this transaction, unless a statement has set another one meanwhile."""
        self._execute_at_end(transaction, _CLEAR_SKIP_LSN, str(skip_lsn))

    def explain(self, error: SubscriberError) -> SubscriberError:
        """See error_context.explain(). For an error of this session's statements; any other is returned as it is."""
        if error is not self.pipeline.error:
            return error
        explained = explain(error, self.pipeline, self.roles, self.origin)
        if isinstance(explained, StaleMapping):
            self.known_tables.forget()
        return explained
