"""The SQL of each kind of change."""

from __future__ import annotations

import pytest

from subscriber.apply.relation_map import RelationMapping, map_relation
from subscriber.errors import MappingError
from subscriber.protocol.messages import OldPart, ReplicaIdentity
from subscriber.targets.postgres.sql import row_statements
from subscriber.targets.postgres.sql.row_statements import NEW, OLD, Plan
from tests.apply.build import column, local, remote

FULL = ReplicaIdentity.FULL
EQ = "OPERATOR(pg_catalog.=)"
FOUND = "ctid = nullif(pg_catalog.current_setting('subscriber.place'), '')::pg_catalog.tid"


def placing(found: str) -> str:
    """Return the query for a row that no session has locked, or else for the first row."""
    return f"SELECT pg_catalog.set_config('subscriber.place', coalesce(({found} SKIP LOCKED), ({found}), ''), true)"


KEYED = map_relation(remote("a*", "b", "c"), local("a", "x", "b", "c", identity=("a",)))
COMPOSITE = map_relation(remote("a*", "b*", "c"), local("a", "b", "c", identity=("b", "a")))
WHOLE = map_relation(remote("a", "b", replica_identity=FULL), local("a", "x", "b"))
PARTITIONED = map_relation(remote("a", replica_identity=FULL), local("a", partitioned=True))
PARTITIONED_KEYED = map_relation(remote("a*", "b"), local("a", "b", identity=("a",), partitioned=True))
ODD = map_relation(
    remote('a"b*', namespace="S x", name='T"t'), local('a"b', identity=('a"b',), schema="S x", name='T"t')
)
CAST = map_relation(
    remote("a*", "b*"),
    local(
        column("a", "numeric(5,2)", search_cast="numeric(5,2)"),
        column("b", "public.dom", base_type="public.mood", equality="OPERATOR(ext.=)"),
        identity=("a", "b"),
    ),
)
ALWAYS_KEY = map_relation(remote("a*", "b"), local(column("a", identity_always=True), "b", identity=("a",)))
ALWAYS = map_relation(
    remote("a*", "i", "b"),
    local("a", column("i", identity_always=True), "b", "x", column("g", generated=True), identity=("a",)),
)
EMPTY = map_relation(remote(replica_identity=FULL), local("x"))
NOTHING_KNOWN = map_relation(remote(replica_identity=FULL), local())
NONE = map_relation(remote("a*"), local("a"))
JSON = map_relation(remote("a", "j", replica_identity=FULL), local("a", column("j", "json", equality=None)))


def update(mapping: RelationMapping, new: bytes, old: bytes | None = None, *, identity_changed: bool = False) -> Plan:
    part = None if old is None else OldPart.KEY if mapping.search is not None else OldPart.ROW
    return row_statements.update(mapping, part, new, identity_changed)


