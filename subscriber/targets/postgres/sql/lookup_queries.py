"""Statements that read the target's rows before a change is applied, and those that remove conflicting rows.

They lock the rows, in the transaction that applies the change. So the rows cannot change between the policy's decision
and the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_in_plan

from subscriber.apply.relation_map import RelationMapping
from subscriber.protocol.tuple_data import BINARY, NULL, UNCHANGED
from subscriber.quoting import identifier, qualified
from subscriber.targets.postgres.sql.row_statements import (
    IS_FOUND,
    IS_FOUND_IN_PARTITION,
    NEW,
    OLD,
    Builder,
    Plan,
    replace,
    where_searched,
)
from subscriber.timestamps import UNIX_EPOCH_OFFSET_US

# Passes the place of a row, as searched() and holders() return it, to later statements of the transaction.
SET_PLACE = "SELECT pg_catalog.set_config('subscriber.place', $1, true)"

# Which columns of which index are to be unique. Those on expressions and partial ones are left out, and deferrable
# ones are not enforced for replicated changes at all. A partitioned table's own, which all partitions have.
UNIQUE_INDEXES = """
SELECT pg_catalog.json_build_array(x.relname, pg_catalog.json_agg(a.attname ORDER BY k.place))
  FROM pg_catalog.pg_index i
  JOIN pg_catalog.pg_class t ON t.oid = i.indrelid AND t.relname = $2
  JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace AND n.nspname = $1
  JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid,
       pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY AS k (attnum, place)
  JOIN pg_catalog.pg_attribute a ON a.attnum = k.attnum
 WHERE a.attrelid = i.indrelid AND k.place <= i.indnkeyatts AND i.indisunique AND i.indisvalid AND i.indimmediate
   AND i.indpred IS NULL AND i.indexprs IS NULL
 GROUP BY x.oid, x.relname ORDER BY x.oid
"""

_TEXT_OID = 25

_COMMITTED = f"(extract(epoch FROM w.timestamp) * 1000000)::pg_catalog.int8 - {UNIX_EPOCH_OFFSET_US}"
_TIMED = "LEFT JOIN LATERAL pg_catalog.pg_xact_commit_timestamp_origin(found.xmin) w ON true"
_NOT_TIMED = "CROSS JOIN (SELECT NULL::pg_catalog.timestamptz, NULL::pg_catalog.oid) w (timestamp, roident)"


def _described(table: str, where: str, *, timed: bool, lock: bool) -> str:
    """Rows with who wrote them.

    Returns for each: the commit's time as the server prints it and in microseconds since 2000-01-01 UTC, origin id and
    origin name (NULL without `timed`, that is without commit timestamps), its table as schema.name, its place, xmin,
    all columns.
    """
    return (
        f"SELECT w.timestamp, {_COMMITTED}, w.roident, o.roname, found.*"
        " FROM (SELECT (SELECT n.nspname || '.' || c.relname FROM pg_catalog.pg_class c"
        " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = t.tableoid),"
        f" t.tableoid || ' ' || t.ctid, t.xmin, t.* FROM {table} t WHERE {where}{' FOR UPDATE' if lock else ''}) found"
        f" {_TIMED if timed else _NOT_TIMED} LEFT JOIN pg_catalog.pg_replication_origin o ON o.roident = w.roident"
    )


def searched(mapping: RelationMapping, row: int, *, timed: bool) -> Plan:
    """The row that an UPDATE or DELETE is about; see _described(). Without a key, the one that find() has found."""
    key = ("searched", row, timed)
    if (plan := mapping.plans.get(key)) is None:
        build = Builder(mapping)
        sql = _described(build.only, where_searched(build, row), timed=timed, lock=True)
        plan = mapping.plans[key] = build.plan(sql, b"")
    assert isinstance(plan, Plan)
    return plan


def holders(mapping: RelationMapping, columns: Sequence[int], *, timed: bool) -> Plan:
    """The rows that have the new row's values in `columns`; see _described()."""
    key = ("holders", tuple(columns), timed)
    if (plan := mapping.plans.get(key)) is None:
        build = Builder(mapping)
        sql = _described(build.only, build.where_key(NEW, columns), timed=timed, lock=True)
        plan = mapping.plans[key] = build.plan(sql, b"")
    assert isinstance(plan, Plan)
    return plan


def in_the_way(
    mapping: RelationMapping,
    table: tuple[str, str],
    columns: Sequence[int],
    *,
    searched: bytes | None,
    timed: bool,
) -> Plan:
    """Like holders(), for one table alone, the mapped one or a partition, and without locks.

    `searched` is the status of the row that an UPDATE changes, which is left out; None: it is an INSERT.
    """
    build = Builder(mapping)
    where = build.where_key(NEW, columns)
    if searched is not None:
        search = mapping.search
        where += f" AND NOT ({build.where_row(OLD, searched) if search is None else build.where_key(OLD, search)})"
    return build.plan(_described(f"ONLY {qualified(*table)}", where, timed=timed, lock=False), b"")


def as_text(mapping: RelationMapping, new: bytes, old: bytes) -> Plan:
    """Print the rows of a change as the target would, the new one first. Text values stay unchanged.

    `new` and `old` are their status, empty for a missing one.
    Binary values have their columns' types, without lengths, which could cut them. The query does not read the table:
    the role may lack the privilege, and a query for a report must not fail.
    """
    build = Builder(mapping)
    types: list[int] = []
    rows = [
        f"({', '.join([_whole(build, types, row, index, kind) for index, kind in enumerate(status)])})"
        for row, status in ((NEW, new), (OLD, old))
        if status
    ]
    return replace_in_plan(build.plan(f"VALUES {', '.join(rows)}", b""), types=tuple(types))


def _whole(build: Builder, types: list[int], row: int, index: int, kind: int) -> str:
    """A parameter for the value, whose type is added to `types`; no type's name, which its owner could change."""
    if kind in (NULL, UNCHANGED):
        return "NULL"
    sets = build.mapping.attributes[index].batch_info
    assert sets is not None
    types.append(sets.element_oid if kind == BINARY else _TEXT_OID)
    return build.parameter(row, index)


def update_at_place(mapping: RelationMapping, status: bytes) -> Plan:
    """Update the row at the place set by SET_PLACE with the columns of the new row that were sent."""
    key = ("update at place", bytes(s == UNCHANGED for s in status))
    if (plan := mapping.plans.get(key)) is None:
        build = Builder(mapping)
        sent = [index for index in range(len(mapping.attributes)) if status[index] != UNCHANGED]
        if any(mapping.attributes[index].identity_always for index in sent):
            plan = replace(build, sent, _is_found(build))
        else:
            sets = ", ".join(f"{identifier(mapping.attributes[i].name)} = {build.parameter(NEW, i)}" for i in sent)
            plan = build.plan(f"UPDATE {build.only} SET {sets} WHERE {_is_found(build)}", b"UPDATE 1")
        mapping.plans[key] = plan
    assert isinstance(plan, Plan)
    return plan


def delete_at_place(mapping: RelationMapping) -> Plan:
    build = Builder(mapping)
    return build.plan(f"DELETE FROM {build.only} WHERE {_is_found(build)}", b"DELETE 1")


def _is_found(build: Builder) -> str:
    return IS_FOUND_IN_PARTITION if build.mapping.local.partitioned else IS_FOUND
