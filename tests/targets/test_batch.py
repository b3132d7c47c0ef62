"""The batch applier, in one session and in several, compared with the row applier.

Both get the same random transactions, and must have the same result. Each run creates its tables and applies a few
hundred transactions. It ends with all of them, or with an error at one of them. The rows, the position, the rows that
were reported as missing and the error are compared. A failure names its seed.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from time import monotonic

import anyio
import pytest

from subscriber.apply.progress import Progress
from subscriber.catalog.connection import CatalogConnection
from subscriber.connection.connect import open_session
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import StaleMapping, SubscriberError
from subscriber.lsn import Lsn
from subscriber.protocol.copy_data import XLogData
from subscriber.protocol.copy_data import encode as wrap
from subscriber.protocol.encode import encode
from subscriber.protocol.messages import (
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    OldPart,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Truncate,
    Update,
)
from subscriber.protocol.tuple_data import BINARY, NULL, TEXT, UNCHANGED, TupleData
from subscriber.settings import Settings
from subscriber.targets.postgres.session.capabilities import TargetCapabilities
from subscriber.targets.postgres.target import PostgresTarget
from subscriber.targets.postgres.worker_session import (
    TargetConfig,
    WorkerSession,
    claim,
    open_target,
    register_session,
)
from subscriber.worker.apply.transactions import TransactionKinds, Transactions
from subscriber.worker.apply_hooks import ApplyHooks
from subscriber.worker.session.applier import Counters
from subscriber.worker.session.apply_sessions import FIRST
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import SUBID, subscription

Row = tuple[str | None, ...]

# Small batches, always attempted, and attempted again immediately after a rejection.
EAGER = Settings(
    batch_rows=40,
    batch_small_transaction=10,
    batch_min_rows=2,
    batch_min_rows_per_step=0,
    batch_retry_rows=0,
    parallel_batch_min_rows=1,
)

INTEGER, TEXT_TYPE, NUMERIC = 23, 25, 1700
# Values of columns with these names, in table "odd"; bits that are too many are an error, not cut.
ODD = {"c": ["x", "\\101"], "i": ["00:05:00", "2 days 00:07:00"], "r": ["integer", "text"], "b": ["10"] * 30 + ["101"]}


@dataclass
class Table:
    """A table. `key` are indexes of columns; `trouble` is how often a change does not match the target's rows."""

    name: str
    ddl: list[str]
    columns: tuple[tuple[str, int], ...]  # name and type
    key: tuple[int, ...] = (0,)
    full: bool = False
    wide: int | None = None  # the column that may be sent as unchanged
    kept: int | None = None  # the column that updates hardly ever change
    rows: dict[Row, Row] = field(default_factory=dict)

    @property
    def relid(self) -> int:
        return 50_000 + TABLE_NAMES.index(self.name)

    @property
    def relation(self) -> Relation:
        columns = tuple(
            RelationColumn(self.full or i in self.key, name, oid, -1) for i, (name, oid) in enumerate(self.columns)
        )
        identity = ReplicaIdentity.FULL if self.full else ReplicaIdentity.DEFAULT
        return Relation(None, self.relid, "public", self.name, identity, columns)


