"""Nondeterministic ICU collations: different texts are equal, and one key."""

from __future__ import annotations

from random import Random

import pytest

from subscriber.comparison.comparison import verify
from tests.repair.test_repair import damage
from tests.repair.test_single_tables import assert_spelling_is_repaired
from tests.scenarios.conftest import Pair

CASELESS = "CREATE COLLATION caseless (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
KEYS = "abcdefghijkl"
ROUNDS = 30


def transactions(random: Random) -> list[str]:
    """Statements on keys that exist in one spelling at a time, in small and in large transactions."""
    texts = []
    for _ in range(ROUNDS):
        statements = []
        for _ in range(random.choice((1, 3, 40))):
            key = random.choice(KEYS)
            spelled = random.choice((key, key.upper()))
            statements.append(
                random.choice(
                    (
                        f"INSERT INTO t VALUES ('{spelled}', '{spelled}') ON CONFLICT DO NOTHING",
                        f"UPDATE t SET id = '{spelled}' WHERE id = '{key}'",
                        f"UPDATE t SET v = '{spelled}' WHERE id = '{key}'",
                        f"DELETE FROM t WHERE id = '{key}'",
                        f"DELETE FROM t WHERE id = '{key}'; INSERT INTO t VALUES ('{spelled}', 'new')",
                    )
                )
            )
        texts.append("; ".join(statements))
    return texts


@pytest.mark.parametrize("sessions", [1, 2])
async def test_keys_change_their_spelling(pair: Pair, sessions: int) -> None:
    await pair.both(CASELESS, "CREATE TABLE t (id text COLLATE caseless PRIMARY KEY, v text)")
    await pair.subscribe("FOR TABLE t", apply_sessions=sessions)
    await pair.source.execute(*transactions(Random(sessions)))
    await pair.change("INSERT INTO t VALUES ('last', '')")
    await pair.assert_same('SELECT id, v FROM t ORDER BY id COLLATE "C"')
    assert not pair.subscriber.log.has("ERROR|conflict")


async def test_rows_without_a_key_are_compared_as_their_columns_are(pair: Pair) -> None:
    """As the built-in worker does: the row that is equal, though its text is another one."""
    await pair.both(CASELESS, "CREATE TABLE t (a text COLLATE caseless, b int)", "ALTER TABLE t REPLICA IDENTITY FULL")
    await pair.source.execute("INSERT INTO t VALUES ('x', 1), ('y', 1)")
    await pair.subscribe("FOR TABLE t")
    await pair.target.execute("UPDATE t SET a = 'X' WHERE a = 'x'")
    await pair.change("UPDATE t SET b = 2 WHERE a = 'x'", "DELETE FROM t WHERE a = 'Y'")
    assert await pair.rows("SELECT a, b FROM t") == [("x", 2)]


async def test_a_comparison_finds_another_spelling(pair: Pair) -> None:
    """Also of columns whose texts are hashed, because their types are not the same."""
    columns = "id text COLLATE caseless PRIMARY KEY, a {0} COLLATE caseless, b text[] COLLATE caseless, c {1}"
    await pair.both(CASELESS, "CREATE DOMAIN spelled AS text COLLATE caseless")
    await pair.source.execute(f"CREATE TABLE t ({columns.format('varchar(5)', 'spelled')})")
    await pair.target.execute(f"CREATE TABLE t ({columns.format('text', 'text COLLATE caseless')})")
    await pair.both("INSERT INTO t SELECT k, 'a', '{a}', 'a' FROM unnest('{v,w,x,y,z}'::text[]) k")
    await pair.both("CREATE TABLE u (a text COLLATE caseless)", "INSERT INTO u VALUES ('x'), ('y')")
    await pair.subscribe("FOR TABLE t, u", copy_data="false")
    await pair.subscriber.wait_for_ready(pair.source)
    assert (await verify(pair.target.dsn(), "s")).is_same
    changed = (
        "a = 'A' WHERE id = 'v'",
        "b = '{A}' WHERE id = 'w'",
        "c = 'A' WHERE id = 'x'",
        "id = 'Y' WHERE id = 'y'",
    )
    await pair.target.execute(*(f"UPDATE t SET {change}" for change in changed), "UPDATE u SET a = 'X' WHERE a = 'x'")
    table, keyless = (await verify(pair.target.dsn(), "s")).tables
    assert (keyless.missing_count, keyless.extra_count) == (1, 1)
    assert table.changed == {("v",): ("a",), ("w",): ("b",), ("x",): ("c",)}
    assert (table.missing, table.extra) == ([("y",)], [("Y",)])


async def test_a_repair_changes_the_spelling_of_a_key(pair: Pair) -> None:
    await pair.both(
        CASELESS,
        "CREATE TABLE names (name text COLLATE caseless PRIMARY KEY, v int)",
        "CREATE TABLE pairs (a text COLLATE caseless, b int, v int, PRIMARY KEY (a, b))",
    )
    await pair.source.execute(
        "INSERT INTO names SELECT 'Name' || i, i FROM generate_series(1, 30) i",
        "INSERT INTO pairs SELECT 'Name' || i % 5, i, i FROM generate_series(1, 30) i",
    )
    await pair.subscribe("FOR TABLE names, pairs", copy_engine="snapshot")
    await pair.subscriber.wait_for_ready(pair.source)
    await damage(
        pair.target,
        "UPDATE names SET name = lower(name) WHERE v % 3 = 0",
        "UPDATE names SET v = -v WHERE abs(v) % 6 = 0",
        "DELETE FROM names WHERE v = 7",
        "UPDATE pairs SET a = upper(a) WHERE b % 4 = 0",
    )
    await assert_spelling_is_repaired(pair.source, pair.target)
