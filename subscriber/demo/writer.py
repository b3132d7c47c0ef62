"""The demo's second writer, in addition to pgbench: transactions with every kind of change to the demo's tables."""

from __future__ import annotations

import random
from collections import Counter

import anyio

from subscriber.catalog.connection import Connection
from subscriber.connection.connect import connect
from subscriber.demo import schema

PAUSE = 0.005  # seconds between two transactions: three servers share the processors
BIG = 2000  # rows of a large transaction

_INSERT_TOASTED = (
    "INSERT INTO demo.toasted (version, big, doc) SELECT 0, repeat(md5(random()::text), 200), '{\"a\": 1}'"
)
_PICK_TOASTED = "(SELECT id FROM demo.toasted OFFSET floor(random() * 150) LIMIT 1)"
_PICK_TYPES = "(SELECT id FROM demo.many_types OFFSET floor(random() * 1500) LIMIT 1)"
_PICK_NO_KEY = "(SELECT ctid FROM demo.no_key OFFSET floor(random() * 700) LIMIT 1)"
_PICK_CODE = "(SELECT code FROM demo.codes OFFSET floor(random() * 450) LIMIT 1)"
_ROW = '"select" = floor(1 + random() * 100)'
_PICK_DAY = "(SELECT id FROM demo.measurements OFFSET floor(random() * 2500) LIMIT 1)"

TRUNCATE = "truncate of two tables"
# name, weight, statements
OPERATIONS: list[tuple[str, int, tuple[str, ...]]] = [
    ("update of many types", 10, (
        "UPDATE demo.many_types SET words = md5(random()::text), docb = docb || '[1]', numbers = numbers || 1,"
        f" exact = exact + 1, span = NULL WHERE id = {_PICK_TYPES}",)),
    ("values become NULL", 4, (
        "UPDATE demo.many_types SET words = NULL, bytes = NULL, address = NULL, mood = NULL"
        f" WHERE id = {_PICK_TYPES}",)),
    ("delete", 6, (f"DELETE FROM demo.many_types WHERE id = {_PICK_TYPES}",)),
    ("insert of a large value", 4, (_INSERT_TOASTED,)),
    ("update beside a large value", 10, (
        f"UPDATE demo.toasted SET version = version + 1 WHERE id = {_PICK_TOASTED}",
        "UPDATE demo.toasted_full SET version = version + 1 WHERE id = floor(1 + random() * 50)")),
    ("update of a large value", 4, (
        f"UPDATE demo.toasted SET big = repeat(md5(random()::text), 220) WHERE id = {_PICK_TOASTED}",
        "UPDATE demo.toasted_full SET big = repeat(md5(random()::text), 220) WHERE id = floor(1 + random() * 50)")),
    ("delete of a large value", 2, (f"DELETE FROM demo.toasted WHERE id = {_PICK_TOASTED}",)),
    ("change of a key", 8, (
        f"UPDATE demo.codes SET code = md5(random()::text), changed = changed + 1 WHERE code = {_PICK_CODE}",)),
    ("change of an index's key", 6, (
        "UPDATE demo.by_index SET email = md5(random()::text) || '@example.org', seen = seen + 1"
        " WHERE id = floor(1 + random() * 500)",
        "UPDATE demo.by_index SET seen = seen + 1 WHERE id = floor(1 + random() * 500)")),
    ("rows without a key", 10, (
        "INSERT INTO demo.no_key SELECT floor(random() * 50)::int, nullif('x' || floor(random() * 3)::int, 'x0'),"
        " floor(random() * 2) FROM generate_series(1, 2)",
        f"UPDATE demo.no_key SET c = c + 1, b = nullif(b, 'x1') WHERE ctid = {_PICK_NO_KEY}",
        f"DELETE FROM demo.no_key WHERE ctid = {_PICK_NO_KEY}")),
    ("row movement between partitions", 8, (
        "INSERT INTO demo.measurements (day, value) VALUES ('2030-07-01', random())",
        f"UPDATE demo.measurements SET day = '2029-06-01'::date + floor(random() * 900)::int WHERE id = {_PICK_DAY}",
        f"DELETE FROM demo.measurements WHERE id = {_PICK_DAY}")),
    (TRUNCATE, 2, (
        "TRUNCATE demo.parents, demo.children",
        "INSERT INTO demo.parents SELECT i, 'again' FROM generate_series(1, 20) i",
        "INSERT INTO demo.children SELECT i, i FROM generate_series(1, 20) i")),
    ("odd names", 3, (
        f"""UPDATE demo."Odd Names" SET "ein ""Wort hier" = md5(random()::text) WHERE {_ROW}""",)),
]  # fmt: skip


class DemoWriter:
    """Writes until stopped.

    `counts` has the number of committed operations, by the names of OPERATIONS and a few more.
    """

    def __init__(self, dsn: str, seed: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        self.transactions = 0
        self.rolled_back = 0
        # One statement truncates two tables with a foreign key between them. A table sync worker that synchronizes only
        # one of the tables cannot repeat it, neither PostgreSQL's nor ours.
        self.may_truncate = False
        self._dsn = dsn
        self._random = random.Random(seed)

    async def run(self, stop: anyio.Event) -> None:
        """Write until `stop` is set, then finish the open transaction."""
        connection = await connect(self._dsn, application_name="demo writer")
        try:
            while not stop.is_set():
                await self._transaction(connection)
                await anyio.sleep(PAUSE)
        finally:
            connection.terminate()

    async def _transaction(self, connection: Connection) -> None:
        done: Counter[str] = Counter()
        transaction = connection.transaction()
        await transaction.start()
        for _ in range(self._random.randint(1, 4)):
            await self._something(connection, done)
        if self._random.random() < 0.05:
            await transaction.rollback()
            self.rolled_back += 1
            return
        await transaction.commit()
        self.transactions += 1
        self.counts += done

    async def _something(self, connection: Connection, done: Counter[str]) -> None:
        luck = self._random.random()
        if luck < 0.2:
            await connection.execute(schema.INSERT_MANY_TYPES, self._random.randint(1, 3))
            done["insert of many types"] += 1
        elif luck < 0.25:
            await self._in_savepoint(connection, done)
        elif luck < 0.252:
            await connection.execute("INSERT INTO demo.bulk SELECT i, 'row' FROM generate_series(1, $1::int) i", BIG)
            done["large transaction"] += 1
        else:
            await self._operation(connection, done)

    async def _operation(self, connection: Connection, done: Counter[str]) -> None:
        weights = [weight for _, weight, _ in OPERATIONS]
        ((name, _, statements),) = self._random.choices(OPERATIONS, weights)
        if name == TRUNCATE and not self.may_truncate:
            return
        for statement in statements:
            await connection.execute(statement)
        done[name] += 1

    async def _in_savepoint(self, connection: Connection, done: Counter[str]) -> None:
        """Execute an operation that is rolled back, and after it one that is not."""
        savepoint = connection.transaction()
        await savepoint.start()
        await self._operation(connection, Counter())
        await savepoint.rollback()
        await self._operation(connection, done)
        done["rollback to a savepoint"] += 1


async def prepare(connection: Connection) -> None:
    """Fill the tables with rows for the initial copy."""
    for statement in schema.START:
        await connection.execute(statement)
