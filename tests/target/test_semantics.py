"""Changes do to a real target what the built-in apply worker does."""

from __future__ import annotations

import pytest

from subscriber.errors import MappingError, ServerError
from subscriber.protocol.messages import ReplicaIdentity
from tests.apply.build import UNSENT
from tests.plugins.fix_cluster import Database
from tests.target.conftest import Applier, Sessions, Table, truncate

FULL = ReplicaIdentity.FULL


# --- columns --------------------------------------------------------------------------------------


async def test_rows_come_go_and_change(db: Database, applier: Applier) -> None:
    await db.execute('CREATE TABLE "T ""1" ("A b" int PRIMARY KEY, "c" text)')
    t = Table('T "1', "A b*", "c")
    await applier.apply(t.insert("1", "x"), t.insert("2", None), t.insert("3", ""))
    await applier.apply(t.update("1", "y"), t.update("4", "key", old=("2", None)), t.delete("3", None))
    assert await db.rows('SELECT * FROM "T ""1" ORDER BY 1') == [(1, "y"), (4, "key")]
    assert applier.missing == []
    assert applier.committed == [200, 300]


async def test_columns_only_the_target_has_get_their_defaults_and_keep_their_values(
    db: Database, applier: Applier
) -> None:
    await db.execute(
        "CREATE SEQUENCE q",
        "CREATE TABLE t (extra text DEFAULT 'd' || nextval('public.q'), dropped int, a int PRIMARY KEY, b text,"
        " serial serial, g int GENERATED ALWAYS AS (a * 2) STORED, v int GENERATED ALWAYS AS (a * 3) VIRTUAL,"
        " i int GENERATED ALWAYS AS IDENTITY)",
        "ALTER TABLE t DROP dropped",
    )
    t = Table("t", "b", "a*")
    await applier.apply(t.insert("x", "1"), t.insert("x", "2"))
    await db.execute("UPDATE t SET extra = 'mine' WHERE a = 1")
    await applier.apply(t.update("y", "1"), t.update("z", "3", old=(None, "2")))
    assert await db.rows("SELECT extra, a, b, serial, g, v, i FROM t ORDER BY a") == [
        ("mine", 1, "y", 1, 2, 3, 1),
        ("d2", 3, "z", 2, 6, 9, 2),
    ]


async def test_a_table_without_columns_and_one_without_published_columns(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE none ()", "CREATE TABLE t (a int DEFAULT 7)")
    none, t = Table("none", identity=FULL), Table("t", identity=FULL)
    await applier.apply(none.insert(), none.insert(), t.insert(), none.delete())
    assert await db.rows("SELECT a, (SELECT count(*) FROM none) FROM t") == [(7, 1)]


async def test_a_value_that_was_not_sent_is_kept(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY, b text, c text)")
    t = Table("t", "a*", "b", "c")
    await applier.apply(t.insert("1", "long", "x"), t.insert("2", UNSENT, "x"))
    await applier.apply(t.update("1", UNSENT, "y"), t.update("3", UNSENT, None, old=("2", None, None)))
    await applier.apply(t.update("1", UNSENT, UNSENT))
    await applier.apply(t.update(UNSENT, UNSENT, UNSENT, old=("1", None, None)))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, "long", "y"), (3, None, None)]
    assert applier.missing == []
    await applier.apply(t.update(UNSENT, UNSENT, UNSENT, old=("9", None, None)))
    assert applier.missing == ["UPDATE public.t"]


async def test_an_identity_column_that_is_the_key(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, b text, extra int DEFAULT 5)")
    t = Table("t", "a*", "b")
    await applier.apply(t.insert("10", "x"), t.insert("11", "y"))
    await db.execute("UPDATE t SET extra = a")
    await applier.apply(t.update("10", "same key"), t.update("20", UNSENT, old=("11", None)))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(10, "same key", 10), (20, "y", 11)]
    await applier.apply(t.update("30", "z", old=("9", None)), t.update("9", "z"), t.delete("9", None))
    assert applier.missing == ["UPDATE public.t", "UPDATE public.t", "DELETE public.t"]


