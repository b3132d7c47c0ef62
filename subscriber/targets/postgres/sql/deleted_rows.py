"""Statements about deleted rows that the target remembers (migrations/schema.sql, section 9).

The target has a hash of each key. The statement key() computes the hash of the key in a change, in the same way as the
trigger that remembers deleted rows. It stores the hash in a setting of the transaction, for the statements that follow.
"""

from __future__ import annotations

from subscriber.apply.relation_map import LocalColumn, RelationMapping
from subscriber.quoting import literal
from subscriber.targets.postgres.sql.row_statements import Builder, Plan
from subscriber.timestamps import UNIX_EPOCH_OFFSET_US

_KEY = "pg_catalog.decode(pg_catalog.current_setting('subscriber.key'), 'hex')"

# Types whose text depends on settings of the session or has no normal form, by OID. The migration has the same.
_NORMAL_FORMS = {
    17: "pg_catalog.encode({}, 'hex')",
    1082: "pg_catalog.encode(pg_catalog.date_send({}), 'hex')",
    1083: "pg_catalog.encode(pg_catalog.time_send({}), 'hex')",
    1266: "pg_catalog.encode(pg_catalog.timetz_send({}), 'hex')",
    1114: "pg_catalog.encode(pg_catalog.timestamp_send({}), 'hex')",
    1184: "pg_catalog.encode(pg_catalog.timestamptz_send({}), 'hex')",
    1186: "pg_catalog.encode(pg_catalog.interval_send({}), 'hex')",
    700: "pg_catalog.encode(pg_catalog.float4send({}), 'hex')",
    701: "pg_catalog.encode(pg_catalog.float8send({}), 'hex')",
    790: "pg_catalog.encode(pg_catalog.cash_send({}), 'hex')",
    1700: "pg_catalog.trim_scale({})",
}


def has_key(mapping: RelationMapping) -> bool:
    """Return True if the target can remember deleted rows of the table."""
    return mapping.search is not None


def key(mapping: RelationMapping, row: int) -> Plan:
    """Set the key for find() and remember() to that of the change's row `row`. The table must have a key."""
    name = ("deleted key", row)
    if (plan := mapping.plans.get(name)) is None:
        assert mapping.search is not None
        build = Builder(mapping)
        values = [_normal_form(mapping.attributes[index], build.parameter(row, index)) for index in mapping.search]
        printed = f"pg_catalog.format({literal('%L,' * len(values))}, {', '.join(values)})"
        encoded = f"pg_catalog.convert_to({printed}, pg_catalog.getdatabaseencoding())"
        hashed = f"pg_catalog.encode(pg_catalog.sha256({encoded}), 'hex')"
        plan = build.plan(f"SELECT pg_catalog.set_config('subscriber.key', {hashed}, true)", b"SELECT 1")
        mapping.plans[name] = plan
    assert isinstance(plan, Plan)
    return plan


def _normal_form(column: LocalColumn, parameter: str) -> str:
    info = column.batch_info
    assert info is not None
    # The owner of an enum may rename it at any moment. Its labels are the same bytes in text and binary.
    type_name = "pg_catalog.text" if info.enum else column.search_cast or info.element
    return _NORMAL_FORMS.get(info.element_oid, "{}").format(f"{parameter}::{type_name}")


def find(mapping: RelationMapping, shown: tuple[str, str]) -> str:
    """Find the last deletion of the key. `shown` are the progress record and its fence as texts.

    Returns no row, or one: the commit's time as the server prints it and in microseconds since 2000-01-01 UTC, origin
    id, origin name, and the transaction. The times are NULL if the target does not track them.
    """
    return (
        "SELECT d.committed,"
        f" (extract(epoch FROM d.committed) * 1000000)::pg_catalog.int8 - {UNIX_EPOCH_OFFSET_US},"
        " d.origin, o.roname, d.xid"
        f" FROM subscriber.deleted_by({_shown(*shown)}, {mapping.local.oid}, {_KEY}) d"
        " LEFT JOIN pg_catalog.pg_replication_origin o ON o.roident = d.origin"
    )


def remember(mapping: RelationMapping, shown: tuple[str, str]) -> str:
    """Remember the key as deleted by the transaction that is open. `shown` is as for find()."""
    return f"SELECT subscriber.remember_delete({_shown(*shown)}, {mapping.local.oid}, {_KEY})"


def _shown(record: str, fence: str) -> str:
    return f"{record}::pg_catalog.oid, {literal(fence)}::pg_catalog.bytea"
