"""StoredIcebergTable: one Iceberg table, with its snapshots and manifests.

A snapshot has one new manifest: the entries of its new files, of the files that it removes, and of the files that were
in the same manifests as those. Small manifests are written again together when there are many. So the number of
manifests stays small, and a commit reads and writes those of the files that it changes. Delete files
(position_deletes.py) have manifests of their own. An entry keeps its sequence number: a delete file applies to data
files whose number is not greater. All files of a version have the same specification of partitions: if that changes,
all of them are written again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import count
from operator import or_
from typing import Literal
from uuid import uuid4

import pyarrow as pa
from pyiceberg.exceptions import (
    CommitFailedException,
)
from pyiceberg.manifest import DataFile as IcebergFile
from pyiceberg.manifest import (
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import DataScan, Table
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import (
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSnapshotUpdate,
    AssertCurrentSchemaId,
    AssertDefaultSortOrderId,
    AssertDefaultSpecId,
    AssertLastAssignedFieldId,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSpecUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.transforms import parse_transform
from pyiceberg.types import NestedField

from subscriber.changelog.storage import Location, directory_names, modified_times
from subscriber.errors import ApplyError
from subscriber.lsn import Lsn
from subscriber.spark.tables.data_files import DataFile, DataFolder, NewFile
from subscriber.spark.tables.iceberg_io import location_of, path_of
from subscriber.spark.tables.iceberg_order import IcebergLayout, cluster_of, is_followed, order_updates, order_with
from subscriber.spark.tables.iceberg_types import (
    arrow_schema,
    deleted_from,
    iceberg_delete_file,
    iceberg_file,
    iceberg_type,
    is_readable_as,
    key_range,
    partition_values,
)
from subscriber.spark.tables.layout import Layout
from subscriber.spark.tables.partitions import (
    IDENTITY,
    PartitionColumn,
    Partitions,
    check_partitions,
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

_DATA, _METADATA = "data", "metadata"  # folders in the directory of a table
MERGE_MODE, COPY_ON_WRITE = "write.merge.mode", "copy-on-write"  # a property of tables, as Iceberg documents it
_MANY = 20  # small manifests of a table, from which on they are written again as one
_SMALL = 1024 * 1024  # bytes
_COMPRESSION: Literal["deflate"] = "deflate"  # of manifests


class StoredIcebergTable:
    """An Iceberg table. `scan()` reads the version that is loaded."""

    def __init__(self, table: Table, path: Location) -> None:
        """Open a table of a catalog. Raises ApplyError if its files are not in `path`."""
        if location_of(path_of(table.location())) != location_of(path):
            raise ApplyError(
                f"the files of its Iceberg table are in {table.location()}, and not in {location_of(path)}",
                hint="The locations of Iceberg tables are absolute: a lake that has been moved cannot be written.",
            )
        self.table = table
        self.path = path
        self._snapshot_id: int | None = None  # None: the newest version

    @property
    def version(self) -> int:
        # The newest snapshot may be another program's, with the same rows.
        position = str(self.position)
        return next(
            (snapshot.snapshot_id for snapshot in reversed(self.table.snapshots()) if _position(snapshot) == position),
            0,
        )

    @property
    def position(self) -> Lsn:
        if self._snapshot_id is None:
            position = self.table.properties.get(POSITION)
        else:
            position = _position(self.table.snapshot_by_id(self._snapshot_id))
        return Lsn.parse(position) if position else Lsn(0)

    @property
    def number(self) -> int:
        return int(self.table.properties.get(NUMBER, 0))

    @property
    def columns_position(self) -> Lsn:
        position = self.table.properties.get(COLUMNS)
        return Lsn.parse(position) if position else Lsn(0)

    @property
    def folder(self) -> DataFolder:
        return self.folder_of(self.table.schema(), self._layout)

    @property
    def _layout(self) -> IcebergLayout:
        return IcebergLayout(self.table.spec(), self.table.sort_order())

    def folder_of(self, schema: Schema, layout: IcebergLayout) -> DataFolder:
        """Return the folder of the files with these columns and this layout."""
        has_deletes = self.table.properties.get(MERGE_MODE) != COPY_ON_WRITE
        address = self._directory if has_deletes else None
        return DataFolder(self.path, f"{_DATA}/", arrow_schema(schema), address, layout_of(layout, schema))

    def scan(self) -> DataScan:
        """Return a scan of the version that is loaded."""
        return self.table.scan(snapshot_id=self._snapshot_id)

    def to_arrow(self) -> pa.Table:
        return self.scan().to_arrow()

    def load_version(self, version: int) -> None:
        if self.table.snapshot_by_id(version) is None:
            raise VersionGone("has been removed from the table")
        self._snapshot_id = version

    def check_writable(self) -> None:
        unknown = []
        spec, schema = self.table.spec(), self.table.schema()
        manifests = [manifest for manifest, entries in self._entries if entries]
        try:
            check_partitions(partitions_of(spec, schema), arrow_schema(schema))
        except ApplyError:
            unknown.append(f"partitions by {', '.join(str(field.transform) for field in spec.fields)}")
        if any(written.partition_spec_id != spec.spec_id for written in manifests):
            unknown.append("files with other partitions")
        if self.table.format_version != 2:
            unknown.append(f"format version {self.table.format_version}")
        if not all(deleted_from(file) for file in self._files(ManifestContent.DELETES)):
            unknown.append("delete files of other kinds")
        if unknown:
            raise ApplyError(
                f"its Iceberg table has a feature that is not supported here: {', '.join(unknown)}",
                hint="Another program has changed the table.",
            )

    def files(self, column: str | None) -> list[DataFile]:
        schema = self.table.schema()
        field = schema.find_field(column) if column is not None else None
        cluster = [schema.find_field(name) for name in cluster_of(self.table.sort_order(), schema)[:1]]
        deletes = defaultdict[str | None, list[str]](list)
        for file in self._files(ManifestContent.DELETES):
            deletes[deleted_from(file)].append(self._relative(file))
        return [
            DataFile(
                self._relative(file),
                file.file_size_in_bytes,
                *key_range(file, field),
                tuple(sorted(deletes[file.file_path])),
                partition_values(file),
                *(key_range(file, first)[0] for first in cluster),
            )
            for file in self._files(ManifestContent.DATA)
        ]

    def _files(self, content: ManifestContent) -> list[IcebergFile]:
        """Return the files of the newest version that have data, or deletes."""
        fitting = [entries for manifest, entries in self._entries if manifest.content == content]
        return [entry.data_file for entries in fitting for entry in entries]

    @cached_property
    def _entries(self) -> list[tuple[ManifestFile, list[ManifestEntry]]]:
        """The manifests of the newest version, and their entries of files that it has."""
        snapshot, io = self.table.current_snapshot(), self.table.io
        manifests = snapshot.manifests(io) if snapshot is not None else []
        return [(manifest, manifest.fetch_manifest_entry(io)) for manifest in manifests]

    @property
    def _directory(self) -> str:
        return f"{self.table.location().rstrip('/')}/"

    def _relative(self, file: IcebergFile) -> str:
        if not file.file_path.startswith(self._directory):
            raise ApplyError(f"its Iceberg table has a file that is not in {self._directory}: {file.file_path}")
        return file.file_path.removeprefix(self._directory)

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
        properties = {POSITION: str(position)} | ({} if number is None else {NUMBER: str(number)})
        try:
            return self.replace(removed, added, properties, deletes=deletes, same_rows=same_rows)
        except CommitFailedException as error:
            raise CommitConflict(str(error)) from error

    def change_columns(self, columns: Sequence[NewColumn], position: Lsn) -> None:
        if self.columns_position >= position:
            return
        schema, properties = self.schema_with(columns), {COLUMNS: str(position)}
        before = {field.name: field.field_id for field in self.table.schema().fields}
        numbers = [before.get(column.source or "") for column in columns]
        kept = [field.field_id == number for field, number in zip(schema.fields, numbers, strict=True)]
        empty = [column.source is None and column.fill is None for column in columns]
        names = {column.source: column.name for column in columns if column.source is not None}
        layout = layout_of(self._layout, self.table.schema()).following(names, arrow_schema(schema))
        layout.check(arrow_schema(schema))
        stored = self.layout_with(layout, schema)
        if stored.spec == self.table.spec() and all(map(or_, kept, empty)):  # so no row changes
            updates = self._schema_updates(schema) + order_updates(self.table.metadata, stored.order)
            self._commit(updates, self._schema_requirements(), properties)
            return
        self.check_writable()
        folder, files = self.folder_of(schema, stored), self.files(None)
        added = folder.write(converted(self.folder.rows(files), columns, folder.schema))
        self.replace(files, added, properties, schema, stored)

    def schema_with(self, columns: Sequence[NewColumn]) -> Schema:
        """Return the schema of the table with other columns.

        A column keeps its number if its values can be read from the files of the former one.
        """
        before = {field.name: field for field in self.table.schema().fields}
        numbers = count(self.table.metadata.last_column_id + 1)
        fields = []
        for column in columns:
            kind, field = iceberg_type(column.kind, numbers), before.get(column.source or "")
            if column.source is None or field is None or not is_readable_as(field.field_type, kind):
                number = next(numbers)
            else:
                number = field.field_id
            fields.append(NestedField(number, column.name, kind, required=False))
        highest = max(schema.schema_id for schema in self.table.metadata.schemas)
        return Schema(*fields, schema_id=highest + 1)

    def layout_with(self, layout: Layout, schema: Schema) -> IcebergLayout:
        """Return the layout of a table with other columns, as the metadata of the table have it."""
        order = order_with(self.table.metadata, layout.cluster, schema)
        return IcebergLayout(self._spec_with(layout.partitions, schema), order)

    def _spec_with(self, partitions: Partitions, schema: Schema) -> PartitionSpec:
        """Return the specification of partitions of a table with other columns.

        It is the one that the table has, if that has these partitions, and no other column has one of their names.
        """
        metadata = self.table.metadata
        numbers = count((metadata.last_partition_id or PARTITION_FIELD_ID_START - 1) + 1)
        before = self.table.schema()
        if _is_valid(metadata.spec(), before, schema) and partitions_of(metadata.spec(), schema) == partitions:
            return metadata.spec()
        if not partitions:
            unpartitioned = (spec for spec in metadata.partition_specs if not spec.fields)
            if (fitting := next(unpartitioned, None)) is not None:
                return fitting
        fields = []
        for partition in partitions:
            number, name = (
                next(numbers),
                partition.column if partition.transform == IDENTITY else f"{partition.column}_{partition.transform}",
            )
            while partition.transform != IDENTITY and name in schema.column_names:
                name = f"{name}_{number}"
            source = schema.find_field(partition.column).field_id
            fields.append(PartitionField(source, number, parse_transform(partition.transform), name))
        highest = max(spec.spec_id for spec in metadata.partition_specs)
        return PartitionSpec(*fields, spec_id=highest + 1)

    def _spec_updates(self, spec: PartitionSpec) -> tuple[TableUpdate, ...]:
        if spec.spec_id == self.table.spec().spec_id:
            return ()
        is_new = spec.spec_id not in self.table.specs()
        added = (AddPartitionSpecUpdate(spec=spec),) if is_new else ()
        return *added, SetDefaultSpecUpdate(spec_id=-1 if is_new else spec.spec_id)

    def _schema_updates(self, schema: Schema) -> tuple[TableUpdate, ...]:
        if schema.fields == self.table.schema().fields:
            return ()
        return AddSchemaUpdate(schema_=schema), SetCurrentSchemaUpdate(schema_id=-1)

    def _schema_requirements(self) -> tuple[TableRequirement, ...]:
        metadata = self.table.metadata
        return (
            AssertCurrentSchemaId(current_schema_id=metadata.current_schema_id),
            AssertLastAssignedFieldId(last_assigned_field_id=metadata.last_column_id),
            AssertDefaultSpecId(default_spec_id=metadata.default_spec_id),
            AssertDefaultSortOrderId(default_sort_order_id=metadata.default_sort_order_id),
        )

    def replace(
        self,
        removed: Sequence[DataFile],
        added: Sequence[NewFile],
        properties: Mapping[str, str],
        schema: Schema | None = None,
        layout: IcebergLayout | None = None,
        deletes: Sequence[NewDeletes] = (),
        *,
        same_rows: bool = False,
    ) -> int:
        """Commit a snapshot in which files replace others. Returns its number.

        Args:
            removed: the files of the newest version that the snapshot does not have.
            added: the new files.
            properties: the properties that the table and, for a position of rows, the snapshot get.
            schema: the columns of the new files, from schema_with(); None: those of the table.
            layout: that of the new files, from layout_with(); None: that of the table. If the partitions are others,
                all files must be replaced.
            deletes: the new delete files, of files that the snapshot keeps.
            same_rows: as for commit().

        If another commit has come first, the error of PyIceberg for that is raised, and nothing has changed.
        """
        updates: tuple[TableUpdate, ...] = ()
        schema_id = self.table.metadata.current_schema_id
        if schema is not None and (updates := self._schema_updates(schema)):
            schema_id = schema.schema_id
        gone = {self._directory + file.path for file in removed}
        gone |= self._without_effect(gone | {self._directory + new.data_file for new in deletes})
        schema, (spec, order) = schema or self.table.schema(), layout or self._layout
        order_id = order.order_id if is_followed(order, schema) else None
        files = [iceberg_file(file, self._directory, schema, spec.spec_id, order_id) for file in added]
        known = {file.file_path: file for file in self._files(ManifestContent.DATA)} if deletes else {}
        files += [iceberg_delete_file(new, self._directory, known[self._directory + new.data_file]) for new in deletes]
        operation = Operation.REPLACE if same_rows else Operation.OVERWRITE
        snapshot = self._snapshot(gone, files, schema, spec, schema_id, properties, operation)
        updates = *updates, *self._spec_updates(spec), *order_updates(self.table.metadata, order)
        updates = *updates, AddSnapshotUpdate(snapshot=snapshot), _newest(snapshot)
        before = AssertRefSnapshotId(ref=MAIN_BRANCH, snapshot_id=snapshot.parent_snapshot_id)
        self._commit(updates, (before, *self._schema_requirements()), properties)
        return snapshot.snapshot_id

    def _without_effect(self, gone: set[str]) -> set[str]:
        """Return the delete files of the newest version that do not apply to its data files other than `gone`."""
        left = {file.file_path for file in self._files(ManifestContent.DATA)} - gone
        of = {file.file_path: deleted_from(file) for file in self._files(ManifestContent.DELETES)}
        # One of another kind may apply to all data files.
        return {path for path, target in of.items() if not left or (target is not None and target not in left)}

    def _snapshot(
        self,
        gone: set[str],
        added: Sequence[IcebergFile],
        schema: Schema,
        spec: PartitionSpec,
        schema_id: int,
        properties: Mapping[str, str],
        operation: Operation,
    ) -> Snapshot:
        """Write the manifests of a snapshot, and return it."""
        parent, io = self.table.current_snapshot(), self.table.io
        # The partitions of files that go may be of columns that the table does not have any more.
        specs = {known.spec_id: (known, self.table.schema()) for known in self.table.specs().values()}
        specs[spec.spec_id] = spec, schema
        number, sequence = self.table.metadata.new_snapshot_id(), self.table.metadata.next_sequence_number()
        provider, unique = self.table.location_provider(), uuid4()
        collected = SnapshotSummaryCollector()
        kept, entries = self._kept_manifests(gone)
        written = []
        for entry in entries:
            if entry.data_file.file_path in gone:
                spec_of, schema_of = specs[entry.data_file.spec_id]
                collected.remove_file(entry.data_file, schema_of, spec_of)
                written.append(_entry(ManifestEntryStatus.DELETED, entry.data_file, entry, number))
            else:
                written.append(_entry(ManifestEntryStatus.EXISTING, entry.data_file, entry, entry.snapshot_id))
        for file in added:
            collected.add_file(file, schema, spec)
            written.append(_entry(ManifestEntryStatus.ADDED, file, None, number))
        together = defaultdict[tuple[bool, int], list[ManifestEntry]](list)
        for changed in written:
            together[changed.data_file.content == DataFileContent.DATA, changed.data_file.spec_id].append(changed)
        for place, ((is_data, number_of), some) in enumerate(together.items()):
            output = io.new_output(provider.new_metadata_location(f"{unique}-m{place}.avro"))
            writer_of = ManifestWriterV2 if is_data else _DeleteManifestWriter
            with writer_of(*specs[number_of], output, number, _COMPRESSION) as writer:
                for changed in some:
                    writer.add_entry(changed)
            kept.append(writer.to_manifest_file())
        listed = provider.new_metadata_location(f"snap-{number}-0-{unique}.avro")
        parent_id = parent.snapshot_id if parent is not None else None
        with write_manifest_list(2, io.new_output(listed), number, parent_id, sequence, _COMPRESSION) as listing:
            listing.add_manifests(kept)
        own = {name: value for name, value in properties.items() if name == POSITION}
        # PyIceberg adds up the totals of some operations only.
        totals = update_snapshot_summaries(
            Summary(Operation.OVERWRITE, **collected.build(), **own),
            parent.summary.additional_properties if parent is not None and parent.summary is not None else None,
        )
        return Snapshot(
            snapshot_id=number,
            parent_snapshot_id=parent_id,
            sequence_number=sequence,
            manifest_list=listed,
            schema_id=schema_id,
            summary=Summary(operation, **totals.additional_properties),
        )

    def _kept_manifests(self, gone: set[str]) -> tuple[list[ManifestFile], list[ManifestEntry]]:
        """Return the manifests that the next snapshot keeps, and the entries of those that it writes again as one.

        These are the manifests that have a file of `gone`, and the small ones if there are many.
        """
        small = [manifest for manifest, entries in self._entries if entries and manifest.manifest_length < _SMALL]
        again = set(map(_path, small)) if len(small) >= _MANY else set[str]()
        again |= {
            _path(stored) for stored, entries in self._entries if any(e.data_file.file_path in gone for e in entries)
        }
        kept = [manifest for manifest, entries in self._entries if entries and _path(manifest) not in again]
        return kept, [entry for stored, entries in self._entries if _path(stored) in again for entry in entries]

    def _commit(
        self,
        updates: tuple[TableUpdate, ...],
        requirements: tuple[TableRequirement, ...] = (),
        properties: Mapping[str, str] | None = None,
    ) -> None:
        if properties:
            updates = (*updates, SetPropertiesUpdate(updates=dict(properties)))
        before = self.table.metadata
        same = AssertTableUUID(uuid=before.table_uuid)
        # Not by a transaction of PyIceberg, which repeats a commit that is second: that could add rows twice.
        after = self.table.catalog.commit_table(self.table, (same, *requirements), updates).metadata
        kept = {entry.metadata_file for entry in after.metadata_log}
        with suppress(OSError):  # clean_up() removes them, too
            for entry in before.metadata_log:
                if entry.metadata_file not in kept:
                    self.table.io.delete(entry.metadata_file)

    def clean_up(self, hours: int, versions: frozenset[int]) -> int:
        before = datetime.now(UTC) - timedelta(hours=hours)
        limit = before.timestamp() * 1000
        old = [snapshot.snapshot_id for snapshot in self.table.snapshots() if snapshot.timestamp_ms < limit]
        heads = {reference.snapshot_id for reference in self.table.refs().values()}
        if gone := [number for number in old if number not in versions | heads]:
            self._commit((RemoveSnapshotsUpdate(snapshot_ids=gone),))
            self.table.refresh()
        return self._remove_unreferenced(before.timestamp())

    def _remove_unreferenced(self, before: float) -> int:
        """Remove files that no snapshot has and that were modified before a time, in seconds since 1970."""
        io, known = self.table.io, {self.table.metadata_location}
        known |= {entry.metadata_file for entry in self.table.metadata.metadata_log}
        manifests: dict[str, ManifestFile] = {}
        for snapshot in self.table.snapshots():
            known.add(snapshot.manifest_list)
            manifests |= {manifest.manifest_path: manifest for manifest in snapshot.manifests(io)}
        known |= manifests.keys()
        metadata = self.table.metadata
        known |= {statistics.statistics_path for statistics in (*metadata.statistics, *metadata.partition_statistics)}
        for manifest in manifests.values():
            known |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(io)}
        return sum(self._remove_other_files(folder, known, before) for folder in (_DATA, _METADATA))

    def _remove_other_files(self, folder: str, known: set[str], before: float) -> int:
        # Other programs have a folder for each partition.
        folders = directory_names(self.path / folder)
        removed = sum(self._remove_other_files(f"{folder}/{name}", known, before) for name in folders)
        for name, modified in modified_times(self.path / folder).items():
            if name not in folders and modified < before and f"{self._directory}{folder}/{name}" not in known:
                (self.path / folder / name).unlink()
                removed += 1
        return removed


class _DeleteManifestWriter(ManifestWriterV2):
    """Writes a manifest of delete files, which PyIceberg does not write."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def _position(snapshot: Snapshot | None) -> str | None:
    summary = snapshot.summary if snapshot is not None else None
    return summary.additional_properties.get(POSITION) if summary is not None else None


