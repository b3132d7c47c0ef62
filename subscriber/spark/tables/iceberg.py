"""Iceberg tables without Java: executors write Parquet, the driver commits with PyIceberg.

In a lake, table `name` of schema `schema` is the Iceberg table `schema.name` of a catalog, and its files are in the
directory of the lake. The catalog is a file of SQLite in that directory (`catalog.db`), or one that PyIceberg is
configured for. The catalog chooses the location of a table of apply_changes().

**Invariants.** Snapshot, columns and position are in one commit of the catalog, which fails if another one has come
first. The position is a property of the table, for the newest version, and of the snapshot, for the versions before.
Columns have numbers in the files, so that a rename or a wider type changes no file.

**Failure cases.**

- Killed before the commit: the files that were written belong to no snapshot; clean_up() removes them.
- Killed after the commit: the repeated batch finds that the table has its position.
- Commit whose answer is lost: the same, because the batch is repeated.
- Table of the same name in the catalog that is not of this lake: an error, and the table stays as it is. The same if it
  is of this lake, and has another name there: Hive and Glue do not distinguish names that differ only in case.
- Files of a table removed, which the catalog still has: the table cannot be read; a load creates it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import count
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    BadRequestError,
    ForbiddenError,
    NoSuchPropertyException,
    NoSuchTableError,
    NotInstalledError,
    RESTError,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import NestedField
from sqlalchemy.exc import OperationalError

from subscriber.changelog.storage import Location, remove_directory
from subscriber.errors import ApplyError, StatementError
from subscriber.lsn import Lsn
from subscriber.spark.tables.iceberg_io import LakeFileIO, location_of, path_of
from subscriber.spark.tables.iceberg_table import StoredIcebergTable
from subscriber.spark.tables.iceberg_types import iceberg_type
from subscriber.spark.tables.layout import NO_LAYOUT, Layout
from subscriber.spark.tables.table_format import POSITION, NewColumn

LAKE = "subscriber.lake"  # the property of a table that has the ID of its lake
TABLE = "subscriber.table"  # the property that has its label there
PLACE, BY_CATALOG = "subscriber.place", "catalog"  # the property of a table whose location the catalog has chosen
CATALOG_NAME = "subscriber"  # of the catalog in the directory
CATALOG_FILE = "catalog.db"
HIVE = "HiveCatalog"  # a class of PyIceberg, which can be imported if its client is installed

_CATALOG_OPTIONS = {"py-io-impl": f"{LakeFileIO.__module__}.{LakeFileIO.__qualname__}"}
_PROPERTIES = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}


def table_format(directory: Location, lake_id: str, catalog: str | None) -> IcebergFormat:
    """Return the format. Raises StatementError if a lake in an object store has no catalog."""
    if catalog is None and not isinstance(directory, Path):
        raise StatementError(
            "a lake of Iceberg tables in an object store needs a catalog",
            detail="The catalog of a lake in a directory is a file, which an object store cannot have.",
            hint="Name one of PyIceberg's configuration with --catalog, see https://py.iceberg.apache.org/configuration.",
        )
    return IcebergFormat(directory, lake_id, catalog)


class IcebergFormat:
    """The tables of a lake as Iceberg tables."""

    title = "Iceberg"

    def __init__(self, directory: Location, lake_id: str, catalog: str | None) -> None:
        self._directory = directory
        self._lake_id = lake_id
        self._catalog_name = catalog

    def connect(self) -> None:
        _ = self.catalog

    @cached_property
    def catalog(self) -> Catalog:
        """Return the catalog. Raises StatementError if PyIceberg cannot load it."""
        if self._catalog_name is None:
            uri = f"sqlite:///{self._directory / CATALOG_FILE}"
            return SqlCatalog(CATALOG_NAME, uri=uri, **_CATALOG_OPTIONS)
        return configured_catalog(self._catalog_name)

    def open(self, label: str, path: Location) -> StoredIcebergTable:
        try:
            return _stored(self._checked(self.catalog.load_table(identifier(label)), label), path)
        except NoSuchTableError:
            raise FileNotFoundError(f"the catalog has no table {label}") from None

    @staticmethod
    def _checked(table: Table, label: str) -> Table:
        """Return a table. Raises ApplyError if it is another one of the lake."""
        if (other := table.properties.get(TABLE, label)) != label:
            raise ApplyError(
                f"the catalog does not distinguish it from table {other} of the lake, whose name differs only in case",
                hint="Leave one of them out of the lake, or give the lake another catalog.",
            )
        return table

    def create(
        self,
        label: str,
        path: Location,
        schema: pa.Schema,
        position: Lsn,
        rows: Iterable[pa.RecordBatch],
        layout: Layout = NO_LAYOUT,
    ) -> None:
        layout.check(schema)
        created = self._created(label, path)
        if created.properties.get(LAKE) != self._lake_id:
            raise ApplyError(
                f"the catalog has another Iceberg table {label}",
                hint=f'Drop or rename it, or give the lake another catalog. Property "{LAKE}" has the ID of its lake.',
            )
        table = _stored(self._checked(created, label), path)
        columns = table.schema_with([NewColumn(field.name, field.type, None, None) for field in schema])
        stored = table.layout_with(layout, columns)
        folder = table.folder_of(columns, stored)
        added = folder.write(batch.cast(folder.schema) for batch in rows)
        table.replace(table.files(None), added, {POSITION: str(position)}, columns, stored)

    def _created(self, label: str, path: Location) -> Table:
        """Return the table of the catalog, which is created without columns if it does not exist."""
        name, place = identifier(label), location_of(path)
        self.catalog.create_namespace_if_not_exists(name[0])
        try:
            return self.catalog.load_table(name)
        except NoSuchTableError:
            pass
        except FileNotFoundError as error:
            if str(path) not in str(error):
                raise
            self.catalog.drop_table(name)  # its files have been removed from the lake
        properties = {**_PROPERTIES, LAKE: self._lake_id, TABLE: label}
        try:
            return self.catalog.create_table(name, Schema(), place, properties=properties)
        except BadRequestError:  # the catalog chooses the locations of all tables
            return self.catalog.create_table(name, Schema(), properties={**properties, PLACE: BY_CATALOG})

    def remove(self, label: str, path: Location) -> None:
        name = identifier(label)
        try:
            properties = self.catalog.load_table(name).properties
            if properties.get(LAKE) == self._lake_id and properties.get(TABLE, label) == label:
                drop = self.catalog.purge_table if properties.get(PLACE) == BY_CATALOG else self.catalog.drop_table
                drop(name)
        except NoSuchTableError:
            pass
        remove_directory(path)

    def raises_storage_error(self, error: Exception) -> bool:
        # Of the database or the server that has the catalog, which answers nothing about one table then.
        of_one_table = ForbiddenError, BadRequestError
        return isinstance(error, (OperationalError, RESTError)) and not isinstance(error, of_one_table)


def _stored(table: Table, path: Location) -> StoredIcebergTable:
    return StoredIcebergTable(table, path_of(table.location()) if table.properties.get(PLACE) == BY_CATALOG else path)


def configured_catalog(name: str) -> Catalog:
    """Return a catalog of PyIceberg's configuration. Raises StatementError if PyIceberg cannot load it."""
    try:
        catalog = load_catalog(name, **_CATALOG_OPTIONS)
        if type(catalog).__name__ != HIVE:
            return catalog
        from subscriber.spark.tables.hive import LakeHiveCatalog

        return LakeHiveCatalog(catalog.name, **catalog.properties)
    except (ValueError, ImportError, NotInstalledError, NoSuchPropertyException) as error:
        raise StatementError(
            f'PyIceberg cannot load catalog "{name}": {error}',
            hint="Configure it in ~/.pyiceberg.yaml, or in environment variables PYICEBERG_CATALOG__….",
        ) from None


