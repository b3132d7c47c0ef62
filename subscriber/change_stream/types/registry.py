"""The types of a publisher: their names, and the functions that decode their values to Python objects.

This module knows PostgreSQL's built-in scalar types and their arrays. The decoders of other types (enums, domains,
composites, ranges, multiranges, arrays) are built from the publisher's catalog, see types/catalog.py. A value of an
unknown type is a string, or bytes in binary format. Types of extensions are unknown, except for citext and hstore.

Values are the objects that asyncpg returns. Two differ: a composite is a dictionary, and a pg_lsn is an Lsn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from subscriber.change_stream.types import binary, text
from subscriber.change_stream.types import containers as nested
from subscriber.change_stream.types.text import Decode


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """A type of the publisher. `text` and `binary` decode one value that is not NULL."""

    name: str  # as format_type() writes it
    text: Decode
    binary: Decode


@dataclass(frozen=True, slots=True)
class TypeRow:
    """The definition of a type in the publisher's catalog. Types are OIDs, or 0 if the kind has none."""

    oid: int
    name: str
    kind: str  # pg_type.typtype, or "a" for an array
    part: int  # the type of an array's elements, of a domain's base, or of the bounds of a range or multirange
    delimiter: str  # between the elements of an array of this type
    attributes: tuple[tuple[str, int], ...]  # name and type of each attribute of a composite

    @property
    def needs(self) -> set[int]:
        """The OIDs of the types that this type contains."""
        parts = {oid for _, oid in self.attributes}
        return parts | {self.part} if self.part else parts


def _same(value: bytes) -> bytes:
    return value


def _as_text(name: str) -> TypeInfo:
    """Return a type whose values are strings in both formats."""
    return TypeInfo(name, text.text, text.text)