def _tables() -> list[Table]:
    pair = (("id", INTEGER), ("v", INTEGER))
    three = (("id", INTEGER), ("v", INTEGER), ("t", TEXT_TYPE))
    log = "CREATE TABLE IF NOT EXISTS log (n serial, what text)"
    logged = (
        "CREATE FUNCTION logged() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO public.log (what) VALUES (TG_OP || coalesce(new.v, old.v, 0)::text); RETURN NULL; END $$"
    )
    return [
        Table("plain", ["CREATE TABLE plain (id int PRIMARY KEY, v int, t text)"], three, wide=2),
        Table(
            "extra",
            ["CREATE TABLE extra (t text, v int DEFAULT 1, id int PRIMARY KEY, local int DEFAULT 7, d timestamptz)"],
            three,
            wide=2,
        ),
        Table(
            "composite",
            ["CREATE TABLE composite (a int, b text, v numeric(6,1), PRIMARY KEY (b, a))"],
            (("a", INTEGER), ("b", TEXT_TYPE), ("v", NUMERIC)),
            key=(0, 1),
        ),
        Table("uniq", ["CREATE TABLE uniq (id int PRIMARY KEY, v int UNIQUE)"], pair),
        Table(
            "users",
            ["CREATE TABLE users (id int PRIMARY KEY, v int, u int UNIQUE, n int UNIQUE, UNIQUE (u, n))"],
            (*pair, ("u", INTEGER)),
            kept=2,
        ),
        Table("checked", ["CREATE TABLE checked (id int PRIMARY KEY, v int NOT NULL CHECK (v < 95))"], pair),
        Table("required", ["CREATE TABLE required (id int PRIMARY KEY, v int NOT NULL)"], pair),
        Table("short", ["CREATE TABLE short (id int PRIMARY KEY, v varchar(2))"], (pair[0], ("v", TEXT_TYPE))),
        Table(
            "triggered",
            [
                log,
                logged,
                "CREATE TABLE triggered (id int PRIMARY KEY, v int)",
                "CREATE TRIGGER t AFTER INSERT OR UPDATE OR DELETE ON triggered FOR EACH ROW EXECUTE FUNCTION logged()",
                "ALTER TABLE triggered ENABLE ALWAYS TRIGGER t",
            ],
            pair,
        ),
        Table("whole", ["CREATE TABLE whole (id int, v int)"], pair, full=True),
        Table("whole_with_key", ["CREATE TABLE whole_with_key (id int PRIMARY KEY, v int)"], pair, full=True),
        Table("deferred", ["CREATE TABLE deferred (id int PRIMARY KEY, v int UNIQUE DEFERRABLE)"], pair),
        Table(
            "identities",
            ["CREATE TABLE identities (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int)"],
            pair,
        ),
        Table(
            "odd",
            [
                "CREATE TABLE odd (id int PRIMARY KEY, v int GENERATED ALWAYS AS IDENTITY, "
                'c "char", i interval minute, r regtype, b bit(2))'
            ],
            (*pair, ("c", INTEGER), ("i", INTEGER), ("r", INTEGER), ("b", INTEGER)),
        ),
        Table("numbers", ["CREATE TABLE numbers (id numeric PRIMARY KEY, v int)"], (("id", NUMERIC), pair[1])),
        Table(
            "generated",
            ["CREATE TABLE generated (id int PRIMARY KEY, v int, g int GENERATED ALWAYS AS (100 / (v - 50)) STORED)"],
            pair,
        ),
        Table(
            "parts",
            [
                "CREATE TABLE parts (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
                "CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (15)",
                "CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (15) TO (1000000)",
            ],
            pair,
        ),
        Table(
            "ordinary",  # its trigger fires only without the replica role
            [
                log,
                logged.replace("logged()", "logged_too()"),
                "CREATE TABLE ordinary (id int PRIMARY KEY, v int)",
                "CREATE TRIGGER t AFTER INSERT OR UPDATE OR DELETE ON ordinary FOR EACH ROW"
                " EXECUTE FUNCTION logged_too()",
            ],
            pair,
        ),
        Table(
            "linked",
            [
                "CREATE TABLE hundred (id int PRIMARY KEY)",
                "INSERT INTO hundred SELECT generate_series(0, 98)",
                "CREATE TABLE linked (id int PRIMARY KEY, v int REFERENCES hundred)",
                "CREATE TABLE dependent (id int REFERENCES linked ON DELETE CASCADE)",
            ],
            pair,
        ),
    ]


SEED = int(os.environ.get("SUBSCRIBER_BATCH_SEED", "1"))
SECONDS = float(os.environ.get("SUBSCRIBER_BATCH_SECONDS", "300"))