async def test_an_identity_column_that_is_not_the_key(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (k int PRIMARY KEY, a int GENERATED ALWAYS AS IDENTITY, b text, extra int)")
    t = Table("t", "k*", "a", "b")
    await applier.apply(*(t.insert(str(n), str(n), "x") for n in range(1, 5)))
    await db.execute("UPDATE t SET extra = a")
    await applier.apply(
        t.update("1", "1", "unchanged"),
        t.update("2", "22", "changed"),
        t.update("33", "3", "key changed", old=("3", None, None)),
        t.update("44", "444", "both", old=("4", None, None)),
    )
    assert await db.rows("SELECT * FROM t ORDER BY k") == [
        (1, 1, "unchanged", 1),
        (2, 22, "changed", 2),
        (33, 3, "key changed", 3),
        (44, 444, "both", 4),
    ]
    assert applier.missing == []
    await applier.apply(t.update("9", "9", "z"))
    assert applier.missing == ["UPDATE public.t"]


async def test_a_composite_key_with_an_identity_column_in_it(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int GENERATED ALWAYS AS IDENTITY, k int, b text, PRIMARY KEY (a, k))")
    t = Table("t", "a*", "k*", "b")
    await applier.apply(t.insert("1", "1", "x"), t.insert("2", "1", "x"))
    await applier.apply(t.update("1", "2", "y", old=("1", "1", None)), t.update("3", "1", "y", old=("2", "1", None)))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, 2, "y"), (3, 1, "y")]


async def test_an_identity_column_of_a_table_without_key(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int GENERATED ALWAYS AS IDENTITY, b text)")
    t = Table("t", "a", "b", identity=FULL)
    await applier.apply(t.insert("1", "x"), t.insert("2", None))
    await applier.apply(t.update("1", "y", old=("1", "x")), t.update("3", "z", old=("2", None)))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, "y"), (3, "z")]


async def test_another_rows_key_is_not_mistaken_when_key_and_identity_column_change(
    db: Database, applier: Applier
) -> None:
    """The new key is that of a row which is deleted later in the transaction: found is the old one all the same."""
    await db.execute("CREATE TABLE t (k int PRIMARY KEY DEFERRABLE, a int GENERATED ALWAYS AS IDENTITY)")
    await db.execute("CREATE UNIQUE INDEX i ON t (k)", "ALTER TABLE t REPLICA IDENTITY USING INDEX i")
    t = Table("t", "k*", "a")
    await applier.apply(t.insert("1", "10"), t.insert("2", "20"))
    await applier.apply(t.delete("2", None), t.update("2", "11", old=("1", None)))
    assert await db.rows("SELECT * FROM t") == [(2, 11)]


# --- which row ------------------------------------------------------------------------------------


async def test_one_of_several_equal_rows_is_changed(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int, b text)")
    t = Table("t", "a", "b", identity=FULL)
    await applier.apply(*(t.insert("1", None) for _ in range(4)))
    await applier.apply(t.update("1", "u", old=("1", None)), t.delete("1", None))
    assert await db.rows("SELECT * FROM t ORDER BY b NULLS FIRST") == [(1, None), (1, None), (1, "u")]
    await applier.apply(t.update("2", "u", old=("1", "u")), t.delete("1", "u"), t.delete(None, None))
    assert applier.missing == ["DELETE public.t", "DELETE public.t"]


async def test_the_whole_row_counts_and_what_the_publisher_does_not_know_is_null(
    db: Database, applier: Applier
) -> None:
    await db.execute("CREATE TABLE t (a int, extra int, g int GENERATED ALWAYS AS (a) STORED)")
    await db.execute("INSERT INTO t (a, extra) VALUES (1, 5), (1, NULL), (2, 5)")
    t = Table("t", "a", identity=FULL)
    await applier.apply(t.update("3", old=("1",)), t.delete("2"))
    assert await db.rows("SELECT a, extra FROM t ORDER BY a") == [(1, 5), (2, 5), (3, None)]
    assert applier.missing == ["DELETE public.t"]