_BUILT_IN: dict[int, tuple[TypeInfo, int]] = {  # OID -> type, OID of its array
    16: (TypeInfo("boolean", text.boolean, binary.boolean), 1000),
    17: (TypeInfo("bytea", text.bytea, _same), 1001),
    18: (TypeInfo('"char"', text.char, _same), 1002),
    19: (_as_text("name"), 1003),
    20: (TypeInfo("bigint", text.integer, binary.integer), 1016),
    21: (TypeInfo("smallint", text.integer, binary.integer), 1005),
    22: (TypeInfo("int2vector", text.vector, nested.ArrayFromBinary(binary.integer)), 1006),
    23: (TypeInfo("integer", text.integer, binary.integer), 1007),
    25: (_as_text("text"), 1009),
    26: (TypeInfo("oid", text.integer, binary.unsigned), 1028),
    27: (TypeInfo("tid", text.tid, binary.tid), 1010),
    28: (TypeInfo("xid", text.integer, binary.unsigned), 1011),
    29: (TypeInfo("cid", text.integer, binary.unsigned), 1012),
    30: (TypeInfo("oidvector", text.vector, nested.ArrayFromBinary(binary.unsigned)), 1013),
    114: (_as_text("json"), 199),
    142: (_as_text("xml"), 143),
    600: (TypeInfo("point", text.point, binary.point), 1017),
    601: (TypeInfo("lseg", text.lseg, binary.lseg), 1018),
    602: (TypeInfo("path", text.path, binary.path), 1019),
    604: (TypeInfo("polygon", text.polygon, binary.polygon), 1027),
    628: (TypeInfo("line", text.line, binary.line), 629),
    650: (TypeInfo("cidr", text.cidr, binary.inet), 651),
    700: (TypeInfo("real", text.float4, binary.float4), 1021),
    701: (TypeInfo("double precision", text.float8, binary.float8), 1022),
    718: (TypeInfo("circle", text.circle, binary.circle), 719),
    774: (TypeInfo("macaddr8", text.text, binary.macaddr), 775),
    790: (TypeInfo("money", text.text, _same), 791),  # an integer, in cents or the unit of lc_monetary
    829: (TypeInfo("macaddr", text.text, binary.macaddr), 1040),
    869: (TypeInfo("inet", text.inet, binary.inet), 1041),
    1042: (_as_text("character"), 1014),
    1043: (_as_text("character varying"), 1015),
    1082: (TypeInfo("date", text.parse_date, binary.parse_date), 1182),
    1083: (TypeInfo("time without time zone", text.parse_time, binary.parse_time), 1183),
    1114: (TypeInfo("timestamp without time zone", text.timestamp, binary.timestamp), 1115),
    1184: (TypeInfo("timestamp with time zone", text.timestamptz, binary.timestamptz), 1185),
    1186: (TypeInfo("interval", text.interval, binary.interval), 1187),
    1266: (TypeInfo("time with time zone", text.parse_time, binary.timetz), 1270),
    1560: (TypeInfo("bit", text.parse_bits, binary.parse_bits), 1561),
    1562: (TypeInfo("bit varying", text.parse_bits, binary.parse_bits), 1563),
    1700: (TypeInfo("numeric", text.numeric, binary.numeric), 1231),
    1790: (_as_text("refcursor"), 2201),
    2950: (TypeInfo("uuid", text.parse_uuid, binary.parse_uuid), 2951),
    2970: (TypeInfo("txid_snapshot", text.snapshot, binary.snapshot), 2949),
    3220: (TypeInfo("pg_lsn", text.lsn, binary.lsn), 3221),
    3614: (TypeInfo("tsvector", text.text, binary.tsvector), 3643),
    3802: (TypeInfo("jsonb", text.text, binary.versioned), 3807),
    4072: (TypeInfo("jsonpath", text.text, binary.versioned), 4073),
    5038: (TypeInfo("pg_snapshot", text.snapshot, binary.snapshot), 5039),
    5069: (TypeInfo("xid8", text.integer, binary.unsigned), 271),
}
# Object identifier types. In binary format they are OIDs, which only the publisher can resolve to names.
_NAMES = {
    24: ("regproc", 1008),
    2202: ("regprocedure", 2207),
    2203: ("regoper", 2208),
    2204: ("regoperator", 2209),
    2205: ("regclass", 2210),
    2206: ("regtype", 2211),
    3734: ("regconfig", 3735),
    3769: ("regdictionary", 3770),
    4089: ("regnamespace", 4090),
    4096: ("regrole", 4097),
    4191: ("regcollation", 4192),
}
_BUILT_IN |= {oid: (TypeInfo(name, text.text, binary.unsigned), array) for oid, (name, array) in _NAMES.items()}
# Types of PostgreSQL's own extensions. By their names without a schema, because an extension can be in any schema.
_OF_EXTENSIONS: dict[str, Decode] = {"citext": text.text, "hstore": binary.hstore}
_DEEPEST = 50  # levels of nested types; a deeper type, and a type that contains itself, counts as unknown
_BOX = 603  # its array has another delimiter


def _array(of: TypeInfo, delimiter: str, name: str | None = None) -> TypeInfo:
    return TypeInfo(name or f"{of.name}[]", nested.ArrayFromText(of.text, delimiter), nested.ArrayFromBinary(of.binary))


def _built_in() -> dict[int, TypeInfo]:
    types = {oid: known for oid, (known, _) in _BUILT_IN.items()}
    types |= {array: _array(known, ",") for known, array in _BUILT_IN.values()}
    types[_BOX] = TypeInfo("box", text.box, binary.box)
    types[1020] = _array(types[_BOX], ";")
    return types


_SHORT = {
    "bool": "boolean",
    "int8": "bigint",
    "int2": "smallint",
    "int4": "integer",
    "int": "integer",
    "bpchar": "character",
    "char": "character",
    "varchar": "character varying",
    "float4": "real",
    "float8": "double precision",
    "time": "time without time zone",
    "timetz": "time with time zone",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
    "varbit": "bit varying",
    "decimal": "numeric",
}


