"""Types with the same binary format on every server, for which binary may be used without the option `binary`.

They are built-in types with the same OID on both sides. These are left out:

- types that are OIDs of the catalog in binary and names in text: reg*, aclitem
- money, whose text depends on lc_monetary, and xml, whose text may name an encoding
- interval: since 17 it has infinities, which older servers would read as finite values
- rare types, whose formats have not been compared

Source: the *_send() and *_recv() functions in src/backend/utils/adt.
"""

from __future__ import annotations

from subscriber.apply.batch.eligibility import FIRST_NORMAL_OID, ineligible_reason
from subscriber.apply.relation_map import LocalColumn, RelationMapping
from subscriber.protocol.messages import RelationColumn, Update

_SCALARS = {
    16: "bool",
    17: "bytea",
    18: "char",
    19: "name",
    20: "int8",
    21: "int2",
    23: "int4",
    25: "text",
    26: "oid",
    114: "json",
    600: "point",
    601: "lseg",
    602: "path",
    603: "box",
    604: "polygon",
    628: "line",
    650: "cidr",
    700: "float4",
    701: "float8",
    718: "circle",
    774: "macaddr8",
    829: "macaddr",
    869: "inet",
    1042: "bpchar",
    1043: "varchar",
    1082: "date",
    1083: "time",
    1114: "timestamp",
    1184: "timestamptz",
    1266: "timetz",
    1560: "bit",
    1562: "varbit",
    1700: "numeric",
    2950: "uuid",
    3220: "pg_lsn",
    3802: "jsonb",
}
_ARRAYS = {
    199: "json",
    1000: "bool",
    1001: "bytea",
    1005: "int2",
    1007: "int4",
    1009: "text",
    1014: "bpchar",
    1015: "varchar",
    1016: "int8",
    1021: "float4",
    1022: "float8",
    1041: "inet",
    1115: "timestamp",
    1182: "date",
    1185: "timestamptz",
    1231: "numeric",
    2951: "uuid",
    3807: "jsonb",
}
_RANGES = {3904: "int4", 3906: "num", 3908: "ts", 3910: "tstz", 3912: "date", 3926: "int8"}

# By the name in pg_type.
SAME_IN_BINARY = {
    **_SCALARS,
    **{oid: f"_{name}" for oid, name in _ARRAYS.items()},
    **{oid: f"{name}range" for oid, name in _RANGES.items()},
}


def same_in_binary(mapping: RelationMapping) -> bool:
    """Return True if every column has a type of this list, the same one on both sides. Modifiers may differ."""
    return _first_different(mapping) is None


def text_format_reason(mapping: RelationMapping) -> str | None:
    """Why changes of the table have to be sent as text, or had better be, in words without values; None: no reason."""
    index = _first_different(mapping)
    if index is not None:
        return _described(mapping, index)
    if _updates_in_sets(mapping, binary=False) and not _updates_in_sets(mapping, binary=True):
        return f'updates of table "{mapping.label}", which has a column of arrays, are quicker from text'
    return None


def _first_different(mapping: RelationMapping) -> int | None:
    """Return the index of the first column without such a type, or with different types; None if there is none."""
    columns = enumerate(zip(mapping.remote.columns, mapping.attributes, strict=True))
    return next((index for index, (theirs, ours) in columns if not _same(theirs, ours)), None)


def _same(theirs: RelationColumn, ours: LocalColumn) -> bool:
    return (
        theirs.type_oid in SAME_IN_BINARY
        and ours.batch_info is not None
        and ours.batch_info.type_oid == theirs.type_oid
    )


def _described(mapping: RelationMapping, index: int) -> str:
    theirs, ours = mapping.remote.columns[index], mapping.attributes[index]
    text = f'column "{ours.name}" of table "{mapping.label}" is of type {ours.type_name}'
    name = SAME_IN_BINARY.get(theirs.type_oid)
    own = ours.batch_info is not None and ours.batch_info.type_oid >= FIRST_NORMAL_OID
    if name is not None:
        return f"{text}, and of type {name} on the publisher"
    different = ours.batch_info is not None and ours.batch_info.type_oid != theirs.type_oid
    return f"{text}, and of another on the publisher" if different and not own else text


def _updates_in_sets(mapping: RelationMapping, *, binary: bool) -> bool:
    return ineligible_reason(mapping, Update.letter[0], with_old=False, binary=binary) is None
