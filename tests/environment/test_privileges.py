"""Random layouts of privileges: rows are applied or refused, as with PostgreSQL's own subscription.

A layout has a subscription's owner, and tables with owners, privileges, row-level security, closed schemas and code.
Rows are copied. Then changes of each kind follow, each in its own transaction. After each change either both
subscriptions have applied it, or both have stopped with an error. The missing privileges are then granted, and both
resume. If only one of them stops, KNOWN has the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pprint import pformat
from time import monotonic
from typing import Any

import asyncpg
import pytest
from anyio.from_thread import BlockingPortal

from subscriber.demo.servers import Server, Servers
from tests.environment.beside import NATIVE, OURS, Stage, beside
from tests.matrix.programs import NEWEST, NotAvailable, programs
from tests.plugins.fix_cluster import SETTINGS

SUPERUSER, SUBSCRIBES, FIRST, SECOND = "postgres", "layout_subscribes", "layout_first", "layout_second"
ROLES = (SUBSCRIBES, FIRST, SECOND)
PRIVILEGES = ("INSERT", "UPDATE", "DELETE", "SELECT", "TRUNCATE")
FILL = "INSERT INTO {} SELECT i, 'sad', 'text' || i FROM generate_series(30, 70) i"
NEEDS = {
    "copy": "INSERT",
    "fill": "INSERT",
    "INSERT": "INSERT",
    "UPDATE": "SELECT, UPDATE",
    "UPDATE of keys": "SELECT, INSERT, UPDATE, DELETE",
    "DELETE": "SELECT, DELETE",
    "TRUNCATE": "TRUNCATE",
    "INSERT again": "INSERT",
}
STATEMENTS = {
    "fill": FILL,
    "INSERT": "INSERT INTO {} SELECT i, 'ok', 'more' FROM generate_series(11, 90) i WHERE i NOT BETWEEN 30 AND 70",
    "UPDATE": "UPDATE {} SET feels = 'happy', plain = plain || '+' WHERE id % 7 = 0",
    "UPDATE of keys": "UPDATE {} SET id = id + 100 WHERE id IN (33, 61)",
    "DELETE": "DELETE FROM {} WHERE id % 5 = 0",
    "TRUNCATE": "TRUNCATE {}",
    "INSERT again": "INSERT INTO {} VALUES (1, 'sad', 'after')",
}
FUNCTIONS = {
    "default": "RETURNS text LANGUAGE plpgsql AS $$ BEGIN RETURN 'by ' || current_user; END $$",
    "generated": "RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN 'by ' || current_user; END $$",
    "ALWAYS": "RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.seen := current_user; RETURN NEW; END $$",
    "definer": "RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER"
    " AS $$ BEGIN NEW.seen := current_user; RETURN NEW; END $$",
}
FUNCTIONS["REPLICA"] = FUNCTIONS["ALWAYS"]

SEED = int(os.environ.get("SUBSCRIBER_LAYOUT_SEED", "0"))  # the first of the soak tests
MANY = int(os.environ.get("SUBSCRIBER_LAYOUTS", "80"))  # of each major, as a soak test
TOGETHER = 5  # one after another in the same databases
PATIENCE = 25.0  # seconds
ATTEMPTS = 2  # that fail before a subscription, or the copy of a table, is taken to stand still
EXITED = re.compile(r'background worker "logical replication [^"]*" \(PID (\d+)\) exited with exit code 1')
MESSAGE = re.compile(r"\[(\d+)\] ERROR:  (.*)")
COPIES = re.compile(r'\[(\d+)\] LOG:  .* table synchronization worker for .*, table "([^"]*)" has started')
# of a worker that has begun before the one before it has ended
PASSING = re.compile("replication origin with ID .* is already active|replication slot .* is active")


@dataclass
class Table:
    """The first of a layout is `s1.t1`, with types and functions in schema `x1`."""

    number: int
    kind: str  # keyed, full, parted
    owner: str
    part_owner: str  # of the second partition
    withheld: tuple[str, ...]  # privileges that the owners are revoked
    shared: tuple[str, ...]  # privileges that the subscription's owner is granted
    part_shared: tuple[str, ...]  # privileges that the owner is granted on the second partition
    by_column: bool  # the revoked privileges are granted on all columns
    closed: tuple[str, ...]  # of schemas s1 and x1: the owner may not use them
    closed_to_subscription: bool  # its owner may not use schema s1
    row_security: str  # ENABLE, FORCE, or nothing
    row_security_of_part: bool
    policy: bool
    code: str  # of FUNCTIONS, sequence, or nothing
    closed_code: bool  # the owner may not execute or use it
    refers: bool  # to the layout's first table
    late: bool  # privileges are revoked only after the copy

    @property
    def schema(self) -> str:
        return f"s{self.number}"

    @property
    def types(self) -> str:
        return f"x{self.number}"

    @property
    def name(self) -> str:
        return f"{self.schema}.t{self.number}"

    @property
    def all(self) -> tuple[str, ...]:
        """Return the table and its partitions."""
        return (self.name, f"{self.name}_low", f"{self.name}_high") if self.kind == "parted" else (self.name,)

    @property
    def contents(self) -> str:
        return f"SELECT id, feels::text, plain, seen FROM {self.name} ORDER BY 1, 3"

    def owner_of(self, name: str) -> str:
        return self.part_owner if name.endswith("_high") else self.owner

    def everywhere(self) -> Iterator[str]:
        yield f"CREATE SCHEMA {self.schema}"
        yield f"CREATE SCHEMA {self.types}"
        yield f"CREATE TYPE {self.types}.mood AS ENUM ('sad', 'ok', 'happy')"
        key = "" if self.kind == "full" else " PRIMARY KEY"
        parted = " PARTITION BY RANGE (id)" if self.kind == "parted" else ""
        yield f"CREATE TABLE {self.name} (id int{key}, feels {self.types}.mood, plain text){parted}"
        if self.kind == "parted":
            yield f"CREATE TABLE {self.name}_low PARTITION OF {self.name} FOR VALUES FROM (MINVALUE) TO (50)"
            yield f"CREATE TABLE {self.name}_high PARTITION OF {self.name} FOR VALUES FROM (50) TO (MAXVALUE)"
        if self.kind == "full":
            yield f"ALTER TABLE {self.name} REPLICA IDENTITY FULL"

    def on_targets(self, first: Table) -> Iterator[str]:
        yield f"GRANT USAGE ON SCHEMA {self.schema}, {self.types} TO {', '.join(ROLES)}"
        yield from self._code()
        if self.refers:
            yield f"ALTER TABLE {self.name} ADD refers int CONSTRAINT refers REFERENCES {first.name}"
        for name in self.all:
            yield f"ALTER TABLE {name} OWNER TO {self.owner_of(name)}"
            if self.shared:
                yield f"GRANT {', '.join(self.shared)} ON {name} TO {SUBSCRIBES}"
            if self.part_shared and name.endswith("_high") and self.owner != self.part_owner:
                yield f"GRANT {', '.join(self.part_shared)} ON {name} TO {self.owner}"

    def _code(self) -> Iterator[str]:
        function = f"{self.types}.code()"
        if self.code in FUNCTIONS:
            yield f"CREATE FUNCTION {function} {FUNCTIONS[self.code]}"
            yield f"ALTER FUNCTION {function} OWNER TO {self.part_owner if self.code == 'definer' else self.owner}"
        column = f"ALTER TABLE {self.name} ADD seen text"
        if self.code == "sequence":
            yield f"CREATE SEQUENCE {self.types}.code"
            yield f"ALTER SEQUENCE {self.types}.code OWNER TO {self.owner}"
            yield f"{column} DEFAULT (nextval('{self.types}.code') > 0)::text"
        elif self.code == "default":
            yield f"{column} DEFAULT {function}"
        elif self.code == "generated":
            yield f"{column} GENERATED ALWAYS AS ({function}) STORED"
        else:
            yield column
        if self.code in ("ALWAYS", "REPLICA", "definer"):
            when = self.code.replace("definer", "ALWAYS")
            for name in self.all[1:] or self.all:
                yield f"CREATE TRIGGER x BEFORE INSERT OR UPDATE ON {name} FOR EACH ROW EXECUTE FUNCTION {function}"
                yield f"ALTER TABLE {name} ENABLE {when} TRIGGER x"

    def taken_away(self) -> Iterator[str]:
        for name in self.all if self.withheld else ():
            yield f"REVOKE {', '.join(self.withheld)} ON {name} FROM {self.owner_of(name)}"
        for privilege in {"INSERT", "UPDATE", "SELECT"} & set(self.withheld) if self.by_column else ():
            yield f"GRANT {privilege} (id, feels, plain) ON {self.name} TO {self.owner}"
        for schema in self.closed:
            yield f"REVOKE USAGE ON SCHEMA {schema} FROM {self.owner}"
        if self.closed_to_subscription:
            yield f"REVOKE USAGE ON SCHEMA {self.schema} FROM {SUBSCRIBES}"
        if self.closed_code and self.code:
            what = "SEQUENCE" if self.code == "sequence" else "FUNCTION"
            yield f"REVOKE ALL ON {what} {self.types}.code FROM PUBLIC, {self.owner}"
        if self.policy:
            yield f"CREATE POLICY everything ON {self.name} USING (true) WITH CHECK (true)"
        if self.row_security:
            yield f"ALTER TABLE {self.name} ENABLE ROW LEVEL SECURITY"
        if self.row_security == "FORCE":
            yield f"ALTER TABLE {self.name} FORCE ROW LEVEL SECURITY"
        if self.row_security_of_part:
            yield f"ALTER TABLE {self.all[-1]} ENABLE ROW LEVEL SECURITY"

    def mended(self, kind: str, layout: Layout) -> Iterator[str]:
        """Yield all privileges that a change of this kind can need."""
        if kind == "TRUNCATE":
            for table in layout.tables:
                yield f"ALTER TABLE {table.name} DROP CONSTRAINT IF EXISTS refers"
        if SUPERUSER in (self.owner, self.part_owner):
            self.owner, self.part_owner = (role.replace(SUPERUSER, FIRST) for role in (self.owner, self.part_owner))
            for name in self.all:
                yield f"ALTER TABLE {name} OWNER TO {self.owner_of(name)}"
            if self.code in FUNCTIONS:
                yield f"ALTER FUNCTION {self.types}.code OWNER TO {FIRST}"
        for name in self.all:
            yield f"GRANT {NEEDS[kind]} ON {name} TO {', '.join(ROLES)}"
            if self.kind == "parted":  # to lock it
                yield f"GRANT UPDATE ON {name} TO {self.owner}"
            yield f"ALTER TABLE {name} DISABLE ROW LEVEL SECURITY"
        yield f"GRANT USAGE ON SCHEMA {self.schema}, {self.types} TO {', '.join(ROLES)}"
        if self.code:
            what = "USAGE ON SEQUENCE" if self.code == "sequence" else "EXECUTE ON FUNCTION"
            yield f"GRANT {what} {self.types}.code TO PUBLIC"
        for role in {self.owner, self.part_owner} - {SUBSCRIBES}:
            grant = f"GRANT {role} TO {SUBSCRIBES}" + (" WITH SET TRUE" if layout.major >= 16 else "")
            layout.members.setdefault(role, grant)
            yield grant


@dataclass
class Layout:
    seed: str
    major: int
    owner: str  # of the subscription
    run_as_owner: bool
    members: dict[str, str]  # GRANT of an owner of tables to the subscription's
    via_root: bool
    copy_data: bool  # else the first rows are sent as changes
    options: str
    trusted: bool  # trusted_owners has all roles; else no role
    tables: list[Table]

    def native_options(self) -> str:
        since_16 = f", run_as_owner = {self.run_as_owner}, password_required = false" if self.major >= 16 else ""
        return f"enabled = false, {self.options}{since_16}"

    def ours_options(self) -> str:
        trusted = f", trusted_owners = '{', '.join(ROLES)}'" if self.trusted else ""
        run_as_owner = f", run_as_owner = {self.run_as_owner}, password_required = false"
        return f"enabled = false, {self.options}{run_as_owner}{trusted}"


def layout_of(seed: str, major: int) -> Layout:
    order = random.Random(seed)

    def maybe(probability: float) -> bool:
        return order.random() < probability

    def some(values: tuple[str, ...], probability: float) -> tuple[str, ...]:
        return tuple(value for value in values if maybe(probability))

    # PostgreSQL 14 checks no privilege of an owner; before 16 the subscription's owner applies changes.
    owner = SUBSCRIBES if major >= 15 and maybe(0.6) else SUPERUSER
    memberships = [f"GRANT {{}} TO {SUBSCRIBES}"] * 2
    if major >= 16:
        memberships = [
            f"GRANT {{}} TO {SUBSCRIBES} WITH {how}" for how in ("SET TRUE", "SET TRUE, INHERIT FALSE", "SET FALSE")
        ]
    members = {role: order.choice(memberships).format(role) for role in (FIRST, SECOND) if maybe(0.85)}
    tables: list[Table] = []
    for number in (1, 2, 3):
        role = order.choice([FIRST, FIRST, SECOND, SUBSCRIBES, SUPERUSER])
        kind = order.choice(["keyed", "full", "parted"])
        harsh = maybe(0.5)
        tables.append(
            Table(
                number,
                kind,
                owner=role,
                part_owner=order.choice([role, FIRST, SECOND]) if kind == "parted" else role,
                withheld=some(PRIVILEGES, 0.3) if harsh else (),
                shared=some(PRIVILEGES, 0.85) if maybe(0.8) else (),
                part_shared=some(PRIVILEGES, 0.9),
                by_column=maybe(0.2),
                closed=some((f"s{number}", f"x{number}"), 0.3),
                closed_to_subscription=maybe(0.15),
                row_security=order.choice(["", "", "", "", "ENABLE", "FORCE"]),
                row_security_of_part=kind == "parted" and maybe(0.1),
                policy=maybe(0.5),
                # where whole rows are compared, one with a value that the publisher does not have is not found
                code=order.choice(["", "", "", "sequence", *FUNCTIONS]) if kind != "full" else "",
                closed_code=maybe(0.2),
                refers=number > 1 and tables[0].kind != "full" and maybe(0.15),
                late=maybe(0.5),
            )
        )
    options = {
        "copy_data": (copy_data := maybe(0.8)),
        "binary": maybe(0.3),
        "streaming": maybe(0.3),
        "synchronous_commit": maybe(0.2),
    }
    return Layout(
        seed,
        major,
        owner,
        run_as_owner=major < 16 or maybe(0.3),
        members=members,
        via_root=maybe(0.5),
        copy_data=copy_data,
        options=", ".join(f"{name} = {value}" for name, value in options.items()),
        trusted=any(table.code for table in tables) or maybe(0.5),
        tables=tables,
    )


@dataclass
class Found:
    """The result of a change: applied, or the errors of stopped subscriptions."""

    native: list[str]
    ours: list[str]

    @property
    def outcome(self) -> str:
        return {
            (False, False): "both applied",
            (True, True): "both refused",
            (True, False): "native alone refused",
            (False, True): "ours alone refused",
        }[bool(self.native), bool(self.ours)]


class Watched:
    """A stage with its own sessions, and the logs of both subscriptions since forget()."""

    def __init__(self, stage: Stage, server: Server, source: Any, native: Any, ours: Any) -> None:
        self.stage = stage
        self.source: asyncpg.Connection = source
        self.native: asyncpg.Connection = native
        self.ours: asyncpg.Connection = ours
        self._log = server.log
        self.forget()

    def forget(self) -> None:
        self._start = self._log.stat().st_size
        self.stage.subscriber.log.clear()

    def errors(self, table: str | None = None) -> tuple[list[str], list[str]]:
        """Return the messages of each subscription so far: of its apply worker, or of the workers that copy a table.

        PostgreSQL's own messages are from workers that have exited.
        """
        with self._log.open("rb") as log:
            log.seek(self._start)
            text = log.read().decode()
        exited, copies = set(EXITED.findall(text)), dict(COPIES.findall(text))
        name = None if table is None else table.partition(".")[2]
        native = [
            message
            for worker, message in MESSAGE.findall(text)
            if worker in exited and copies.get(worker) == name and not PASSING.search(message)
        ]
        ours = [
            record.getMessage()
            for record in self.stage.subscriber.log.records
            if record.levelno >= logging.ERROR and copied_by(record) == table
        ]
        return native, ours

    async def changed(self) -> Found:
        """Wait until each has applied the source's changes, or has stopped."""
        position = await self.source.fetchval("SELECT pg_current_wal_lsn()::text")
        deadline = monotonic() + PATIENCE
        while monotonic() < deadline:
            rows = await self.source.fetch(
                "SELECT application_name FROM pg_stat_replication WHERE application_name = ANY ($1)"
                f" AND state = 'streaming' AND replay_lsn >= '{position}'",
                [NATIVE, OURS],
            )
            applied = {name for (name,) in rows}
            native, ours = self.errors()
            if (NATIVE in applied or len(native) >= ATTEMPTS) and (OURS in applied or len(ours) >= ATTEMPTS):
                return Found([] if NATIVE in applied else native, [] if OURS in applied else ours)
            await asyncio.sleep(0.04)
        raise TimeoutError(f"after {PATIENCE} s {applied} have applied the change; {self.errors()}")

    async def copied(self) -> dict[str, Found]:
        """Wait until each has copied all tables, or stands still with some: those."""
        self.forget()
        deadline = monotonic() + PATIENCE
        while monotonic() < deadline:
            query = "SELECT srrelid::regclass::text FROM {} WHERE srsubstate NOT IN ('s', 'r')"
            native = {name for (name,) in await self.native.fetch(query.format("pg_subscription_rel"))}
            ours = {name for (name,) in await self.ours.fetch(query.format("subscriber.subscription_rel"))}
            errors = {name: self.errors(name) for name in sorted(native | ours)}
            if all(len(errors[name][0]) >= ATTEMPTS for name in native) and all(
                len(errors[name][1]) >= ATTEMPTS for name in ours
            ):
                return {
                    name: Found(here if name in native else [], there if name in ours else [])
                    for name, (here, there) in errors.items()
                }
            await asyncio.sleep(0.04)
        raise TimeoutError(f"after {PATIENCE} s {native} and {ours} are not copied: {errors}")


