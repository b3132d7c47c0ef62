"""Databases in different encodings: the target has the same rows and names as with PostgreSQL's own worker.

All values are compared as bytes and written in ASCII: the sessions of the test see no text.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import asyncpg
import pytest

import subscriber
from subscriber.check.check import collect
from subscriber.demo.servers import Server
from subscriber.errors import SubscriberError
from subscriber.protocol.encodings import CODECS, decode, is_text
from tests.environment.beside import NATIVE, OURS, Stage, beside
from tests.plugins.fix_cluster import Database, fresh_database
from tests.plugins.fix_subscriber import running_subscriber

SAMPLES = 60  # values of a table
# Each of two encodings that have something in common, or that only ours could convert.
PAIRS = [
    ("SQL_ASCII", "SQL_ASCII"),
    ("SQL_ASCII", "UTF8"),
    ("SQL_ASCII", "LATIN1"),
    ("SQL_ASCII", "EUC_TW"),
    ("UTF8", "SQL_ASCII"),
    ("LATIN1", "SQL_ASCII"),
    ("LATIN1", "UTF8"),
    ("UTF8", "LATIN9"),
    ("WIN1252", "UTF8"),
    ("KOI8R", "WIN1251"),
    ("EUC_JP", "UTF8"),
    ("UTF8", "EUC_JIS_2004"),
    ("UTF8", "EUC_TW"),
    ("EUC_TW", "EUC_TW"),
    ("EUC_TW", "MULE_INTERNAL"),
    ("MULE_INTERNAL", "MULE_INTERNAL"),
    ("MULE_INTERNAL", "LATIN1"),
    ("MULE_INTERNAL", "UTF8"),  # refused
    ("LATIN1", "EUC_JP"),  # refused
]

# Those that are not left to soaks.
QUICK = {
    *(("SQL_ASCII", "UTF8"), ("UTF8", "SQL_ASCII"), ("UTF8", "LATIN9"), ("UTF8", "EUC_JIS_2004")),
    *(("MULE_INTERNAL", "UTF8"), ("LATIN1", "EUC_JP")),
}

# Byte sequences that are valid in one encoding, and their conversion to another. A conversion from MULE_INTERNAL may
# have an invalid result.
CONVERTED = """
CREATE FUNCTION converted(given bytea, here name, there name) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE found bytea;
BEGIN
  found := convert(convert_to(convert_from(given, here), here), here, there);
  PERFORM length(found, there);
  RETURN found;
EXCEPTION WHEN OTHERS THEN RETURN NULL; END $$
"""
TEXT = """
CREATE FUNCTION text_of(given text) RETURNS text LANGUAGE sql AS
$$ SELECT convert_from(decode(given, 'hex'), '{encoding}') $$
"""
TABLES = """
DO $$ BEGIN
  CREATE TABLE texts (id int PRIMARY KEY, v text, many varchar[], c char(9), d jsonb);
  CREATE TABLE bare (v text, n int);
  EXECUTE format('CREATE TABLE %I (%I text PRIMARY KEY, n int)', 't' || text_of('{table}'), 'c' || text_of('{column}'));
END $$
"""
CONTENTS = """
CREATE FUNCTION contents() RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE name text;
BEGIN
  FOR name IN SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace LOOP
    RETURN QUERY EXECUTE
      format('SELECT encode(convert_to(%L || t::text, getdatabaseencoding()), ''hex'') FROM %I t', name, name);
  END LOOP;