@pytest.mark.parametrize(
    ("plan", "sql", "parameters", "expect"),
    [
        (
            row_statements.insert(KEYED),
            'INSERT INTO "s"."t" ("a", "b", "c") OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3)',
            ((NEW, 0), (NEW, 1), (NEW, 2)),
            b"INSERT 0 1",
        ),
        (row_statements.insert(EMPTY), 'INSERT INTO "s"."t" DEFAULT VALUES', (), b"INSERT 0 1"),
        (
            row_statements.insert(ODD),
            'INSERT INTO "S x"."T""t" ("a""b") OVERRIDING SYSTEM VALUE VALUES ($1)',
            ((NEW, 0),),
            b"INSERT 0 1",
        ),
        (
            update(KEYED, b"ttn"),
            f'UPDATE ONLY "s"."t" SET "a" = $1, "b" = $2, "c" = $3 WHERE "a" {EQ} $4',
            ((NEW, 0), (NEW, 1), (NEW, 2), (NEW, 0)),
            b"UPDATE 1",
        ),
        (
            update(KEYED, b"tub", b"tnn"),
            f'UPDATE ONLY "s"."t" SET "a" = $1, "c" = $2 WHERE "a" {EQ} $3',
            ((NEW, 0), (NEW, 2), (OLD, 0)),
            b"UPDATE 1",
        ),
        (
            update(COMPOSITE, b"ttt", b"ttn"),
            f'UPDATE ONLY "s"."t" SET "a" = $1, "b" = $2, "c" = $3 WHERE "b" {EQ} $4 AND "a" {EQ} $5',
            ((NEW, 0), (NEW, 1), (NEW, 2), (OLD, 1), (OLD, 0)),
            b"UPDATE 1",
        ),
        (  # nothing was sent: only whether the row is there
            update(KEYED, b"uuu", b"tnn"),
            f'SELECT 1 FROM ONLY "s"."t" WHERE "a" {EQ} $1 FOR UPDATE',
            ((OLD, 0),),
            b"SELECT 1",
        ),
        (
            row_statements.find(WHOLE, OLD, b"tn"),
            placing(
                'SELECT ctid::pg_catalog.text FROM ONLY "s"."t"'
                f' WHERE "a" {EQ} $1 AND "b" IS NOT DISTINCT FROM NULL'
                ' AND "x" IS NOT DISTINCT FROM NULL LIMIT 1 FOR UPDATE'
            ),
            ((OLD, 0),),
            b"SELECT 1",
        ),
        (
            row_statements.find(PARTITIONED, OLD, b"t"),
            placing(f"""SELECT tableoid || ' ' || ctid FROM "s"."t" WHERE "a" {EQ} $1 LIMIT 1 FOR UPDATE"""),
            ((OLD, 0),),
            b"SELECT 1",
        ),
        (
            row_statements.find(NOTHING_KNOWN, OLD, b""),
            placing('SELECT ctid::pg_catalog.text FROM ONLY "s"."t" WHERE true LIMIT 1 FOR UPDATE'),
            (),
            b"SELECT 1",
        ),
        (
            update(WHOLE, b"tt", b"tn"),
            f'UPDATE ONLY "s"."t" SET "a" = $1, "b" = $2 WHERE {FOUND}',
            ((NEW, 0), (NEW, 1)),
            b"UPDATE 1",
        ),
        (row_statements.delete(WHOLE), f'DELETE FROM ONLY "s"."t" WHERE {FOUND}', (), b"DELETE 1"),
        (
            row_statements.delete(KEYED),
            f'DELETE FROM ONLY "s"."t" WHERE "a" {EQ} $1',
            ((OLD, 0),),
            b"DELETE 1",
        ),
        (
            row_statements.delete(PARTITIONED),
            'DELETE FROM "s"."t" WHERE'
            " tableoid = nullif(pg_catalog.split_part(pg_catalog.current_setting('subscriber.place'), ' ', 1), '')"
            "::pg_catalog.oid AND"
            " ctid = nullif(pg_catalog.split_part(pg_catalog.current_setting('subscriber.place'), ' ', 2), '')"
            "::pg_catalog.tid",
            (),
            b"DELETE 1",
        ),
        (
            update(PARTITIONED_KEYED, b"tt"),
            f'UPDATE "s"."t" SET "a" = $1, "b" = $2 WHERE "a" {EQ} $3',
            ((NEW, 0), (NEW, 1), (NEW, 0)),
            b"UPDATE 1",
        ),
        (
            row_statements.delete(CAST),
            f'DELETE FROM ONLY "s"."t" WHERE "a" {EQ} $1::numeric(5,2) AND "b"::public.mood OPERATOR(ext.=) $2',
            ((OLD, 0), (OLD, 1)),
            b"DELETE 1",
        ),
        (  # an identity column that keeps its value is not named
            update(ALWAYS_KEY, b"tt"),
            f'UPDATE ONLY "s"."t" SET "b" = $1 WHERE "a" {EQ} $2',
            ((NEW, 1), (NEW, 0)),
            b"UPDATE 1",
        ),
        (
            update(ALWAYS_KEY, b"tu", b"tn", identity_changed=True),
            f'WITH gone AS (DELETE FROM ONLY "s"."t" WHERE "a" {EQ} $1 RETURNING *) INSERT INTO "s"."t" ("a", "b")'
            ' OVERRIDING SYSTEM VALUE SELECT $2, gone."b" FROM gone',
            ((OLD, 0), (NEW, 0)),
            b"INSERT 0 1",
        ),
        (
            row_statements.replace_if_changed(ALWAYS, 1, b"ttu"),
            f'WITH gone AS (DELETE FROM ONLY "s"."t" WHERE "a" {EQ} $2 AND "i" <> $1 RETURNING *)'
            ' INSERT INTO "s"."t" ("a", "i", "b", "x") OVERRIDING SYSTEM VALUE'
            ' SELECT $3, $4, gone."b", gone."x" FROM gone',
            ((NEW, 1), (NEW, 0), (NEW, 0), (NEW, 1)),
            b"INSERT 0 1",
        ),
        (
            row_statements.lock(KEYED, OLD),
            f'SELECT 1 FROM ONLY "s"."t" WHERE "a" {EQ} $1 FOR UPDATE',
            ((OLD, 0),),
            b"SELECT 1",
        ),
        (
            row_statements.lock(WHOLE, NEW),
            f'SELECT 1 FROM ONLY "s"."t" WHERE {row_statements.IS_FOUND} FOR UPDATE',
            (),
            b"SELECT 1",
        ),
    ],
)
def test_each_change_has_its_statement_and_parameters(
    plan: Plan, sql: str, parameters: tuple[tuple[int, int], ...], expect: bytes
) -> None:
    assert plan.sql == sql
    assert plan.parameters == parameters
    assert plan.expect == expect + b"\0"


