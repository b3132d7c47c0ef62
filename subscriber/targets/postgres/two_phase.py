"""Transactions that the publisher prepared: prepared here, then committed or rolled back when it says so.

PREPARE TRANSACTION cannot move the progress with it: the record would stay locked until COMMIT PREPARED, and the
very next transaction needs it. COMMIT PREPARED must not be in a transaction block. So each takes two steps,
and a restart finds in subscriber.prepared which of the steps are done:

    PREPARE            1  the changes, and a row that is `committed`: visible once the changes are
                       2  the progress, and a row that is not `committed`: the transaction is pending, and since when
    COMMIT PREPARED    1  COMMIT PREPARED
                       2  the progress, and both rows are deleted
    ROLLBACK PREPARED  1  ROLLBACK PREPARED
                       2  the progress, and the row that is left goes

The publisher's name for the transaction is not used: two subscriptions may get the same one. Ours has the
subscription's OID and the publisher's xid.

Failure cases, where the worker, its connection, or the target ends:
- Before PREPARE is done: the target rolls back; the whole transaction is sent again.
- After PREPARE, before the progress: it is sent again from its BEGIN PREPARE. Its name is among the prepared ones,
  so its changes are skipped and only step 2 is done.
- After COMMIT PREPARED, before the progress: it is sent again. The name is missing and the `committed` row is visible:
  only step 2 is done. Where both are missing, a user has resolved it by hand. Continuing would lose it: an error.
- After ROLLBACK PREPARED, before the progress: it is sent again. An unknown name is no error, since a transaction
  prepared before the slot had two-phase enabled was never sent.
- A crash of the target undoes progress that was not flushed, never a PREPARE or COMMIT PREPARED, which
  PostgreSQL always flushes: the same cases.
- Another role has prepared a transaction with the name: it is not taken for ours, and PREPARE fails until it is ended.
- A backend of a dead worker that still works on a PREPARE is registered as that worker's; we read after it has ended.

Source: apply_handle_prepare() and those below it in worker.c, TwoPhaseTransactionGid() and LookupGXact() in twophase.c.
"""

from __future__ import annotations

from subscriber import names, telemetry
from subscriber.apply.error_context import error_context
from subscriber.apply.transaction import RemoteTransaction, TransactionState
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, RollbackPrepared, moment
from subscriber.sqlstate import UNDEFINED_OBJECT
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.target import PostgresTarget

# Any role can prepare a transaction, with any name. Only a role with duty apply, or a superuser, prepares ours.
_PREPARED = """
SELECT gid FROM pg_catalog.pg_prepared_xacts
 WHERE database = pg_catalog.current_database() AND pg_catalog.strpos(gid, $1) = 1
   AND pg_catalog.has_function_privilege(owner, 'subscriber.mark_prepared(oid, bytea, bigint, text)', 'EXECUTE')
"""
_MARK = "SELECT subscriber.mark_prepared($1, $2, $3, $4)"
_NOTE = "SELECT subscriber.note_prepared($1, $2, $3, $4, $5, $6, $7)"
_FIND = "SELECT f.committed, f.prepare_end_lsn FROM subscriber.find_prepared($1, $2, $3) f"
_FORGET = "SELECT subscriber.forget_prepared($1, $2, $3)"