async def test_full_with_a_key_on_the_target_is_searched_by_the_key(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)", "INSERT INTO t VALUES (1, 'differs'), (2, 'too')")
    t = Table("t", "a", "b", identity=FULL)
    await applier.apply(t.update("1", "new", old=("1", "old")), t.delete("2", "old"))
    assert await db.rows("SELECT * FROM t") == [(1, "new")]


async def test_the_targets_identity_decides(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b int NOT NULL, c text)",
        "CREATE UNIQUE INDEX i ON t (b) INCLUDE (c)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX i",
        "INSERT INTO t VALUES (1, 10, 'x')",
    )
    t = Table("t", "a*", "b*", "c")
    await applier.apply(t.update("2", "10", "y"))
    assert await db.rows("SELECT * FROM t") == [(2, 10, "y")]
    no = Table("t", "a*", "b", "c")
    with pytest.raises(MappingError, match="publisher did not send replica identity column expected"):
        await applier.apply(no.update("1", "10", "y"))


async def test_a_deferrable_key_identifies_nothing(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY DEFERRABLE)")
    t = Table("t", "a*")
    await applier.apply(t.insert("1"))
    with pytest.raises(MappingError, match="has neither REPLICA IDENTITY index nor PRIMARY KEY"):
        await applier.apply(t.delete("1"))


async def test_a_type_without_equality_operator(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int, j json)", "CREATE TABLE k (a int PRIMARY KEY, j json)")
    t, k = Table("t", "a", "j", identity=FULL), Table("k", "a", "j", identity=FULL)
    await applier.apply(
        t.insert("1", "{}"), k.insert("1", "{}"), k.update("1", "[]", old=("1", "{}")), t.insert("2", None)
    )
    await applier.apply(t.delete("2", None))  # nothing to compare
    with pytest.raises(MappingError) as caught:
        await applier.apply(t.delete("1", "{}"))
    assert caught.value.message == "could not identify an equality operator for type json"
    assert caught.value.sqlstate == "42883"


async def test_operators_of_an_extension_in_another_schema(db: Database, applier: Applier) -> None:
    """A type with a comparison of its own, as citext has, and search_path is empty all the while."""
    await db.execute(
        "CREATE SCHEMA ext",
        "CREATE TYPE ext.ci",
        "CREATE FUNCTION ext.ci_in(cstring) RETURNS ext.ci LANGUAGE internal IMMUTABLE STRICT AS 'textin'",
        "CREATE FUNCTION ext.ci_out(ext.ci) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout'",
        "CREATE TYPE ext.ci (INPUT = ext.ci_in, OUTPUT = ext.ci_out, LIKE = text, CATEGORY = 'S')",
        "CREATE CAST (ext.ci AS text) WITHOUT FUNCTION AS IMPLICIT",
        "CREATE FUNCTION ext.ci_cmp(ext.ci, ext.ci) RETURNS int LANGUAGE sql IMMUTABLE"
        " AS 'SELECT pg_catalog.bttextcmp(pg_catalog.lower($1::text), pg_catalog.lower($2::text))'",
        *(
            f"CREATE FUNCTION ext.ci_{name}(ext.ci, ext.ci) RETURNS bool LANGUAGE sql IMMUTABLE"
            f" AS 'SELECT ext.ci_cmp($1, $2) {operator} 0';"
            f"CREATE OPERATOR ext.{operator} (LEFTARG = ext.ci, RIGHTARG = ext.ci, FUNCTION = ext.ci_{name})"
            for name, operator in [("lt", "<"), ("le", "<="), ("eq", "="), ("ge", ">="), ("gt", ">")]
        ),
        "CREATE OPERATOR CLASS ext.ci_ops DEFAULT FOR TYPE ext.ci USING btree AS OPERATOR 1 ext.<, OPERATOR 2 ext.<=,"
        " OPERATOR 3 ext.=, OPERATOR 4 ext.>=, OPERATOR 5 ext.>, FUNCTION 1 ext.ci_cmp(ext.ci, ext.ci)",
        "CREATE TABLE t (a ext.ci PRIMARY KEY, b text)",
        "CREATE TABLE f (a ext.ci, b text)",
    )
    t, f = Table("t", "a*", "b"), Table("f", "a", "b", identity=FULL)
    await applier.apply(t.insert("One", "x"), t.insert("Two", "x"), f.insert("One", "x"), f.insert("one", "y"))
    await applier.apply(t.update("ONE", "y"), t.delete("tWO", None), f.delete("ONE", "y"))
    assert await db.rows("SELECT a::text, b FROM t") == [("ONE", "y")]
    assert await db.rows("SELECT a::text, b FROM f") == [("One", "x")]
    assert applier.missing == []


