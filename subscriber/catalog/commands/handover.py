"""What `subscriber adopt` and `subscriber hand-back` have in common.

Both move a subscription between PostgreSQL and this program, with its slot, its position and its tables, in three
steps. Only the third one decides who applies the changes:

1. A transaction disables the subscription at the side that runs it, and marks PostgreSQL's subscription
   (catalog/native_subscription.py).
2. The command waits until the workers have ended and the slot is inactive.
3. A transaction moves slot, position and tables. The other side's subscription exists and can be enabled from its
   commit on, and this side's subscription does not exist any more.

Before the third step the slot belongs to the side that ran the subscription, afterwards to the other one. So there is
no moment at which both can apply, and the slot holds the WAL all the time.

Everything in the third step is undone by a rollback. That needs care with origins: a drop and an advance change the
position in the server's memory at once. So the origin is renamed and not dropped, and its position is set to the one
that the side still has if the transaction is rolled back. The origin's id stays the same too, so rows keep the origin
that has written them, and are no conflicts after the move.

Failure cases:
- Killed before step 1: no change.
- Killed before the commit of step 3: the subscription is disabled and marked. The command continues if it runs again.
  The slot, the position and the tables are still on the side that ran the subscription.
- Killed after that: the move is done. The command finds nothing to do if it runs again.
- Another error before the commit of step 3: the command enables the subscription again and removes the mark.
- The target is lost during the commit of step 3: nothing is enabled again; the same command finds out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import asyncpg

from subscriber.catalog import native_subscription
from subscriber.catalog.commands import privileges
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.native_subscription import Move, NativeRelation, databases_of
from subscriber.display import nearest_word, shell_word, sql_identifier, sql_literal
from subscriber.errors import ConnectionLost, SlotLost, StatementError
from subscriber.limited_wait import LimitedWait
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher, SlotInfo, SystemIdentity
from subscriber.publisher.timelines import read_history
from subscriber.remedy import Remedy
from subscriber.settings import Settings
from subscriber.sqlstate import (
    INSUFFICIENT_PRIVILEGE,
    OBJECT_IN_USE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    UNDEFINED_OBJECT,
)

PATIENCE = 30.0  # seconds for workers to roll back, and for the slot to become inactive
ANSWER_TIMEOUT = 60.0  # seconds for all requests of one step to the publisher
LOCK_TIMEOUT = 30.0  # seconds for another session's statement about the subscription
NAMED = 5  # tables that an error names

# The server's log would have the statement, or its parameters, with the password of the connection string.
UNLOGGED_SETTINGS = {
    "log_statement": "'none'",
    "log_min_duration_statement": "-1",
    "log_min_error_statement": "'panic'",
    "log_min_messages": "'panic'",  # an error about the connection string quotes it
    "log_parameter_max_length_on_error": "0",
}

# Returns the process IDs of a disabled subscription's workers.
LoadWorkers = Callable[[asyncpg.Connection, int], Awaitable[Sequence[int]]]

# Called after each step, with its name and a line for people.
OnStep = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of a move."""

    name: str
    slot: str
    position: Lsn  # where the stream continues
    tables: int
    sequences: int
    enabled: bool


