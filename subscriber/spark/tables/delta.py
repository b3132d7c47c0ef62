"""One Delta table: created with its rows, then one commit for each batch, with the position that the table reaches.

**Invariants.** A commit of rows records its position twice. As an application transaction, whose newest value Delta
keeps, it makes a repeated batch harmless. In the commit's metadata, readers of the table find the position. A commit
that changes the columns records the position of the new version in the same way, in another application.

**Failure cases.**

- Killed before the commit: nothing has happened.
- Killed after the commit: the repeated batch finds that the table has its position.
- Killed after the commit that changes the columns, which comes first: the repeated batch finds that the table has them.
- Partitions changed with the columns: Delta's library replaces the table, which keeps its earlier versions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema, TableFeatures, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from subscriber.changelog.storage import Location, location, remove_directory
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.spark.tables.cluster import Cluster, following_cluster
from subscriber.spark.tables.data_files import DataFile, DataFolder, NewFile
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.partitions import (
    HINT,
    IDENTITY,
    PartitionColumn,
    Partitions,
    check_partitions,
    hive_texts,
)
from subscriber.spark.tables.position_deletes import NewDeletes
from subscriber.spark.tables.table_format import (
    COLUMNS,
    NUMBER,
    POSITION,
    CommitConflict,
    NewColumn,
    VersionGone,
    converted,
)

APPLICATION = "subscriber"  # whose transactions are the positions of rows; those of COLUMNS are of changed columns

# Features of Delta tables that these commits observe.
_TIMESTAMP_NTZ, _WITHOUT_ZONE = "timestampNtz", pa.timestamp("us")
_FEATURES = frozenset({"appendOnly", "invariants", _TIMESTAMP_NTZ})
_WRITER_VERSIONS = (1, 2, 7)  # 7: the table names its features
_LOG_RETENTION = "delta.logRetentionDuration"

CLUSTER = "subscriber.cluster"  # in the metadata of a cluster column: its place among them, from 1 on

# Delta's library takes the address and the credentials of an object store from the environment, as ours does.
_OPTIONS = {"conditional_put": "etag", "timeout": "60s"}  # the store decides which of two commits is first


def table_format(directory: Location, lake_id: str, catalog: str | None) -> DeltaFormat:
    """Return the format. A Delta table is its directory, so there is nothing to configure."""
    return DeltaFormat()


class DeltaFormat:
    """The tables of a lake as Delta tables."""

    title = "Delta"

    def connect(self) -> None:
        pass

    def open(self, label: str, path: Location) -> StoredDeltaTable:
        return StoredDeltaTable(path)

    def create(
        self,
        label: str,
        path: Location,
        schema: pa.Schema,
        position: Lsn,
        rows: Iterable[pa.RecordBatch],
        layout: Layout = NO_LAYOUT,
    ) -> None:
        folder, properties = _folder(path, schema, layout), _committed(position)
        added = folder.write(rows)
        if DeltaTable.is_deltatable(str(path), storage_options=_OPTIONS):
            StoredDeltaTable(path).replace_all(folder, added, properties)
            return
        create_table_with_add_actions(
            str(path),
            Schema.from_arrow(folder.schema),
            [_add(file, layout.partitions) for file in added],
            partition_by=[partition.column for partition in layout.partitions],
            storage_options=_OPTIONS,
            commit_properties=properties,
        )

    def remove(self, label: str, path: Location) -> None:
        remove_directory(path)

    def raises_storage_error(self, error: Exception) -> bool:
        return False  # they are OSErrors


class StoredDeltaTable:
    """A Delta table. `table` is the table as Delta's library has it."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self.table = DeltaTable(str(path), storage_options=_OPTIONS)

    @property
    def version(self) -> int:
        return self.table.version()

    @property
    def position(self) -> Lsn:
        return Lsn(self.table.transaction_version(APPLICATION) or 0)

    @property
    def number(self) -> int:
        return self.table.transaction_version(NUMBER) or 0

    @property
    def columns_position(self) -> Lsn:
        return Lsn(self.table.transaction_version(COLUMNS) or 0)

    @property
    def folder(self) -> DataFolder:
        partitions = tuple(map(PartitionColumn, self.table.metadata().partition_columns))
        schema = pa.schema(self.table.schema().to_arrow())
        layout = Layout(partitions, _cluster(schema))
        return DataFolder(self.path, "", schema, None, layout, bool(partitions))

    def to_arrow(self) -> pa.Table:
        return self.table.to_pyarrow_table()

    def load_version(self, version: int) -> None:
        try:
            self.table.load_as_version(version)
        except (DeltaError, OSError) as error:
            raise VersionGone(f"cannot be read: {error}") from error

    def check_writable(self) -> None:
        protocol = self.table.protocol()
        unknown = set(protocol.writer_features or ()) - _FEATURES
        if protocol.min_writer_version not in _WRITER_VERSIONS:
            unknown.add(f"writer version {protocol.min_writer_version}")
        folder = self.folder
        try:
            check_partitions(folder.partitions, folder.schema)
        except ApplyError:
            unknown.add(f"partitions by {', '.join(map(str, folder.partitions))}")
        if unknown:
            raise ApplyError(
                f"its Delta table has a feature that is not supported here: {', '.join(sorted(unknown))}",
                hint="Another program has changed the table.",
            )

    def files(self, column: str | None) -> list[DataFile]:
        names, cluster = self.table.metadata().partition_columns, self.folder.cluster

        def bound(found: dict[str, Any], side: str, name: str | None = column) -> Any:
            return (found.get("partition" if name in names else side) or {}).get(name)

        return [
            DataFile(
                unquote(action["path"]),
                action["size_bytes"],
                bound(action, "min"),
                bound(action, "max"),
                partition=tuple(action["partition"][name] for name in names),
                cluster=bound(action, "min", cluster[0]) if cluster else None,
            )
            for action in pa.table(self.table.get_add_actions()).to_pylist()
        ]

    def commit(
        self,
        removed: Sequence[DataFile],
        added: Sequence[NewFile],
        position: Lsn,
        number: int | None = None,
        deletes: Sequence[NewDeletes] = (),
        *,
        same_rows: bool = False,
    ) -> int:
        assert not deletes  # the folder has no address
        now, partitions = int(time.time() * 1000), self.folder.partitions
        gone = [
            RemoveAction(file.path, not same_rows, now, file.size, hive_texts(partitions, file.partition))
            for file in removed
        ]
        try:
            self.table.create_write_transaction(
                [*gone, *(_add(file, partitions, same_rows=same_rows) for file in added)],
                "append",
                self.table.schema(),
                partition_by=[partition.column for partition in partitions],
                commit_properties=_committed(position, number),
            )
        except CommitFailedError as error:
            raise CommitConflict(str(error)) from error
        return self.version + 1  # no other commit has come first

    def change_columns(self, columns: Sequence[NewColumn], position: Lsn) -> None:
        if self.columns_position >= position:
            return
        folder = self.folder
        properties = CommitProperties(app_transactions=[Transaction(COLUMNS, int(position))])
        # Delta keeps the order of columns if their names are the same, so the order is of no importance.
        kept = {(column.source, column.name, column.kind) for column in columns if column.source is not None}
        new = [column for column in columns if column.source is None]
        if kept == {(field.name, field.name, field.type) for field in folder.schema}:
            if new and all(column.fill is None for column in new):
                fields = Schema.from_arrow(pa.schema([(column.name, column.kind) for column in new])).fields
                added = [Field(field.name, field.type, nullable=True) for field in fields]
                self.table.alter.add_columns(added, commit_properties=properties)
            if not any(column.fill is not None for column in new):
                return
        schema = pa.schema([(column.name, column.kind) for column in columns])
        names = {column.source: column.name for column in columns if column.source is not None}
        changed = _folder(self.path, schema, folder.layout.following(names, schema))
        rows = converted(folder.rows(self.files(None)), columns, schema)
        self.replace_all(changed, changed.write(rows), properties)

    def replace_all(self, folder: DataFolder, added: Sequence[NewFile], properties: CommitProperties) -> None:
        """Replace columns, layout and files of the table in one commit."""
        schema, names = folder.schema, [partition.column for partition in folder.partitions]
        metadata = self.table.metadata()
        if names or metadata.partition_columns:
            # An ordinary transaction keeps the partitions that the table has. This one is repeated if another commit
            # comes first: that can only be a compaction of the same rows.
            create_table_with_add_actions(
                str(self.path),
                Schema.from_arrow(schema),
                [_add(file, folder.partitions) for file in added],
                "overwrite",
                names,
                configuration=metadata.configuration,
                storage_options=_OPTIONS,
                commit_properties=properties,
            )
            return
        features = self.table.protocol().writer_features or []
        if any(field.type == _WITHOUT_ZONE for field in schema) and _TIMESTAMP_NTZ not in features:
            feature = TableFeatures.TimestampWithoutTimezone
            self.table.alter.add_feature(feature, allow_protocol_versions_increase=True)
        self.table.create_write_transaction(
            [_add(file, ()) for file in added], "overwrite", Schema.from_arrow(schema), commit_properties=properties
        )

    def clean_up(self, hours: int, versions: frozenset[int]) -> int:
        wanted = f"interval {hours} hours"
        if self.table.metadata().configuration.get(_LOG_RETENTION) != wanted:
            self.table.alter.set_table_properties({_LOG_RETENTION: wanted})
        removed = self.table.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=True)
        self.table.create_checkpoint()
        self.table.cleanup_metadata()
        return len(removed)


