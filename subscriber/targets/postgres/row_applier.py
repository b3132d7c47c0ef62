"""The apply session on a PostgreSQL target: the reference path, one statement for one change.

Statements are pipelined: nothing here waits for an answer but introspection and settle(). The server
works through them in order, so a remote transaction is one local transaction, committed in commit order.
Why running ahead is safe is told in targets/postgres/session/progress.py; why the shape of a table is checked inside
each transaction, in targets/postgres/session/schema_check.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from subscriber.apply.batch.batch import Batch, Ends, Taken
from subscriber.apply.batch.table_batch import Kind
from subscriber.apply.conflicts.policy import Policies
from subscriber.apply.hooks.config import Hooks
from subscriber.apply.relation_map import LocalRelation, RelationMap, RelationMapping, map_relation
from subscriber.apply.transaction import RemoteTransaction
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.errors import MappingError, StaleMapping, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, OldPart, Relation, Truncate, Update
from subscriber.protocol.tuple_data import UNCHANGED
from subscriber.targets.postgres.conflicts.detection import Noticing
from subscriber.targets.postgres.conflicts.history import History
from subscriber.targets.postgres.conflicts.resolution import Resolving
from subscriber.targets.postgres.session import introspection, schema_check
from subscriber.targets.postgres.session.apply_settings import apply_settings
from subscriber.targets.postgres.session.capabilities import Means
from subscriber.targets.postgres.session.error_context import explain
from subscriber.targets.postgres.session.foreign_code import Containing
from subscriber.targets.postgres.session.known_tables import KnownTables
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.roles import Acting
from subscriber.targets.postgres.session.statement_context import Note, OnConflict, Wants
from subscriber.targets.postgres.sql import batch_statements, row_statements
from subscriber.targets.postgres.sql.parameters import NO_ROW, Row, bind, require_columns
from subscriber.targets.postgres.sql.row_statements import NEW, OLD, Plan

_CLEAR_SKIP_LSN = "SELECT subscriber.clear_skip($1, $2, $3)"


class PostgresTarget:
    """Implements target.base.Target. One worker's session; not safe for two tasks at once."""

    def __init__(self, session: Session | Pipeline, origin: str, on_conflict: OnConflict) -> None:
        """`on_conflict` is told of rows that were not there, and of those that somebody else wrote last.

        A pipeline is one that another target, which is done, has used before.
        """
        self.pipeline = session if isinstance(session, Pipeline) else Pipeline(session)
        self.origin = origin
        self.means = Means()
        self.acting = Acting(self.pipeline)
        self.known = KnownTables()
        self.noticing = Noticing(self.pipeline, self.asking, on_conflict, origin)
        self.policies = Policies({})
        self.history: History | None = None  # None: no conflict is recorded
        self.hooks: Hooks | None = (
            None  # for whoever brings the changes (worker/session/applier.py); None: there are none
        )
        self.same_types_only = False  # likewise: the values are in binary, and nobody has said that they can be
        self.one_by_one: Counter[str] = Counter()  # changes that BatchingTarget has not applied set-based, and why
        self.wake: Callable[[], None] = lambda: None  # called when rest() has something to do again
        self.resolving: Resolving | None = None  # None: no change has to look before it is applied
        self.progress: ProgressRecord
        self._shapes = schema_check.Shapes(self.pipeline)
        self.containing = Containing(self.pipeline, self.acting, self._shapes)
        self.has_run_foreign_code = False
        self._is_open = False  # the target's transaction has begun, and its end was not queued
        self._checked: set[int] = set()  # local relations whose shape this transaction has checked
        self._fresh: set[int] = set()  # local relations that were mapped in this transaction
        self._made: set[int] = set()  # local relations without a key in which this transaction has made rows

    @property
    def position(self) -> Lsn:
        return self.progress.position

    def resume(self, progress: ProgressRecord, origin_id: int | None = None) -> None:
        """Continue from this progress record; before the first commit().

        `origin_id`: report rows that were written through another origin than this one, or none. For targets
        with track_commit_timestamp, at the price of one more statement for each UPDATE and DELETE.
        """
        self.progress = progress
        self.noticing.origin_id = origin_id
        if self.resolving is not None:
            self.resolving.looking.timed = origin_id is not None
            self.resolving.progress = progress

    async def configure(self, synchronous_commit: str) -> None:
        """Make the session what an apply worker's is."""
        self.containing.settings = apply_settings(self.pipeline.session, self.means, synchronous_commit)
        for statement in self.containing.settings:
            self.pipeline.execute(statement, note=Note("SET"))
        await self.pipeline.settle()

    async def map(self, remote: Relation) -> RelationMapping:
        known = self.known.find(remote.schema, remote.name, self.acting.terms)
        if known is not None:
            with suppress(MappingError):  # it may have been altered since
                return map_relation(remote, known, self.codec)
        self.acting.step_back(Note("RELATION"))
        local = await introspection.introspect(self.pipeline, remote.schema, remote.name, self.acting.terms)
        self._fresh.add(local.oid)
        self.known.add(local, self.acting.terms)
        return map_relation(remote, local, self.codec)

    async def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        if not transaction.changed:
            self.begin(transaction)
        oid = mapping.local.oid
        note = Note(change.message_type, transaction, mapping, change)
        note.may_be_stale = oid not in self._checked and oid not in self._fresh
        note.own_first = transaction.keeps_locks and oid in self._made
        self._guard(mapping.local, "ROW EXCLUSIVE", note)
        self.acting.become([mapping.local], note)
        if mapping.runs_foreign_code:
            self.containing.begin(mapping)
            self.has_run_foreign_code = True
        left: Insert | Update | Delete | None = change
        if self.resolving is not None and self.resolving.concerns(mapping, change):
            left = await self.resolving.resolve(change, note)
            note = replace(note, change=left, resolved=True)
        if isinstance(left, Insert):
            self._insert(mapping, left, note)
        elif isinstance(left, Update):
            self._update(mapping, left, note)
        elif isinstance(left, Delete):
            self._delete(mapping, left, note)
        if mapping.search is None and not isinstance(left, Delete):
            self._made.add(oid)
        if mapping.runs_foreign_code:
            self.containing.set_again(note)
        if oid not in self._checked:
            self._check_shape(mapping, note)
        await self.pipeline.drain()

    def _insert(self, mapping: RelationMapping, change: Insert, note: Note) -> None:
        status, values = change.new.split()
        require_columns(mapping, status)
        self._run(row_statements.insert(mapping), (status, values), NO_ROW, note)

    def _update(self, mapping: RelationMapping, change: Update, note: Note) -> None:
        new = change.new.split()
        old = change.old.split() if change.old is not None else NO_ROW
        require_columns(mapping, new[0])
        if change.old is not None:
            require_columns(mapping, old[0])
        identity_changed = False
        for index, column in enumerate(mapping.attributes):
            if not column.identity_always or new[0][index] == UNCHANGED:
                continue
            in_key = mapping.search is None or index in mapping.search
            if change.old is None:
                if not in_key:
                    plan = row_statements.replace_if_changed(mapping, index, new[0])
                    replacing = Note("UPDATE", note.transaction, mapping, may_be_stale=note.may_be_stale)
                    self._run(plan, new, new, replacing)
            elif in_key or change.old_part is OldPart.ROW:
                identity_changed = identity_changed or old[1][index] != new[1][index]
            else:  # the old value was not sent, and the new key would find another row
                identity_changed = True
        row = NEW if change.old is None else OLD
        self._find(row, new, old, note)
        self.noticing.look_for(row, new, old, note)
        self.noticing.look_at_writer(row, new, old, note)
        self._run(row_statements.update(mapping, change.old_part, new[0], identity_changed), new, old, note)

    def _delete(self, mapping: RelationMapping, change: Delete, note: Note) -> None:
        old = change.old.split()
        require_columns(mapping, old[0])
        self._find(OLD, NO_ROW, old, note)
        self.noticing.look_for(OLD, NO_ROW, old, note)
        self.noticing.look_at_writer(OLD, NO_ROW, old, note)
        self._run(row_statements.delete(mapping), NO_ROW, old, note)

    def _find(self, row: int, new: Row, old: Row, note: Note) -> None:
        """For a table without a key: find the row that the next statement is about."""
        mapping = note.mapping
        if mapping is not None and mapping.search is None:
            plan = row_statements.find(mapping, row, (new, old)[row][0], own_first=note.own_first)
            self._run(plan, new, old, Note(note.message, note.transaction, mapping, may_be_stale=note.may_be_stale))

    def _run(
        self,
        plan: Plan,
        new: Row,
        old: Row,
        note: Note,
    ) -> None:
        note.plan = plan
        formats, parameters = bind(plan, new, old)
        self.pipeline.execute(
            plan.sql, formats, parameters, note=note, expect=plan.expect, on_result=self.noticing.answered
        )

    def _guard(self, local: LocalRelation, mode: str, note: Note) -> None:
        """Before a guarded table is first touched in this transaction: see targets/postgres/session/foreign_code.py."""
        if local.guarded and local.oid not in self._checked:
            self._checked.add(local.oid)
            self.containing.guard(local, mode, note)

    @contextmanager
    def asking(self, mapping: RelationMapping, note: object) -> Iterator[None]:
        """Within the block a question about rows of the table is queued, inside of a transaction or between two."""
        guarded, alone = mapping.local.guarded, not self._is_open
        if alone:
            self.pipeline.execute("BEGIN", note=note)
        role = self.acting.step_back(note)
        if guarded and (alone or mapping.local.oid not in self._checked):
            self.containing.guard(mapping.local, "ACCESS SHARE", note)
        self.acting.become([mapping.local], note)
        yield
        if alone:
            self.pipeline.execute("COMMIT", note=note)
            self.acting.began()
        else:
            self.acting.resume(role, note)

    def _check_shape(self, mapping: RelationMapping, note: Note) -> None:
        local = mapping.local
        self._checked.add(local.oid)
        self.acting.step_back(note)
        self._shapes.check(local, self.acting.owner, note)

    def take(
        self, transaction: RemoteTransaction, waiting: deque[bytes], limit: int, relations: RelationMap, wants: Wants
    ) -> tuple[int, int]:
        """Take changes as the walsender sent them, where that is quicker: number and bytes. None here."""
        return 0, 0

    def take_transactions(
        self, waiting: deque[bytes], limit: int, relations: RelationMap, wants: Wants, ends: Ends
    ) -> Taken | None:
        """Take whole transactions in the same way. Never here."""
        return None

    def expect_few(self, few: bool) -> bool:
        """Say whether what comes until rest() is `few` whole transactions; whether to offer none of it to take()."""
        return few

    async def make_room(self) -> None:
        """To be awaited after take()."""

    async def rest(self) -> None:
        """The stream pauses: do what was gathered, if anything was."""
        if self.pipeline.idle and not self._is_open and self._shapes.check_some(self.acting.owner, Note("RELATION")):
            await self.pipeline.settle()
            self.wake()

    def check_ahead(self, tables: Iterable[LocalRelation]) -> None:
        """Compare the shapes of known tables while the stream pauses, so that their first changes need not."""
        self._shapes.check_later(tables)
        self.wake()

    async def alone(self, transaction: RemoteTransaction) -> None:
        """To be awaited before the session is used otherwise than by this contract, inside of `transaction` or not."""

    async def empty(self, transaction: RemoteTransaction, mappings: list[RelationMapping], truncate: Truncate) -> None:
        if not transaction.changed:
            self.begin(transaction)
        note = Note(truncate.message_type, transaction, mappings[0] if len(mappings) == 1 else None, truncate)
        oids = {mapping.local.oid for mapping in mappings}
        note.may_be_stale = not oids <= self._checked | self._fresh
        for mapping in mappings:
            self._guard(mapping.local, "ACCESS EXCLUSIVE", note)
        foreign = [mapping for mapping in mappings if mapping.runs_foreign_code]  # perhaps a trigger for TRUNCATE
        for mapping in foreign:
            self.containing.begin(mapping)
            self.has_run_foreign_code = True
        self.acting.become([mapping.local for mapping in mappings], note)
        await self.acting.name_tables([mapping.local for mapping in mappings], "TRUNCATE", note)
        sql = row_statements.truncate(mappings, restart_identity=truncate.restart_identity)
        self.pipeline.execute(sql, note=note)
        if foreign:
            self.containing.set_again(note)
        for mapping in mappings:
            if mapping.local.oid not in self._checked:
                self._check_shape(mapping, note)
        await self.pipeline.drain()

    def apply_steps(self, batch: Batch, note: Note) -> None:
        """Queue what a batch comes to; batch_applier.py says when that is right."""
        for table in batch.tables.values():
            if not table.steps:
                continue
            local = table.mapping.local
            if table.mapping.search is None:
                self._made.add(local.oid)
            self._guard(local, "ROW EXCLUSIVE", note)
            self.acting.become([local], note)
            for step in table.steps:
                what = replace(note, message=step.kind.name, mapping=table.mapping)
                if step.kind is Kind.INSERT:
                    self.pipeline.copy(batch_statements.copy(table), batch_statements.copy_data(table, step), note=what)
                else:
                    formats, parameters = batch_statements.arrays(table, step)
                    types = batch_statements.types(table, step)
                    self.pipeline.execute(
                        batch_statements.change(table, step), formats, parameters, note=what, types=types
                    )
            if local.oid not in self._checked:
                self._check_shape(table.mapping, note)
        self.acting.step_back(note)

    def begin(self, transaction: RemoteTransaction) -> None:
        """Open the target's transaction for this remote one."""
        transaction.changed = self._is_open = True
        self._checked.clear()
        self._made.clear()
        self.acting.began()
        self.containing.began()
        self.pipeline.execute("BEGIN", note=Note("BEGIN", transaction))

    async def commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        self.queue_commit(transaction, end_lsn, on_committed)
        await self.pipeline.drain()

    def queue_commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        """Queue what commit() does, waiting for nothing."""
        note = Note("COMMIT", transaction)
        self.containing.run_deferred(note)
        self.acting.step_back(note)
        self.progress.advance(self.pipeline, end_lsn, transaction.commit_time, note)
        self.pipeline.execute("COMMIT", note=note)
        self.pipeline.sync(on_committed)
        self._ended()

    def prepare(self, name: str, note: Note) -> None:
        """Queue PREPARE TRANSACTION; what goes with it comes before, see run_deferred()."""
        self.containing.refuse_to_prepare()
        self.pipeline.execute_once(f"PREPARE TRANSACTION '{name}'", note=note)
        self.pipeline.sync()
        self._ended()

    def rolled_back(self) -> None:
        """The target's transaction was rolled back, with nothing of it left (session_group.py)."""
        self._is_open = False

    def run_deferred(self, note: Note) -> None:
        """Queue what foreign code has put off to the end of the transaction."""
        self.containing.run_deferred(note)

    def _ended(self) -> None:
        """The end of the target's transaction was queued."""
        self._is_open = False
        self.containing.clean()
        self._fresh.clear()

    def set_origin(self, lsn: Lsn, time: int, note: Note) -> None:
        """What PREPARE TRANSACTION and COMMIT PREPARED are to record: the publisher's position and time."""
        self.progress.set_origin(self.pipeline, lsn, time, note)

    def share_progress(self, other: PostgresTarget) -> None:
        """Have `other`, a session of the same worker, make the next commit; nothing of ours is under way."""
        other.progress = self.progress.copy()

    def follow(self, position: Lsn) -> None:
        """The progress record is at `position` when this session moves it next: another one of this worker has."""
        self.progress.position = position

    @property
    def codec(self) -> str:
        """Of the session's texts, see protocol/encodings.py."""
        return self.pipeline.codec

    @property
    def pipelines(self) -> list[Pipeline]:
        """Of all sessions of this worker in which something may be under way; first that of what commits first."""
        return [self.pipeline]

    def retreat(self) -> bool:
        """The first of `pipelines` waits for a lock. Whether others have anything open; then it is rolled back."""
        return False

    async def apply_gathered(self, transaction: RemoteTransaction) -> None:
        """Have what came of `transaction` so far done, and hold its locks, though more is to come."""

    async def savepoint(self, transaction: RemoteTransaction, name: str) -> None:
        """Begin a subtransaction; `name` needs no quotes."""
        self._queue_savepoint(transaction, name)

    def _queue_savepoint(self, transaction: RemoteTransaction, name: str) -> None:
        if not transaction.changed:
            self.begin(transaction)
        note = Note("SAVEPOINT", transaction)
        self.acting.step_back(note)
        self.pipeline.execute_once(f"SAVEPOINT {name}", note=note)

    async def roll_back_to(self, transaction: RemoteTransaction, name: str) -> None:
        """Undo everything since savepoint() of that name, which ends with it."""
        self._queue_roll_back_to(transaction, name)

    def _queue_roll_back_to(self, transaction: RemoteTransaction, name: str) -> None:
        note = Note("ROLLBACK TO SAVEPOINT", transaction)
        self.pipeline.execute_once(f"ROLLBACK TO SAVEPOINT {name}", note=note)
        self.pipeline.execute_once(f"RELEASE SAVEPOINT {name}", note=note)
        self.acting.began()  # the role went back with it, and so did the locks that keep the tables' shapes
        self._checked.clear()
        self._shapes.forget()

    async def roll_back(self, transaction: RemoteTransaction) -> None:
        """Undo the transaction."""
        self._queue_roll_back(transaction)

    def _queue_roll_back(self, transaction: RemoteTransaction) -> None:
        if transaction.changed:
            self.pipeline.execute("ROLLBACK", note=Note("ROLLBACK", transaction))
            self.pipeline.sync()
        self._ended()

    def clear_skip_lsn(self, transaction: RemoteTransaction, skip_lsn: Lsn) -> None:
        """Forget the position to skip, with this transaction; unless another one was named meanwhile."""
        if not transaction.changed:
            self.begin(transaction)
        note = Note("COMMIT", transaction)
        self.acting.step_back(note)
        parameters = self.pipeline.texts((*self.progress.shown, str(skip_lsn)))
        self.pipeline.execute(_CLEAR_SKIP_LSN, parameters=parameters, note=note)

    async def settle(self) -> None:
        await self.pipeline.settle()

    def explain(self, error: SubscriberError) -> SubscriberError:
        """See explaining.explain(). For an error of this session's statements; any other is returned as it is."""
        if error is not self.pipeline.error:
            return error
        explained = explain(error, self.pipeline, self.acting, self.origin)
        if isinstance(explained, StaleMapping):
            self.known.forget()
        return explained
