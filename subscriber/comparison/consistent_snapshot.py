"""A snapshot of both sides of a subscription at one position of the publisher's WAL, while replication continues.

    pause the worker where it is                  at X
    publisher: temporary slot, its snapshot       at L >= X; exactly the transactions that finish before L
    resume the worker, and pause it at L          the target has exactly those as well
    target: snapshot
    resume the worker

**Purpose.** The comparison needs no retries and no tolerance: a difference between the two snapshots is a difference of
the data. The worker is paused while the slot is created, and while it advances from X to L, which takes moments. A long
transaction on the publisher delays the new slot, and so does a prepared one in any database, whatever it has changed.
The worker is then resumed, and the steps are retried a few times.

The snapshots are passed to connections that hold nothing else. The slot, which retains WAL, is dropped by then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio

from subscriber import names, telemetry
from subscriber.catalog import pause_requests, worker_sessions
from subscriber.catalog.connection import CatalogConnection, Connection, encoding_of
from subscriber.catalog.store.workers import APPLY_WORKER, load_permanent_error
from subscriber.connection.connect import open_session
from subscriber.connection.session import Session
from subscriber.connection.settings import EXACT_TEXT
from subscriber.display import shell_word
from subscriber.errors import ServerError, SubscriberError
from subscriber.failpoints import Point, reached
from subscriber.limited_wait import LimitedWait
from subscriber.lsn import Lsn
from subscriber.publisher.answers import parsing
from subscriber.publisher.connection import Publisher
from subscriber.publisher.open_transactions import UnfinishedTransactions, open_transactions
from subscriber.quoting import literal
from subscriber.remedy import Remedy
from subscriber.sqlstate import (
    INVALID_PARAMETER_VALUE,
    OBJECT_IN_USE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    SERIALIZATION_FAILURE,
    UNDEFINED_OBJECT,
)
from subscriber.subscription import Subscription

APPLICATION_NAME = "subscriber verify"
ATTEMPTS = 5
SLOT_PATIENCE = 10.0  # seconds to wait for the publisher's running transactions
HOLD_PATIENCE = 60.0  # seconds for the worker to finish its transaction and to reach the position
ERROR_PATIENCE = 5.0  # seconds between two checks whether an error keeps the worker from the position
RESTART_PATIENCE = 2.0  # seconds without a worker, during which a restarting worker returns
KILLED_PATIENCE = 5.0  # seconds for the target to notice that an earlier command was killed
POLL = 0.01  # seconds

_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


@dataclass(frozen=True, slots=True)
class CommonSnapshot:
    """`source` and `target` are names for SET TRANSACTION SNAPSHOT.

    The sessions are in transactions with these snapshots.
    """

    lsn: Lsn
    source: str
    target: str
    source_session: Session
    target_session: Session


@asynccontextmanager
async def common_snapshot(
    catalog: CatalogConnection,
    target: str,
    subscription: Subscription,
    *,
    at_rest: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[CommonSnapshot]:
    """Take a snapshot of both sides at one position, valid until the end of the block.

    Args:
        catalog: a connection to the target, which no other task uses.
        target: the connection string of the role that reads rows of the target.
        subscription: the subscription.
        at_rest: awaited while the target is at the position.

    Raises:
        SubscriberError: there is no worker to pause, or the publisher's transactions do not end.
    """
    async with AsyncExitStack() as stack:
        source_session = await open_side(stack, subscription.conninfo, must_use_password=subscription.must_use_password)
        target_session = await open_side(stack, target)
        async with paused_worker(catalog, subscription, source_session) as (lsn, source):
            snapshot = await begin_snapshot(target_session)
            if at_rest is not None:
                await at_rest()
        yield CommonSnapshot(lsn, source, snapshot, source_session, target_session)


async def begin_snapshot(session: Session, snapshot: str | None = None) -> str:
    """Begin a transaction with a snapshot, and export its snapshot. Returns the name for SET TRANSACTION SNAPSHOT.

    `snapshot` is a snapshot that another session has exported. None: a new one.
    """
    await session.query(_BEGIN)
    if snapshot is not None:
        try:
            await session.query(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
        except ServerError as error:
            raise lost_snapshot(error) if is_snapshot_lost(error) else error from None
    return await _export(session)


def is_snapshot_lost(error: SubscriberError) -> bool:
    """Return True if SET TRANSACTION SNAPSHOT has failed because the server does not have the snapshot any more."""
    return error.sqlstate in (UNDEFINED_OBJECT, INVALID_PARAMETER_VALUE, OBJECT_NOT_IN_PREREQUISITE_STATE)


def lost_snapshot(error: SubscriberError) -> SubscriberError:
    """Return the error for a snapshot whose session has ended."""
    return SubscriberError(
        f"the snapshot of the comparison is lost: {error.message}",
        detail="The session that holds it has ended, for example because the server was restarted, or a command or an"
        " idle timeout has ended the session.",
        hint="Repeat the command. After verify --resume FILE it continues with the tables that are not compared yet.",
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


@asynccontextmanager
async def paused_worker(
    catalog: CatalogConnection, subscription: Subscription, session: Session
) -> AsyncIterator[tuple[Lsn, str]]:
    """Pause the apply worker at a position, for the length of the block.

    Within the block the target has exactly the transactions of the publisher that finish before the position.

    Args:
        catalog: a connection to the target, which the block must not use.
        subscription: the subscription.
        session: a session with the publisher. A transaction is begun in it, whose snapshot is that of the position.

    Returns:
        The position, and the name of the snapshot for SET TRANSACTION SNAPSHOT.

    Raises:
        SubscriberError: there is no worker to pause, another command has paused it, or the publisher's transactions do
            not end.
    """
    async with catalog.use() as connection:
        wait = LimitedWait("another command that has paused the apply worker", KILLED_PATIENCE)
        while not await worker_sessions.register_own(connection, subscription.oid, pause_requests.HOLDER):
            if wait.is_over:
                raise SubscriberError(
                    f'another command has paused the apply worker of subscription "{subscription.name}"',
                    hint="Run one command for a subscription at a time: verify or repair.",
                    sqlstate=OBJECT_IN_USE,
                )
            await wait.pause()
        try:
            yield await _source_at_rest(connection, subscription, session)
        finally:
            if not connection.is_closed():
                with anyio.CancelScope(shield=True):
                    await pause_requests.release(connection, subscription.oid)
                    await worker_sessions.release_own(connection, subscription.oid, pause_requests.HOLDER)


async def open_side(
    stack: AsyncExitStack, conninfo: str, *, must_use_password: bool = False, encoding: str | None = None
) -> Session:
    """Open a session whose values have the text format of comparisons. `stack` closes it.

    Args:
        stack: closes the session.
        conninfo: the connection string of the server.
        must_use_password: see Publisher.connect().
        encoding: the encoding of texts. None: the database's own.

    Raises:
        ConnectionLost: the server cannot be reached.
        ServerError: the server refuses the session, or cannot convert its texts.
    """
    settings = EXACT_TEXT if encoding is None else {**EXACT_TEXT, "client_encoding": encoding}
    session = await open_session(
        conninfo, application_name=APPLICATION_NAME, settings=settings, must_use_password=must_use_password
    )
    stack.callback(session.abort)
    return session


async def _export(session: Session) -> str:
    """Export the snapshot of the session's transaction. Returns its name."""
    rows = await session.rows("SELECT pg_catalog.pg_export_snapshot()")
    with parsing("a snapshot"):
        ((name,),) = rows
    return name or ""