KEYS = [
    ("numeric(5,2)", "1.005", "1.01", "1.004"),
    ("timestamp(0)", "2024-01-01 00:00:00.6", "2024-01-01 00:00:01", "2024-01-01 00:00:00.4"),
    ("timestamptz(0)", "2024-01-01 00:00:00.6+00", "2024-01-01 00:00:01+00", "2024-01-01 00:00:00.4+00"),
    ("time(1)", "10:00:00.06", "10:00:00.1", "10:00:00.04"),
    ("interval(0)", "00:00:00.6", "00:00:01", "00:00:00.4"),
    ("char(5)", "ab", "ab   ", "ac"),
    ("varchar(5)", "ab", "ab", "ac"),
    ("text", "ab", "ab", "ac"),
    ("name", "ab", "ab", "ac"),
    ('"char"', "a", "a", "b"),
    ("bool", "t", "true", "f"),
    ("oid", "16384", "16384", "1"),
    ("regclass", "pg_catalog.pg_class", "pg_catalog.pg_class", "pg_catalog.pg_type"),
    ("regtype", "integer", "int4", "text"),
    ("float8", "0.1", "0.1", "NaN"),
    ("bytea", "\\x0001", "\\x0001", "\\x00"),
    (
        "uuid",
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        "A0EEBC999C0B4EF8BB6D6BB9BD380A11",
        "b0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    ),
    ("date", "2024-02-29", "2024-02-29", "2024-03-01"),
    ("timetz", "10:00:00+02", "10:00:00+02", "10:00:00+01"),
    ("inet", "10.0.0.1", "10.0.0.1", "10.0.0.2"),
    ("cidr", "10.0.0.0/8", "10.0.0.0/8", "11.0.0.0/8"),
    ("macaddr", "08:00:2b:01:02:03", "08-00-2b-01-02-03", "08:00:2b:01:02:04"),
    ("bit(3)", "101", "101", "111"),
    ("varbit(5)", "101", "101", "1011"),
    ("jsonb", '{"a": 1}', '{"a":1}', "{}"),
    ("money", "$1.50", "$1.50", "$2.00"),
    ("pg_lsn", "0/10", "0/10", "0/11"),
    ("int4range", "[1,3)", "[1,2]", "[1,4)"),
    ("int4multirange", "{[1,3)}", "{[1,2]}", "{[1,4)}"),
    ("int[]", "{1,NULL}", "{1,NULL}", "{1}"),
    ("varchar(3)[]", "{abc}", "{abc}", "{abd}"),
    ("numeric(5,2)[]", "{1.5}", "{1.50}", "{1.6}"),
    ("tsvector", "'a' 'b'", "'b' 'a'", "'a'"),
    ("mood", "happy", "happy", "sad"),
    ("mood[]", "{happy}", "{happy}", "{sad}"),
    ("pair", "(1,x)", "(1,x)", "(1,y)"),
    ("short", "ab", "ab", "ac"),
    ("price", "1.005", "1.01", "1.004"),
    ("moods", "{happy}", "{happy}", "{sad}"),
    ("nonempty", "happy", "happy", "sad"),
    ("xid8", "5", "5", "6"),
    ("xid", "5", "5", "6"),
    ("tid", "(0,1)", "(0,1)", "(0,2)"),
]
TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE TYPE pair AS (a int, b text);"
    " CREATE DOMAIN short AS varchar(3); CREATE DOMAIN price AS numeric(5,2) CHECK (VALUE > 0);"
    " CREATE DOMAIN moods AS mood[]; CREATE DOMAIN nonempty AS mood NOT NULL"
)


