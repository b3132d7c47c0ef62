"""One SQL statement for one change, with the semantics of the built-in apply worker's executor calls.

Statements are texts with numbered parameters that have no declared type: the server infers each from
where it stands, so a value goes through the column type's own input or receive function, and an
assignment checks the column's length as INSERT does. An explicit cast would cut a varchar silently.

Rules that are not obvious, each from a difference between SQL and the executor:

- Only the first of several equal rows is changed (REPLICA IDENTITY FULL): a statement of its own locks it and
  keeps its ctid for the next, which changes it. A single statement would use the snapshot from before the lock wait,
  and would not see the row version that another session has left.
- `IS NOT DISTINCT FROM` a value never uses an index, so a search for a NULL is a statement of its own.
- Every column that was sent is set, changed or not, so that triggers FOR UPDATE OF see them;
  a column that was not sent (unchanged TOAST) is left out.
- UPDATE may not name a GENERATED ALWAYS identity column. One that identifies the row is left out while
  it keeps its value; when it changes, the row is deleted and inserted again.
- A numeric or time value of the publisher may be finer than the target's column; the row to find has
  the rounded one. Such search values are cast to the column's type; texts and bits never, see above.
  So are values of composite and reg* types, whose equality operator is that of all records and of oids.
- A domain is compared as the type it is of: operators of all enums or ranges do not know domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subscriber.apply.relation_map import RelationMapping
from subscriber.errors import MappingError
from subscriber.protocol.messages import OldPart
from subscriber.protocol.tuple_data import NULL, UNCHANGED
from subscriber.quoting import identifier, qualified
from subscriber.sqlstate import UNDEFINED_FUNCTION

NEW, OLD = 0, 1  # the row of the change to which a parameter belongs

# Where find() keeps the place of the row it has locked; empty: there is none.
_PLACE = "pg_catalog.current_setting('subscriber.place')"
IS_FOUND = f"ctid = nullif({_PLACE}, '')::pg_catalog.tid"
IS_FOUND_IN_PARTITION = (
    f"tableoid = nullif(pg_catalog.split_part({_PLACE}, ' ', 1), '')::pg_catalog.oid"
    f" AND ctid = nullif(pg_catalog.split_part({_PLACE}, ' ', 2), '')::pg_catalog.tid"
)

# Those of the session's transaction and of its subtransactions that are not over: each holds the lock on its own xid.
_OWN_XIDS = (
    "ARRAY(SELECT l.transactionid FROM pg_catalog.pg_locks l WHERE l.locktype = 'transactionid'"
    " AND l.pid = pg_catalog.pg_backend_pid() AND l.mode = 'ExclusiveLock')"
)
_EARLIER_XIDS = "pg_catalog.current_setting('subscriber.made', true)"
# To be run before a subtransaction that has made rows is released, and its lock with it.
REMEMBER_XIDS = (
    "SELECT pg_catalog.set_config('subscriber.made', pg_catalog.concat_ws(',',"
    f" nullif({_EARLIER_XIDS}, ''), pg_catalog.array_to_string({_OWN_XIDS}, ',')), true)"
)
# That the session's transaction, or one of its subtransactions, has made the row.
_MADE_HERE = (
    f"(xmin OPERATOR(pg_catalog.=) ANY ({_OWN_XIDS}) OR xmin OPERATOR(pg_catalog.=) ANY"
    f" (pg_catalog.string_to_array({_EARLIER_XIDS}, ',')::pg_catalog.xid[]))"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A statement, and for each of its parameters the row and column it is taken from."""

    sql: str
    parameters: tuple[tuple[int, int], ...]
    expect: bytes  # the command tag when exactly one row was there, with its NUL
    types: tuple[int, ...] = ()  # OIDs of the parameters' types, 0 or none where the server infers it


def copy_from(schema: str, name: str, columns: Sequence[str], binary: bool) -> str:
    """COPY … FROM STDIN into the columns that the publisher sends, in its order."""
    listed = f" ({', '.join(map(identifier, columns))})" if columns else ""
    return f"COPY {qualified(schema, name)}{listed} FROM STDIN{' WITH (FORMAT binary)' if binary else ''}"


