"""copy_indexes = after: the publisher's foreign keys are added and validated when both of their tables are ready."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.plugins.fix_cluster import Database
from tests.plugins.fix_subscriber import Program, Subscriptions
from tests.ranges.copies import closing_program

TABLES = (
    "CREATE TABLE parents (a int NOT NULL, b int NOT NULL, note text)",
    'CREATE TABLE "kids \'n" (id int NOT NULL, "a\'b" int, b int)',
    "CREATE TABLE alone (id int NOT NULL)",
)
ROWS = (
    "INSERT INTO parents SELECT i, -i, 'note' FROM generate_series(1, 400) i",
    'INSERT INTO "kids \'n" SELECT i, i, -i FROM generate_series(1, 400) i',
)
KEYS = (
    "ALTER TABLE parents ADD PRIMARY KEY (a), ADD UNIQUE (a, b)",
    "ALTER TABLE alone ADD PRIMARY KEY (id)",
    'ALTER TABLE "kids \'n" ADD PRIMARY KEY (id)',
    'ALTER TABLE "kids \'n" ADD CONSTRAINT "both ""of"" them" FOREIGN KEY ("a\'b", b) REFERENCES parents (a, b)'
    " MATCH FULL ON UPDATE CASCADE ON DELETE SET NULL DEFERRABLE INITIALLY DEFERRED",
    'ALTER TABLE "kids \'n" ADD CONSTRAINT later FOREIGN KEY (b) REFERENCES alone NOT VALID',
    "ALTER TABLE parents ADD CONSTRAINT own FOREIGN KEY (a) REFERENCES parents",
)
DEFINITIONS = """
SELECT k.conrelid::regclass::text, k.conname::text, pg_get_constraintdef(k.oid), k.convalidated
  FROM pg_constraint k WHERE k.contype = 'f' AND k.connamespace = 'public'::regnamespace ORDER BY 1, 2
"""
WAITING = "SELECT count(*) FROM subscriber.subscription_rel WHERE srforeignkeys"


PROBLEMS = "SELECT relid::regclass::text, error FROM subscriber.worker WHERE error LIKE '%foreign key%' ORDER BY 1"


@pytest.mark.parametrize(
    ("engine", "tables"),
    [("ranges", "ALL TABLES"), pytest.param("snapshot", 'TABLE parents, "kids \'n"', marks=pytest.mark.soak)],
)
async def test_foreign_keys_are_added_after_refusals_and_kills(
    source_db: Database, target_db: Database, processes: Path, subscriptions: Subscriptions, engine: str, tables: str
) -> None:
    await source_db.execute(*TABLES, *ROWS, *KEYS, f"CREATE PUBLICATION p FOR {tables}")
    # One foreign key cannot be added, because its name is taken. A row of the target alone violates the other.
    violation = 'INSERT INTO "kids \'n" VALUES (-1, 77, 77)'
    await target_db.execute(*TABLES, violation, "ALTER TABLE parents ADD CONSTRAINT own CHECK (a > 0)")
    program = Program(target_db.dsn(), processes / "run.log", options=["--setting", "retry_interval=0.2s"])
    await subscriptions.create(source_db, "p", "s", copy_engine=engine, copy_indexes="after")
    with closing_program(program):
        await program.start("launcher started")
        await target_db.wait_for(f"SELECT count(*) FROM ({PROBLEMS}) p", 2, timeout=60)
        await subscriptions.wait_for_ready(source_db)
        await target_db.wait_for(WAITING, 2)
        program.kill()
        ((_, first), (_, second)) = await target_db.rows(PROBLEMS)
        assert first.startswith('foreign key "both "of" them" of table "public.kids \'n" could not be built')
        assert second == (
            'foreign key "own" of table "public.parents" could not be built: constraint "own" for relation "parents"'
            " already exists"
        )
        added = {name: is_validated for _, name, _, is_validated in await target_db.rows(DEFINITIONS)}
        assert added['both "of" them'] is False
        assert "own" not in added
        # A foreign key that is not added does not stop changes.
        await target_db.execute("ALTER TABLE parents DROP CONSTRAINT own")
        await source_db.execute("UPDATE parents SET note = 'other' WHERE a = 1")
        await program.start("launcher started")
        await target_db.wait_for(WAITING, 1, timeout=30)
        program.kill()
        await target_db.execute('DELETE FROM "kids \'n" WHERE id = -1')
        await program.start("launcher started")
        await target_db.wait_for(WAITING, 0, timeout=30)
        await target_db.wait_for(f"SELECT count(*) FROM ({PROBLEMS}) p", 0)
        await source_db.wait_for_catchup("s")
    published, added_all = await source_db.rows(DEFINITIONS), await target_db.rows(DEFINITIONS)
    if engine == "snapshot":
        left_out = (
            'foreign key "later" of table "public.kids \'n" is not added, because table "public.alone" is not part'
        )
        assert left_out in program.text
        published = [row for row in published if row[1] != "later"]
    assert added_all == published
    assert await target_db.value("SELECT note FROM parents WHERE a = 1") == "other"
    tables = shlex.join(["public.kids 'n", "public.parents"])
    assert f"subscriber verify s\n\tThen correct them: subscriber repair s {tables}\n" in program.text