def copied_by(record: logging.LogRecord) -> str | None:
    """Return the table, if the record is from our worker that copies a table."""
    keys = record.__dict__["keys"]
    return keys["relation"] if keys.get("worker") == "tablesync" else None


async def set_up(stage: Stage, layout: Layout) -> None:
    tables = layout.tables
    await stage.everywhere(*chain(*(table.everywhere() for table in tables)))
    await stage.on_targets(*chain(*(table.on_targets(tables[0]) for table in tables)))
    if layout.copy_data:
        await stage.source.execute(*(FILL.format(table.name) for table in tables))
    names = ", ".join(table.name for table in tables)
    await stage.source.execute(
        f"CREATE PUBLICATION p FOR TABLE {names} WITH (publish_via_partition_root = {layout.via_root})"
    )
    await stage.native.execute(stage.creation(NATIVE, layout.native_options()))
    await stage.subscriber.execute(stage.creation(OURS, layout.ours_options()))
    if layout.owner != SUPERUSER:
        await stage.native.execute(f"ALTER ROLE {SUBSCRIBES} SUPERUSER", *layout.members.values())
        await stage.alter(f"OWNER TO {SUBSCRIBES}")
        await stage.native.execute(f"ALTER ROLE {SUBSCRIBES} NOSUPERUSER")
    await stage.on_targets(*chain(*(table.taken_away() for table in tables if not table.late)))


