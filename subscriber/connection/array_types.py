"""Array types of the server, as asyncpg describes types to itself.

asyncpg knows all types of the server but arrays. A session that meets one asks the server for it by a recursive query,
whose plan takes 5 ms, and then prepares its own query again. The numbers of these types never change.
"""

from __future__ import annotations

from typing import Any, Final

# Number of the array type -> number and name of the type of its elements.
_ELEMENTS = {
    1000: (16, "bool"),
    1001: (17, "bytea"),
    1002: (18, "char"),
    1003: (19, "name"),
    1005: (21, "int2"),
    1007: (23, "int4"),
    1009: (25, "text"),
    1015: (1043, "varchar"),
    1016: (20, "int8"),
    1022: (701, "float8"),
    1028: (26, "oid"),
    1185: (1184, "timestamptz"),
    2951: (2950, "uuid"),
    3221: (3220, "pg_lsn"),
    3807: (3802, "jsonb"),
}

ARRAY_TYPES: Final[tuple[dict[str, Any], ...]] = tuple(
    {
        "oid": oid,
        "ns": "pg_catalog",
        "name": f"_{name}",
        "kind": b"b",
        "basetype": None,
        "elemtype": element,
        "elemtype_name": name,
        "elemdelim": ",",
        "range_subtype": None,
        "attrtypoids": None,
        "attrnames": None,
    }
    for oid, (element, name) in _ELEMENTS.items()
)
