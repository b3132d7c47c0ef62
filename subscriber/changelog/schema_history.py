"""The schema history of a change log: the versions of each table, and the transactions from which they hold.

    schema.jsonl    one `TableVersion` in each line, as a JSON object with a checksum

**Purpose.** pgoutput describes a table by the names and types of its columns. These do not distinguish a renamed column
from a new one, and have no value of a new column for earlier rows. The publisher's catalog does both. So the archiver
reads it whenever the publisher describes a table, and stores the changes. column_steps() then returns which column of
a later version is which column of an earlier one.

**Invariants.**

- A version is on disk before a transaction that has its changes becomes durable.
- A version holds from its `position` on: the publisher described the table before a change of the transaction whose
  commit record starts there. DDL becomes visible with the first change of the table that follows.
- The catalog was read later than that, at `asked`. It counts only if it has the columns that the publisher described.
- column_steps() returns a result only if no other history of the table leads to both versions. PostgreSQL never uses
  the number of a dropped column again, so few histories are possible.
- The publisher does not report a change of a composite type. But it refuses to change the type of an attribute while a
  column uses the type, it adds attributes at the end, and its catalog always keeps dropped attributes. So if a type
  has no dropped attribute at some time, an earlier text with n fields has the first n attributes. The archiver reads
  the composite types again before a change of their tables becomes durable. Types with a dropped attribute have no
  `LoggedType`, and their values are text.

**Failure cases.**

- Catalog changed between the transaction and the query: the version has the columns of both. It counts only if the
  description repeats an earlier version, and the later catalog shows that it is the same. See is_repeated().
- Primary key dropped and added again between the transaction and the query: two rows may have had the same key in
  between. The new key has another `index_oid`, so it holds from `asked` on, and not from `position` on. See
  spark/lake/lake_table.py.
- Catalog that cannot be read: every step to the version is refused.
- Archiver killed after it stored a version: it stores the version again, or finds that nothing has changed.
- Archiver killed in the middle of a line: the next writer cuts the line off, and readers ignore it.
- Line damaged: ChangeLogDamaged.
- File lost: readers find no version for a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from subscriber.changelog.files import damaged, json_checksum, reading
from subscriber.changelog.storage import Location, append_line, whole_lines
from subscriber.display import sql_identifier, sql_name
from subscriber.errors import LoadNeeded
from subscriber.lsn import Lsn
from subscriber.protocol.messages import Relation, RelationColumn, ReplicaIdentity

SCHEMA = "schema.jsonl"
_TEXTS = {25, 1043}  # text and varchar, which have the same text


@dataclass(frozen=True, slots=True)
class LoggedColumn:
    """A published column of a table."""

    name: str
    type_oid: int
    type_modifier: int
    is_key: bool
    number: int | None = None  # pg_attribute.attnum; None: the catalog is not known
    written: str | None = None  # the transaction that last changed the column's definition
    has_missing: bool | None = False  # rows before ADD COLUMN have the value `missing`; None: not known
    missing: str | None = None


class LoggedAttribute(NamedTuple):
    """An attribute of a composite type."""

    name: str
    type_oid: int
    type_modifier: int


@dataclass(frozen=True, slots=True)
class LoggedType:
    """A composite type without dropped attributes, or an array type of such a type."""

    oid: int
    attributes: tuple[LoggedAttribute, ...] = ()  # of a composite type, in the order of its text
    element: int | None = None  # the OID of an array's elements


class PrimaryKey(NamedTuple):
    """The primary key of a table whose replica identity is FULL."""

    index_oid: int  # another key with these columns has another one
    numbers: tuple[int, ...]  # of its columns


@dataclass(frozen=True, slots=True)
class TableVersion:
    """The definition of a table from a position on."""

    position: Lsn
    asked: Lsn  # the position at which the catalog was read
    relid: int
    schema: str
    name: str
    replica_identity: str  # pg_class.relreplident
    columns: tuple[LoggedColumn, ...]  # in the order of rows
    attributes: int | None = None  # the highest column number that was ever used; None: the catalog is not known
    dropped: tuple[int, ...] = ()  # numbers of dropped columns
    storage: str | None = None  # changes when the table is rewritten
    published: str = ""  # changes when the table is published in another way
    # The columns that the catalog had instead of those that the publisher described. None: it had the described ones.
    catalog: tuple[LoggedColumn, ...] | None = None
    types: tuple[LoggedType, ...] = ()  # that the columns and their attributes have, by OID
    primary_key: PrimaryKey | None = None  # at `asked`; None: there is none, or the replica identity is not FULL

    @property
    def label(self) -> str:
        """Return schema.name."""
        return f"{self.schema}.{self.name}"

    @property
    def is_known(self) -> bool:
        """Return True if the catalog had the columns that the publisher described."""
        return self.attributes is not None and self.catalog is None

    def key_names(self) -> tuple[str, ...] | None:
        """Return the columns of the primary key in the order of rows. None: there is none, or it is not published."""
        numbers = self.primary_key.numbers if self.primary_key is not None else ()
        names = tuple(column.name for column in self.columns if column.number in numbers)
        return names if names and len(names) == len(numbers) else None

    def relation(self) -> Relation:
        """Return the description that the publisher sends."""
        columns = tuple(RelationColumn(c.is_key, c.name, c.type_oid, c.type_modifier) for c in self.columns)
        return Relation(None, self.relid, self.schema, self.name, ReplicaIdentity(self.replica_identity), columns)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as from_json() reads them."""
        fields = {**asdict(self), "position": str(self.position), "asked": str(self.asked)}
        for name in ("types", "primary_key"):
            if not fields[name]:
                del fields[name]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> TableVersion:
        """Return the version that as_json() was called on. Raises KeyError, TypeError or ValueError."""
        return cls(
            **{
                **fields,
                "position": Lsn.parse(fields["position"]),
                "asked": Lsn.parse(fields["asked"]),
                "columns": tuple(LoggedColumn(**column) for column in fields["columns"]),
                "dropped": tuple(fields["dropped"]),
                "catalog": None
                if fields["catalog"] is None
                else tuple(LoggedColumn(**column) for column in fields["catalog"]),
                "types": tuple(
                    LoggedType(kind["oid"], tuple(LoggedAttribute(*a) for a in kind["attributes"]), kind["element"])
                    for kind in fields.get("types", ())
                ),
                "primary_key": PrimaryKey(key[0], tuple(key[1])) if (key := fields.get("primary_key")) else None,
            }
        )