def known(layout: Layout, table: Table, kind: str, message: str, *, native: bool) -> str | None:
    """Return why only one of them stops with that error, as docs/differences.md describes; None: unknown."""
    name = f"t{table.number}"
    acting = layout.owner if layout.run_as_owner else table.owner
    through_root = table.kind == "parted" and layout.via_root
    denied = message.startswith("permission denied for table")
    protected = "row-level security" in message
    of_part = re.search(rf"\b{name}_(low|high)\b", message) is not None
    if native:
        if (
            kind == "TRUNCATE"
            and layout.owner == SUBSCRIBES
            and (protected or (denied and "TRUNCATE" not in table.shared))
        ):
            return "asks the subscription's owner whether it may empty the table"
        if through_root and kind != "copy" and of_part and (denied or protected):
            return "asks for privileges on the partition that has the row"
        inherits = "INHERIT FALSE" not in layout.members.get(table.owner, "INHERIT FALSE")
        if denied and table.by_column and (acting == table.owner or inherits):
            return "asks for privileges on the table, not on its columns"
        closed = table.closed_to_subscription or (table.owner == SUBSCRIBES and table.schema in table.closed)
        if closed and message == f"permission denied for schema {table.schema}":
            return "looks tables up as the subscription's owner"
    else:
        if kind == "TRUNCATE" and denied and "TRUNCATE" in table.withheld and acting == table.owner:
            return "asks the table's owner whether it may empty the table"
        if through_root and kind != "copy" and not of_part and (denied or protected):
            return "asks for privileges on the partitioned table"
        protects = table.row_security or table.row_security_of_part
        if table.closed and protects and message.startswith("permission denied for schema"):
            return "has to know the names of a table with row-level security as its owner"
    return None


