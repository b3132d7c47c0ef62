"""What the replay benchmark writes on the publisher."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.stage import INSERT, TABLE, Stage, connection, execute

TABLES = [
    TABLE,
    "CREATE TABLE history (i int, text text)",
    """
    CREATE TABLE indexed (
      id bigint PRIMARY KEY, a integer, b integer, c timestamptz, d numeric(12,2), e text)
    """,
    *(f"CREATE INDEX ON indexed ({column})" for column in "abcde"),
    "CREATE TABLE whole (id bigint PRIMARY KEY, number integer, amount numeric(12,2), label text)",
    "ALTER TABLE whole REPLICA IDENTITY FULL",
    "CREATE TABLE wide (id bigint PRIMARY KEY, number integer, "
    + ", ".join(f"c{i} integer" for i in range(20))
    + ", body text)",
    "CREATE TABLE users (id bigint PRIMARY KEY, email text UNIQUE, number integer)",
    "ALTER TABLE wide ALTER COLUMN body SET STORAGE EXTERNAL",
]


@dataclass(frozen=True)
class Workload:
    """`rows` are row changes; `write` commits them all on the publisher."""

    name: str
    rows: int
    write: Callable[[Stage], Awaitable[None]]


async def _nothing(where: Stage) -> None:
    await execute(where.source, "SELECT pg_logical_emit_message(true, 'benchmark', '')")


def _transaction(*statements: str) -> Callable[[Stage], Awaitable[None]]:
    async def write(where: Stage) -> None:
        await execute(where.source, "; ".join(("BEGIN", *statements, "COMMIT")))

    return write


def small(transactions: int) -> Callable[[Stage], Awaitable[None]]:
    """An update and an insert each."""
    return _transactions(
        transactions,
        "UPDATE items SET number = number + 1 WHERE id = 1 + i % 1000",
        "INSERT INTO history VALUES (i, 'row')",
    )


def _transactions(number: int, *statements: str) -> Callable[[Stage], Awaitable[None]]:
    """One after another, of statements in which i counts them from 1."""

    async def write(where: Stage) -> None:
        async with connection(where.source) as one:
            await one.execute("SET synchronous_commit = off")
            await one.execute(
                "CREATE OR REPLACE PROCEDURE pg_temp.many(n int) LANGUAGE plpgsql AS $$ BEGIN "
                f"FOR i IN 1..n LOOP {'; '.join(statements)}; COMMIT; END LOOP; END $$"
            )
            await one.execute(f"CALL pg_temp.many({number})", timeout=None)
            await one.execute("SET synchronous_commit = on; SELECT pg_logical_emit_message(true, 'flush', '')")

    return write


def workloads(rows: int) -> list[Workload]:
    """Those that change many rows do it in one transaction. They need each other's rows, in this order."""
    first, last = 1_000_001, 1_000_000 + rows
    part = rows // 4
    some = max(rows // 20, 1)
    ints = ", ".join(f"i + {n}" for n in range(20))
    return [
        Workload("nothing", 0, _nothing),
        Workload("insert", rows, _transaction(INSERT.format(first=first, last=last))),
        Workload("update", rows, _transaction(f"UPDATE items SET number = number + 1 WHERE id >= {first}")),
        Workload("update of keys", rows, _transaction(f"UPDATE items SET id = id + 10000000 WHERE id >= {first}")),
        Workload(
            "insert, update, delete",
            3 * part,
            _transaction(
                INSERT.format(first=first, last=first + part - 1),
                f"UPDATE items SET number = number + 1 WHERE id BETWEEN {first} AND {first + part - 1}",
                f"DELETE FROM items WHERE id BETWEEN {first} AND {first + part - 1}",
            ),
        ),
        Workload("delete", rows, _transaction(f"DELETE FROM items WHERE id >= {first}")),
        Workload("small transactions", rows // 4, small(rows // 8)),
        Workload(
            "wide rows",
            some,
            _transaction(
                f"INSERT INTO wide SELECT i, 0, {ints}, repeat(md5(i::text), 128) FROM generate_series(1, {some}) i"
            ),
        ),
        Workload("wide rows, body unchanged", some, _transaction("UPDATE wide SET number = number + 1")),
        Workload("wide rows, deleted", some, _transaction("DELETE FROM wide")),
        Workload(
            "whole rows as identity",
            2 * part,
            _transaction(
                f"INSERT INTO whole SELECT i, i, i / 7.0, 'label ' || i FROM generate_series(1, {part}) i",
                "UPDATE whole SET number = number + 1",
            ),
        ),
        Workload("whole rows as identity, deleted", part, _transaction("DELETE FROM whole")),
        Workload(
            "five indexes, insert",
            part,
            _transaction(
                "INSERT INTO indexed SELECT i, i % 1000, (i::bigint * 7919) % 1000003, now() + i * interval '1 s', "
                f"i / 7.0, md5(i::text) FROM generate_series(1, {part}) i"
            ),
        ),
        Workload("five indexes, update", part, _transaction("UPDATE indexed SET b = b + 1")),
        Workload(
            "five indexes, updates of 100 rows",
            part // 100 * 100,
            _transactions(
                part // 100, "UPDATE indexed SET b = b + 1, e = md5(e) WHERE id BETWEEN i * 100 - 99 AND i * 100"
            ),
        ),
        Workload("five indexes, delete", part, _transaction("DELETE FROM indexed")),
        Workload(
            "two unique indexes, insert",
            part,
            _transaction(f"INSERT INTO users SELECT i, md5(i::text), i FROM generate_series(1, {part}) i"),
        ),
        Workload("two unique indexes, update", part, _transaction("UPDATE users SET number = number + 1")),
        Workload("two unique indexes, delete", part, _transaction("DELETE FROM users")),
    ]
