"""Collect the state of a target's subscriptions.

One connection reads the catalog. Each publisher is queried for its position on a connection of its own. These queries
run concurrently and for at most `status_publisher_timeout`, so that an unreachable publisher delays nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import anyio

from subscriber import names as names_of_slots
from subscriber.catalog import (
    identity,
    native_subscription,
    pglogical_subscription,
    schema,
    table_names,
    worker_sessions,
)
from subscriber.catalog.commands.privileges import does_not_exist
from subscriber.catalog.connection import CatalogConnection, Connection
from subscriber.catalog.native_subscription import Move
from subscriber.catalog.store import audit, progress_records, stats
from subscriber.catalog.store.memberships import load_different, load_memberships
from subscriber.catalog.store.prepared_transactions import load_prepared
from subscriber.catalog.store.quarantine import load_summaries
from subscriber.catalog.store.subscription_rel import load_relation_states
from subscriber.catalog.store.subscription_sequence import load_sequences
from subscriber.catalog.store.subscriptions import load_subscriptions
from subscriber.catalog.store.workers import load_workers
from subscriber.connection.connect import open_session
from subscriber.display import shell_word
from subscriber.errors import ServerError, SubscriberError
from subscriber.lsn import Lsn
from subscriber.publisher.answers import parsing, seconds
from subscriber.publisher.memberships import Name, read_published_tables
from subscriber.publisher.standby_slots import read_slots_waited_for
from subscriber.publisher.wal_holders import read_wal_holders
from subscriber.quoting import literal
from subscriber.remedy import Remedy
from subscriber.settings import DEFAULTS, Settings
from subscriber.sqlstate import (
    LOCK_NOT_AVAILABLE,
)
from subscriber.status import slot_statistics, slot_wal
from subscriber.status.model import SubscriptionStatus, assess
from subscriber.status.problems import LOCK_PATIENCE
from subscriber.status.snapshot import LockWait, PublisherAnswer, StatusSnapshot
from subscriber.status.stages import WalsenderPositions
from subscriber.status.transactions import Prepared
from subscriber.subscription import Subscription

_NOW = "SELECT pg_catalog.clock_timestamp()"
_PUBLISHER = """
WITH wal AS (SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
                         ELSE pg_catalog.pg_current_wal_lsn() END AS position)
SELECT wal.position, s.slot_name IS NOT NULL, s.active, s.confirmed_flush_lsn, s.wal_status,
       pg_catalog.pg_wal_lsn_diff(wal.position, s.restart_lsn)::bigint, extract(epoch FROM r.replay_lag)::float8,
       extract(epoch FROM pg_catalog.clock_timestamp())::float8,
       r.sent_lsn, r.write_lsn, r.flush_lsn, r.replay_lsn
  FROM wal LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = {slot}
  LEFT JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid
"""

# Sessions whose lock keeps others from reading one of our tables. ALTER TABLE takes such a lock; statements on
# subscriptions do not.
_CATALOG_LOCKS = """
SELECT DISTINCT pg_catalog.format('process %s ("%s")', l.pid, a.application_name)
  FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_class c ON c.oid = l.relation
  LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
 WHERE l.granted AND l.mode = 'AccessExclusiveLock' AND c.relnamespace = 'subscriber'::pg_catalog.regnamespace
       AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