async def follow(stage: Stage, target: Server, layout: Layout, tally: Counter[str]) -> None:
    """Create the layout, compare the results of changes, and leave the databases empty."""
    await stage.native.execute(*(f"CREATE ROLE {role} LOGIN" for role in ROLES))
    sessions = [await database.connect() for database in (stage.source, stage.native, stage.ours)]
    try:
        await set_up(stage, layout)
        await played(Watched(stage, target, *sessions), layout, tally)
    finally:
        for session in sessions:
            await session.close()
        await stage.native.execute(f"ALTER ROLE {SUBSCRIBES} SUPERUSER")
        await stage.drop()
        await stage.on_targets(f"DROP OWNED BY {', '.join(ROLES)} CASCADE")
        schemas = ", ".join(f"{table.schema}, {table.types}" for table in layout.tables)
        await stage.everywhere(f"DROP SCHEMA IF EXISTS {schemas} CASCADE")
        await stage.source.execute("DROP PUBLICATION IF EXISTS p")
        await stage.native.execute(*(f"DROP ROLE {role}" for role in ROLES))


async def played(watched: Watched, layout: Layout, tally: Counter[str]) -> None:
    stage = watched.stage
    await stage.alter("ENABLE")
    await copy(watched, layout, tally)
    await stage.on_targets(*chain(*(table.taken_away() for table in layout.tables if table.late)))
    await stage.restart()
    for kind, statement in STATEMENTS.items():
        if kind == "fill" and layout.copy_data:
            continue
        for table in layout.tables:
            what = f"{kind} {table.name}"
            watched.forget()
            await stage.source.execute(statement.format(table.name))
            changed = await watched.changed()
            note(layout, table, kind, changed, tally)
            if changed.native or changed.ours:
                await stage.on_targets(*table.mended(kind, layout))
                watched.forget()
                changed = await watched.changed()
                assert changed.outcome == "both applied", (what, "mended", changed)
            native, ours = await watched.native.fetch(table.contents), await watched.ours.fetch(table.contents)
            assert ours == native, what