STALE = "the table's shape may have changed"  # instead of an error

TABLE_NAMES = [table.name for table in _tables()]


def _transaction(lsn: int, *body: Message) -> list[bytes]:
    begin = Begin(Lsn(lsn), 1_000_000, lsn)
    commit = Commit(Lsn(lsn), Lsn(lsn + 100), 1_000_000)
    return [wrap(XLogData(Lsn(lsn), Lsn(lsn), 5, encode(m))) for m in (begin, *body, commit)]


class Source:
    """A publisher's changes. It has no constraints except its keys, so the target may reject changes."""

    def __init__(self, seed: int, tables: list[Table], *, keys: int, binary: bool) -> None:
        self.random = Random(seed)
        self.tables = tables
        self.binary = binary
        self.keys = keys
        self.lsn = 1000
        self.announced: set[str] = set()

    def transaction(self, changes: int) -> list[bytes]:
        self.lsn += 1000
        body: list[Message] = []
        for _ in range(changes):
            table = self.random.choice(self.tables)
            if table.name not in self.announced:
                self.announced.add(table.name)
                body.append(table.relation)
            body.append(self.change(table))
        return _transaction(self.lsn, *body)

    def change(self, table: Table) -> Message:
        random = self.random
        dice = random.random()
        if dice < 0.003:
            table.rows.clear()
            return Truncate(None, False, False, (table.relid,))
        key = tuple(self.value(table, i, random.randrange(self.keys)) for i in table.key)
        there = table.rows.get(key)
        if there is None:
            row = list(self.row(table))
            for i, value in zip(table.key, key, strict=True):
                row[i] = value
            table.rows[key] = tuple(row)
            return Insert(None, table.relid, self.data(table, tuple(row)))
        if dice < 0.25:
            del table.rows[key]
            return Delete(None, table.relid, *self.old(table, there))
        row = list(self.row(table))
        for i, value in zip(table.key, key, strict=True):
            row[i] = value
        if dice < 0.35:
            fresh = tuple(self.value(table, i, random.randrange(self.keys)) for i in table.key)
            if fresh not in table.rows:
                for i, value in zip(table.key, fresh, strict=True):
                    row[i] = value
                del table.rows[key]
                key = fresh
        if table.kept is not None and random.random() < 0.98:
            row[table.kept] = there[table.kept]
        unchanged = table.wide if random.random() < 0.3 else None
        if unchanged is not None:
            row[unchanged] = there[unchanged]
        table.rows[key] = tuple(row)
        old: tuple[OldPart | None, TupleData | None] = (None, None)
        if table.full or any(there[i] != row[i] for i in table.key):
            old = self.old(table, there)
        return Update(None, table.relid, *old, self.data(table, tuple(row), unchanged))

    def old(self, table: Table, row: Row) -> tuple[OldPart, TupleData]:
        if table.full:
            return OldPart.ROW, self.data(table, row)
        return OldPart.KEY, self.data(table, tuple(v if i in table.key else None for i, v in enumerate(row)))

    def row(self, table: Table) -> Row:
        return tuple(self.value(table, i, self.random.randrange(100)) for i in range(len(table.columns)))

    def value(self, table: Table, index: int, number: int) -> str | None:
        name, oid = table.columns[index]
        if index not in table.key and self.random.random() < 0.02:
            return None
        if name in ODD:
            return ODD[name][number % len(ODD[name])]
        if name == "u":
            return str(self.random.choice([number, *[self.random.randrange(100, 10**9)] * 30]))
        if oid == NUMERIC:
            return self.random.choice([f"{number}", f"{number}.0"]) if name == "id" else f"{number}.26"
        if oid == TEXT_TYPE and name == "t":
            return self.random.choice([f"{number}", "a\tb", "back\\slash", "\\N", "\\.", "line\nbreak", "\r", "", "é"])
        return str(number)

    def data(self, table: Table, row: Row, unchanged: int | None = None) -> TupleData:
        status = bytearray()
        values: list[bytes | None] = []
        for i, value in enumerate(row):
            if i == unchanged:
                status.append(UNCHANGED)
                values.append(None)
            elif value is None:
                status.append(NULL)
                values.append(None)
            elif self.binary:
                status.append(BINARY)
                values.append(int(value).to_bytes(4, "big") if table.columns[i][1] == INTEGER else value.encode())
            else:
                status.append(TEXT)
                values.append(value.encode())
        return TupleData.join(bytes(status), values)