async def _source_at_rest(connection: Connection, subscription: Subscription, session: Session) -> tuple[Lsn, str]:
    """Pause the worker at the position of a snapshot of the publisher, and start a transaction of `session` with it.

    Returns:
        The position, and the snapshot's name.
    """
    for attempt in range(1, ATTEMPTS + 1):
        held_at = await _hold(connection, subscription, Lsn(0))
        await reached(Point.WORKER_HELD)
        publisher = await Publisher.connect(
            subscription.conninfo,
            application_name=APPLICATION_NAME,
            client_encoding=encoding_of(connection),
            must_use_password=subscription.must_use_password,
        )
        try:
            rest = None
            with anyio.move_on_after(SLOT_PATIENCE):
                slot = await publisher.create_slot(
                    _slot_name(subscription, publisher), snapshot="export", temporary=True
                )
                rest = slot.consistent_point, await begin_snapshot(session, slot.snapshot_name or "")
            if rest is not None:
                if held_at > rest[0]:
                    raise SubscriberError("the apply worker is ahead of its publisher")
                await _hold(connection, subscription, rest[0])
                return rest
            obstacle = await open_transactions(session, "repeat the command")
        except ServerError as error:
            if error.sqlstate != SERIALIZATION_FAILURE:
                raise
            obstacle = UnfinishedTransactions(
                f"The publisher answers: {error.message}. {error.detail}", error.hint or ""
            )
        finally:
            publisher.session.abort()
        await session.query("ROLLBACK")
        await pause_requests.release(connection, subscription.oid)
        if attempt < ATTEMPTS:
            telemetry.log(
                telemetry.LOG,
                f"no snapshot of the publisher could be taken in attempt {attempt} of {ATTEMPTS}, and it is retried",
                detail=obstacle.detail,
                hint=obstacle.hint,
                event="comparison.waits",
            )
            await anyio.sleep(SLOT_PATIENCE / 2)
    raise SubscriberError(
        "no snapshot of the publisher could be taken",
        detail=obstacle.detail,
        hint=obstacle.hint,
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


def _slot_name(subscription: Subscription, publisher: Publisher) -> str:
    return names.table_sync_slot(subscription.oid, pause_requests.HOLDER, str(publisher.session.pid))


async def _hold(connection: Connection, subscription: Subscription, stop_at: Lsn) -> Lsn:
    """Pause the worker at `stop_at` (0: at its current position). Returns its position."""
    await pause_requests.request(connection, subscription.oid, stop_at)
    seen = checked = anyio.current_time()
    with anyio.move_on_after(HOLD_PATIENCE):
        while anyio.current_time() < seen + RESTART_PATIENCE:
            request = await pause_requests.load(connection, subscription.oid)
            if request is not None and request.held_at is not None:
                return request.held_at
            if stop_at and anyio.current_time() > checked + ERROR_PATIENCE:
                checked = anyio.current_time()
                await _check_worker(connection, subscription)
            if await worker_sessions.holder(connection, subscription.oid, APPLY_WORKER) is not None:
                seen = anyio.current_time()
            await anyio.sleep(POLL)
    if await worker_sessions.leader(connection) is None:
        raise SubscriberError(
            f'no launcher runs subscription "{subscription.name}"',
            hint=Remedy("start one", "subscriber run"),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    await _check_worker(connection, subscription)
    raise SubscriberError(
        f'the apply worker of subscription "{subscription.name}" does not reach the position of the comparison',
        detail=f"It was requested to stop at {stop_at}." if stop_at else "It does not reach the end of a transaction.",
        hint=Remedy("see its state and its waits", "subscriber status"),
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


async def _check_worker(connection: Connection, subscription: Subscription) -> None:
    """Raise SubscriberError if the apply worker has an error that a retry alone cannot solve."""
    worker = await load_permanent_error(connection, subscription.oid)
    if worker is not None:
        name = shell_word(subscription.name)
        raise SubscriberError(
            f'the apply worker of subscription "{subscription.name}" has an error, and does not reach the position'
            " of the comparison",
            detail=worker.error,
            hint=(worker.error_remedy or Remedy("repair the cause, or skip the transaction.")).with_alternative(
                Remedy("have a new slot and all rows compared", f"subscriber reseed {name}")
            ),
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
