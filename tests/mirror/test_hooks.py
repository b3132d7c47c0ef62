"""Mirrors with hooks.

The copy and the changes have the same result, and no excluded value reaches the mirror.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from subscriber import ApplyError, Hook, HookError, Hooks, hooks_from
from subscriber.errors import HooksMissing, MappingError
from tests.mirror.conftest import Mirror

PERSON = """
CREATE TABLE person (id int PRIMARY KEY, name text, email text, secret text, note text);
ALTER TABLE person ALTER note SET STORAGE external;
INSERT INTO person SELECT i, 'name ' || i, i || '@example.org', 'secret', repeat('x', 3000)
  FROM generate_series(1, 3) i;
"""


async def shout(row: dict[str, Any]) -> dict[str, Any]:
    await anyio.lowlevel.checkpoint()
    return {**row, "note": row["note"].upper()} if row["note"] else row


def contents(mirror: Mirror) -> bytes:
    """Return all bytes ever written to the file that SQLite has not overwritten."""
    return mirror.file.read_bytes()


async def test_hooks_change_copied_rows_and_changes(mirror: Mirror) -> None:
    person = Hook(
        to="staging.people",
        rename={"name": "full_name", "id": "number"},
        drop=["secret"],
        mask={"email": lambda text: f"{len(text)}@masked", "name": "N. N."},
        row=shout,
    )
    hooks = Hooks({"person": person}, schemas={"x": "public"})
    await mirror.source.execute(
        PERSON,
        "CREATE TABLE plain (a int PRIMARY KEY)",
        "CREATE SCHEMA x",
        "CREATE TABLE x.other (a int PRIMARY KEY)",
        "INSERT INTO plain VALUES (1)",
        "INSERT INTO x.other VALUES (2)",
    )
    await mirror.run(hooks=hooks)
    columns = "number, full_name, email, length(note), substr(note, 1, 2)"
    people = f"SELECT {columns} FROM staging_people ORDER BY number"
    masked = ("N. N.", "13@masked", 3000, "XX")
    assert mirror.rows(people) == [(number, *masked) for number in (1, 2, 3)]
    assert mirror.rows("SELECT * FROM plain, other") == [(1, 2)]
    await mirror.source.execute(
        "INSERT INTO person VALUES (4, 'name', NULL, 'secret', 'hi')",
        "UPDATE person SET email = 'x@example.org' WHERE id = 1",  # the note is not sent
        "UPDATE person SET id = 20 WHERE id = 2",
        "DELETE FROM person WHERE id = 3",
        "INSERT INTO x.other VALUES (3); INSERT INTO plain VALUES (3)",
    )
    await mirror.run(hooks=hooks)
    assert mirror.rows(people) == [(1, *masked), (4, "N. N.", None, 2, "HI"), (20, *masked)]
    assert mirror.rows("SELECT plain.a FROM plain JOIN other USING (a)") == [(3,)]
    assert b"secret" not in contents(mirror)
    assert b"example" not in contents(mirror)
    await mirror.source.execute("TRUNCATE person")
    await mirror.run(hooks=hooks)
    assert mirror.rows(people) == []


@pytest.mark.parametrize(
    "hook",
    [
        Hook(where=lambda row: row["tenant"] == "demo", mask={"b": None}),
        Hook(row=lambda row: row if row["tenant"] == "demo" else None, mask={"b": None}),
    ],
    ids=["where", "row"],
)
async def test_rows_that_are_left_out(mirror: Mirror, hook: Hook) -> None:
    hooks = Hooks({"t": hook})
    await mirror.source.execute(
        "CREATE TABLE t (a int PRIMARY KEY, tenant text, b text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t SELECT i, CASE i % 2 WHEN 0 THEN 'demo' ELSE 'real' END, 'x' FROM generate_series(1, 6) i",
    )
    await mirror.run(hooks=hooks)
    rows = "SELECT a, tenant, b FROM t ORDER BY a"
    assert mirror.rows(rows) == [(a, "demo", None) for a in (2, 4, 6)]
    await mirror.source.execute(
        "UPDATE t SET tenant = 'real' WHERE a = 2",  # leaves the filter
        "UPDATE t SET tenant = 'demo' WHERE a = 3",  # enters the filter
        "UPDATE t SET b = 'y' WHERE a = 1",
        "UPDATE t SET a = 40 WHERE a = 4",
        "DELETE FROM t WHERE a IN (5, 6)",
        "INSERT INTO t VALUES (7, 'real', 'x'), (8, 'demo', 'x')",
    )
    await mirror.run(hooks=hooks)
    assert mirror.rows(rows) == [(a, "demo", None) for a in (3, 8, 40)]


async def test_tables_of_sqlalchemy(mirror: Mirror) -> None:
    from sqlalchemy import Column, Integer, MetaData, Table, Text

    metadata = MetaData()
    Table(
        "people",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("full_name", Text, info={"source": "name"}),
        Column("email", Text, info={"mask": None}),
        info={"source": "person"},
    )
    await mirror.source.execute(PERSON)
    await mirror.run(hooks=hooks_from(metadata))
    assert mirror.rows("SELECT * FROM people WHERE id = 1") == [(1, "name 1", None)]


REFUSED = [
    (Hooks({"persons": Hook()}), 'hooks of mirror "m" name a table that is not part of it: "public.persons"'),
    (Hooks({"person": Hook(drop=["nosuch"])}), "names columns that are not published"),
    (Hooks({"person": Hook(drop=["id"])}), 'drops key column "id"'),
    (Hooks({"person": Hook(mask={"id": "1"})}), 'masks key column "id"'),
    (Hooks({"full": Hook(drop=["a"])}), 'drops key column "a"'),
    (Hooks({"full": Hook(row=lambda row: {**row, "a": "7"})}), "changes the key of a row"),
    (Hooks({"person": Hook(to="full")}), "would be one on the target"),
    (Hooks({"person": Hook(row=lambda _: None)}), "leaves out a row"),
    (Hooks({"person": Hook(where=lambda row: row["name"] == "x")}), 'reads column "name"'),
    (Hooks({"person": Hook(mask={"email": int})}), "raised ValueError"),
]


async def test_a_hook_that_does_not_fit_its_table_is_refused(mirror: Mirror) -> None:
    await mirror.source.execute(
        PERSON,
        'CREATE TABLE "full" (a int PRIMARY KEY, b int)',
        'ALTER TABLE "full" REPLICA IDENTITY FULL',
        'INSERT INTO "full" VALUES (1, 2)',
    )
    for hooks, message in REFUSED:
        with pytest.raises(MappingError, match=message) as caught:
            await mirror.run(hooks=hooks)
        assert "example" not in str(caught.value)
        with pytest.raises(HooksMissing):  # a copy that was begun with hooks is not made without
            await mirror.run()
    assert b"example" not in contents(mirror)


async def test_a_mirror_does_not_run_without_its_hooks(mirror: Mirror) -> None:
    hooks = Hooks({"person": Hook(to="people", mask={"email": None})})
    await mirror.source.execute(PERSON)
    await mirror.run(hooks=hooks)
    await mirror.source.execute("INSERT INTO person VALUES (4, 'n', 'example', 's', 'n')")
    with pytest.raises(HooksMissing, match='mirror "m" has hooks, and this program has none for it'):
        await mirror.run()
    with pytest.raises(HookError, match=r'takes the rows of "public.person", which the hooks send to "person"'):
        await mirror.run(hooks=Hooks({"person": Hook(mask={"email": None})}))
    await mirror.run(hooks=hooks)
    assert b"example" not in contents(mirror)
    await mirror.run(hooks=Hooks({"person": Hook(to="people")}))  # changed hooks apply only to later changes
    await mirror.source.execute("INSERT INTO person VALUES (5, 'n', 'mine', 's', 'n')")
    await mirror.run(hooks=Hooks({"person": Hook(to="people")}))
    assert mirror.rows("SELECT id, email FROM people WHERE id > 2") == [(3, None), (4, None), (5, "mine")]


async def test_hooks_that_come_or_go_later(mirror: Mirror) -> None:
    await mirror.source.execute(PERSON)
    await mirror.run()
    await mirror.run(hooks=Hooks({"person": Hook(mask={"email": None})}))
    await mirror.source.execute("INSERT INTO person VALUES (4, 'n', 'gone', 's', 'n')")
    await mirror.run(hooks=Hooks({"person": Hook(mask={"email": None})}))
    with pytest.raises(HooksMissing):
        await mirror.run()
    await mirror.run(hooks=Hooks())
    await mirror.source.execute("INSERT INTO person VALUES (5, 'n', 'here', 's', 'n')")
    await mirror.run()
    assert mirror.rows("SELECT id, email FROM person WHERE id > 2") == [(3, "3@example.org"), (4, None), (5, "here")]


async def test_a_function_that_fails_later_stops_at_its_transaction(mirror: Mirror) -> None:
    """Earlier transactions are stored. With another function the mirror resumes."""

    def strict(text: str) -> str:
        if text == "bad":
            raise ValueError(text)
        return text.upper()

    def hooks(mask: Callable[[str], str]) -> Hooks:
        return Hooks({"t": Hook(mask={"b": mask})})

    await mirror.source.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    await mirror.run(hooks=hooks(strict))
    for number, value in enumerate(["good", "bad", "good"]):
        await mirror.source.execute(f"INSERT INTO t VALUES ({number}, '{value}')")
    with pytest.raises(ApplyError, match=r'mask of the hook of table "public.t" raised ValueError') as caught:
        await mirror.run(hooks=hooks(strict))
    assert "bad" not in str(caught.value)
    assert mirror.rows("SELECT b FROM t") == [("GOOD",)]
    await mirror.run(hooks=hooks(str.title))
    assert mirror.rows("SELECT b FROM t ORDER BY a") == [("GOOD",), ("Bad",), ("Good",)]