def described_version(relation: Relation, position: Lsn, later: TableVersion | None = None) -> TableVersion:
    """Return the version that the publisher describes, without the catalog.

    Args:
        relation: the description.
        position: the position of the version.
        later: the catalog that was read, which has other columns. None: it could not be read.
    """
    columns = tuple(LoggedColumn(c.name, c.type_oid, c.type_modifier, c.is_key) for c in relation.columns)
    identity = relation.replica_identity.value
    if later is not None:
        return replace(later, replica_identity=identity, columns=columns, catalog=later.columns)
    return TableVersion(position, position, relation.relid, relation.schema, relation.name, identity, columns)


class ColumnStep(NamedTuple):
    """A column of the later version. `before` is the same column of the earlier one; None: it was added since.

    The rows that were there before have `fill` in an added column.
    """

    before: LoggedColumn | None
    after: LoggedColumn
    fill: str | None


def column_steps(before: TableVersion, after: TableVersion) -> list[ColumnStep]:
    """Return how the columns of `after` follow from those of `before`, with the values of all earlier rows.

    Raises:
        LoadNeeded: that is not certain, or the values of earlier rows have changed.
    """

    def refuse(reason: str) -> LoadNeeded:
        return LoadNeeded(f"{table} {reason}")

    table = f"table {sql_name(before.schema, before.name)}"
    if before.relid != after.relid:
        raise refuse("was dropped and created again")
    if (before.schema, before.name) != (after.schema, after.name):
        raise refuse(f"was renamed to {sql_name(after.schema, after.name)}")
    if before.is_known and is_repeated(before, after):
        return [ColumnStep(column, column, None) for column in before.columns]
    if before.attributes is None or not before.is_known or not after.is_known:
        raise refuse("was changed several times before the archiver could read the publisher's catalog")
    if before.published != after.published:
        raise refuse("was published in another way, so that changes may be missing")
    if any(number > before.attributes for number in after.dropped):
        raise refuse("had columns added and dropped")
    earlier = {column.number: column for column in before.columns}
    numbers = {column.number for column in after.columns}
    added = [column for column in after.columns if column.number not in earlier]
    if added and not numbers.issuperset(earlier):
        raise refuse("had columns dropped and others added")
    is_rewritten = before.storage != after.storage
    steps = []
    for column in after.columns:
        was = earlier.get(column.number)
        name = f"column {sql_identifier(column.name)}"
        if was is not None:
            if is_rewritten and was.written != column.written:
                raise refuse(f"was rewritten, because {name} was changed")
            if was.type_oid != column.type_oid and not {was.type_oid, column.type_oid} <= _TEXTS:
                raise refuse(f"has another type in {name}")
        elif column.number is None or column.number <= before.attributes:
            raise refuse(f"has {name}, which was not published before")
        elif column.has_missing is None or (is_rewritten and not column.has_missing):
            raise refuse(f"has a new {name}, whose values in earlier rows are not known")
        steps.append(ColumnStep(was, column, column.missing if was is None else None))
    return steps


def following(before: TableVersion, after: TableVersion) -> TableVersion:
    """Return the version that holds after a step of column_steps(): `after`, or `before` if `after` only repeats it."""
    return before if before.is_known and is_repeated(before, after) else after


