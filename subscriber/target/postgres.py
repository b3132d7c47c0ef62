"""The apply session on a PostgreSQL target: the reference path, one statement for one change.

Statements are pipelined: nothing here waits for an answer but introspection and settle(). The server
works through them in order, so a remote transaction is one local transaction, committed in commit order.
Why running ahead is safe is told in target/progress.py; why the shape of a table is checked inside each
transaction, in target/shapes.py.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from subscriber.apply.batch import Batch, Ends, Taken
from subscriber.apply.context import RemoteTransaction, error_context
from subscriber.apply.hooks import Hooks
from subscriber.apply.policy import Policies
from subscriber.apply.relation_map import RelationMap, RelationMapping, map_relation
from subscriber.apply.steps import Kind
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.errors import ServerError, StaleMapping, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol import wire
from subscriber.protocol.messages import Delete, Insert, OldPart, Relation, Truncate, Update
from subscriber.protocol.tuples import UNCHANGED
from subscriber.target import relations, sets, shapes, statements
from subscriber.target.acting import Acting
from subscriber.target.binding import NO_ROW, Row, bind, require_columns
from subscriber.target.history import History
from subscriber.target.means import Means, refuse_row_security
from subscriber.target.note import Note, OnConflict, Wants
from subscriber.target.noticing import Noticing
from subscriber.target.progress import ProgressRow
from subscriber.target.resolving import Resolving
from subscriber.target.statements import NEW, OLD, Plan

# What the built-in worker sets, and what a session through SQL needs besides (each with its reason).
SETTINGS = {
    "session_replication_role": "replica",
    "search_path": "",
    "default_transaction_isolation": "read committed",  # others would fail where the executor waits
    "row_security": "off",  # an error instead of rows silently left out
    "enable_seqscan": "off",  # the built-in worker always uses the identity's index, however small the table
    "plan_cache_mode": "force_generic_plan",  # every value of a key is searched for in the same way
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",  # 14+
    "transaction_timeout": "0",  # 17+
}
_SINCE = {"idle_session_timeout": 140000, "transaction_timeout": 170000}

# CONTEXT of an error in a parameter: unnamed portal parameter $1 = '...'  (bind_param_error_callback() in postgres.c).
_PARAMETER = re.compile(r"[^$\n]*\$(\d+)(?: = .*)?", re.DOTALL)

_CLEAR_SKIP_LSN = """
UPDATE subscriber.subscription SET subskiplsn = '0/0'
 WHERE subid = $1::pg_catalog.text::pg_catalog.oid AND subskiplsn = $2::pg_catalog.text::pg_catalog.pg_lsn