END $$
"""
NAMED = "DO $$ BEGIN EXECUTE format('{statement}', 't' || text_of('{table}'), 'c' || text_of('{column}')); END $$"


@dataclass
class Scene:
    stage: Stage
    samples: list[str]  # texts of the source, in hexadecimal
    table: str  # one of `samples`, or empty: part of a table's name
    column: str  # the same for one of its columns

    def named(self, statement: str) -> str:
        """Return a statement for the table with that name, %1$I, and that column, %2$I."""
        return NAMED.format(statement=statement.replace("'", "''"), table=self.table, column=self.column)

    async def compare(self) -> None:
        await self.stage.compare("SELECT contents() ORDER BY 1")
        assert await self.stage.native.rows("SELECT contents()")


@asynccontextmanager
async def scene(publisher: Server, target: Server, here: str, there: str) -> AsyncIterator[Scene]:
    """Tables in three databases. Without samples, no text of one encoding can be converted to the other."""
    async with beside(publisher, target, here, there) as stage:
        await stage.source.execute(CONVERTED)
        rows_read = await stage.source.rows(
            "SELECT s, c FROM unnest($1::text[]) s, converted(decode(s, 'hex'), $2, $3) c WHERE c IS NOT NULL",
            candidates(here, there),
            here,
            there,
        )
        samples = [sample for sample, _ in rows_read][:SAMPLES]
        # A table's name has to be text for all sessions; a column's name only for those that have the rows.
        table = next((sample for sample, text in rows_read if is_text(decode(text, CODECS[there]))), "")
        column = samples[0] if samples else ""
        tables = TABLES.format(table=table, column=column)
        await stage.everywhere(TEXT.format(encoding=here), CONTENTS, tables)
        await stage.source.execute("ALTER TABLE bare REPLICA IDENTITY FULL", "CREATE PUBLICATION p FOR ALL TABLES")
        yield Scene(stage, samples, table, column)


def candidates(here: str, there: str) -> list[str]:
    """Return byte sequences in hexadecimal. Some are valid texts of the encoding."""
    if here == "UTF8":
        texts = ["é", "ß", "Ÿ", "Ж", "я", "ł", "ő", "ş", "α", "א", "ع", "ไ", "あ", "漢", "中文", "한", "€", "ヲ", "😀"]
        return [text.encode().hex() for text in texts]
    if there == "UTF8" and here == "SQL_ASCII":
        return candidates("UTF8", "UTF8")
    order = random.Random(f"{here} {there}")
    high = [bytes([number]) for number in range(0x80, 0x100)]
    codes = [*high, *(a + b for a, b in itertools.product(high[0x20::5], high[0x21::7]))]
    codes += [lead + order.choice(high) for lead in high[1:14] for _ in range(20)]  # the first bytes of MULE_INTERNAL
    codes += [lead + order.choice(high) + order.choice(high) for lead in high[:0x20] for _ in range(20)]
    codes += [b"\x8e" + order.choice(high[0x21:0x27]) + order.choice(high) + order.choice(high) for _ in range(40)]
    order.shuffle(codes)
    return [text.hex() for text in dict.fromkeys(codes)]


async def fill(scene: Scene, start: int) -> None:
    """Insert rows with each of the samples."""
    await scene.stage.source.execute("BEGIN; " + "; ".join(inserts(scene, start)) + "; COMMIT")


def inserts(scene: Scene, start: int) -> list[str]:
    rows = texts(scene.samples)
    return [
        f"INSERT INTO texts SELECT n + {start}, v, ARRAY[v, 'x'], v, to_json(v) FROM ({rows}) s",
        f"INSERT INTO bare SELECT v, n + {start} FROM ({rows}) s",
        scene.named(f"INSERT INTO %1$I (%2$I, n) SELECT v || {start}, n FROM ({rows}) s"),
    ]


def texts(samples: Sequence[str]) -> str:
    listed = ", ".join(f"'{sample}'" for sample in samples)
    return f"SELECT text_of(s) AS v, n::int FROM unnest(ARRAY[{listed}]) WITH ORDINALITY AS u (s, n)"


async def change(scene: Scene, start: int) -> None:
    """Insert, update and delete rows."""
    await fill(scene, start)
    first = scene.samples[0]
    await scene.stage.source.execute(
        f"UPDATE texts SET v = v || v, c = '' WHERE id % 3 = 0 AND id > {start}",
        f"UPDATE bare SET n = n + 1000 WHERE v = text_of('{first}')",
        "DELETE FROM bare WHERE n % 5 = 0",
        scene.named("UPDATE %1$I SET n = -n WHERE n %% 2 = 0"),
        scene.named(f"UPDATE %1$I SET %2$I = %2$I || '+' WHERE n = {len(scene.samples) // 2}"),
        scene.named("DELETE FROM %1$I WHERE n = 3"),
        f"DELETE FROM texts WHERE v = text_of('{scene.samples[-1]}')",
    )


async def follow(publisher: Server, target: Server, here: str, there: str, *, binary: bool) -> None:
    """Subscribe both in databases of two encodings, and compare them after the copy and after changes."""
    async with scene(publisher, target, here, there) as played:
        stage = played.stage
        options = f"binary = {binary}, streaming = on"
        if not played.samples:
            with pytest.raises(asyncpg.PostgresError, match="onversion between"):
                await stage.native.execute(stage.creation(NATIVE, options))
            with pytest.raises(SubscriberError, match="onversion between"):
                await stage.subscriber.execute(stage.creation(OURS, options))
            facts = await collect(stage.ours.dsn(), stage.source.dsn(), ["p"], None)
            assert any("onversion between" in finding.message for finding in facts.failures)
            return
        await fill(played, 0)
        await stage.subscribe(options)
        await stage.copied()
        await played.compare()
        await change(played, 1000)
        await played.compare()
        if await stage.source.major() >= 16:
            await stage.source.stream_everything()
            await stage.restart()
            await change(played, 2000)
            await played.compare()
        assert not stage.subscriber.log.has("ERROR|WARNING|FATAL|PANIC"), stage.subscriber.log.text()


@pytest.mark.prints_password("the server logs a statement of its own that fails")
@pytest.mark.parametrize(
    ("here", "there", "binary"),
    [
        pytest.param(*pair, bool(at % 2), marks=[] if pair in QUICK else [pytest.mark.soak])
        for at, pair in enumerate(PAIRS)
    ],
)
async def test_rows_are_stored_as_postgresql_stores_them(
    publisher: Server, target: Server, here: str, there: str, binary: bool
) -> None:
    await follow(publisher, target, here, there, binary=binary)


@pytest.mark.soak
@pytest.mark.parametrize("here", CODECS)
async def test_rows_arrive_between_databases_of_every_pair_of_encodings(
    publisher: Server, target: Server, here: str
) -> None:
    for number, there in enumerate(CODECS):
        await follow(publisher, target, here, there, binary=bool(number % 2))


async def test_hooks_read_and_write_text(source_db: Database, target: Server) -> None:
    """Functions get the decoded values, and their results are stored in the encoding of the target."""
    given: list[str | None] = []

    def shout(row: dict[str, Any]) -> dict[str, Any]:
        given.append(row["v"])
        return {**row, "v": row["v"].upper(), "größe": row["größe"] + "€"}

    table = 'CREATE TABLE "ä" (id int PRIMARY KEY, v text, "größe" text)'
    await source_db.execute(table, """INSERT INTO "ä" VALUES (1, 'à la carte', 'ö')""")
    await source_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    async with fresh_database(target, "LATIN9") as ours:
        ours.settings["client_encoding"] = "UTF8"
        await ours.execute(table)
        hooks = {"s": subscriber.Hooks({"ä": subscriber.Hook(row=shout)})}
        async with subscriber.connect(ours.dsn(), hooks=hooks) as db, db.running():
            await db.execute(f"CREATE SUBSCRIPTION s CONNECTION '{source_db.dsn()}' PUBLICATION p")
            with anyio.fail_after(20):
                await db.wait_for_sync("s")
            await source_db.execute("""UPDATE "ä" SET v = 'naïf'""", """INSERT INTO "ä" VALUES (2, 'œuvre', '')""")
            await source_db.wait_for_catchup("s")
            assert await ours.rows('SELECT * FROM "ä" ORDER BY id') == [(1, "NAÏF", "ö€"), (2, "ŒUVRE", "€")]
            await db.execute("DROP SUBSCRIPTION s")
    assert given == ["à la carte", "naïf", "œuvre"]


@pytest.mark.parametrize(("there", "shown"), [("LATIN1", "café"), ("SQL_ASCII", "caf\\xe9")])
async def test_messages_about_conflicts_have_readable_text(
    publisher: Server, target: Server, there: str, shown: str
) -> None:
    table = "CREATE TABLE t (k text PRIMARY KEY, v text)"
    async with fresh_database(publisher, "LATIN1") as source, fresh_database(target, there) as ours:
        await source.execute(table, TEXT.format(encoding="LATIN1"), "CREATE PUBLICATION p FOR TABLE t")
        await ours.execute(table)
        ours.settings["client_encoding"] = "UTF8"  # as a reader of the views
        ours.close_sessions()
        async with running_subscriber(ours) as launcher:
            await launcher.create(source, "p", conflict_policy="skip", conflict_history="all", conflict_log_rows=True)
            await launcher.wait_for_ready(source)
            await source.execute("INSERT INTO t VALUES (text_of('636166e9'), text_of('e9'))")
            await source.wait_for_catchup("s")
            await ours.execute("DELETE FROM t")
            await source.execute("UPDATE t SET v = v || v")
            await source.wait_for_catchup("s")
            rows = await ours.rows("SELECT conflict_type, key ->> 'k' FROM subscriber.conflict_history")
            assert rows == [("update_missing", shown)]
            assert launcher.log.has(f"replica identity.*{shown}".replace("\\", "\\\\"))


@pytest.mark.parametrize(
    ("here", "data", "text"),
    [("LATIN1", "636166e9", "café"), ("SQL_ASCII", "636166e9", "caf\udce9"), ("EUC_TW", "c4e3", "中")],
)
async def test_a_stream_reads_text(publisher: Server, here: str, data: str, text: str) -> None:
    """Decoded to Unicode; bytes of unknown encoding become surrogate escapes."""
    async with fresh_database(publisher, here) as source:
        await source.execute(TEXT.format(encoding=here), "CREATE TABLE t (v text PRIMARY KEY)")
        await source.execute("CREATE PUBLICATION p FOR TABLE t")
        async with subscriber.stream(source.dsn(), publications=["p"], slot="stream", create="missing") as stream:
            await source.execute(f"INSERT INTO t VALUES (text_of('{data}'))")
            with anyio.fail_after(20):
                transaction = await anext(aiter(stream))
                (change,) = [change async for change in transaction]
            assert isinstance(change, subscriber.Insert)
            assert change.new["v"] == text
            assert change.new.raw("v") == text.encode(errors="surrogateescape")