class Builder:
    """Collects parameters while a statement's text is put together."""

    def __init__(self, mapping: RelationMapping) -> None:
        self.mapping = mapping
        self.parameters: list[tuple[int, int]] = []
        local = mapping.local
        self.table = qualified(local.schema, local.name)
        self.only = local.only

    def parameter(self, row: int, index: int) -> str:
        self.parameters.append((row, index))
        return f"${len(self.parameters)}"

    def assigned(self, index: int, stored: str) -> str:
        """The value that an UPDATE gives to a column. `stored` is the expression for the target's value.

        A difference is added to the target's value (apply/conflicts/delta.py). If one of the values is NULL there is
        no difference, and the column gets the publisher's value.
        """
        new = self.parameter(NEW, index)
        computed_in = self.mapping.delta_types.get(index)
        if computed_in is None:
            return new
        info = self.mapping.attributes[index].batch_info
        assert info is not None
        # The first cast gives the parameter the column's type, in which a binary value is sent.
        new, old = (f"{value}::{info.element}::{computed_in}" for value in (new, self.parameter(OLD, index)))
        return f"coalesce({stored}::{computed_in} + ({new} - {old}), {new})"

    def plan(self, sql: str, expect: bytes) -> Plan:
        return Plan(sql, tuple(self.parameters), expect + b"\0")

    def where_key(self, row: int, search: Sequence[int]) -> str:
        return " AND ".join(self._equals(row, index) for index in search)

    def where_row(self, row: int, status: bytes) -> str:
        """Matches every row equal to all of `row`."""
        conditions = []
        for index, column in enumerate(self.mapping.attributes):
            if status[index] == NULL:
                conditions.append(is_null(identifier(column.name)))
            else:
                conditions.append(self._equals(row, index))
        conditions += [is_null(identifier(column.name)) for column in self.mapping.local_only]
        return " AND ".join(conditions) or "true"

    def _equals(self, row: int, index: int) -> str:
        column = self.mapping.attributes[index]
        if column.equality is None:
            raise MappingError(
                f"could not identify an equality operator for type {column.type_name}", sqlstate=UNDEFINED_FUNCTION
            )
        stored, sought = identifier(column.name), self.parameter(row, index)
        if column.base_type is not None:
            stored += f"::{column.base_type}"
        if column.search_cast is not None:
            sought += f"::{column.search_cast}"
        return f"{stored} {column.equality} {sought}"


def is_null(value: str) -> str:
    """Return a condition that is true for NULL itself. IS NULL is true for a composite value of NULL fields, too."""
    return f"{value} IS NOT DISTINCT FROM NULL"


def insert(mapping: RelationMapping) -> Plan:
    """Columns that the publisher does not have get their defaults."""
    key = "insert"
    if (plan := mapping.plans.get(key)) is None:
        plan = mapping.plans[key] = _insert(mapping)
    assert isinstance(plan, Plan)
    return plan


def _insert(mapping: RelationMapping) -> Plan:
    build = Builder(mapping)
    if not mapping.attributes:
        return build.plan(f"INSERT INTO {build.table} DEFAULT VALUES", b"INSERT 0 1")
    columns = ", ".join(identifier(column.name) for column in mapping.attributes)
    values = ", ".join(build.parameter(NEW, index) for index in range(len(mapping.attributes)))
    sql = f"INSERT INTO {build.table} ({columns}) OVERRIDING SYSTEM VALUE VALUES ({values})"
    return build.plan(sql, b"INSERT 0 1")


def update(
    mapping: RelationMapping,
    old_part: OldPart | None,
    new_status: bytes,
    identity_changed: bool = False,
) -> Plan:
    """Find the row by the old row's key if one was sent, else by the new row's, and set the columns that were sent.

    Without a key, the row is the one that find() has found. `identity_changed`: an identity column
    GENERATED ALWAYS gets another value. Raises MappingError when the row cannot be identified.
    """
    unchanged = bytes(s == UNCHANGED for s in new_status)
    key = ("update", old_part is not None, unchanged, identity_changed)
    if (plan := mapping.plans.get(key)) is None:
        row = NEW if old_part is None else OLD
        plan = mapping.plans[key] = _update(mapping, row, new_status, identity_changed)
    assert isinstance(plan, Plan)
    return plan