def layout_of(layout: IcebergLayout, schema: Schema) -> Layout:
    """Return the layout of a table by the names of its columns."""
    return Layout(partitions_of(layout.spec, schema), cluster_of(layout.order, schema))


def partitions_of(spec: PartitionSpec, schema: Schema) -> Partitions:
    """Return the partitions of a table. One whose column the table does not have gets a name that no column has."""
    names = {field.field_id: field.name for field in schema.fields}
    return tuple(
        PartitionColumn(names.get(field.source_id, f"column {field.source_id}"), str(field.transform))
        for field in spec.fields
    )


def _is_valid(spec: PartitionSpec, before: Schema, after: Schema) -> bool:
    """Return True if a specification of partitions fits other columns.

    The values of partitions keep their type, and no other column has got the name of a partition.
    """
    types = {field.field_id: field.field_type for field in before.fields}
    changed = {field.field_id: field for field in after.fields}
    names = {field.name: field.field_id for field in after.fields}
    for field in spec.fields:
        source = changed.get(field.source_id)
        if source is None or source.field_type != types.get(field.source_id):
            return False
        owner = field.source_id if str(field.transform) == IDENTITY else None
        if field.name in names and names[field.name] != owner:
            return False
    return True


def _path(manifest: ManifestFile) -> str:
    return manifest.manifest_path


def _entry(
    status: ManifestEntryStatus, file: IcebergFile, before: ManifestEntry | None, snapshot: int | None
) -> ManifestEntry:
    """Return an entry of a manifest for a file that an earlier snapshot may have added (`before`)."""
    return ManifestEntry.from_args(
        status=status,
        snapshot_id=snapshot,
        sequence_number=before.sequence_number if before is not None else None,
        file_sequence_number=before.file_sequence_number if before is not None else None,
        data_file=file,
    )


def _newest(snapshot: Snapshot) -> SetSnapshotRefUpdate:
    """Return the update that makes a snapshot the newest version."""
    return SetSnapshotRefUpdate(
        ref_name=MAIN_BRANCH,
        type=SnapshotRefType.BRANCH,
        snapshot_id=snapshot.snapshot_id,
        max_ref_age_ms=None,
        max_snapshot_age_ms=None,
        min_snapshots_to_keep=None,
    )