@dataclass(frozen=True, slots=True)
class PublisherState:
    """The publisher, after the workers have ended."""

    slot: SlotInfo  # inactive
    system: SystemIdentity
    history: str | None  # ends of its earlier timelines; None: of a standby, which may be promoted unnoticed
    version: int


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason why a move would not be exact, with the way to remove it."""

    problem: str  # a sentence
    remedy: str  # a statement, or a sentence


def refuse_obstacles(name: str, move: Move, obstacles: Sequence[Obstacle]) -> None:
    """Raise StatementError (55000) with all obstacles, if there are any."""
    if not obstacles:
        return
    what = "taken over" if move is Move.ADOPT else "handed back"
    raise StatementError(
        f'subscription "{name}" cannot be {what} exactly',
        detail="\n".join(obstacle.problem for obstacle in obstacles),
        hint="\n".join(dict.fromkeys(obstacle.remedy for obstacle in obstacles)),
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


async def check_superuser(connection: asyncpg.Connection, move: Move) -> None:
    """Raise StatementError (42501) if the current role is no superuser."""
    who = await privileges.current_role(connection)
    if not who.is_superuser:
        raise StatementError(
            f"must be superuser to run subscriber {move}",
            detail="Only superusers may read connection strings of pg_subscription, and rename a replication origin.",
            hint="Connect to the target as a superuser. The subscription keeps its owner.",
            sqlstate=INSUFFICIENT_PRIVILEGE,
        )


async def not_found(connection: asyncpg.Connection, name: str, move: Move, known: Iterable[str]) -> StatementError:
    """Return the error for a name that neither PostgreSQL nor this program has a subscription of.

    Args:
        connection: a connection to the target.
        name: the name.
        move: the command.
        known: the names of the subscriptions that the command can move.
    """
    elsewhere = await databases_of(connection, name)
    known = sorted(known)
    near = nearest_word(name, known)
    if elsewhere:
        remedy = Remedy("connect to that database.")
    elif near is not None:
        remedy = Remedy(f'perhaps you meant "{near}"', f"subscriber {move} {shell_word(near)}")
    elif known:
        remedy = Remedy(f"this database has: {', '.join(map(sql_identifier, known))}.")
    else:
        remedy = Remedy("this database has none that can be moved. See the subscriptions", "subscriber status")
    return StatementError(
        f'subscription "{name}" does not exist in this database',
        detail=f"PostgreSQL has one in: {', '.join(elsewhere)}." if elsewhere else None,
        hint=remedy,
        sqlstate=UNDEFINED_OBJECT,
    )


def name_taken(name: str) -> StatementError:
    """Return the error for a name that both sides have a subscription of."""
    return StatementError(
        f'both PostgreSQL and subscriber have a subscription "{name}" in this database',
        hint=f"Rename one of them: ALTER SUBSCRIPTION {sql_identifier(name)} RENAME TO …",
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )


def describe_relations(relations: Iterable[NativeRelation | tuple[str, str, str]]) -> str:
    """Return the names of tables with their states: `public.a (i), public.b (d)`, and the number of further ones."""
    parts = [
        (relation.schema, relation.name, relation.state) if isinstance(relation, NativeRelation) else relation
        for relation in relations
    ]
    return abbreviated([f"{schema}.{name} ({state})" for schema, name, state in parts])


def abbreviated(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones."""
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *more])


async def wait_for_workers(
    connection: asyncpg.Connection,
    load_workers: LoadWorkers,
    oid: int,
    *,
    system: str,
    may_terminate: bool,
    notice: Notice,
    settings: Settings,
) -> None:
    """Wait for the workers of a disabled subscription. After `worker_shutdown_grace` end them.

    A worker that starts now finds the subscription disabled, and ends without a change.

    Args:
        connection: a session on the target.
        load_workers: returns the workers that still run.
        oid: the subscription's OID.
        system: the owner of the workers, for messages: PostgreSQL or pglogical.
        may_terminate: end workers. False: only wait for them.
        notice: receives a message if workers are ended.
        settings: limits the time of waiting.

    Raises:
        StatementError: A worker still runs after PATIENCE seconds more (55006).
    """
    wait, ending = LimitedWait(f"workers of {system} to end", settings.worker_shutdown_grace + PATIENCE), False
    while pids := await load_workers(connection, oid):
        processes = ", ".join(map(str, pids))
        if wait.seconds >= settings.worker_shutdown_grace and may_terminate:
            if not ending:
                notice("NOTICE", f"ending workers of {system} that have not stopped: {processes}", None, None)
            ending = True
            for pid in pids:
                await native_subscription.terminate(connection, pid)
        if wait.is_over:
            raise StatementError(
                f"workers of {system} are still running",
                detail=f"Their processes on this server are: {processes}.",
                hint=Remedy(
                    "see what they wait for, on the target",
                    f"SELECT pid, wait_event, pg_blocking_pids(pid) FROM pg_stat_activity WHERE pid IN ({processes});",
                ),
                sqlstate=OBJECT_IN_USE,
            )
        await wait.pause()


