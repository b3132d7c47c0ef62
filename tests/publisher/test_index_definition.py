"""Index definitions: a real server's text creates the same index; an attacker's text creates none."""

from __future__ import annotations

import pytest

from subscriber.errors import ProtocolError
from subscriber.publisher.index_definition import IndexDefinition
from tests.plugins.fix_cluster import Database

TABLE = """
CREATE TABLE "O""dd name" (id int, "select" text, words text[], price numeric(10,2), at timestamptz, ok bool, j jsonb,
  "back\\slash" text, area point, "Ünï" text);
CREATE SCHEMA "s; x";
CREATE FUNCTION "s; x".f(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT $1';
"""
INDEXES = (
    'ON "O""dd name" (id)',
    'ON "O""dd name" (id DESC NULLS LAST, "select" COLLATE "C" text_pattern_ops) WITH (fillfactor = 70)',
    'ON "O""dd name" USING gin (words) WITH (fastupdate = off)',
    'ON "O""dd name" USING hash ("select")',
    'ON "O""dd name" USING gist (area)',
    'ON "O""dd name" USING brin (at) WITH (pages_per_range = 4)',
    'ON "O""dd name" (lower("select") DESC, (id % 7), (id - -1), (j ->> \'a\'\'b\'), (words[1])) INCLUDE (price, ok)',
    'ON "O""dd name" ("s; x".f("select")) WHERE ok AND price > 1.5e3 AND "select" ~ \'^\\d+[;)("]--$\'',
    "ON \"O\"\"dd name\" ((CASE WHEN ok THEN 'a' ELSE 'b' END)) WHERE ok",
    'ON "O""dd name" ("back\\slash", "Ünï") WHERE id = ANY (ARRAY[1, 2, 3]) OR j @> \'{"a": [1]}\'',
    "ON \"O\"\"dd name\" ((at AT TIME ZONE 'UTC')) WHERE (B'101'::bit(3) & B'100'::bit(3)) = B'100'::bit(3)",
)
DEFINITIONS = """
SELECT i.relname::text, pg_get_indexdef(x.indexrelid) FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid
 WHERE x.indrelid = '"O""dd name"'::regclass ORDER BY 1
"""


@pytest.mark.parametrize("unique", ["", "UNIQUE"])
async def test_the_same_index_is_made(source_db: Database, unique: str) -> None:
    await source_db.execute(TABLE)
    version = await source_db.value("SELECT current_setting('server_version_num')::int")
    for number, index in enumerate(INDEXES):
        if not unique or "USING" not in index:
            await source_db.execute(f'CREATE {unique} INDEX "i""{number}" {index}')
    if unique and version >= 150000:
        await source_db.execute('CREATE UNIQUE INDEX n ON "O""dd name" (id) NULLS NOT DISTINCT')
    async with source_db.connection() as connection:
        await connection.execute("SET search_path = ''")
        query = DEFINITIONS.replace("'\"O", "'public.\"O")
        before = [tuple(row) for row in await connection.fetch(query)]
        assert len(before) >= 7
        for name, definition in before:
            statement = IndexDefinition.parse(definition, "public", 'O"dd name').create(name, "public", 'O"dd name')
            await connection.execute('DROP INDEX public."' + name.replace('"', '""') + '"')
            await connection.fetch(statement)
        assert [tuple(row) for row in await connection.fetch(query)] == before


GOOD = "CREATE INDEX i ON public.t USING btree (id)"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "DROP TABLE public.t",
        "CREATE INDEX i ON public.other USING btree (id)",
        "CREATE INDEX i ON pg_catalog.t USING btree (id)",
        "CREATE INDEX CONCURRENTLY i ON public.t USING btree (id)",
        "CREATE INDEX i ON public.t USING btree (id",
        "CREATE INDEX i ON public.t USING btree (id]",
        "CREATE INDEX i ON public.t USING btree (id))",
        f"{GOOD}; DROP TABLE public.t",
        f"{GOOD};",
        f"{GOOD} TABLESPACE pg_global",
        f"{GOOD} WHERE",
        f"{GOOD} WHERE true); DROP TABLE public.t; SELECT (1",
        f"{GOOD} WHERE true) UNION SELECT (1",
        f"{GOOD} -- x",
        f"{GOOD} /* x */",
        f"{GOOD} WHERE id +/* x */ 1 > 0",
        f"{GOOD} WHERE note = E'\\'; DROP TABLE public.t; --'",
        f"{GOOD} WHERE note = U&'\\0027'",
        f'{GOOD} WHERE U&"\\0022" = 1',
        f"{GOOD} WHERE note = $$x$$",
        f"{GOOD} WHERE note = $1",
        f"{GOOD} WHERE note = 'x",
        f'{GOOD} WHERE "note = 1',
        f"{GOOD} WHERE note = 'x\0'",
        f"{GOOD}\r WHERE true",
        "CREATE INDEX i ON public.t USING btree (id) \\! touch x",
    ],
)
def test_text_that_is_no_index_definition_is_refused(text: str) -> None:
    IndexDefinition.parse(GOOD, "public", "t")
    with pytest.raises(ProtocolError, match="definition of an index"):
        IndexDefinition.parse(text, "public", "t")


@pytest.mark.parametrize("name", ["x\0", "x\udcff"])
def test_an_index_name_that_is_no_identifier_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        IndexDefinition.parse(GOOD, "public", "t").create(name, "public", "t")


def test_a_statement_is_made_of_parts() -> None:
    definition = IndexDefinition.parse(
        'create  unique index "x"";" on "public"."t" using "btree" ( id,lower( note ))', "public", "t"
    )
    assert definition.create('y"', "other", "t") == (
        'CREATE UNIQUE INDEX "y""" ON "other"."t" USING "btree" (id , lower ( note ))'
    )