"""


async def read_catalog(catalog: CatalogConnection, names: Sequence[str] = ()) -> StatusSnapshot:
    """Read the state of the subscriptions called `names` (empty: all), and of their tables, from the catalog.

    Raises:
        StatementError: a name does not exist.
        CatalogMoved: the catalog belongs to another database.
        ConnectionLost: the target is a standby, or the connection is lost.
        ServerError: the target refuses the query, or another session locks the catalog for longer than lock_timeout.
    """
    try:
        async with catalog.use() as connection:
            if await schema.current_revision(connection) is None:
                subscriptions: list[Subscription] = []
                look = StatusSnapshot(datetime.now(UTC), None, subscriptions, [], {})
            else:
                await identity.refuse_standby(connection)
                await schema.restore(
                    connection
                )  # a crash of the server empties these tables, but not that of the subscriptions
                await identity.check(connection)
                subscriptions = [s for s in await load_subscriptions(connection) if not names or s.name in names]
                look = await _read(connection, subscriptions)
    except ServerError as error:
        if error.sqlstate == LOCK_NOT_AVAILABLE:
            raise await _locked(catalog, error) from error
        raise
    if missing := [name for name in names if name not in {s.name for s in subscriptions}]:
        async with catalog.use() as connection:
            is_native = missing[0] in await native_subscription.load_marks(connection)
            unknown = await does_not_exist(connection, missing[0])
        if is_native:
            unknown.amend(
                hint=Remedy("PostgreSQL has one. To take it over", f"subscriber adopt {shell_word(missing[0])}")
            )
        raise unknown
    return look


async def _locked(catalog: CatalogConnection, error: ServerError) -> ServerError:
    async with catalog.use() as connection:
        holders = [row[0] for row in await connection.fetch(_CATALOG_LOCKS)]
    held = f"It is held by {', '.join(holders)}." if holders else "No session holds it any more."
    pids = holders[0].split()[1] if holders else ""
    return ServerError(
        {
            **error.fields,
            "M": 'a lock on the tables of schema "subscriber" is not to be had',
            "D": held,
            "H": f"To end that session: SELECT pg_terminate_backend({pids});" if pids else "Try again.",
        }
    )


async def _read(connection: Connection, subscriptions: list[Subscription]) -> StatusSnapshot:
    now = await connection.fetchval(_NOW)
    leader = await worker_sessions.leader(connection)
    prepared: dict[int, list[Prepared]] = {}
    for subid, *values in await load_prepared(connection):
        prepared.setdefault(subid, []).append(Prepared(*values))
    counted = await stats.load_stats(connection)
    marks = await native_subscription.load_marks(connection)
    lock_waits: dict[int, list[LockWait]] = {}
    for subid, pid, waited, holders in await worker_sessions.load_lock_waits(connection, LOCK_PATIENCE):
        if holders:
            lock_waits.setdefault(subid, []).append(LockWait(pid, waited, tuple(holders)))
    return StatusSnapshot(
        at=now,
        launcher_pid=leader.pid if leader is not None else None,
        subscriptions=subscriptions,
        workers=await load_workers(connection),
        relations={s.oid: await load_relation_states(connection, s.oid) for s in subscriptions},
        progress=await progress_records.load_all(connection),
        errors={subid: (counts[0], counts[1], counts[2]) for subid, counts in counted.items()},
        conflicts={subid: dict(zip(stats.CONFLICTS, counts[3:], strict=True)) for subid, counts in counted.items()},
        prepared=prepared,
        launcher_age=leader.age if leader is not None else None,
        lock_waits=lock_waits,
        lost={s.oid: await table_names.load_lost(connection, s.oid) for s in subscriptions},
        memberships={s.oid: await load_memberships(connection, s.oid) for s in subscriptions},
        different={s.oid: await load_different(connection, s.oid) for s in subscriptions},
        quarantine=await load_summaries(connection),
        sequences={s.oid: await load_sequences(connection, s.oid) for s in subscriptions},
        comparisons=await audit.load_last_comparisons(connection),
        adopted_in_part=await pglogical_subscription.load_disabled(connection),
        handed_back={name for name, mark in marks.items() if mark is not None and mark.move is Move.HAND_BACK},
    )


async def assess_all(look: StatusSnapshot, settings: Settings = DEFAULTS) -> list[SubscriptionStatus]:
    """Query all publishers concurrently, and combine the answers with the catalog's rows.

    Args:
        look: the catalog's rows.
        settings: the time-out for each publisher, and the time after which something counts as forgotten.
    """
    answers: dict[int, PublisherAnswer] = {}

    async def ask(subscription: Subscription) -> None:
        tables = [membership.source for membership in look.memberships.get(subscription.oid, ())]
        answers[subscription.oid] = await ask_publisher(subscription, settings.status_publisher_timeout, tables)

    async with anyio.create_task_group() as tasks:
        for subscription in look.subscriptions:
            tasks.start_soon(ask, subscription)
    return [assess(s, look, answers[s.oid], settings.forgotten_after) for s in look.subscriptions]


async def ask_publisher(
    subscription: Subscription,
    timeout: float = DEFAULTS.status_publisher_timeout,
    tables: Collection[Name] = (),
) -> PublisherAnswer:
    """Query the publisher for its position, the state of the subscription's slot, and the tables of its publications.

    Args:
        subscription: the subscription.
        timeout: in seconds.
        tables: schema and name on the publisher of the subscription's tables.

    Returns:
        The answer. It has only `error` if the publisher cannot be queried.
    """
    slot = subscription.slot_name
    try:
        with anyio.fail_after(timeout):
            async with await open_session(
                subscription.conninfo,
                application_name="subscriber status",
                must_use_password=subscription.must_use_password,
                timeout=timeout,
            ) as session:
                rows = await session.rows(_PUBLISHER.format(slot="NULL" if slot is None else literal(slot)))
                published = await read_published_tables(session, subscription.publications, tables)
                holders = await read_wal_holders(session)
                query = None if slot is None else slot_statistics.query(slot, session.server_version)
                statistics = slot_statistics.parse([] if query is None else await session.rows(query))
                prefix = names_of_slots.table_sync_slot_prefix(subscription.oid)
                limits = slot_wal.parse([] if slot is None else await session.rows(slot_wal.query(slot, prefix)))
                standbys = () if slot is None else await read_slots_waited_for(session, slot)
        answer = _publisher_answer(rows, slot)
        return replace(
            answer,
            published=published,
            wal_holders=holders,
            statistics=statistics,
            standby_slots=standbys,
            limits=limits,
        )
    except SubscriberError as error:
        return PublisherAnswer(error=error.message, error_remedy=error.remedy)
    except TimeoutError:
        return PublisherAnswer(error=f"no answer within {timeout:.0f} s")


def _publisher_answer(rows: Sequence[tuple[str | None, ...]], slot: str | None) -> PublisherAnswer:
    """Parse the publisher's rows. Raises ProtocolError if they are malformed."""
    with parsing("its position"):
        ((position, exists, active, confirmed, wal_status, retained, replay_lag, now, *positions),) = rows
        sent, received, flushed, applied = (Lsn.parse(text) if text else None for text in positions)
        return PublisherAnswer(
            position=Lsn.parse(position) if position else None,
            confirmed=Lsn.parse(confirmed) if confirmed else None,
            slot_exists=exists == "t" if slot is not None else None,
            slot_active=None if active is None else active == "t",
            wal_status=wal_status,
            retained_bytes=None if retained is None else int(retained),
            replay_lag=None if replay_lag is None else seconds(replay_lag),
            now=datetime.fromtimestamp(seconds(now), UTC),
            walsender=WalsenderPositions(sent, received, flushed, applied),
        )