def _committed(position: Lsn, number: int | None = None) -> CommitProperties:
    """Return the properties of a commit of rows.

    The commit fails if another one has come first. Delta's library would repeat it without regard to the files that
    the other one has removed.
    """
    numbered = [] if number is None else [Transaction(NUMBER, number)]
    return CommitProperties(
        custom_metadata={POSITION: str(position)},
        app_transactions=[Transaction(APPLICATION, int(position)), *numbered],
        max_commit_retries=0,
    )


def table_exists(into: Location | str) -> bool:
    """Return True if there is a table that is not one of a lake."""
    return bool(DeltaTable.is_deltatable(str(location(into)), storage_options=_OPTIONS))


def open_table(into: Location | str, columns: pa.Schema) -> StoredDeltaTable:
    """Open a table that is not one of a lake, and create it with these columns if it does not exist."""
    path = location(into)
    if not table_exists(into):
        DeltaTable.create(str(path), Schema.from_arrow(columns), storage_options=_OPTIONS)
    return StoredDeltaTable(path)


def _folder(path: Location, schema: pa.Schema, layout: Layout) -> DataFolder:
    """Return the folder of a new table. Raises ApplyError if Delta cannot have the layout."""
    layout.check(schema)
    partitions = layout.partitions
    for partition in partitions:
        if partition.transform != IDENTITY:
            raise ApplyError(f"a Delta table cannot have partitions by {partition}, only by whole values", hint=HINT)
    if partitions and len(partitions) == len(schema):
        raise ApplyError("a Delta table needs a column that is not one of its partitions", hint=HINT)
    for place, name in enumerate(layout.cluster, 1):
        index = schema.get_field_index(name)
        schema = schema.set(index, schema.field(index).with_metadata({CLUSTER: str(place)}))
    return DataFolder(path, "", schema, None, layout, bool(partitions))