def _update(mapping: RelationMapping, row: int, new_status: bytes, identity_changed: bool) -> Plan:
    require_search(mapping)
    build = Builder(mapping)
    sent = [i for i in range(len(mapping.attributes)) if new_status[i] != UNCHANGED]
    if identity_changed:
        return replace(build, sent, where_searched(build, row), add=row == OLD)
    sent = [i for i in sent if not mapping.attributes[i].identity_always]
    if not sent:  # nothing that UPDATE may set: only see whether the row is there
        return lock(mapping, row)
    names = {i: identifier(mapping.attributes[i].name) for i in sent}
    sets = ", ".join(f"{name} = {build.assigned(i, name)}" for i, name in names.items())
    where = where_searched(build, row)
    return build.plan(f"UPDATE {build.only} SET {sets} WHERE {where}", b"UPDATE 1")


def replace(build: Builder, sent: list[int], where: str, *, add: bool = False) -> Plan:
    """DELETE and INSERT in one statement, for what UPDATE is not allowed to do.

    `add`: an old row exists, and differences are added as in UPDATE.
    """
    mapping = build.mapping
    given = {mapping.attributes[i].name: i for i in sent}
    columns = [column.name for column in mapping.local.columns if not column.generated]
    kept = {name: f"gone.{identifier(name)}" for name in columns}
    for name, i in given.items():
        kept[name] = build.assigned(i, kept[name]) if add else build.parameter(NEW, i)
    values = ", ".join(kept.values())
    names = ", ".join(identifier(name) for name in columns)
    return build.plan(
        f"WITH gone AS (DELETE FROM {build.only} WHERE {where} RETURNING *) "
        f"INSERT INTO {build.table} ({names}) OVERRIDING SYSTEM VALUE SELECT {values} FROM gone",
        b"INSERT 0 1",
    )


def replace_if_changed(mapping: RelationMapping, index: int, status: bytes) -> Plan:
    """Give identity column `index` its new value if it has another one.

    For a column that does not identify the row: its old value was not sent, so only the server can compare.
    An UPDATE for the other columns follows. Returns no row count that means anything.
    """
    key = ("replace", index, bytes(s == UNCHANGED for s in status))
    if (plan := mapping.plans.get(key)) is None:
        require_search(mapping)
        build = Builder(mapping)
        name = identifier(mapping.attributes[index].name)
        condition = f" AND {name} <> {build.parameter(NEW, index)}"
        sent = [i for i in range(len(mapping.attributes)) if status[i] != UNCHANGED]
        plan = mapping.plans[key] = replace(build, sent, where_searched(build, NEW) + condition)
    assert isinstance(plan, Plan)
    return plan


def delete(mapping: RelationMapping) -> Plan:
    """Without a key, of the row that find() has found. Raises MappingError when the row cannot be identified."""
    key = "delete"
    if (plan := mapping.plans.get(key)) is None:
        require_search(mapping)
        build = Builder(mapping)
        plan = build.plan(f"DELETE FROM {build.only} WHERE {where_searched(build, OLD)}", b"DELETE 1")
        mapping.plans[key] = plan
    assert isinstance(plan, Plan)
    return plan


def lock(mapping: RelationMapping, row: int) -> Plan:
    """Lock the row that an UPDATE or DELETE is about; returns no row if it is not there."""
    key = ("lock", row)
    if (plan := mapping.plans.get(key)) is None:
        build = Builder(mapping)
        sql = f"SELECT 1 FROM {build.only} WHERE {where_searched(build, row)} FOR UPDATE"
        plan = mapping.plans[key] = build.plan(sql, b"SELECT 1")
    assert isinstance(plan, Plan)
    return plan