async def copy(watched: Watched, layout: Layout, tally: Counter[str]) -> None:
    stuck = await watched.copied()
    for name, rows_stuck in stuck.items():
        table = next(table for table in layout.tables if name in table.all)
        note(layout, table, "copy", rows_stuck, tally)
        await watched.stage.on_targets(*table.mended("copy", layout))
    if stuck:
        assert not (still := await watched.copied()), still
    for table in layout.tables:
        rows, wanted = await watched.ours.fetch(table.contents), await watched.native.fetch(table.contents)
        assert rows == wanted, f"copy of {table.name}"


def note(layout: Layout, table: Table, kind: str, found: Found, tally: Counter[str]) -> None:
    """Count the outcome. A difference has to be known."""
    tally[found.outcome] += 1
    if bool(found.native) != bool(found.ours):
        for message in set(found.native or found.ours):
            reason = known(layout, table, kind, message, native=bool(found.native))
            assert reason is not None, (kind, found, table)
            tally[f"{found.outcome}: {reason}"] += 1


async def try_layouts(publisher: Server, target: Server, seeds: Iterable[int], tally: Counter[str]) -> None:
    """Count how many changes ended how, and the layouts that were begun."""
    async with beside(publisher, target) as stage:
        major = await stage.native.major()
        for seed in seeds:
            layout = layout_of(f"{major} {seed}", major)
            tally["layouts"] += 1
            try:
                await follow(stage, target, layout, tally)
            except BaseException as error:
                error.add_note(pformat(layout))
                raise