class TwoPhase:
    """The prepared transactions of one subscription, for its apply worker. Two tasks must not use it concurrently."""

    def __init__(self, target: PostgresTarget, subid: int) -> None:
        self._target = target
        self._subid = subid
        self._prepared: set[str] = set()

    async def load(self) -> None:
        """Read the names of prepared transactions. Call it with the worker's locks held, before its first message."""
        rows = await self._target.session.pipeline.rows(_PREPARED, names.prepared_prefix(self._subid))
        self._prepared = {name for (name,) in rows if name is not None and names.is_prepared_gid(name, self._subid)}

    def is_prepared(self, xid: int) -> bool:
        """Return True if the publisher's transaction `xid` is prepared on the target."""
        return self.gid(xid) in self._prepared

    @property
    def names(self) -> list[str]:
        """The names of all prepared transactions."""
        return sorted(self._prepared)

    def forget(self, name: str) -> None:
        """Remove the name of a transaction that another session has resolved."""
        self._prepared.discard(name)

    def gid(self, xid: int) -> str:
        return names.prepared_gid(self._subid, xid)

    async def prepare(
        self, transaction: RemoteTransaction, end_lsn: Lsn, session: PostgresTarget | None = None
    ) -> None:
        """Prepare the transaction, unless that was done before a restart.

        Args:
            session: that has applied the transaction; None: the apply worker's own.
        """
        target = session or self._target
        await target.leave_batch_mode(transaction)
        gid = self.gid(transaction.xid)
        if gid in self._prepared:
            return
        # Queries caused by results are sent before PREPARE. After it they would wait for the locks it keeps.
        await target.session.pipeline.sync()
        if not transaction.is_open_on_target:  # also one without changes for us: COMMIT PREPARED needs it
            target.row_applier.begin(transaction)
        note = StatementContext("PREPARE", transaction)
        target.session.foreign_code.run_deferred(note)
        target.session.roles.reset_role(note)
        pipeline = target.session.pipeline
        pipeline.execute(_MARK, parameters=self._key(transaction.xid, gid), note=note)
        self._set_origin(target, end_lsn, transaction.commit_time, note)
        target.row_applier.prepare(gid, note)
        await pipeline.sync()
        self._prepared.add(gid)

    def note(self, transaction: RemoteTransaction, end_lsn: Lsn) -> RemoteTransaction:
        """After prepare(): the transaction of our own that says so, and is to be committed then."""
        own, note = self._begin(transaction, "PREPARE")
        at = str(moment(transaction.commit_time))
        parameters = self._key(transaction.xid, self.gid(transaction.xid), transaction.gid, str(end_lsn), at)
        self._target.session.pipeline.execute(_NOTE, parameters=parameters, note=note)
        return own

    async def commit(self, message: CommitPrepared, transaction: RemoteTransaction) -> RemoteTransaction:
        """COMMIT PREPARED; the transaction of our own that is to be committed then.

        `transaction` stands for what the message is about. Raises ApplyError if nothing of that name was prepared.
        """
        await self._target.leave_batch_mode(transaction)
        gid = self.gid(message.xid)
        if gid in self._prepared:
            note = StatementContext(message.message_type, transaction)
            self._set_origin(self._target, message.end_lsn, message.commit_time, note)
            await self._alone(f"COMMIT PREPARED '{gid}'", note)
            self._prepared.remove(gid)
        elif transaction.state is not TransactionState.SKIP and ("t", None) not in await self._rows(message.xid):
            error = ApplyError(
                f'prepared transaction with identifier "{gid}" does not exist',
                detail="The publisher has committed it; it was rolled back on the target by somebody else.",
                hint="Its changes are lost here. Apply them by hand, then skip it with ALTER SUBSCRIPTION ... SKIP.",
                sqlstate=UNDEFINED_OBJECT,
            )
            target = self._target
            context = error_context(target.origin, message.message_type, target.wording, transaction=transaction)
            error.context.append(context)
            raise error
        return self._forget(transaction, message.message_type)

    async def rollback(self, message: RollbackPrepared, transaction: RemoteTransaction) -> RemoteTransaction:
        """ROLLBACK PREPARED, if it is here; the transaction of our own that is to be committed then."""
        await self._target.leave_batch_mode(transaction)
        gid = self.gid(message.xid)
        if gid in self._prepared:
            known = next((lsn for committed, lsn in await self._rows(message.xid) if committed == "f"), None)
            if known is None or Lsn.parse(known) == message.prepare_end_lsn:
                note = StatementContext(message.message_type, transaction)
                self._set_origin(self._target, message.rollback_end_lsn, message.rollback_time, note)
                await self._alone(f"ROLLBACK PREPARED '{gid}'", note)
                self._prepared.remove(gid)
        else:
            telemetry.log(telemetry.DEBUG, f'prepared transaction "{gid}" was rolled back and is not here')
        return self._forget(transaction, message.message_type)

    @staticmethod
    def _set_origin(target: PostgresTarget, lsn: Lsn, time: int, note: StatementContext) -> None:
        """Set the publisher's position and time, which PREPARE TRANSACTION and COMMIT PREPARED record."""
        target.row_applier.progress.set_origin(target.session.pipeline, lsn, time, note)

    async def _alone(self, sql: str, note: StatementContext) -> None:
        """Run a statement that must not be in a transaction block. Statements between two Syncs are in one."""
        await self._target.sync()
        self._target.session.pipeline.execute_once(sql, note=note)
        await self._target.sync()

    def _forget(self, transaction: RemoteTransaction, what: str) -> RemoteTransaction:
        own, note = self._begin(transaction, what)
        if self.gid(transaction.xid) not in self._prepared:
            self._target.session.pipeline.execute(_FORGET, parameters=self._key(transaction.xid), note=note)
        return own

    def _begin(self, transaction: RemoteTransaction, what: str) -> tuple[RemoteTransaction, StatementContext]:
        own = RemoteTransaction(transaction.xid, transaction.finish_lsn, transaction.commit_time)
        own.state = transaction.state
        self._target.row_applier.begin(own)
        return own, StatementContext(what, own)

    async def _rows(self, xid: int) -> list[tuple[str | None, ...]]:
        return await self._target.session.pipeline.rows(_FIND, *self._target.row_applier.progress.shown, str(xid))

    def _key(self, xid: int, *more: str | None) -> bytes:
        return self._target.session.pipeline.texts((*self._target.row_applier.progress.shown, str(xid), *more))
