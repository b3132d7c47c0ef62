"""LakeTable: what the lake knows of one table, and the versions of its stored table by position.

    states/<table>      a JSON object: the columns, the problem of a table that is set aside, the gaps in its history
    versions/<table>    a line for each commit: the position, and the version that its format has then

A table is set aside when its changes cannot be applied exactly. It keeps the rows of its last right position, and the
other tables follow the log. A reload makes it right again, so that the table has a gap between the two positions.

**Failure cases.**

- Killed in the middle of a line of versions/: the line is cut off when the batch is repeated.
- Killed during a reload: the table was set aside before, so it stays so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from subscriber.changelog.schema_history import LoggedColumn, TableVersion
from subscriber.changelog.storage import (
    Location,
    append_line,
    claim_file,
    cut_unfinished_line,
    whole_lines,
    write_file,
)
from subscriber.lsn import Lsn
from subscriber.protocol.messages import RelationColumn
from subscriber.spark.lake.layout_options import options_of_table
from subscriber.spark.sources.arrow_types import arrow_type
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.partitions import PartitionColumn

AHEAD: Literal["ahead"] = "ahead"  # the condition of a table that the lake has not reached


class TableProblem(NamedTuple):
    """Why a table is set aside."""

    message: str
    hint: str
    needs_load: bool = False  # a load from the publisher makes the table right, without other settings


NOT_LOADED = TableProblem("its load was not finished", "", needs_load=True)
LOADING = TableProblem(
    "it is being loaded by ranges", "`subscriber lake advance` with --source continues the load.", needs_load=True
)


class Gap(NamedTuple):
    """The table is not right at positions after `after` and before `until`; None: up to now."""

    after: Lsn
    until: Lsn | None


@dataclass(frozen=True, slots=True)
class LakeTable:
    """The state of one table. `label` is schema.name.

    `keyed`: a batch that starts there or later finds rows by the primary key of `version`, if it has one. The
    publisher's catalog had the key at that position, and each change of the key is another version.
    """

    label: str
    version: TableVersion | None = None  # None: the table is not loaded
    text: tuple[int, ...] = ()  # numbers of the columns that are kept as text
    loaded: Lsn = Lsn(0)  # position of the last load
    problem: TableProblem | None = None  # None: the table is not set aside
    gaps: tuple[Gap, ...] = ()
    keyed: Lsn = Lsn(0)
    layout: Layout = NO_LAYOUT  # by the publisher's names of the columns; that of the next load if it is set aside

    @property
    def is_current(self) -> bool:
        """Return True if the table is loaded and not set aside."""
        return self.version is not None and self.problem is None

    @property
    def is_present(self) -> bool:
        """Return True unless the table is no longer published."""
        return self.is_current or self.problem is not None

    def has(self, position: Lsn) -> bool:
        """Return True if the table is right at `position`, after its first load."""
        return not any(gap.after < position and (gap.until is None or position < gap.until) for gap in self.gaps)

    def set_aside(self, problem: TableProblem, after: Lsn) -> LakeTable:
        """Return the state of a table whose changes after `after` cannot be applied."""
        gaps = self.gaps
        if self.is_current:
            gaps += (Gap(after, None),)
        return replace(self, problem=problem, gaps=gaps)

    def reloaded(self, version: TableVersion, text: tuple[int, ...], position: Lsn) -> LakeTable:
        """Return the state after a load."""
        gaps = tuple(gap if gap.until is not None else Gap(gap.after, position) for gap in self.gaps)
        return LakeTable(self.label, version, text, position, None, gaps, position, self.layout)

    def following(self, version: TableVersion, text: tuple[int, ...]) -> LakeTable:
        """Return the state with a later version."""
        before = self.version.primary_key if self.version is not None else None
        keyed = self.keyed if version.primary_key == before else version.asked
        return replace(self, version=version, text=text, keyed=keyed)

    def key_names(self, start: Lsn) -> tuple[str, ...] | None:
        """Return the columns of the primary key by which a batch from `start` on finds rows, in the order of rows.

        None: it finds them by the replica identity, or by all values if that is FULL.
        """
        return self.version.key_names() if self.version is not None and start >= self.keyed else None

    def ended(self, after: Lsn) -> LakeTable:
        """Return the state of a table that is no longer published."""
        return replace(self.set_aside(NOT_LOADED, after), version=None, problem=None)

    def position(self, reached: Lsn) -> Lsn:
        """Return the newest position at which the table is right, in a lake that has reached `reached`."""
        return self.gaps[-1].after if self.problem is not None and self.gaps else max(self.loaded, reached)

    def condition(self, reached: Lsn) -> Literal["current", "ahead", "set aside"]:
        """Return how the table is, in a lake that has reached `reached`. One that is ahead can be read later."""
        if self.problem is not None:
            return "set aside"
        return AHEAD if self.loaded > reached else "current"

    @property
    def needs_load(self) -> bool:
        """Return True if the table is set aside, and a load from the publisher makes it right."""
        return self.problem is not None and self.problem.needs_load

    def names(self) -> list[str]:
        """Return the names of the columns in the lake. No two differ only in case.

        Delta and Spark do not distinguish such names. A later column of the same name has its number appended.
        """
        columns = self.version.columns if self.version is not None else ()
        taken = {column.name for column in columns}
        used: set[str] = set()
        chosen = []
        for column in columns:
            name = column.name
            while name.lower() in used or (name != column.name and name in taken):
                name += f"_{column.number}"
            used.add(name.lower())
            chosen.append(name)
        return chosen

    def kind(self, column: LoggedColumn) -> pa.DataType:
        """Return the column's type in the lake."""
        if column.number in self.text:
            return pa.string()
        return arrow_type(RelationColumn(column.is_key, column.name, column.type_oid, column.type_modifier))

    def as_text(self) -> frozenset[str]:
        """Return the columns that are kept as text, as schema.table.column."""
        columns = self.version.columns if self.version is not None else ()
        return frozenset(f"{self.label}.{column.name}" for column in columns if column.number in self.text)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as from_json() reads them."""
        return {
            "table": self.label,
            "version": self.version.as_json() if self.version is not None else None,
            "text": self.text,
            "loaded": str(self.loaded),
            "keyed": str(self.keyed),
            "problem": self.problem._asdict() if self.problem is not None else None,
            "partitions": self.layout.partitions,
            "cluster": self.layout.cluster,
            "gaps": [[str(gap.after), str(gap.until) if gap.until is not None else None] for gap in self.gaps],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> LakeTable:
        """Return the state that as_json() was called on."""
        return cls(
            fields["table"],
            TableVersion.from_json(fields["version"]) if fields["version"] else None,
            tuple(fields["text"]),
            Lsn.parse(fields["loaded"]),
            TableProblem(**fields["problem"]) if fields["problem"] else None,
            tuple(
                Gap(Lsn.parse(after), Lsn.parse(until) if until is not None else None)
                for after, until in fields["gaps"]
            ),
            Lsn.parse(fields["keyed"]),
            Layout(
                tuple(PartitionColumn(*partition) for partition in fields["partitions"]),
                tuple(fields["cluster"]),
            ),
        )


def text_columns(version: TableVersion, as_text: frozenset[str]) -> tuple[int, ...]:
    """Return the numbers of the columns that are named in `as_text`, as schema.table.column."""
    return tuple(
        column.number
        for column in version.columns
        if column.number is not None and f"{version.label}.{column.name}" in as_text
    )


def chosen_layout(state: LakeTable, version: TableVersion, as_text: frozenset[str], given: Layout) -> Layout:
    """Return the layout of a table that is loaded.

    Args:
        state: the table before the load.
        version: its columns.
        as_text: the columns to keep as text, as schema.table.column.
        given: the layout of any table, by schema.table.column (layout_options.py).

    Returns:
        The given one of this table. Without a given part, that part stays, for the columns that can still have it.
    """
    table = LakeTable(version.label, version, text_columns(version, as_text))
    schema = pa.schema([(column.name, table.kind(column)) for column in version.columns])
    before = state.layout.following({name: name for name in schema.names}, schema)
    return options_of_table(version.label, given).instead_of(before)


def stored_layout(version: TableVersion, layout: Layout) -> Layout:
    """Return the layout of a table by the names that the columns have in the lake."""
    names = LakeTable(version.label, version).names()
    stored = {column.name: name for column, name in zip(version.columns, names, strict=True)}
    return Layout(
        tuple(
            partition._replace(column=stored.get(partition.column, partition.column)) for partition in layout.partitions
        ),
        tuple(stored.get(name, name) for name in layout.cluster),
    )


def lake_schema(version: TableVersion, as_text: frozenset[str] = frozenset()) -> pa.Schema:
    """Return the columns of a table that is loaded. `as_text` are columns to keep as text, as schema.table.column."""
    table = LakeTable(version.label, version, text_columns(version, as_text))
    return pa.schema(zip(table.names(), map(table.kind, version.columns), strict=True))


class CommittedVersion(NamedTuple):
    """A version of a stored table, and the position that it has."""

    position: Lsn
    version: int


def read_versions(path: Location) -> list[CommittedVersion]:
    """Return the versions of a table, oldest first. Empty if it was never loaded."""
    lines = [line.decode().split() for line in whole_lines(path)]
    return [CommittedVersion(Lsn.parse(lsn), int(version)) for lsn, version in lines]


def add_version(path: Location, position: Lsn, version: int) -> None:
    """Add the version that has `position`, unless a version has it."""
    versions = read_versions(path)
    if versions and versions[-1].position >= position:
        return
    if isinstance(path, Path):
        cut_unfinished_line(path)
    append_line(path, _line(CommittedVersion(position, version)))


def write_versions(path: Location, versions: Sequence[CommittedVersion]) -> None:
    """Replace the versions of a table."""
    write_file(path, b"".join(map(_line, versions)))


def _line(version: CommittedVersion) -> bytes:
    return f"{version.position} {version.version}\n".encode()


def write_json(path: Location, fields: Mapping[str, Any]) -> None:
    """Write a small file atomically."""
    write_file(path, json.dumps(fields).encode())


def claim_json(path: Location, fields: Mapping[str, Any]) -> None:
    """Write a small file that must not exist with other contents. Errors are those of claim_file()."""
    claim_file(path, json.dumps(fields).encode())


def read_json(path: Location) -> Any:
    """Return the contents of a file of write_json()."""
    return json.loads(path.read_bytes())