def oid_of(name: str) -> int | None:
    """Return the OID of a built-in type. None: the type is not built in.

    Args:
        name: the name or a short name of the type, with the suffix `[]` for its array.
    """
    bare = name.removesuffix("[]")
    bare = _SHORT.get(bare, bare)
    for oid, (known, array) in _BUILT_IN.items():
        if known.name == bare:
            return array if name.endswith("[]") else oid
    return None


class Types:
    """The known types of one publisher: built-in ones, and those that were read from its catalog."""

    def __init__(self) -> None:
        self._known = _built_in()
        self._looked_up: set[int] = set()

    @property
    def known(self) -> Iterable[int]:
        """The OIDs of all known types."""
        return self._known.keys()

    def unknown(self, oids: Iterable[int]) -> set[int]:
        """Return the OIDs of the types that have to be read from the publisher's catalog."""
        return {oid for oid in oids if oid not in self._known}

    def invalidate(self, oids: Iterable[int]) -> None:
        """Forget all types from the catalog if `oids` has one, because the table that uses it has changed."""
        if self._looked_up.intersection(oids):
            for oid in self._looked_up:
                del self._known[oid]
            self._looked_up.clear()

    def get(self, oid: int) -> TypeInfo:
        """Return a type. A value of an unknown type is decoded to a string, or to bytes in binary format."""
        return self._known.get(oid) or TypeInfo(f"type {oid}", text.text, _same)

    def add(self, rows: Iterable[TypeRow]) -> None:
        """Add types from the catalog, in any order. A contained type that is neither known nor in `rows` is unknown."""
        described = {row.oid: row for row in rows}
        begun: set[int] = set()

        def learn(oid: int, within: int) -> TypeInfo:
            row = described.get(oid)
            if row is not None and oid not in self._known and oid not in begun and within < _DEEPEST:
                begun.add(oid)
                inner = _base(row, described)
                parts = {part: learn(part, within + 1) for part in inner.needs}
                self._known[oid] = replace(_built(inner, parts, described), name=row.name)
                self._looked_up.add(oid)
            return self.get(oid)

        for oid in described:
            learn(oid, 0)

    def mark_unresolvable(self, oids: Iterable[int]) -> None:
        """Treat those of `oids` that are not known as unknown types, because the catalog does not have them."""
        for oid in self.unknown(oids):
            self._known[oid] = self.get(oid)
            self._looked_up.add(oid)


def _base(row: TypeRow, described: dict[int, TypeRow]) -> TypeRow:
    """Return the innermost domain of a domain over domains, and any other type as it is."""
    seen: set[int] = set()
    while row.kind == "d" and row.oid not in seen:
        seen.add(row.oid)
        inner = described.get(row.part)
        if inner is None or inner.kind != "d":
            break
        row = inner
    return row


def _built(row: TypeRow, parts: dict[int, TypeInfo], described: dict[int, TypeRow]) -> TypeInfo:
    from_text: Any
    from_binary: Any
    match row.kind:
        case "a":
            delimiter = described[row.part].delimiter if row.part in described else ";" if row.part == _BOX else ","
            return _array(parts[row.part], delimiter, row.name)
        case "d":
            from_text, from_binary = parts[row.part].text, parts[row.part].binary
        case "e":
            from_text = from_binary = text.text
        case "c":
            from_text = nested.CompositeFromText([(name, parts[oid].text) for name, oid in row.attributes])
            from_binary = nested.CompositeFromBinary([(name, parts[oid].binary) for name, oid in row.attributes])
        case "r":
            from_text = nested.RangeFromText(parts[row.part].text)
            from_binary = nested.RangeFromBinary(parts[row.part].binary)
        case "m":
            from_text = nested.MultirangeFromText(parts[row.part].text)
            from_binary = nested.MultirangeFromBinary(parts[row.part].binary)
        case _:
            bare = row.name.rpartition(".")[2]
            from_text, from_binary = text.text, _OF_EXTENSIONS.get(bare, _same)
    return TypeInfo(row.name, from_text, from_binary)