"""

INSUFFICIENT_PRIVILEGE = "42501"


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
        self.noticing = Noticing(self.pipeline, self.acting, on_conflict, origin)
        self.policies = Policies({})
        self.history: History | None = None  # None: no conflict is recorded
        self.hooks: Hooks | None = None  # for whoever brings the changes (worker/applier.py); None: there are none
        self.same_types_only = False  # likewise: the values are in binary, and nobody has said that they can be
        self.one_by_one: Counter[str] = Counter()  # changes that BatchingTarget has not applied set-based, and why
        self.wake: Callable[[], None] = lambda: None  # called when rest() has something to do again
        self.resolving: Resolving | None = None  # None: no change has to look before it is applied
        self._progress: ProgressRow
        self._shapes = shapes.Shapes(self.pipeline)
        self._checked: set[int] = set()  # local relations whose shape this transaction has checked
        self._fresh: set[int] = set()  # local relations that were mapped in this transaction
        self._made: set[int] = set()  # local relations without a key in which this transaction has made rows

    @property
    def position(self) -> Lsn:
        return self._progress.position

    def resume(self, progress: ProgressRow, origin_id: int | None = None) -> None:
        """Go on from this progress row; before the first commit().

        `origin_id`: report rows that were written through another origin than this one, or none. For targets
        with track_commit_timestamp, at the price of one more statement for each UPDATE and DELETE.
        """
        self._progress = progress
        self.noticing.origin_id = origin_id
        if self.resolving is not None:
            self.resolving.looking.timed = origin_id is not None

    async def configure(self, synchronous_commit: str) -> None:
        """Make the session what an apply worker's is."""
        version = self.pipeline.session.server_version
        values = {n: v for n, v in SETTINGS.items() if version >= _SINCE.get(n, 0)}
        if not self.means.replica_role:
            del values["session_replication_role"]
        if not self.means.own_tables:
            del values["row_security"]
        for name, value in {**values, "synchronous_commit": synchronous_commit}.items():
            self.pipeline.execute(
                "SELECT pg_catalog.set_config($1, $2, false)",
                parameters=wire.text_parameters((name, value)),
                note=Note(f"SET {name}"),
            )
        await self.pipeline.settle()

    async def map(self, remote: Relation) -> RelationMapping:
        local = await relations.introspect(self.pipeline, remote.schema, remote.name, self.acting.owner)
        if not self.means.own_tables:
            await refuse_row_security(self.pipeline, local, self.acting.role([local]))
        self._fresh.add(local.oid)
        return map_relation(remote, local)

    async def change(
        self, transaction: RemoteTransaction, mapping: RelationMapping, change: Insert | Update | Delete
    ) -> None:
        if not transaction.changed:
            self.begin(transaction)
        oid = mapping.local.oid
        note = Note(change.message_type, transaction, mapping, change)
        note.may_be_stale = oid not in self._checked and oid not in self._fresh
        note.own_first = transaction.keeps_locks and oid in self._made
        self.acting.become([mapping.local], note)
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
        if oid not in self._checked:
            self._check_shape(mapping, note)
        await self.pipeline.drain()

    def _insert(self, mapping: RelationMapping, change: Insert, note: Note) -> None:
        status, values = change.new.split()
        require_columns(mapping, status)
        self._run(statements.insert(mapping), (status, values), NO_ROW, note)

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
                    plan = statements.replace_if_changed(mapping, index, new[0])
                    replacing = Note("UPDATE", note.transaction, mapping, may_be_stale=note.may_be_stale)
                    self._run(plan, new, new, replacing)
            elif in_key or change.old_part is OldPart.ROW:
                identity_changed = identity_changed or old[1][index] != new[1][index]
            else:  # the old value was not sent, and the new key would find another row
                identity_changed = True
        row = NEW if change.old is None else OLD
        self._find(row, new, old, note)
        self.noticing.look_at_writer(row, new, old, note)
        self._run(statements.update(mapping, change.old_part, new[0], identity_changed), new, old, note)

    def _delete(self, mapping: RelationMapping, change: Delete, note: Note) -> None:
        old = change.old.split()
        require_columns(mapping, old[0])
        self._find(OLD, NO_ROW, old, note)
        self.noticing.look_at_writer(OLD, NO_ROW, old, note)
        self._run(statements.delete(mapping), NO_ROW, old, note)

    def _find(self, row: int, new: Row, old: Row, note: Note) -> None:
        """For a table without a key: find the row that the next statement is about."""
        mapping = note.mapping
        if mapping is not None and mapping.search is None:
            plan = statements.find(mapping, row, (new, old)[row][0], own_first=note.own_first)
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

    def _check_shape(self, mapping: RelationMapping, note: Note) -> None:
        local = mapping.local
        self._checked.add(local.oid)
        self.acting.step_back(note)
        self._shapes.check(local, self.acting.owner, note)

    def take(
        self, transaction: RemoteTransaction, waiting: deque[bytes], limit: int, relations: RelationMap, wants: Wants
    ) -> tuple[int, int]:
        """Take changes as the walsender sent them, where that is quicker (batch.py): number and bytes. None here."""
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

    async def alone(self, transaction: RemoteTransaction) -> None:
        """To be awaited before the session is used otherwise than by this contract, inside of `transaction` or not."""

    async def empty(self, transaction: RemoteTransaction, mappings: list[RelationMapping], truncate: Truncate) -> None:
        if not transaction.changed:
            self.begin(transaction)
        note = Note(truncate.message_type, transaction, mappings[0] if len(mappings) == 1 else None, truncate)
        oids = {mapping.local.oid for mapping in mappings}
        note.may_be_stale = not oids <= self._checked | self._fresh
        self.acting.become([mapping.local for mapping in mappings], note)
        sql = statements.truncate(mappings, restart_identity=truncate.restart_identity)
        self.pipeline.execute(sql, note=note)
        for mapping in mappings:
            if mapping.local.oid not in self._checked:
                self._check_shape(mapping, note)
        await self.pipeline.drain()

    def apply_steps(self, batch: Batch, note: Note) -> None:
        """Queue what a batch comes to; batch.py says when that is right."""
        for table in batch.tables.values():
            if not table.steps:
                continue
            local = table.mapping.local
            if table.mapping.search is None:
                self._made.add(local.oid)
            self.acting.become([local], note)
            for step in table.steps:
                what = replace(note, message=step.kind.name, mapping=table.mapping)
                if step.kind is Kind.INSERT:
                    self.pipeline.copy(sets.copy(table), sets.copy_data(table, step), note=what)
                else:
                    self.pipeline.execute(sets.change(table, step), *sets.arrays(table, step), note=what)
            if local.oid not in self._checked:
                self._check_shape(table.mapping, note)
        self.acting.step_back(note)

    def begin(self, transaction: RemoteTransaction) -> None:
        """Open the target's transaction for this remote one."""
        transaction.changed = True
        self._checked.clear()
        self._made.clear()
        self.acting.began()
        self.pipeline.execute("BEGIN", note=Note("BEGIN", transaction))

    async def commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        self.queue_commit(transaction, end_lsn, on_committed)
        await self.pipeline.drain()

    def queue_commit(self, transaction: RemoteTransaction, end_lsn: Lsn, on_committed: Callable[[], None]) -> None:
        """Queue what commit() does, waiting for nothing."""
        note = Note("COMMIT", transaction)
        self.acting.step_back(note)
        self._progress.advance(self.pipeline, end_lsn, transaction.commit_time, note)
        self.pipeline.execute("COMMIT", note=note)
        self.pipeline.sync(on_committed)
        self._fresh.clear()

    def set_origin(self, lsn: Lsn, time: int, note: Note) -> None:
        """What PREPARE TRANSACTION and COMMIT PREPARED are to record: the publisher's position and time."""
        self._progress.set_origin(self.pipeline, lsn, time, note)

    def share_progress(self, other: PostgresTarget) -> None:
        """Have `other`, a session of the same worker, make the next commit; nothing of ours is under way."""
        other._progress = self._progress.copy()

    def follow(self, position: Lsn) -> None:
        """The progress row is at `position` when this session moves it next: another one of this worker has."""
        self._progress.position = position

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
        self._fresh.clear()

    def clear_skip_lsn(self, transaction: RemoteTransaction, subid: int, skip_lsn: Lsn) -> None:
        """Forget the position to skip, with this transaction; unless another one was named meanwhile."""
        if not transaction.changed:
            self.begin(transaction)
        note = Note("COMMIT", transaction)
        self.acting.step_back(note)
        parameters = wire.text_parameters((str(subid), str(skip_lsn)))
        self.pipeline.execute(_CLEAR_SKIP_LSN, parameters=parameters, note=note)

    async def settle(self) -> None:
        await self.pipeline.settle()

    def explain(self, error: SubscriberError) -> SubscriberError:
        """Add the CONTEXT of what was being done, or say that only the table's shape has changed.

        For an error of this session's statements; any other is returned as it is.
        """
        note = self.pipeline.failed_note
        if error is not self.pipeline.error or not isinstance(note, Note) or note.transaction is None:
            return error
        if error.sqlstate == shapes.CHANGED or (
            note.may_be_stale and error.sqlstate.startswith(shapes.OF_AN_OLD_SHAPE)
        ):
            return StaleMapping(error.message)
        if error.sqlstate == INSUFFICIENT_PRIVILEGE and isinstance(error, ServerError) and note.mapping is not None:
            error = self._row_security(error, note.mapping)
        if self.pipeline.session.error is None:
            self.add_context(error, note)
        return error

    def _row_security(self, error: ServerError, mapping: RelationMapping) -> SubscriberError:
        """With row_security = off the server refuses where rows would be left out; say what that means here."""
        if error.fields.get("R") != "check_enable_rls":
            return error
        role = self.acting.role([mapping.local])
        return ServerError(
            {
                **error.fields,
                "C": "0A000",
                "M": f'user "{role}" cannot replicate into relation with row-level security enabled: '
                f'"{mapping.local.name}"',
            }
        )

    def add_context(self, error: SubscriberError, note: Note) -> None:
        """The line PostgreSQL's apply worker adds to the context that the server gave, if any."""
        column = _failed_column(error, note)
        if column is not None:
            error.context.clear()  # names the parameter, and shows its value if the server is so configured
        relation = note.mapping.label if note.mapping is not None else None
        error.context.append(error_context(self.origin, note.message, relation, column, note.transaction))


def _failed_column(error: SubscriberError, note: Note) -> str | None:
    """The column whose value could not be read; None when the error is no such one."""
    if len(error.context) != 1 or note.plan is None or note.mapping is None:
        return None
    found = _PARAMETER.fullmatch(error.context[0])
    if found is None or int(found[1]) > len(note.plan.parameters):
        return None
    _, index = note.plan.parameters[int(found[1]) - 1]
    return note.mapping.attributes[index].name