async def test_values_of_all_kinds_are_found(db: Database, applier: Applier) -> None:
    """Written as the publisher writes it, a value is found as the target stores it, and no other is."""
    await db.execute(TYPES)
    for number, (type_name, sent, stored, other) in enumerate(KEYS):
        await db.execute(
            f"CREATE TABLE t{number} (a {type_name}, b text)",
            f"INSERT INTO t{number} VALUES ('{other.replace(chr(39), chr(39) * 2)}', 'other'),"
            f" ('{stored.replace(chr(39), chr(39) * 2)}', 'x')",
        )
        t = Table(f"t{number}", "a", "b", identity=FULL)
        await applier.apply(t.insert(sent, "y"), t.update(sent, "z", old=(sent, "x")), t.delete(sent, "y"))
        assert applier.missing == [], type_name
        found = await db.rows(f"SELECT (SELECT count(*) FROM t{number} WHERE b = 'z'), count(*) FROM t{number}")
        assert found == [(1, 2)], type_name


async def test_binary_values_are_found_and_stored(db: Database, applier: Applier) -> None:
    await db.execute(TYPES)
    for number, (type_name, _, stored, other) in enumerate(KEYS):
        if type_name in ("pair", "mood[]", "moods"):
            continue  # carries the OIDs of user-defined types, which are others on the publisher
        literal = stored.replace("'", "''")
        await db.execute(
            f"CREATE TABLE t{number} (a {type_name}, b text)",
            f"INSERT INTO t{number} VALUES ('{other.replace(chr(39), chr(39) * 2)}', 'other')",
        )
        connection = await db.connect()
        out = bytearray()

        async def write(data: bytes, out: bytearray = out) -> None:
            out.extend(data)

        await connection.copy_from_query(f"SELECT '{literal}'::{type_name}", output=write, format="binary")
        value = bytes(out[19 + 2 + 4 : -2])
        t = Table(f"t{number}", "a", "b", identity=FULL)
        await applier.apply(t.insert(value, b"x"), t.insert(value, b"y"))
        await applier.apply(t.update(value, "z", old=(value, "x")), t.delete(value, b"y"))
        assert applier.missing == [], type_name
        rows = f"SELECT count(*) FROM t{number} WHERE a::text = '{literal}'::{type_name}::text AND b = 'z'"
        assert await db.value(rows) == 1, type_name


async def test_binary_arrays_and_composites(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TYPE pair AS (a int, b text)", "CREATE TABLE t (k int PRIMARY KEY, a int[], p pair)")
    array = bytes.fromhex("00000001 00000000 00000017 00000002 00000001 00000004 00000007 00000004 00000009")
    pair = bytes.fromhex("00000002 00000017 00000004 00000005 00000019 00000001") + b"x"
    t = Table("t", "k*", "a", "p")
    await applier.apply(t.insert(b"\0\0\0\1", array, pair), t.insert("2", "{1}", "(6,y)"))
    await applier.apply(t.update(b"\0\0\0\2", array, pair, old=(b"\0\0\0\2", None, None)))
    assert await db.rows("SELECT k, a, (p).a, (p).b FROM t ORDER BY k") == [(1, [7, 9], 5, "x"), (2, [7, 9], 5, "x")]


async def test_binary_data_of_another_type_is_refused(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int PRIMARY KEY)")
    with pytest.raises(ServerError) as caught:
        await applier.apply(Table("t", "a*").insert(b"\0" * 8))
    assert caught.value.sqlstate == "22P03"


# --- constraints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_name", "value", "message"),
    [
        ("varchar(3)", "abcd", "value too long for type character varying(3)"),
        ("char(3)", "abcd", "value too long for type character(3)"),
        ("bit(3)", "1010", "bit string length 4 does not match type bit(3)"),
        ("numeric(3,1)", "123.4", "numeric field overflow"),
        ("int", "x", 'invalid input syntax for type integer: "x"'),
        ("mood", "unknown", 'invalid input value for enum mood: "unknown"'),
        ("short", "abcd", "value too long for type character varying(3)"),
        ("price", "-1", 'value for domain price violates check constraint "price_check"'),
    ],
)
@pytest.mark.parametrize("operation", ["insert", "update"])
async def test_a_value_that_does_not_fit_is_an_error(
    db: Database, applier: Applier, type_name: str, value: str, message: str, operation: str
) -> None:
    await db.execute(TYPES, f"CREATE TABLE t (k int PRIMARY KEY, a {type_name})", "INSERT INTO t VALUES (1, NULL)")
    t = Table("t", "k*", "a")
    change = t.insert("2", value) if operation == "insert" else t.update("1", value)
    with pytest.raises(ServerError) as caught:
        await applier.apply(change)
    assert caught.value.message.replace("public.", "") == message
    assert await db.rows("SELECT k, a::text FROM t") == [(1, None)]