@dataclass
class Outcome:
    rows: dict[str, list[str]]
    position: Lsn
    missing: list[str]
    error: str


class SomeBoundaries(ApplyHooks):
    def __init__(self) -> None:
        self._chance = Random(0)

    def needs_boundary(self, position: Lsn) -> bool:
        return self._chance.random() >= 0.7


class Path:
    """One of the two: a target to which messages are given as an apply loop does."""

    def __init__(self, target: PostgresTarget, few: float) -> None:
        """Create the path. `few`: how often the target is notified of a small backlog."""
        self.target = target
        self.few = few
        self.committed: list[int] = []
        self.transactions = Transactions(
            target, SomeBoundaries(), TransactionKinds(), Progress(Lsn(0)), Counters(), self.committed.append
        )

    async def give(self, waiting: deque[bytes], random: Random) -> None:
        few = False
        while waiting:
            if self.transactions.idle:
                few = self.target.set_small_backlog(random.random() < self.few)
            if not few and self.transactions.append_raw(waiting, random.choice([1, 3, 256])):
                await self.target.flush_if_full()
            else:
                await self.transactions.receive(waiting.popleft()[25:])
            if self.transactions.idle and (few or random.random() < 0.1):
                await self.target.on_idle()


async def _apply(
    db: Database,
    tables: list[Table],
    payloads: list[list[bytes]],
    damage: list[str],
    batches: bool,
    sessions: int = 1,
    few: float = 0.0,
    replica_role: bool = True,
) -> tuple[Outcome, PostgresTarget]:
    await db.execute("DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    await db.execute(f"SELECT subscriber.set_progress({SUBID}, 0, '0/0')")
    await db.execute(*[statement for table in tables for statement in table.ddl])
    missing: list[str] = []
    error = ""
    async with AsyncExitStack() as stack:
        catalog = await stack.enter_async_context(CatalogConnection.open(db.dsn(), "test"))
        config = TargetConfig(
            db.dsn(),
            "s",
            subscription(),
            0,
            lambda f, n: missing.append(f"{n.transaction} {f.message} {f.rows}"),
            batching=batches,
            settings=EAGER,
        )
        worker = await stack.enter_async_context(_open(config, catalog, replica_role))
        claimed = await claim(catalog, subscription(), 0)
        assert claimed is not None
        target = await worker.resume(claimed)
        path = Path(target, few)
        lanes = await _lanes(stack, db, catalog, target, sessions - 1, replica_role)
        half = len(payloads) // 2
        try:
            arrived: deque[bytes] = deque()
            for number, transaction in enumerate(payloads):
                random = Random(number)
                if number == half:
                    await path.give(arrived, random)
                    await target.sync()
                    await db.execute(*damage)
                arrived.extend(transaction)
                if random.random() < 0.3:
                    await path.give(arrived, random)
                if number == half // 4:  # in any state of the current batch
                    for lane in lanes:
                        target.join(lane)
            await path.give(arrived, Random(half))
            await target.sync()
        except SubscriberError as failed:
            explained = await worker.explain(failed)
            if isinstance(explained, StaleMapping):
                error = STALE
            else:
                detail = re.sub(r"transaction \d+", "transaction", explained.detail or "")  # the target's own
                error = "\n".join([explained.sqlstate, explained.message, detail, *explained.context])
        assert path.committed == sorted(path.committed)
    async with AsyncExitStack() as stack:  # when the session's last transaction is over
        catalog = await stack.enter_async_context(CatalogConnection.open(db.dsn(), "test"))
        config = TargetConfig(db.dsn(), "s", subscription(), 0, lambda *_: None)
        await stack.enter_async_context(open_target(config, catalog))
        found_progress = await claim(catalog, subscription(), 0)
        assert found_progress is not None
    names = [table.name for table in tables]
    names += ["log"] if {"triggered", "ordinary"} & set(names) else []
    rows = {}
    for name in names:
        shown = "what" if name == "log" else "t"
        rows[name] = sorted(r[0] for r in await db.rows(f"SELECT coalesce({shown}::text, '') FROM {name} t"))
    return Outcome(rows, found_progress.position, missing, error), target


@asynccontextmanager
async def _open(
    config: TargetConfig, catalog: CatalogConnection, replica_role: bool = True
) -> AsyncIterator[WorkerSession]:
    """Open a target. `replica_role`: its session may set session_replication_role."""
    if replica_role:
        async with open_target(config, catalog) as worker:
            yield worker
        return
    session = await open_session(config.conninfo, application_name="test")
    try:
        yield await register_session(config, catalog, Pipeline(session), TargetCapabilities(replica_role=False))
    finally:
        session.abort()


async def _lanes(
    stack: AsyncExitStack,
    db: Database,
    catalog: CatalogConnection,
    target: PostgresTarget,
    number: int,
    replica_role: bool,
) -> list[PostgresTarget]:
    """Further sessions for `target`, which steps back where waits.py would have it do so."""
    targets = []
    for place in range(FIRST, FIRST + number):
        config = TargetConfig(db.dsn(), "s", subscription(), place, lambda *_: None, batching=True, settings=EAGER)
        worker = await stack.enter_async_context(_open(config, catalog, replica_role))
        targets.append(await worker.resume(target.row_applier.progress.claim, number=place))

    async def watch() -> None:
        while True:
            await anyio.sleep(0.05)
            pid = target.pipelines[0].session.pid
            if await db.value(f"SELECT pg_blocking_pids({pid}) <> '{{}}'"):
                target.roll_back_for_lock()

    tasks = await stack.enter_async_context(anyio.create_task_group())
    stack.callback(tasks.cancel_scope.cancel)
    tasks.start_soon(watch)
    return targets


async def _compare(
    db: Database,
    seed: int,
    names: list[str],
    *,
    keys: int,
    sizes: list[int],
    binary: bool,
    transactions: int = 0,
    replica_role: bool = True,
) -> tuple[int, int]:
    """Return the number of changes applied in batches, and how many of them in other sessions than the first."""
    print(f"seed {seed}, tables {names}, {keys} keys, transactions of {sizes}, {binary=}")
    tables = [table for table in _tables() if table.name in names]
    source = Source(seed, tables, keys=keys, binary=binary)
    payloads = [
        source.transaction(source.random.choice(sizes)) for _ in range(transactions or source.random.choice([20, 80]))
    ]
    damage = []
    if source.random.random() < 0.5:
        damage = [f"DELETE FROM {table.name} WHERE {table.columns[0][0]} = {source.random.randrange(keys)}"
                  for table in tables]  # fmt: skip
    expected, _ = await _apply(db, tables, payloads, damage, batches=False, replica_role=replica_role)
    for sessions in (1, 3):
        got, target = await _apply(
            db, tables, payloads, damage, batches=True, sessions=sessions, few=0.2, replica_role=replica_role
        )
        if STALE in (got.error, expected.error):  # a worker starts again, and meets the error if it is one
            assert got.error
            assert expected.error
        else:
            assert got.error == expected.error
        assert got.position == expected.position
        assert sorted(got.missing) == sorted(expected.missing)  # facts that are queried delay their report
        assert got.rows == expected.rows
    return target.batched_changes


@pytest.mark.parametrize("name", [*TABLE_NAMES, "all"])
async def test_both_paths_leave_the_same(db: Database, name: str) -> None:
    names = TABLE_NAMES if name == "all" else [name, "plain"]
    seed = 2 if name == "all" else TABLE_NAMES.index(name)
    keys, sizes = [(2000, [3, 150]), (8, [1, 2, 3]), (60, [1, 5, 30])][seed % 3]
    in_batches, _ = await _compare(db, seed, names, keys=keys, sizes=sizes, binary=False)
    if name in ("plain", "all"):  # others end early with an error, or are never batched
        assert in_batches > 0


@pytest.mark.parametrize("name", ["plain", "ordinary", "linked", "deferred"])
async def test_both_paths_leave_the_same_without_the_replica_role(db: Database, name: str) -> None:
    """Ordinary triggers and foreign keys fire, so their tables are applied row by row, and others in batches."""
    names = [name] if name == "plain" else [name, "plain"]
    batched, _ = await _compare(db, 5, names, keys=60, sizes=[5, 30], binary=False, replica_role=False)
    assert batched > 0 or name == "deferred"


@pytest.mark.parametrize("keys", [100_000, 400], ids=["hardly any row twice", "the same rows again and again"])
@pytest.mark.parametrize("names", [["plain", "composite"], ["numbers"], ["whole"]], ids=",".join)
async def test_several_sessions_leave_the_same(db: Database, names: list[str], keys: int) -> None:
    _, beside = await _compare(db, 1, names, keys=keys, sizes=[4, 12], binary=False, transactions=80)
    assert beside > 0 or keys < 100_000


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_both_paths_leave_the_same_for_a_long_time(db: Database, binary: bool) -> None:
    end, seed = monotonic() + SECONDS, SEED
    while monotonic() < end:
        random = Random(seed)
        able = [name for name in TABLE_NAMES if not binary or name not in ("composite", "numbers", "odd")]
        names = random.sample(able, random.choice([1, 2, 4]))
        sizes = random.choice([[1, 2, 3], [1, 5, 30], [3, 150], [4, 12]])
        await _compare(db, seed, names, keys=random.choice([4, 30, 300, 3000, 100_000]), sizes=sizes, binary=binary)
        seed += 1


async def test_a_report_that_a_refusal_has_delayed_is_made(db: Database) -> None:
    """The query for the missing row's partition is queued behind a batch, which is rejected."""
    tables = [table for table in _tables() if table.name in ("plain", "parts")]
    source = Source(1, tables, keys=10, binary=False)
    plain, parts = tables
    row = Insert(None, plain.relid, source.data(plain, ("9", "9", "9")))
    payloads = [
        _transaction(1000, plain.relation, parts.relation, row),
        _transaction(1500, Delete(None, parts.relid, *source.old(parts, ("7", "1")))),
        _transaction(2000, *[Delete(None, plain.relid, *source.old(plain, (f"{i}", "", ""))) for i in range(3)]),
    ]
    got, target = await _apply(db, tables, payloads, [], batches=True)
    assert target.row_by_row_reasons["row missing"] == 3
    assert [line.partition('"public.')[2].partition('"')[0] for line in got.missing] == ["parts_low", *["plain"] * 3]


@pytest.mark.parametrize("triggers", [False, True])
async def test_a_report_that_an_error_has_delayed_is_made(db: Database, triggers: bool) -> None:
    """The queries about a missing row are queued behind the next transaction, which fails."""
    plain, parts = [table for table in _tables() if table.name in ("plain", "parts")]
    if triggers:
        body = "CREATE FUNCTION pass() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END'"
        trigger = "CREATE TRIGGER pass BEFORE DELETE ON parts_low FOR EACH ROW EXECUTE FUNCTION pass()"
        always = "ALTER TABLE parts_low ENABLE ALWAYS TRIGGER pass"
        parts = replace(parts, ddl=[*parts.ddl, body, trigger, always])
    source = Source(1, [plain, parts], keys=10, binary=False)
    row = Insert(None, plain.relid, source.data(plain, ("9", "9", "9")))
    payloads = [
        _transaction(1000, plain.relation, parts.relation, row),
        _transaction(2000, Delete(None, parts.relid, *source.old(parts, ("7", "1")))),
        _transaction(3000, row),
    ]
    got, _ = await _apply(db, [plain, parts], payloads, [], batches=False)
    assert got.error.startswith("23505")
    assert got.position == Lsn(2100)
    assert [line.partition('"public.')[2].partition('"')[0] for line in got.missing] == ["parts_low"]


async def test_updates_that_leave_other_unique_columns_alone(db: Database) -> None:
    """If an update changes another unique column, it and all later changes are applied row by row."""
    (users,) = [table for table in _tables() if table.name == "users"]
    source = Source(1, [users], keys=10, binary=False)

    def row(number: int, value: int, unique: int) -> TupleData:
        return source.data(users, (str(number), str(value), str(unique)))

    rows = range(10)
    inserts = [Insert(None, users.relid, row(i, 0, i)) for i in rows]
    updates = [Update(None, users.relid, None, None, row(i, 1, i)) for i in rows]
    keys = [
        Update(None, users.relid, *source.old(users, (str(i), "1", str(i))), row(100 + i, 2, i)) for i in rows if i % 2
    ]
    # Each takes the value that the previous one has released.
    moves = [Update(None, users.relid, None, None, row(i, 3, i - 2)) for i in rows if i > 1 and i % 2 == 0]
    moves.insert(0, Update(None, users.relid, None, None, row(0, 3, 1000)))
    payloads = [
        _transaction(1000, users.relation, *inserts),
        _transaction(2000, *updates),
        _transaction(3000, *keys),
        _transaction(4000, *moves),
        _transaction(5000, *moves[:1] * 100),
        _transaction(6000, *moves[:1] * 100),
    ]
    got, target = await _apply(db, [users], payloads, [], batches=True)
    assert got.error == ""
    assert target.batched_changes[0] >= 25
    assert set(target.row_by_row_reasons) == {"row missing", "several unique indexes"}
    expected, _ = await _apply(db, [users], payloads, [], batches=False)
    assert got.rows == expected.rows


async def test_a_session_may_join_while_a_refused_batch_is_rolled_back(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = [table for table in _tables() if table.name == "plain"]
    source = Source(1, [plain], keys=10, binary=False)
    row = Insert(None, plain.relid, source.data(plain, ("9", "9", "9")))
    payloads = [
        _transaction(1000, plain.relation, row),
        _transaction(2000, *[Delete(None, plain.relid, *source.old(plain, (f"{i}", "", ""))) for i in range(3)]),
    ]
    join, settle, recover = PostgresTarget.join, Pipeline.sync, Pipeline.recover
    held, recovered = list[tuple[PostgresTarget, PostgresTarget]](), list[Pipeline]()

    async def note_and_recover(pipeline: Pipeline) -> tuple[SubscriberError | None, object]:
        answer = await recover(pipeline)
        recovered.append(pipeline)
        return answer

    async def sync_and_join(pipeline: Pipeline) -> None:
        await settle(pipeline)
        if recovered and held:
            join(*held.pop())

    monkeypatch.setattr(PostgresTarget, "join", lambda target, lane: held.append((target, lane)))
    monkeypatch.setattr(Pipeline, "recover", note_and_recover)
    monkeypatch.setattr(Pipeline, "sync", sync_and_join)
    got, target = await _apply(db, [plain], payloads, [], batches=True, sessions=2)
    assert got.error == ""
    assert not held
    assert target.row_by_row_reasons["row missing"] == 3
