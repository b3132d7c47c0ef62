"""CdcTable: a table of a pgcdc query, whose columns are fixed when the query starts.

**Purpose.** The changes of a range of the log belong to several versions of a table, and the schema history tells how
they follow from one another. A query has the columns of one version. CdcTable returns where the values of these columns
are in the rows of each other version: a `Placement`.

**Invariants.**

- A version has a placement only if each step between it and the query's version is certain (column_steps()), and no
  value would be lost. Otherwise it has a `Misfit` with the reason.
- A column that was added later has the value in earlier rows that the publisher's catalog has for them.
- Rows of a snapshot have the columns that the catalog had in the snapshot. Changes after it follow from these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa

from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import (
    ColumnStep,
    LoggedColumn,
    TableVersion,
    column_steps,
    following,
)
from subscriber.display import near_word, sql_identifier
from subscriber.errors import ApplyError, StatementError
from subscriber.lsn import Lsn
from subscriber.protocol.messages import RelationColumn, ReplicaIdentity
from subscriber.spark.sources.column_types import column_type, extends, has_struct
from subscriber.spark.sources.stream_origin import RowIdentity
from subscriber.sqlstate import UNDEFINED_TABLE


@dataclass(frozen=True, slots=True)
class CdcColumn:
    """A column of the query."""

    name: str
    kind: pa.DataType
    is_key: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of the query's columns in the rows of a version.

    Attributes:
        width: number of columns of the version.
        sources: for each column of the query, the index in the row. None: the value is that of `fills`.
        fills: for each column of the query, the value of rows that do not have the column.
        names: names of the version's columns, to recognize it.
        extra: indexes and names of columns that the query does not have.
    """

    width: int
    sources: tuple[int | None, ...]
    fills: tuple[bytes | None, ...]
    names: tuple[str, ...]
    extra: tuple[tuple[int, str], ...] = ()

    @property
    def is_same(self) -> bool:
        """Return True if the row has the query's columns, in their order."""
        return self.sources == tuple(range(self.width))


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why the rows of a version do not fit the query's columns. A query that starts at `position` can read on."""

    reason: str
    position: Lsn


Fit: TypeAlias = Placement | Misfit


@dataclass(frozen=True, slots=True)
class CdcTable:
    """A table of a query, see the head of the module. Picklable, for executors.

    Attributes:
        label: schema.name.
        columns: the columns of the query.
        is_full: the publisher sends whole old rows.
        positions: the positions from which on the versions hold, in order.
        fits: the fit of each version.
        snapshot: the fit of the snapshot's rows; None: there is no snapshot.
        identities: how changes identify rows, in the versions that fit, from the snapshot on.
        is_pinned: the query names the position whose columns it has, so a new query has the same columns.
    """

    label: str
    columns: tuple[CdcColumn, ...]
    is_full: bool
    positions: tuple[Lsn, ...]
    fits: tuple[Fit, ...]
    snapshot: Fit | None
    identities: tuple[RowIdentity, ...] = ()
    is_pinned: bool = False

    def fit(self, commit: Lsn) -> Fit:
        """Return the fit of the changes of a transaction whose commit record starts at `commit`."""
        index = max((i for i, position in enumerate(self.positions) if position <= commit), default=0)
        return self.fits[index]

    def fitting_end(self, start: Lsn, end: Lsn) -> Lsn:
        """Return the position up to which the changes after `start` fit: `end`, or an earlier one."""
        if isinstance(self.fit(start), Misfit):
            return start
        pairs = zip(self.positions, self.fits, strict=True)
        return min((p for p, fit in pairs if start < p < end and isinstance(fit, Misfit)), default=end)

    def struct(self) -> pa.DataType:
        """Return the type of a row."""
        return pa.struct([(column.name, column.kind) for column in self.columns])


def table_candidates(
    log: ChangeLog,
    label: str,
    snapshot: TableVersion | None,
    *,
    as_text: frozenset[str],
    rescue: bool,
    position: Lsn | None = None,
) -> Iterable[CdcTable]:
    """Yield the table with the columns of each version that it had, newest first.

    Args:
        log: the change log.
        label: schema.name.
        snapshot: the version of the snapshot's rows. None: no snapshot.
        as_text: columns to keep as text: name, or schema.table.column.
        rescue: values of columns that the query does not have are kept elsewhere.
        position: only the version that holds at this position. None: all versions.

    Raises:
        StatementError: the log has no such table.
    """
    versions = _versions(log, label, snapshot)
    if not versions:
        near = near_word(label, log.schema().labels())
        hint = 'Check the option "tables", or pass the option "snapshot": write_snapshot() describes all tables.'
        raise StatementError(
            f'the change log has no change of table "{label}"',
            hint=near or hint,
            sqlstate=UNDEFINED_TABLE,
        )
    last = len(versions) - 1
    if position is not None:
        last = max((i for i, version in enumerate(versions) if version.position <= position), default=0)
    for chosen in range(last, -1, -1) if position is None else [last]:
        candidate = _table(versions, chosen, label, snapshot, as_text, rescue)
        yield candidate if position is None else replace(candidate, is_pinned=True)


def _versions(log: ChangeLog, label: str, snapshot: TableVersion | None) -> list[TableVersion]:
    history = log.schema()
    relids = {version.relid for version in history.named(label)} | ({snapshot.relid} if snapshot is not None else set())
    sorted_versions = sorted((version for relid in relids for version in history.of(relid)), key=lambda v: v.position)
    if snapshot is None:
        return sorted_versions
    earlier = [version for version in sorted_versions if version.position < snapshot.position]
    # The archiver may have read the catalog for the version before the snapshot after it, with later changes in it.
    read_later = [replace(v, position=snapshot.position) for v in earlier[-1:] if v.asked > snapshot.position]
    return [
        *earlier,
        snapshot,
        *read_later,
        *(version for version in sorted_versions if version.position >= snapshot.position),
    ]