async def test_checks_hold_and_foreign_keys_and_deferrable_uniqueness_do_not(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE p (a int PRIMARY KEY)",
        "CREATE TABLE t (a int PRIMARY KEY, p int REFERENCES p ON DELETE CASCADE, c int CHECK (c > 0),"
        " u int UNIQUE DEFERRABLE)",
        "INSERT INTO p VALUES (1)",
    )
    p, t = Table("p", "a*"), Table("t", "a*", "p", "c", "u")
    await applier.apply(t.insert("1", "1", "1", "1"), t.insert("2", "999", "1", "1"), p.delete("1"))
    assert await db.rows("SELECT * FROM t ORDER BY a") == [(1, 1, 1, 1), (2, 999, 1, 1)]
    with pytest.raises(ServerError) as caught:
        await applier.apply(t.insert("3", None, "-1", None))
    assert caught.value.sqlstate == "23514"


async def test_unique_keys_and_exclusion_constraints_stop_replication(db: Database, sessions: Sessions) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, u int UNIQUE, r int4range, EXCLUDE USING gist (r WITH &&))",
        "INSERT INTO t VALUES (1, 1, '[1,5)')",
    )
    for values, sqlstate in [(("1", "2", None), "23505"), (("2", "1", None), "23505"), (("2", "2", "[2,3)"), "23P01")]:
        applier = await sessions.open()
        with pytest.raises(ServerError) as caught:
            await applier.apply(Table("t", "a*", "u", "r").insert(*values))
        assert caught.value.sqlstate == sqlstate
        applier.target.pipeline.session.abort()


# --- triggers and rules ---------------------------------------------------------------------------


async def test_only_triggers_for_replicas_fire(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b text, c text)",
        "CREATE TABLE log (what text)",
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO public.log VALUES (concat_ws(' ', TG_NAME, TG_OP)); RETURN coalesce(NEW, OLD); END $$",
        *(
            f"CREATE TRIGGER {name} BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note()"
            for name in ("ordinary", "replica", "always", "disabled")
        ),
        "CREATE TRIGGER of_b AFTER UPDATE OF b ON t FOR EACH ROW EXECUTE FUNCTION note()",
        "CREATE TRIGGER of_c AFTER UPDATE OF c ON t FOR EACH ROW EXECUTE FUNCTION note()",
        "ALTER TABLE t ENABLE REPLICA TRIGGER replica, ENABLE ALWAYS TRIGGER always, DISABLE TRIGGER disabled,"
        " ENABLE ALWAYS TRIGGER of_b, ENABLE REPLICA TRIGGER of_c",
    )
    t = Table("t", "a*", "b", "c")
    await applier.apply(t.insert("1", "x", "x"), t.update("1", "x", UNSENT), t.delete("1", None, None))
    assert [what for (what,) in await db.rows("SELECT what FROM log")] == [
        "always INSERT",
        "replica INSERT",
        "always UPDATE",
        "replica UPDATE",
        "of_b UPDATE",  # b was sent, though not changed; c was not
        "always DELETE",
        "replica DELETE",
    ]


