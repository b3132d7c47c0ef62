"""PostgreSQL's own subscription and ours, with the same publications, in two databases of one server."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from time import monotonic

import anyio
import asyncpg
import pytest

from subscriber.errors import ServerError
from subscriber.settings import Settings
from tests.differential import kinds
from tests.differential.tables import LATE, TABLES, TYPES, Table
from tests.differential.workload import Workload
from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import QUICK, Subscriber, running_subscriber

NATIVE, OURS = "oracle_native", "oracle_ours"
PUBLICATIONS = "leaves, roots"
# Relation and type, and all lines of DETAIL. Both logs have this format.
CONFLICT = re.compile(r'LOG:  conflict detected on relation ("[^"]+": conflict=\w+)\n.*? DETAIL:  (.*\n(?:\t.*\n)*)')
# Defects of PostgreSQL (seen in 18.6), on the publisher: no subscriber can decode that part of the log.
UNDECODABLE = re.compile(r"could not map filenumber|got sequence entry \d+ for toast chunk")
# Another one (18.6), on the target: it takes the whole server down.
CRASHED = re.compile('background worker "logical replication .*was terminated by signal 11')
# The publisher sends a change that failed and was rolled back. It fails again in a parallel worker, and PostgreSQL's
# subscription restarts repeatedly. Process 0 stands for a prepared transaction; no other session prepares any here.
WAITS_FOR_PREPARED = """
SELECT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type LIKE 'logical replication%'
               AND datname = current_database() AND 0 = ANY (pg_blocking_pids(pid)))
