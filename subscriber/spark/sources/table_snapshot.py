"""Rows of published tables as of one position of the change log, in files that pgcdc reads before the changes.

    write_snapshot("postgresql://repl@publisher.example/shop", log="/srv/log", directory="/srv/snapshot")

    snapshot.json     the position, the publisher, and each table's columns and files, with a checksum
    <table>-<n>.copy  rows in COPY's text format

**Purpose.** A stream has to read the same rows again after a kill, and an exported snapshot ends with the session that
exported it. So the rows are stored first. A temporary slot supplies the position and the snapshot. Changes whose commit
record starts at the position or later are not in the rows; all others are.

**Invariants.** snapshot.json is written last. A directory without it is no snapshot. Each file has a checksum.

**Failure cases.**

- Killed before snapshot.json is complete: the next call removes the files and starts again.
- Snapshot exists: the call returns its position and reads nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import anyio.to_thread
from anyio.from_thread import start_blocking_portal

from subscriber.changelog.consumers import register
from subscriber.changelog.files import Identity
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import TableVersion
from subscriber.changelog.storage import Location, location, make_directory, write_file
from subscriber.display import near_word, shell_word
from subscriber.errors import ApplyError, StatementError
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import read_table_version, read_types, types_of
from subscriber.publisher.tables import as_relation, copy_statement
from subscriber.spark.publisher_snapshot import publisher_snapshot
from subscriber.sqlstate import DATA_CORRUPTED, OBJECT_NOT_IN_PREREQUISITE_STATE, UNDEFINED_FILE, UNDEFINED_TABLE
from subscriber.timestamps import EPOCH

MANIFEST = "snapshot.json"
FILE_BYTES = 8 * 1024 * 1024  # after which a new file is started


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A file of rows. `first` is the number of its first row in the snapshot, from 0."""

    name: str
    table: str
    first: int
    rows: int
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """The contents of snapshot.json.

    Attributes:
        directory: the directory of the snapshot.
        position: changes that were committed at this position or later are not in the rows.
        system_id: the system identifier of the publisher.
        taken: when the snapshot was taken, in microseconds since PostgreSQL's epoch.
        versions: the columns of each table.
        files: the files, in the order of their rows.
    """

    directory: Location
    position: Lsn
    system_id: int
    taken: int
    versions: tuple[TableVersion, ...]
    files: tuple[SnapshotFile, ...]

    def version(self, label: str) -> TableVersion:
        """Return the columns of a table. Raises StatementError if the snapshot does not have it."""
        for version in self.versions:
            if version.label == label:
                return version
        names = [version.label for version in self.versions]
        raise StatementError(
            f'the snapshot in "{self.directory}" has no table "{label}"',
            hint=near_word(label, names) or f"Its tables are {', '.join(names)}.",
            sqlstate=UNDEFINED_TABLE,
        )

    @classmethod
    def read(cls, directory: Location | str) -> TableSnapshot:
        """Read snapshot.json.

        Raises:
            StatementError: there is no snapshot, or its description is damaged.
        """
        folder = location(directory)
        try:
            fields = json.loads((folder / MANIFEST).read_bytes())
            if fields.pop("checksum") != _checksum(fields):
                raise ValueError("the checksum differs")
            return cls(
                folder,
                Lsn.parse(fields["position"]),
                fields["system_id"],
                fields["taken"],
                tuple(TableVersion.from_json(version) for version in fields["versions"]),
                tuple(SnapshotFile(**file) for file in fields["files"]),
            )
        except FileNotFoundError:
            raise StatementError(
                f'there is no complete snapshot in "{folder}"',
                hint="Call subscriber.spark.write_snapshot() first.",
                sqlstate=UNDEFINED_FILE,
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(folder / MANIFEST) from error

    def store(self) -> None:
        """Write snapshot.json."""
        fields = json.loads(
            json.dumps(
                {
                    "position": str(self.position),
                    "system_id": self.system_id,
                    "taken": self.taken,
                    "versions": [version.as_json() for version in self.versions],
                    "files": [asdict(file) for file in self.files],
                }
            )
        )
        write_file(self.directory / MANIFEST, json.dumps({**fields, "checksum": _checksum(fields)}).encode())


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _damaged(path: Location) -> StatementError:
    folder = str(path).removesuffix(f"/{path.name}")
    is_local = isinstance(path, Path)
    what = f"the snapshot with `rm -r {shell_word(folder)}`" if is_local else f"the objects below {folder}"
    return StatementError(
        f'snapshot file "{path}" is damaged',
        hint=f"Restore it from a copy, or remove {what}, and write a new one for a new query.",
        sqlstate=DATA_CORRUPTED,
    )


class SnapshotRows(NamedTuple):
    """A part of a file: `number` rows, of which the first is row `skip` of the file."""

    file: SnapshotFile
    skip: int
    number: int

    def lines(self, directory: Location) -> list[bytes]:
        """Return the rows in COPY's text format, without newlines. Raises StatementError if the file is damaged."""
        path = directory / self.file.name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise _damaged(path) from None
        if len(data) != self.file.size or zlib.crc32(data) != self.file.checksum:
            raise _damaged(path)
        return data.split(b"\n")[self.skip : self.skip + self.number]


# --- writing --------------------------------------------------------------------------------------


def write_snapshot(
    source: str,
    *,
    log: Location | str,
    directory: Location | str,
    tables: Collection[str] | None = None,
    consumer: str | None = None,
) -> Lsn:
    """Store the rows of published tables, as of a position of the change log, for the option `snapshot` of pgcdc.

    Does nothing if the directory has a snapshot of this publisher with these tables.

    Args:
        source: the connection string of the publisher.
        log: the directory or URL of the change log, which must have begun.
        directory: the directory or URL of the snapshot, which driver and executors see under the same name.
        tables: schema.table of each table; None: all tables of the log's publications.
        consumer: the name of a consumer for which the log keeps all changes after the snapshot: the option `consumer`
            of the stream that follows. None: none.

    Returns:
        The position of the rows.

    Raises:
        StatementError: the log is of another publisher, it begins after the position, a table is not published, or the
            directory has other files.
        ChangeLogError: the log cannot be read, or the consumer cannot be registered.
        SubscriberError: the publisher cannot be read.

    Cancellation: an interrupted call leaves an unfinished snapshot, which the next call replaces.
    """
    changes = ChangeLog(log)
    folder = location(directory)
    if (folder / MANIFEST).exists():
        return _existing(TableSnapshot.read(folder), changes.identity, tables)
    _prepare(folder)
    with start_blocking_portal() as portal:
        return portal.call(_write, source, changes, folder, None if tables is None else frozenset(tables), consumer)


def _existing(snapshot: TableSnapshot, identity: Identity, tables: Collection[str] | None) -> Lsn:
    if snapshot.system_id != identity.system_id:
        raise StatementError(
            f'the snapshot in "{snapshot.directory}" is of another publisher than the change log',
            hint="Choose another directory.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )
    for label in tables or ():
        snapshot.version(label)
    return snapshot.position


def _prepare(folder: Location) -> None:
    """Create the directory, and remove the files of an unfinished snapshot."""
    make_directory(folder)
    for path in folder.iterdir():
        if path.is_dir() or not path.name.endswith((".copy", ".tmp")):
            raise StatementError(
                f'the directory "{folder}" has other files',
                detail=f'It has "{path.name}".',
                hint="Choose an empty directory for the snapshot.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
    for path in folder.iterdir():
        path.unlink()


async def _write(
    source: str, log: ChangeLog, folder: Location, tables: frozenset[str] | None, consumer: str | None
) -> Lsn:
    publications = log.identity.publications
    hint = "Wait until `subscriber archive` has started, then call write_snapshot() again."
    async with publisher_snapshot(source, log, "snapshot", hint=hint) as (publisher, position):
        if consumer is not None:
            await anyio.to_thread.run_sync(register, log.directory, consumer, f"snapshot in {folder}", position)
        taken = (await publisher.now() - EPOCH) // timedelta(microseconds=1)
        published = {f"{schema}.{name}": (schema, name) for schema, name in await publisher.tables(publications)}
        wanted = sorted(published if tables is None else tables)
        for label in wanted:
            if label not in published:
                raise StatementError(
                    f'table "{label}" is not published',
                    hint=near_word(label, published) or f"Published are {', '.join(sorted(published))}.",
                    sqlstate=UNDEFINED_TABLE,
                )
        versions, files = [], _Files(folder)
        for label in wanted:
            table = await publisher.table(*published[label], publications)
            version = await read_table_version(publisher, as_relation(table), publications, position)
            if not version.is_known:
                raise ApplyError(f'the columns of table "{label}" changed while its rows were read')
            versions.append(replace(version, asked=position))
            async with aclosing(publisher.session.copy_out(copy_statement(table, binary=False))) as payloads:
                async for lines in payloads:
                    files.add(label, lines)
            files.finish()
        await _check_types(publisher, versions)
    TableSnapshot(folder, position, log.identity.system_id, taken, tuple(versions), tuple(files.found)).store()
    return position


async def _check_types(publisher: Publisher, versions: Sequence[TableVersion]) -> None:
    """Raise ApplyError if a composite type was altered since. PostgreSQL prints rows by the newest definition."""
    if not any(version.types for version in versions):
        return
    await publisher.commit()
    types = await read_types(publisher, versions)
    for version in versions:
        if types_of(version, types) != version.types:
            raise ApplyError(
                f'a composite type of table "{version.label}" was altered while rows were read',
                hint="Call write_snapshot() again.",
            )


class _Files:
    """Writes rows to files of some MiB each."""

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self.found: list[SnapshotFile] = []
        self._label = ""
        self._lines: list[bytes] = []
        self._size = 0

    def add(self, label: str, lines: list[bytes]) -> None:
        """Add rows of a table, one line each."""
        self._label = label
        self._lines += lines
        self._size += sum(map(len, lines))
        if self._size >= FILE_BYTES:
            self.finish()

    def finish(self) -> None:
        """Write the file of the added rows."""
        if not self._lines:
            return
        data = b"".join(self._lines)
        first = self.found[-1].first + self.found[-1].rows if self.found else 0
        name = f"{len(self.found):06}.copy"
        write_file(self._folder / name, data)
        rows = data.count(b"\n")
        self.found.append(SnapshotFile(name, self._label, first, rows, len(data), zlib.crc32(data)))
        self._lines, self._size = [], 0