async def test_a_row_that_a_trigger_keeps_from_changing_is_not_missing(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b text)",
        "CREATE TABLE f (a int, b text)",
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER no BEFORE UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION no()",
        "CREATE TRIGGER no BEFORE UPDATE OR DELETE ON f FOR EACH ROW EXECUTE FUNCTION no()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER no",
        "ALTER TABLE f ENABLE REPLICA TRIGGER no",
        "INSERT INTO t VALUES (1, 'x')",
        "INSERT INTO f VALUES (1, NULL)",
    )
    t, f = Table("t", "a*", "b"), Table("f", "a", "b", identity=FULL)
    await applier.apply(
        t.update("1", "y"), t.update("2", "y", old=("1", None)), t.delete("1", None), f.delete("1", None)
    )
    await applier.target.settle()
    assert applier.missing == []
    await applier.apply(
        t.update("5", "y"), t.update("6", "y", old=("7", None)), t.delete("5", None), f.delete("2", None)
    )
    await applier.target.settle()
    assert applier.missing == ["UPDATE public.t", "UPDATE public.t", "DELETE public.t", "DELETE public.f"]
    assert applier.committed == [200, 300]


async def test_ordinary_rules_do_not_fire(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY)",
        "CREATE RULE r AS ON INSERT TO t DO INSTEAD NOTHING",
        "CREATE RULE d AS ON DELETE TO t DO INSTEAD NOTHING",
    )
    t = Table("t", "a*")
    await applier.apply(t.insert("1"), t.insert("2"), t.delete("1"))
    assert await db.rows("SELECT a FROM t") == [(2,)]


async def test_functions_run_with_an_empty_search_path_and_as_a_replica(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, settings text DEFAULT concat_ws('/', current_setting('search_path'),"
        " current_setting('session_replication_role'), current_setting('transaction_isolation')))"
    )
    await db.execute(f"ALTER DATABASE {db.name} SET default_transaction_isolation = 'serializable'")
    await applier.apply(Table("t", "a*").insert("1"))
    assert await db.value("SELECT settings FROM t") in ("/replica/read committed", '""/replica/read committed')


# --- partitions, TRUNCATE -------------------------------------------------------------------------


async def test_partitioned_tables(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int, b text, PRIMARY KEY (a)) PARTITION BY RANGE (a)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE t2 (gone int, b text, a int NOT NULL)",
        "ALTER TABLE t2 DROP gone",
        "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20)",
    )
    t = Table("t", "a*", "b")
    await applier.apply(t.insert("1", "x"), t.insert("11", "y"), t.insert("2", "z"))
    await applier.apply(
        t.update("1", "x2"), t.update("12", UNSENT, old=("2", None)), t.delete("11", None), t.delete("19", None)
    )
    assert await db.rows("SELECT tableoid::regclass::text, a, b FROM t ORDER BY a") == [
        ("t1", 1, "x2"),
        ("t2", 12, "z"),
    ]
    assert applier.missing == ["DELETE public.t2"]
    with pytest.raises(ServerError, match='no partition of relation "t" found for row') as caught:
        await applier.apply(t.insert("99", "x"))
    assert caught.value.sqlstate == "23514"


async def test_partitioned_tables_without_key(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int, b text) PARTITION BY LIST (a)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2)",
    )
    t = Table("t", "a", "b", identity=FULL)
    await applier.apply(t.insert("1", None), t.insert("1", None), t.insert("2", None), t.insert("2", "x"))
    await applier.apply(t.update("2", "y", old=("1", None)), t.delete("2", None), t.delete("2", None))
    assert await db.rows("SELECT a, b FROM t ORDER BY 1, 2") == [(1, None), (2, "x"), (2, "y")]
    assert applier.missing == ["DELETE public.t2"]