"""
RUNS = f"SELECT count(*) FROM pg_stat_subscription WHERE subname = '{NATIVE}' AND relid IS NULL AND pid IS NOT NULL"
PARALLEL_FAILED = "logical replication parallel apply worker exited due to error"
PATIENCE = 30.0  # seconds to wait for a lock that a worker holds
LINES = 200  # of the server's log that are shown with a failure


Counters = dict[str, int]
COUNTERS = """
SELECT c.key, c.value::bigint FROM {}, jsonb_each_text(to_jsonb(s)) c WHERE s.subname = $1 AND c.key LIKE 'confl\\_%'
"""
NATIVE_COUNTERS = COUNTERS.format("pg_stat_subscription_stats s")
OUR_COUNTERS = COUNTERS.format("subscriber.pg_stat_subscription_stats s")
WRITTEN_WITHIN = 1.5  # seconds: how often either writes its counters, and half as much again
COUNTED_AFTER = 20.0  # seconds after which both have reported their counters


@dataclass
class Beside:
    source: Database
    native: Database
    ours: Database
    subscriber: Subscriber
    tables: list[Table]
    binary: bool
    sessions: int = 1  # our sessions that apply transactions in parallel
    options: Mapping[str, str] = field(default_factory=dict)  # of both subscriptions
    enabled: bool = True
    seen: tuple[int, int] = (0, 0)  # bytes of the target server's log, characters of ours
    counted: tuple[Counters, Counters] = ({}, {})  # conflicts by type, before those that are compared
    calm: anyio.Lock = field(default_factory=anyio.Lock)  # while it is held, no connection is cut
    disturbances: int = 0  # restarts of our launcher, and connections that disturb() has ended

    async def create_tables(self) -> None:
        types = (*TYPES, *kinds.TYPES)
        await self.source.execute(*types, *[statement for table in self.tables for statement in table.source])
        for target in (self.native, self.ours):
            await target.execute(*types, *[s for table in self.tables for s in (table.target or table.source)])
        for publication, option in (("leaves", "false"), ("roots", "true")):
            names = ", ".join(table.name for table in self.tables if table.publication == publication)
            tables = f"FOR TABLE {names} " if names else ""
            await self.source.execute(
                f"CREATE PUBLICATION {publication} {tables}WITH (publish_via_partition_root = {option})"
            )

    async def subscribe(self) -> None:
        """Create both subscriptions."""
        options = {"binary": str(self.binary).lower(), **self.options}
        listed = ", ".join(f"{name} = {value}" for name, value in options.items())
        native = (
            f"CREATE SUBSCRIPTION {NATIVE} CONNECTION '{self.source.dsn()}' PUBLICATION {PUBLICATIONS} WITH ({listed})"
        )
        ours = self.subscriber.create(self.source, PUBLICATIONS, OURS, apply_sessions=self.sessions, **options)
        await asyncio.gather(self.native.execute(native), ours)

    async def refresh(self, *, copy: bool = True) -> None:
        """Refresh both. Either may be the victim of a deadlock with TRUNCATE of several tables, and is retried."""
        await self.alter("REFRESH PUBLICATION" + ("" if copy else " WITH (copy_data = false)"))

    async def alter(self, what: str) -> None:
        """Alter both, with retries as in refresh()."""
        statement = f"ALTER SUBSCRIPTION {{}} {what}"

        async def native() -> None:
            # REFRESH PUBLICATION holds the subscription's lock, and waits for a table's lock held by a parallel worker.
            # That worker waits for its leader, the leader waits for the start of another worker, and that one waits for
            # the subscription's lock.
            async with self.native.connection() as connection:
                await connection.execute("SET lock_timeout = '5s'")
                while True:
                    with suppress(asyncpg.DeadlockDetectedError, asyncpg.LockNotAvailableError):
                        await connection.execute(statement.format(NATIVE))
                        return

        async def ours() -> None:
            while True:
                try:
                    await self.subscriber.execute(statement.format(OURS))
                except ServerError as error:
                    if error.sqlstate != "40P01":
                        raise
                else:
                    return

        await asyncio.gather(native(), ours())

    async def wait(self) -> None:
        """Wait until both have received everything and confirmed it to the publisher."""
        await self.native.wait_for("SELECT count(*) FROM pg_subscription_rel WHERE srsubstate NOT IN ('s', 'r')", 0)
        await self._wait_for_native()
        await self.subscriber.wait_for_sync(self.source, OURS)
        position = await self.source.value("SELECT pg_current_wal_lsn()::text")
        await self.source.wait_for(
            f"SELECT count(*) FROM pg_replication_slots WHERE slot_name IN ('{NATIVE}', '{OURS}')"
            f" AND confirmed_flush_lsn >= '{position}'",
            2,
        )

    async def _wait_for_native(self) -> None:
        """Wait until PostgreSQL's own worker has caught up.

        PostgreSQL's launcher naps for three minutes after it has missed the end of a worker. A statement wakes it.
        """
        try:
            await self.source.wait_for_catchup(NATIVE)
        except pytest.fail.Exception:
            if not self.enabled or await self.native.value(RUNS):
                raise
            await self.native.execute(f"ALTER SUBSCRIPTION {NATIVE} DISABLE")
            await self.native.execute(f"ALTER SUBSCRIPTION {NATIVE} ENABLE")
            await self.source.wait_for_catchup(NATIVE)

    async def enable(self, enabled: bool) -> None:
        self.enabled = enabled
        await self.alter("ENABLE" if enabled else "DISABLE")

    async def both_patiently(self, statement: str) -> None:
        """Run the statement on both targets, with a short lock timeout and retries.

        A session that waits for a table's lock blocks later sessions. With two_phase these include the apply worker,
        without which the prepared transaction that holds the table's lock would never end. PostgreSQL's own worker can
        wait for a transaction that it has prepared itself, and then the table's lock is never free.
        """
        for name, target in ((NATIVE, self.native), (OURS, self.ours)):
            async with target.connection() as connection:
                await connection.execute("SET lock_timeout = '100ms'")
                deadline = monotonic() + PATIENCE
                while True:
                    if monotonic() > deadline:
                        pytest.fail(
                            f"after {PATIENCE} s a lock is not free for {statement!r}: application_name = '{name}'"
                        )
                    with suppress(asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
                        await connection.execute(statement)
                        break
                    await anyio.sleep(0.05)

    async def both(self, *statements: str) -> None:
        """Run them on both targets."""
        for target in (self.native, self.ours):
            await target.execute(*statements)

    async def compare(self) -> None:
        """Check that both targets have the same rows, and the source's rows unless they were changed on the targets."""
        async with self.calm:
            await self.wait()
        for table in self.tables:
            native = await _rows(self.native, table.name)
            ours = await _rows(self.ours, table.name)
            assert ours == native, f"{table.name}: more {ours - native}, missing {native - ours}"
            if table.same:
                columns = await self.source.value(
                    "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attname) FROM pg_attribute"
                    " WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''",
                    table.name,
                )
                expected = await _rows(self.source, table.name, columns)
                got = await _rows(self.ours, table.name, columns)
                assert got == expected, f"{table.name}: more {got - expected}, missing {expected - got}"
        assert not [p.message for p in self.subscriber.log.parts() if "unexpected error" in p.message]

    def conflicts_so_far(self) -> None:
        """Forget the conflicts up to now: during the copies they depend on the order of the copies."""
        self.seen = self.native.server.log.stat().st_size, len(self.subscriber.log.text())

    def compare_conflicts(self) -> None:
        """Check that both have logged the same conflicts since then, for each row."""
        native, ours = (Counter(conflicts) for conflicts in self._logged_conflicts())
        if self.binary:  # our DETAIL shows such values as bytes
            native, ours = (Counter((kind, "") for kind, _ in c.elements()) for c in (native, ours))
        assert ours == native, f"conflicts: more {ours - native}, missing {native - ours}"

    def _logged_conflicts(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """Relation and kind, and DETAIL, of each since conflicts_so_far(): PostgreSQL's own, and ours."""
        with self.native.server.log.open(errors="replace") as log:
            log.seek(self.seen[0])
            native = CONFLICT.findall(log.read())
        return native, CONFLICT.findall(self.subscriber.log.text()[self.seen[1] :])

    async def count_from_here(self) -> None:
        """Conflicts up to now are not those that compare_counters() compares. Both count them a moment later."""
        self.conflicts_so_far()
        now = await self._counters()
        while True:
            await anyio.sleep(WRITTEN_WITHIN)
            self.counted, now = now, await self._counters()
            if self.counted == now:
                return

    async def compare_counters(self) -> Counter[str]:
        """Check that both have met the same conflicts for each table, and have counted the logged ones.

        Not compared: which one of several equal rows was changed, and whether it was another origin's.
        """
        logged = [Counter(name for name, _ in conflicts) for conflicts in self._logged_conflicts()]
        counted: list[Counter[str]] = []
        expected = [_by_type(conflicts) for conflicts in logged]
        with anyio.move_on_after(COUNTED_AFTER):
            while counted != expected:
                if counted:
                    await anyio.sleep(0.2)
                now = await self._counters()
                counted = [
                    Counter(now_logged) - Counter(before) for now_logged, before in zip(now, self.counted, strict=True)
                ]
        assert counted == expected, f"conflicts: counted by PostgreSQL and us {counted}, logged {expected}"
        without_key = {f"public.{table.name}" for table in self.tables if table.identity == "whole"}
        native, ours = (
            Counter(
                {
                    name: count
                    for name, count in conflicts.items()
                    if not ("origin_differs" in name and re.split('_[ab]"|"', name.lstrip('"'))[0] in without_key)
                }
            )
            for conflicts in logged
        )
        assert ours == native, f"conflicts: more {ours - native}, missing {native - ours}"
        return _by_type(logged[1])

    async def _counters(self) -> tuple[Counters, Counters]:
        native = await self.native.rows(NATIVE_COUNTERS, NATIVE)
        ours = await self.ours.rows(OUR_COUNTERS, OURS)
        return dict(native), dict(ours)

    def has_failed(self) -> bool:
        """Return True if either has had an error since count_from_here(), and may have met conflicts twice."""
        with self.native.server.log.open(errors="replace") as log:
            log.seek(self.seen[0])
            native = log.read()
        return " ERROR: " in native or "ERROR:" in self.subscriber.log.text()[self.seen[1] :]

    async def delete_here(self, *, without_key: bool = True) -> None:
        """Delete some rows on both targets, which the source still has; from now on they lack them.

        `without_key`: of tables without a key, too. A change that finds its row missing may find an equal one there
        that was inserted later. Which it is depends on time where parallel workers apply.
        """
        for index, table in enumerate(list(self.tables)):
            if table.local_delete and (without_key or table.identity != "whole"):
                for target in (self.native, self.ours):
                    await target.execute(f"DELETE FROM {table.name} WHERE hashtext({table.key[0]}::text) % 3 <> 1")
                self.tables[index] = replace(table, same=False, local_delete=False)


async def _end_crashes(database: Database) -> None:
    """Have PostgreSQL's own worker not start again: it would take the server down each time."""
    server, workers = database.server, "max_logical_replication_workers"
    usual = server.settings.get(workers, "4")
    await server.restart("immediate", **{workers: "0"})
    await database.execute(f"ALTER SUBSCRIPTION {NATIVE} DISABLE")
    await server.restart("immediate", **{workers: usual})


def _by_type(conflicts: Counter[str]) -> Counter[str]:
    """Convert `conflicts` by relation and type to the names of the counters."""
    by_type: Counter[str] = Counter()
    for name, count in conflicts.items():
        by_type[f"confl_{name.rpartition('=')[2]}"] += count
    return by_type


async def _rows(database: Database, table: str, columns: str = "*") -> Counter[str]:
    """Return each row as text, and its number of occurrences."""
    rows = await database.rows(f"SELECT t::text FROM (SELECT {columns} FROM {table}) t")
    return Counter(row for (row,) in rows)


async def _waits_for_prepared(database: Database) -> bool:
    """Return True if PostgreSQL's own worker waits for its own transaction. It may be starting again just now."""
    for _ in range(50):
        if await database.value(WAITS_FOR_PREPARED):
            return True
        await anyio.sleep(0.2)
    return False


def _failures(error: BaseException) -> Iterator[BaseException]:
    """Yield the failures of a test, also those within a group of errors."""
    if isinstance(error, BaseExceptionGroup):
        for exception in error.exceptions:
            yield from _failures(exception)
    elif isinstance(error, pytest.fail.Exception):
        yield error


@asynccontextmanager
async def beside(
    source: Database,
    native: Database,
    ours: Database,
    *,
    binary: bool,
    sessions: int = 1,
    options: Mapping[str, str] | None = None,
    tables: Sequence[Table] = TABLES,
    settings: Settings = QUICK,
) -> AsyncIterator[Beside]:
    usable = [table for table in tables if not (binary and table.text_only)]
    began = native.server.log.stat().st_size
    async with running_subscriber(ours, settings=settings) as subscriber:
        try:
            yield Beside(source, native, ours, subscriber, usable, binary, sessions, options or {})
        except BaseException as error:
            if native.server.pid is None:  # between stop and start
                await native.server.start()
            with native.server.log.open() as log:
                log.seek(began)
                lines = log.readlines()
            if (match := UNDECODABLE.search("".join([*lines, subscriber.log.text()]))) is not None:
                pytest.skip(f"the publisher cannot decode its own log: {match[0]}")
            if any(map(CRASHED.search, lines)):
                await _end_crashes(native)
                pytest.skip("PostgreSQL's own apply worker has crashed")
            waited = any(f"application_name = '{NATIVE}'" in str(failure) for failure in _failures(error))
            if waited and any(PARALLEL_FAILED in line for line in lines):
                pytest.skip(f"PostgreSQL's own subscription does not get on: {PARALLEL_FAILED}")
            if waited and await _waits_for_prepared(native):
                pytest.skip("PostgreSQL's own subscription does not get on: it waits for what it has prepared itself")
            print("the target server's log:", *lines[-LINES:], sep="\n")  # pytest shows it with the failure
            print("our log:", *subscriber.log.text().splitlines()[-LINES:], sep="\n")
            raise
        finally:
            for connection in source._connections:  # after a failure, DROP would wait for an open transaction
                connection.terminate()
            if await native.value("SELECT count(*) FROM pg_subscription WHERE subname = $1", NATIVE):
                await native.execute(f"DROP SUBSCRIPTION {NATIVE}")


async def disturb(pair: Beside, random: Random) -> None:
    """Repeatedly stop our launcher, or end one of our connections to either server, until cancelled."""
    ours = "application_name LIKE 'subscriber%' AND datname = current_database()"
    theirs = (  # without the connections of statements, whose errors go to their users
        f"pid IN (SELECT pid FROM pg_stat_replication WHERE application_name = '{OURS}' AND state <> 'startup')"
        " OR application_name LIKE 'pg_35%_sync_%'"
    )
    while True:
        await anyio.sleep(random.uniform(0.05, 0.5))
        async with pair.calm:
            match random.randint(1, 3):
                case 1:
                    await pair.subscriber.restart()
                case number:
                    database, condition = (pair.ours, ours) if number == 2 else (pair.source, theirs)
                    await database.execute(
                        "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity"
                        f" WHERE ({condition}) AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1) a"
                    )
            pair.disturbances += 1


async def run(pair: Beside, seed: int, steps: int, *, undisturbed: bool = True) -> Workload:
    """Run a whole test: tables copied during writes, missing rows, changing columns, an added table."""
    await pair.create_tables()
    work = Workload(seed, pair.source, [table for table in pair.tables if not table.after_copy])
    await work.run(steps)
    await asyncio.gather(pair.subscribe(), work.run(steps))
    await work.run(steps)
    await pair.compare()

    for table in pair.tables:
        if table.after_copy:
            work.add(table)
    pair.conflicts_so_far()
    await pair.delete_here()
    await work.run(steps)
    await pair.compare()
    if undisturbed:
        pair.compare_conflicts()

    await change_shapes(pair, work, steps)
    await pair.compare()
    return work


async def change_shapes(pair: Beside, work: Workload, steps: int) -> None:
    """Columns appear on the targets first, identities change, and a table is added, while changes flow."""
    writing = asyncio.create_task(work.run(steps))
    for database in (pair.ours, pair.native, pair.source):
        await database.execute("ALTER TABLE plain ADD COLUMN later int DEFAULT 5")
        await database.execute("ALTER TABLE whole ADD COLUMN later text")
    await pair.source.execute("ALTER TABLE composite REPLICA IDENTITY FULL")
    await writing
    await work.run(steps)
    await pair.source.execute("ALTER TABLE composite REPLICA IDENTITY DEFAULT")
    for database in (pair.ours, pair.native, pair.source):
        await database.execute(*LATE.source)
    await pair.source.execute("INSERT INTO late SELECT g, 'copied' FROM generate_series(20, 40) g")
    await pair.source.execute("ALTER PUBLICATION leaves ADD TABLE late")
    pair.tables.append(LATE)
    work.add(LATE)
    await asyncio.gather(pair.refresh(), work.run(steps))
    await work.run(steps)