def test_a_statement_is_made_once_for_each_shape() -> None:
    mapping = map_relation(remote("a", "b", replica_identity=FULL), local("a", "b"))
    assert row_statements.insert(mapping) is row_statements.insert(mapping)
    assert update(mapping, b"tt", b"tt") is update(mapping, b"bn", b"bt")
    assert update(mapping, b"tt", b"tt") is not update(mapping, b"tu", b"tt")
    assert row_statements.find(mapping, OLD, b"tt") is row_statements.find(mapping, OLD, b"bt")
    assert row_statements.find(mapping, OLD, b"tt") is not row_statements.find(mapping, OLD, b"nt")
    assert row_statements.delete(mapping) is row_statements.delete(mapping)
    keyed = map_relation(remote("a*", "b"), local("a", "b", identity=("a",)))
    assert update(keyed, b"tt") is update(keyed, b"tn")
    assert update(keyed, b"tt") is not update(keyed, b"tt", b"tn")
    always = map_relation(remote("a*", "i"), local("a", column("i", identity_always=True), identity=("a",)))
    assert row_statements.replace_if_changed(always, 1, b"tt") is row_statements.replace_if_changed(always, 1, b"tt")


def test_a_change_without_an_identity_is_refused() -> None:
    why = "has neither REPLICA IDENTITY index nor PRIMARY KEY"
    with pytest.raises(MappingError, match=why):
        update(NONE, b"t")
    with pytest.raises(MappingError, match=why):
        row_statements.delete(NONE)
    with pytest.raises(MappingError, match=why):
        row_statements.find(NONE, OLD, b"t")
    with pytest.raises(MappingError, match=why):
        row_statements.replace_if_changed(NONE, 0, b"t")
    row_statements.insert(NONE)
    with pytest.raises(MappingError, match="could not identify an equality operator for type json"):
        row_statements.find(JSON, OLD, b"tt")
    assert '"j" IS NOT DISTINCT FROM NULL' in row_statements.find(JSON, OLD, b"tn").sql


def test_truncate_is_one_statement_and_never_cascades() -> None:
    assert row_statements.truncate([KEYED, PARTITIONED, ODD], restart_identity=False) == (
        'TRUNCATE TABLE ONLY "s"."t", "s"."t", ONLY "S x"."T""t" CONTINUE IDENTITY RESTRICT'
    )
    assert (
        row_statements.truncate([KEYED], restart_identity=True)
        == 'TRUNCATE TABLE ONLY "s"."t" RESTART IDENTITY RESTRICT'
    )