async def test_children_are_left_alone(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY)",
        "CREATE TABLE child (PRIMARY KEY (a)) INHERITS (t)",
        "INSERT INTO child VALUES (1), (2)",
        "INSERT INTO t VALUES (2), (3)",
    )
    t = Table("t", "a*")
    await applier.apply(t.delete("1"), t.delete("2"), t.update("4", old=("2",)), truncate(t))
    assert await db.rows("SELECT tableoid::regclass::text, a FROM t ORDER BY a") == [("child", 1), ("child", 2)]
    assert applier.missing == ["DELETE public.t", "UPDATE public.t"]


async def test_truncate_of_several_tables(db: Database, sessions: Sessions) -> None:
    applier = await sessions.open()
    await db.execute(
        "CREATE TABLE p (a int PRIMARY KEY)",
        "CREATE TABLE t (a serial PRIMARY KEY, p int REFERENCES p)",
        "CREATE TABLE r (a int) PARTITION BY LIST (a)",
        "CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1)",
        "INSERT INTO p VALUES (1)",
        "INSERT INTO t (p) VALUES (1), (1)",
        "INSERT INTO r VALUES (1)",
    )
    p, t, r = Table("p", "a*"), Table("t", "a*", "p"), Table("r", "a", identity=FULL)
    await applier.apply(truncate(p, t, r))
    assert await db.rows("SELECT (SELECT count(*) FROM p), (SELECT count(*) FROM t), (SELECT count(*) FROM r)") == [
        (0, 0, 0)
    ]
    assert await db.value("SELECT nextval('t_a_seq')") == 3
    await applier.apply(truncate(p, t, restart_identity=True), p.insert("5"))
    assert await db.value("SELECT nextval('t_a_seq')") == 1
    applier.target.pipeline.session.abort()
    applier = await sessions.open()
    with pytest.raises(ServerError) as caught:
        await applier.apply(truncate(p, cascade=True))
    assert caught.value.sqlstate == "0A000"
    assert caught.value.message == "cannot truncate a table referenced in a foreign key constraint"


# --- targets that are none ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "detail"),
    [
        ("CREATE VIEW t AS SELECT 1 AS a", "This operation is not supported for views."),
        ("CREATE MATERIALIZED VIEW t AS SELECT 1 AS a", "This operation is not supported for materialized views."),
        ("CREATE SEQUENCE t", "This operation is not supported for sequences."),
        ("CREATE TYPE t AS (a int)", "This operation is not supported for composite types."),
    ],
)
async def test_what_is_no_table_is_refused(db: Database, applier: Applier, statement: str, detail: str) -> None:
    await db.execute(statement)
    with pytest.raises(MappingError) as caught:
        await applier.apply(Table("t", "a*").insert("1"))
    assert caught.value.message == 'cannot use relation "public.t" as logical replication target'
    assert (caught.value.detail, caught.value.sqlstate) == (detail, "42809")


async def test_a_table_that_is_not_there(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE other (a int)", "CREATE SCHEMA s", "CREATE TABLE s.t (a int)")
    with pytest.raises(MappingError) as caught:
        await applier.apply(Table("t", "a*").insert("1"))
    assert caught.value.message == 'logical replication target relation "public.t" does not exist'
    assert caught.value.sqlstate == "55000"


async def test_row_level_security_is_an_error_and_not_a_filter(db: Database, sessions: Sessions) -> None:
    role = f"role_{db.name}"
    await db.execute(
        f"CREATE ROLE {role} LOGIN",
        "CREATE TABLE t (a int PRIMARY KEY)",
        "INSERT INTO t VALUES (1)",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY p ON t USING (a > 5)",
        f"GRANT ALL ON t TO {role}; GRANT USAGE ON SCHEMA subscriber TO {role}",
    )
    try:
        for change in (Table("t", "a*").insert("7"), Table("t", "a*").delete("1"), Table("t", "a*").update("1")):
            applier = await sessions.open()
            await applier.target.pipeline.rows(f"SET ROLE {role}")
            with pytest.raises(ServerError) as caught:
                await applier.apply(change)
            assert caught.value.sqlstate == "42501"
            applier.target.pipeline.session.abort()
        assert await db.rows("SELECT a FROM t") == [(1,)]
    finally:
        await db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