def _cluster(schema: pa.Schema) -> Cluster:
    """Return the cluster columns of a table.

    They are in the metadata of columns, which a commit changes with the columns. Delta's library refuses tables with
    the feature "clustering" of other programs, and properties of tables that it does not know.
    """
    places = {field.name: (field.metadata or {}).get(CLUSTER.encode()) for field in schema}
    places_by_depth = sorted((len(place), place, name) for name, place in places.items() if place is not None)
    return following_cluster((name for *_, name in places_by_depth), {name: name for name in places}, schema)


def _add(file: NewFile, partitions: Partitions, *, same_rows: bool = False) -> AddAction:
    values = hive_texts(partitions, file.partition)
    return AddAction(file.path, file.size, values, int(time.time() * 1000), not same_rows, _statistics(file))


def _statistics(file: NewFile) -> str:
    """Return Delta's statistics of a file: the number of rows, and the smallest and largest values of columns."""
    ranges = {name: column for name, column in file.columns.items() if column.low is not None}
    return json.dumps(
        {
            "numRecords": file.rows,
            "minValues": {name: _in_json(column.low) for name, column in ranges.items()},
            "maxValues": {name: _in_json(column.high) for name, column in ranges.items()},
            "nullCount": {name: column.nulls for name, column in file.columns.items()},
        }
    )


def _in_json(found: Any) -> Any:
    if isinstance(found, datetime):
        return found.strftime("%Y-%m-%dT%H:%M:%S.%f") + ("Z" if found.tzinfo is not None else "")
    return found.isoformat() if isinstance(found, date) else found