def _table(
    versions: Sequence[TableVersion],
    chosen: int,
    label: str,
    snapshot: TableVersion | None,
    as_text: frozenset[str],
    rescue: bool,
) -> CdcTable:
    version = versions[chosen]
    columns = tuple(
        CdcColumn(
            column.name,
            pa.string() if {column.name, f"{label}.{column.name}"} & as_text else _kind(column, version),
            column.is_key,
        )
        for column in version.columns
    )
    fits = [_fit(versions, index, chosen, columns, rescue) for index in range(len(versions))]
    first = _first(versions, snapshot)
    identities = [_identity(v, columns, fit) for v, fit in zip(versions[first:], fits[first:], strict=True)]
    return CdcTable(
        label,
        columns,
        all(v.replica_identity == ReplicaIdentity.FULL.value for v in versions[first:]),
        tuple(v.position for v in versions),
        tuple(fits),
        None if snapshot is None else fits[first],
        tuple(identity for identity in identities if identity is not None),
    )


def _identity(version: TableVersion, columns: Sequence[CdcColumn], fit: Fit) -> RowIdentity | None:
    """Return how the changes of a version identify rows, by the names that the query has. None: they do not fit."""
    if isinstance(fit, Misfit):
        return None
    is_full = version.replica_identity == ReplicaIdentity.FULL.value
    sent = tuple(column.name for column in version.columns if column.is_key)
    wanted = (version.key_names() or ()) if is_full else sent
    names = {
        version.columns[source].name: c.name
        for c, source in zip(columns, fit.sources, strict=True)
        if source is not None
    }
    key = tuple(names[name] for name in wanted if name in names)
    return RowIdentity(version.position, is_full, key if len(key) == len(wanted) else ())


def _first(versions: Sequence[TableVersion], snapshot: TableVersion | None) -> int:
    return 0 if snapshot is None else versions.index(snapshot)


def _kind(column: LoggedColumn, version: TableVersion) -> pa.DataType:
    relation_column = RelationColumn(column.is_key, column.name, column.type_oid, column.type_modifier)
    return column_type(relation_column, version.types)


def _fit(versions: Sequence[TableVersion], index: int, chosen: int, columns: Sequence[CdcColumn], rescue: bool) -> Fit:
    version = versions[index]
    try:
        if index <= chosen:
            return _forward(version, versions[index + 1 : chosen + 1])
        place = _backward(versions[chosen], versions[chosen + 1 : index + 1], version, rescue)
        _check_structs(columns, version, place, rescue)
        return place
    except ApplyError as error:
        return Misfit(error.message, version.position if index > chosen else versions[chosen].position)


def _check_structs(columns: Sequence[CdcColumn], later: TableVersion, place: Placement, rescue: bool) -> None:
    """Raise ApplyError if structs of the query do not have the values of a later version of their composite types."""
    for column, source in zip(columns, place.sources, strict=True):
        if source is None or not has_struct(column.kind):
            continue
        name = f"column {sql_identifier(column.name)}"
        kind = _kind(later.columns[source], later)
        if not extends(column.kind, kind):
            raise ApplyError(f"the composite type of {name} has a dropped attribute")
        # Values with more attributes do not fit, so `rescue` keeps them.
        if not extends(kind, column.kind) and not rescue:
            raise ApplyError(f"an attribute was added to the composite type of {name}")


def _names(version: TableVersion) -> tuple[str, ...]:
    return tuple(column.name for column in version.columns)


def _forward(version: TableVersion, later: Iterable[TableVersion]) -> Placement:
    """Return the placement of later columns in the rows of a version."""
    sources: list[int | None] = list(range(len(version.columns)))
    fills: list[bytes | None] = [None] * len(sources)
    current = version
    for step_to in later:
        places = _places(current.columns)
        steps = column_steps(current, step_to)
        kept = [None if step.before is None else places[step.before.name] for step in steps]
        sources = [None if place is None else sources[place] for place in kept]
        fills = [_fill(step, fills, place) for step, place in zip(steps, kept, strict=True)]
        current = following(current, step_to)
    return Placement(len(version.columns), tuple(sources), tuple(fills), _names(version))


def _fill(step: ColumnStep, fills: Sequence[bytes | None], place: int | None) -> bytes | None:
    if place is not None:
        return fills[place]
    return None if step.fill is None else step.fill.encode()


def _backward(chosen: TableVersion, later: Iterable[TableVersion], version: TableVersion, rescue: bool) -> Placement:
    """Return the placement of the columns of `chosen` in the rows of a later version."""
    current = chosen
    origins: list[int | None] = list(range(len(chosen.columns)))  # of the current columns, in those of `chosen`
    for step_to in later:
        places = _places(current.columns)
        steps = column_steps(current, step_to)
        origins = [None if step.before is None else origins[places[step.before.name]] for step in steps]
        current = following(current, step_to)
    for index, column in enumerate(chosen.columns):
        if index not in origins:
            raise ApplyError(f"column {sql_identifier(column.name)} was dropped")
    extra = tuple((place, current.columns[place].name) for place, origin in enumerate(origins) if origin is None)
    if extra and not rescue:
        raise ApplyError(f"column {sql_identifier(extra[0][1])} was added")
    sources = tuple(origins.index(index) for index in range(len(chosen.columns)))
    return Placement(len(version.columns), sources, (None,) * len(sources), _names(version), extra)


def _places(columns: Iterable[LoggedColumn]) -> Mapping[str, int]:
    return {column.name: place for place, column in enumerate(columns)}