def table_exists(catalog: Catalog, name: tuple[str, ...]) -> bool:
    """Return True if the catalog has a table. Not all servers answer PyIceberg's own question for it."""
    try:
        catalog.load_table(name)
    except NoSuchTableError:
        return False
    return True


def open_table(catalog: Catalog, name: tuple[str, ...], columns: pa.Schema) -> StoredIcebergTable:
    """Open a table that is not one of a lake, and create it if it does not exist.

    Args:
        catalog: the catalog, which chooses the location of a new table.
        name: namespace and name of the table.
        columns: those of a new table.

    Raises:
        StatementError: the catalog cannot create the table.
    """
    try:
        table = catalog.load_table(name)
    except NoSuchTableError:
        numbers = count(len(columns) + 1)
        fields = [
            NestedField(number, field.name, iceberg_type(field.type, numbers), required=False)
            for number, field in enumerate(columns, 1)
        ]
        catalog.create_namespace_if_not_exists(name[:-1])
        try:
            table = catalog.create_table(name, Schema(*fields), properties=_PROPERTIES)
        except ValueError as error:
            raise StatementError(
                f"Iceberg table {'.'.join(name)} cannot be created: {error}",
                hint='Give the catalog a property "warehouse", the location of its tables.',
            ) from None
    return StoredIcebergTable(table, path_of(table.location()))


def identifier(label: str) -> tuple[str, str]:
    """Return namespace and name of a table in the catalog."""
    schema, _, name = label.partition(".")
    return schema, name