async def find_slot(publisher: Publisher, name: str, slot: str) -> SlotInfo:
    """Return the slot of a subscription.

    Raises:
        SlotLost: The publisher has no such slot in its database, or the slot is invalidated.
    """
    there = await publisher.slot(slot)
    problem = None
    if there is None:
        problem = f'replication slot "{slot}" does not exist on the publisher'
    elif there.plugin != "pgoutput" or not there.in_this_database:
        problem = f'replication slot "{slot}" does not belong to a subscription of this publisher\'s database'
    elif there.is_lost:
        problem = f'replication slot "{slot}" has lost WAL that the subscription needs'
    if problem is None:
        assert there is not None
        return there
    raise SlotLost(
        problem,
        hint=f"If the subscription works: {reachable_conninfo(name)}",
    )


@asynccontextmanager
async def answering() -> AsyncIterator[None]:
    """Limit the time of requests to the publisher, while which a subscription may be disabled.

    Raises:
        ConnectionLost: The publisher has not answered all requests of the block within ANSWER_TIMEOUT seconds.
    """
    try:
        with anyio.fail_after(ANSWER_TIMEOUT):
            yield
    except TimeoutError as error:
        raise ConnectionLost(f"the publisher has not answered for {ANSWER_TIMEOUT:.0f} s") from error


async def read_publisher(publisher: Publisher, name: str, slot: str) -> PublisherState:
    """Wait until no walsender has the slot, and read what the last step needs, which then sends no requests.

    Raises:
        StatementError: The slot is still in use after PATIENCE seconds (55006).
        SlotLost: The slot is gone.
        ConnectionLost: The publisher does not answer.
    """
    async with answering():
        free = await _wait_for_free_slot(publisher, name, slot)
        system = await publisher.identify_system()
        history = None if system.in_recovery else str(await read_history(publisher, system))
    return PublisherState(free, system, history, publisher.server_version)


async def _wait_for_free_slot(publisher: Publisher, name: str, slot: str) -> SlotInfo:
    wait = LimitedWait(f'the end of the use of replication slot "{slot}"', PATIENCE)
    while (there := await find_slot(publisher, name, slot)).active:
        if wait.is_over:
            raise StatementError(
                f'replication slot "{slot}" is in use on the publisher, although the subscription is disabled',
                hint=Remedy(
                    "find its user, on the publisher",
                    "SELECT * FROM pg_stat_replication WHERE pid = (SELECT active_pid FROM pg_replication_slots"
                    f" WHERE slot_name = {sql_literal(slot)});",
                ),
                sqlstate=OBJECT_IN_USE,
            )
        await wait.pause()
    return there


@asynccontextmanager
async def unlogged(connection: asyncpg.Connection, timeout: float) -> AsyncIterator[None]:
    """Keep statements out of the server's log, and limit each to `timeout` seconds, in the connection's transaction."""
    settings = {**UNLOGGED_SETTINGS, "statement_timeout": f"'{timeout:.0f}s'"}
    await connection.execute("; ".join(f"SET LOCAL {name} = {value}" for name, value in settings.items()))
    yield
    await connection.execute("; ".join(f"SET LOCAL {name} TO DEFAULT" for name in settings))


def reachable_conninfo(name: str) -> str:
    """Return the hint for a connection string that does not lead to the publisher from this machine."""
    return (
        f"ALTER SUBSCRIPTION {sql_identifier(name)} CONNECTION '…'; with a connection string that leads to the"
        " publisher from the target and from here."
    )


@asynccontextmanager
async def undoing(
    connection: asyncpg.Connection, notice: Notice, name: str, move: Move, *actions: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Run the actions in one transaction if the block raises an error, which is more important than one of theirs."""
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True):
            async with warning_of_disabled(notice, name, move), connection.transaction():
                for action in actions:
                    await action()
        raise


@asynccontextmanager
async def warning_of_disabled(notice: Notice, name: str, move: Move) -> AsyncIterator[None]:
    """Turn an error of the target in the block, which enables a subscription again, into a warning."""
    try:
        yield
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
        notice(
            "WARNING",
            f'subscription "{name}" may still be disabled',
            f"It could not be enabled again: {error}",
            f"Run the command again: subscriber {move} {shell_word(name)}",
        )
