"""The server finds rows by the index that the built-in worker would use, for tables of any size."""

from __future__ import annotations

from subscriber.protocol.messages import Delete, ReplicaIdentity, Update
from subscriber.targets.postgres.sql import row_statements
from subscriber.targets.postgres.sql.row_statements import OLD
from tests.plugins.fix_cluster import Database
from tests.targets.conftest import Applier, Change, Table

FULL = ReplicaIdentity.FULL
TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'happy')",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE DOMAIN code AS varchar(20)",
    "CREATE DOMAIN moody AS mood",
    "CREATE DOMAIN price AS numeric(5,2)",
)


async def explain(applier: Applier, change: Change) -> str:
    """Return the plans of a change's statements, with NULL for every parameter."""
    relation, message = change
    assert not isinstance(relation, list)
    assert isinstance(message, Update | Delete)
    mapping = await applier.mapping(relation)
    plans = []
    if mapping.search is None:
        assert message.old is not None
        plans.append(row_statements.find(mapping, OLD, message.old.split()[0]))
    if isinstance(message, Update):
        plans.append(row_statements.update(mapping, message.old_part, message.new.split()[0]))
    else:
        plans.append(row_statements.delete(mapping))
    pipeline = applier.target.session.pipeline
    lines: list[str] = []
    for plan in plans:
        await pipeline.rows("SELECT pg_catalog.set_config('subscriber.place', '', false)")
        await pipeline.rows(f"PREPARE p AS {plan.sql}")
        values = ", ".join(["NULL"] * len(plan.parameters))
        lines += [
            str(line)
            for (line,) in await pipeline.rows(f"EXPLAIN (COSTS off) EXECUTE p{f'({values})' if values else ''}")
        ]
        await pipeline.rows("DEALLOCATE p")
    return "\n".join(lines)


KEYS = (
    *("int", "bigint", "text", "varchar(10)", "char(10)", "name", "numeric(5,2)", "timestamptz(0)", "uuid", "bytea"),
    *("inet", "cidr", "int[]", "varchar(3)[]", "int4range", "jsonb", "oid", "regclass", "bit(3)", '"char"'),
    *("mood", "pair", "code", "moody", "price", "mood[]"),
)


async def test_a_key_of_any_type_is_found_by_its_index(db: Database, applier: Applier) -> None:
    tables = (f"CREATE TABLE t{n} (a {type_name} PRIMARY KEY, b text)" for n, type_name in enumerate(KEYS))
    await db.execute(*TYPES, "; ".join(tables))
    for number, type_name in enumerate(KEYS):
        t = Table(f"t{number}", "a*", "b")
        for change in (t.update("x", "y"), t.delete("x", None)):
            plan = await explain(applier, change)
            assert f" t{number}_pkey" in plan, (type_name, plan)
            assert "Index Cond" in plan, (type_name, plan)


async def test_a_whole_row_is_found_by_an_index_if_there_is_one(db: Database, applier: Applier) -> None:
    await db.execute("CREATE TABLE t (a int, b text)", "CREATE INDEX i ON t (a)")
    t = Table("t", "a", "b", identity=FULL)
    for change in (t.update("x", "y", old=("x", None)), t.delete("x", "y"), t.delete(None, "y")):
        plan = await explain(applier, change)
        assert "Index Scan on i" in plan or "Index Scan using i" in plan, plan
        assert "Tid Scan on t" in plan, plan


async def test_partitions_are_pruned_and_indexes_used(db: Database, applier: Applier) -> None:
    await db.execute(
        "CREATE TABLE t (a int PRIMARY KEY, b text) PARTITION BY RANGE (a)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}0) TO ({n + 1}0)" for n in range(3)),
        "CREATE TABLE f (a int, b text) PARTITION BY RANGE (a)",
        *(f"CREATE TABLE f{n} PARTITION OF f FOR VALUES FROM ({n}0) TO ({n + 1}0)" for n in range(3)),
        "CREATE INDEX ON f (b)",
    )
    plan = await explain(applier, Table("t", "a*", "b").delete("1", None))
    assert "Seq Scan" not in plan, plan
    plan = await explain(applier, Table("f", "a", "b", identity=FULL).delete("1", "x"))
    assert "Seq Scan" not in plan, plan
    assert plan.count("Tid Scan") == 3, plan