def find(mapping: RelationMapping, row: int, status: bytes, *, own_first: bool = False) -> Plan:
    """Lock the first row that is equal to all of `row`, for the statement that follows.

    For tables without a key. Equal rows are interchangeable, so the first unlocked one is taken. If all
    are locked, the statement waits for the first. A prepared or streamed transaction of this subscription may hold it,
    which ends only later in the stream. `own_first`: a row that this transaction has made is taken before any
    other, so that the transaction holds no more rows that others may need than it did on the publisher. Raises
    MappingError when the row cannot be identified.
    """
    key = ("find", row, own_first, bytes(s == NULL for s in status))
    if (plan := mapping.plans.get(key)) is None:
        require_search(mapping)
        build = Builder(mapping)
        place = "tableoid || ' ' || ctid" if mapping.local.partitioned else "ctid::pg_catalog.text"
        query = f"SELECT {place} FROM {build.only} WHERE {build.where_row(row, status)}"
        places = [f"({query} LIMIT 1 FOR UPDATE SKIP LOCKED)", f"({query} LIMIT 1 FOR UPDATE)", "''"]
        if own_first:
            places.insert(0, f"({query} AND {_MADE_HERE} LIMIT 1)")
        plan = mapping.plans[key] = build.plan(
            f"SELECT pg_catalog.set_config('subscriber.place', coalesce({', '.join(places)}), true)", b"SELECT 1"
        )
    assert isinstance(plan, Plan)
    return plan


def written_by_another(mapping: RelationMapping, row: int, origin_id: int) -> Plan:
    """The row that an UPDATE or DELETE is about to change, if it was not written through origin `origin_id`.

    One written by a parallel worker of the same subscription is among them: see types.is_ours().

    Returns the time, the origin's id and name of the transaction that wrote it, the row's table as
    schema.name, xmin, and all columns; nothing for a row of ours, and for one too old for its origin to be known.
    """
    key = ("writer", row)
    if (plan := mapping.plans.get(key)) is None:
        build = Builder(mapping)
        plan = mapping.plans[key] = build.plan(
            "SELECT w.timestamp, w.roident, o.roname, found.*"
            " FROM (SELECT (SELECT n.nspname || '.' || c.relname FROM pg_catalog.pg_class c"
            " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = t.tableoid), xmin, t.*"
            f" FROM {build.only} t WHERE {where_searched(build, row)}) found"
            " CROSS JOIN LATERAL pg_catalog.pg_xact_commit_timestamp_origin(found.xmin) w"
            " LEFT JOIN pg_catalog.pg_replication_origin o ON o.roident = w.roident"
            f" WHERE w.roident <> {origin_id}",
            b"SELECT 0",
        )
    assert isinstance(plan, Plan)
    return plan


def find_partition(mapping: RelationMapping, status: bytes) -> Plan:
    """Return a query for the leaf partition of a row: its index among them, or NULL.

    Columns that were not sent are NULL, as they are where the built-in worker routes a row to be found.
    """
    build = Builder(mapping)
    names = {column.name: index for index, column in enumerate(mapping.attributes)}
    columns = []
    for column in mapping.local.columns:
        index = names.get(column.name)
        given = index is not None and status[index] != UNCHANGED
        value = build.parameter(OLD, index) if given and index is not None else "NULL"
        # A domain may refuse NULL.
        columns.append(f"{value}::{column.base_type or column.type_name} AS {identifier(column.name)}")
    cases = " ".join(
        f"WHEN {partition.constraint or 'true'} THEN {number}"
        for number, partition in enumerate(mapping.local.partitions)
    )
    return build.plan(f"SELECT CASE {cases} END FROM (SELECT {', '.join(columns)}) AS row", b"")


def where_searched(build: Builder, row: int) -> str:
    """Return a condition by the key of `row`, or by the place of the row that find() has found."""
    if build.mapping.search is not None:
        return build.where_key(row, build.mapping.search)
    return IS_FOUND_IN_PARTITION if build.mapping.local.partitioned else IS_FOUND


def require_search(mapping: RelationMapping) -> None:
    if mapping.unsearchable is not None:
        raise MappingError(mapping.unsearchable.message, hint=mapping.unsearchable.hint)


def truncate(mappings: Sequence[RelationMapping], *, restart_identity: bool) -> str:
    """Truncate all tables in one statement; never CASCADE, because the publisher lists the cascaded tables."""
    tables = ", ".join(mapping.local.only for mapping in mappings)
    return f"TRUNCATE TABLE {tables} {'RESTART' if restart_identity else 'CONTINUE'} IDENTITY RESTRICT"