@pytest.fixture(scope="module")
def target_of(target: Server, portal: BlockingPortal, session_servers: Servers) -> Iterator[Callable[[int], Server]]:
    """Return the target server of a major version."""
    started = {NEWEST: target}

    async def start(major: int) -> Server:
        server = await session_servers.create(f"privileges on {major}", SETTINGS, bin=programs(major))
        await server.start()
        return server

    def get(major: int) -> Server:
        try:
            if major not in started:
                started[major] = portal.call(start, major)
        except NotAvailable as reason:
            pytest.skip(f"no PostgreSQL {major}: {reason}")
        return started[major]

    yield get
    for server in started.values():
        if server is not target:
            portal.call(session_servers.remove, server)


@pytest.mark.parametrize(("major", "seeds"), [(18, (1, 2, 3)), pytest.param(15, (3,), marks=pytest.mark.soak)])
async def test_random_layouts_of_privileges_have_the_result_of_postgresql(
    publisher: Server, target_of: Callable[[int], Server], major: int, seeds: tuple[int, ...]
) -> None:
    tally: Counter[str] = Counter()
    await try_layouts(publisher, target_of(major), seeds, tally)
    assert tally["both applied"] > 10 * len(seeds)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("major", [14, 15, 16, 17, 18])
async def test_many_random_layouts_of_privileges_have_the_result_of_postgresql(
    publisher: Server, target_of: Callable[[int], Server], major: int
) -> None:
    tally: Counter[str] = Counter()
    failed = []
    end = SEED + MANY
    first = SEED
    while first < end:
        begun = tally["layouts"]
        try:
            await try_layouts(publisher, target_of(major), range(first, min(first + TOGETHER, end)), tally)
        except Exception as error:
            failed.append(error)
            print(repr(error), *error.__notes__, flush=True)
        first += tally["layouts"] - begun
        print(f"PostgreSQL {major}, layouts to {first - 1}, {len(failed)} failed:", dict(tally), flush=True)
    if failed:
        raise ExceptionGroup(f"{len(failed)} layouts", failed)