def is_same(before: TableVersion, after: TableVersion) -> bool:
    """Return True if a reader need not distinguish the versions: no column, value, name or key is different."""
    if before.relation() != after.relation() or (after.is_known and before.attributes != after.attributes):
        return False
    if before.primary_key != after.primary_key:
        return False
    try:
        steps = column_steps(before, after)
    except LoadNeeded:
        return False
    return all(step.before is not None for step in steps)


def change_of(before: TableVersion, after: TableVersion) -> str | None:
    """Return the difference of two versions as a sentence. None: it is none of columns, names or keys."""
    if not before.is_known or not after.is_known:
        return None
    changes = []
    if (before.schema, before.name) != (after.schema, after.name):
        changes.append(f"its name was {sql_name(before.schema, before.name)}")
    earlier = {column.number: column for column in before.columns}
    for column in after.columns:
        was, name = earlier.pop(column.number, None), f"column {sql_identifier(column.name)}"
        if was is None:
            changes.append(f"{name} was added")
            continue
        if was.name != column.name:
            changes.append(f"column {sql_identifier(was.name)} was renamed to {sql_identifier(column.name)}")
        if (was.type_oid, was.type_modifier) != (column.type_oid, column.type_modifier):
            changes.append(f"{name} has another type")
    changes += [f"column {sql_identifier(column.name)} was dropped" for column in earlier.values()]
    if _key(before) != _key(after):
        changes.append("its replica identity or primary key is another one")
    if before.published != after.published:
        changes.append("it is published in another way")
    if before.storage != after.storage:
        changes.append("it was rewritten")
    return (
        f"{changes[0][0].upper()}{changes[0][1:]}{''.join(f', {change}' for change in changes[1:])}."
        if changes
        else None
    )


def _key(version: TableVersion) -> tuple[object, ...]:
    numbers = tuple(column.number for column in version.columns if column.is_key)
    return version.replica_identity, version.primary_key, numbers


def is_repeated(before: TableVersion, after: TableVersion) -> bool:
    """Return True if `after` is described like `before`, and the catalog of a later time shows that it is the same.

    Args:
        before: a version whose catalog is known.
        after: a version whose catalog had other columns than those that were described.
    """
    if after.catalog is None or before.relation() != after.relation() or before.published != after.published:
        return False
    if before.attributes is None or after.attributes is None or before.primary_key != after.primary_key:
        return False
    written = {column.number: column.written for column in after.catalog}
    if before.storage != after.storage and any(
        written.get(column.number, column.written) != column.written for column in before.columns
    ):
        return False  # the rows were rewritten, perhaps with other values
    is_dropped = any(column.number in after.dropped for column in before.columns)
    # A dropped column may have been another one than the one that was described, if columns were also added.
    return not is_dropped or after.attributes == before.attributes


class SchemaHistory:
    """The versions of all tables of a log, in the order in which they were stored."""

    def __init__(self, versions: Iterable[TableVersion] = ()) -> None:
        self._versions: dict[int, list[TableVersion]] = {}
        for version in versions:
            self.add(version)

    @classmethod
    def read(cls, directory: Location) -> SchemaHistory:
        """Read the history of the log in `directory`; empty before the first change.

        Raises:
            ChangeLogDamaged: a line is damaged.
            ChangeLogError: the file cannot be read.
        """
        path = directory / SCHEMA
        with reading(path):
            lines = whole_lines(path)
        return cls(_decode(path, number, line) for number, line in enumerate(lines, 1))

    def add(self, version: TableVersion) -> None:
        """Add the next version of a table."""
        self._versions.setdefault(version.relid, []).append(version)

    def relids(self) -> list[int]:
        """Return the OIDs of all tables."""
        return list(self._versions)

    def labels(self) -> list[str]:
        """Return schema.name of all tables, also former ones."""
        return sorted({version.label for versions in self._versions.values() for version in versions})

    def of(self, relid: int) -> list[TableVersion]:
        """Return the versions of a table, oldest first."""
        return self._versions.get(relid, [])

    def named(self, label: str) -> list[TableVersion]:
        """Return the versions of all tables that had a name, by position. `label` is schema.name."""
        named = [version for versions in self._versions.values() for version in versions if version.label == label]
        return sorted(named, key=lambda version: version.position)


def store_versions(directory: Location, versions: Iterable[TableVersion]) -> None:
    """Add versions to the history of the log in `directory`, and sync them. Raises OSError."""
    append_line(directory / SCHEMA, b"".join(map(_encode, versions)))


def _encode(version: TableVersion) -> bytes:
    fields = version.as_json()
    return json.dumps({**fields, "checksum": json_checksum(json.loads(json.dumps(fields)))}).encode() + b"\n"


def _decode(path: Location, number: int, line: bytes) -> TableVersion:
    try:
        fields = json.loads(line)
        if fields.pop("checksum") != json_checksum(fields):
            raise ValueError("the checksum differs")
        return TableVersion.from_json(fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(f'change log file "{path}" is damaged in line {number}', detail=f"{error}.") from error
