"""write_snapshot(): stores the rows of published tables as of one position of the change log.

    write_snapshot("postgresql://repl@publisher.example/shop", log="/srv/log", directory="/srv/snapshot")

**Purpose.** A stream has to read the same rows again after a kill, and an exported snapshot ends with the session that
exported it. So the rows are stored first (table_snapshot.py). A temporary slot supplies the position and the snapshot.
Large tables are read before, by ranges of their keys, if the call has a Spark session (snapshot/ranges.py).

**Failure cases.**

- Killed before snapshot.json is complete: the next call removes the files and starts again. Tables that are read by
  ranges continue.
- Killed after that: the next call removes what is left of the tables that were read by ranges.
- Another process writes the snapshot, which its lock shows: the call ends with an error, and removes nothing.
- Lease of a snapshot in an object store lost: the call ends with an error, before snapshot.json is written.
- Snapshot exists: the call returns its position and reads nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

from subscriber.changelog.consumers import register
from subscriber.changelog.directory_use import DirectoryUse, check_use
from subscriber.changelog.files import Identity
from subscriber.changelog.reader import ChangeLog
from subscriber.changelog.schema_history import TableVersion
from subscriber.changelog.storage import Location, Lock, location, locked, make_directory, storage_sqlstate, write_file
from subscriber.connection.session import Session, savepoint
from subscriber.display import near_word
from subscriber.errors import ApplyError, ChangeLogError, ServerError, StatementError
from subscriber.lsn import Lsn
from subscriber.publisher.connection import Publisher
from subscriber.publisher.table_versions import read_snapshot_version, read_types, types_of
from subscriber.publisher.tables import copy_statement
from subscriber.remedy import Remedy
from subscriber.spark.lake.load_ranges import LARGE
from subscriber.spark.publisher_snapshot import missing_grant, publisher_session, publisher_snapshot
from subscriber.spark.snapshot.ranges import FOLDER, RangeTables, large_tables
from subscriber.spark.sources.options import name_list
from subscriber.spark.sources.table_snapshot import FILE_BYTES, MANIFEST, SnapshotFile, TableSnapshot
from subscriber.sqlstate import (
    INSUFFICIENT_PRIVILEGE,
    OBJECT_IN_USE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    UNDEFINED_TABLE,
)
from subscriber.timestamps import EPOCH

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Result = TypeVar("Result")

LOCK = "lock"  # in the directory of the snapshot


def write_snapshot(
    source: str,
    *,
    log: Location | str,
    directory: Location | str,
    tables: Collection[str] | str | None = None,
    consumer: str | None = None,
    spark: SparkSession | None = None,
    ranges_above: int = LARGE,
) -> Lsn:
    """Store the rows of published tables, as of a position of the change log, for the option `snapshot` of pgcdc.

    Does nothing if the directory has a snapshot of this publisher with these tables.

    All tables are read in one snapshot of the publisher. With `spark`, executors first read large tables by ranges of
    their keys, each in a short snapshot of its own, and apply the changes of the log up to the position. Such a table
    needs a key whose order Python knows, which excludes texts with other collations than C.

    Args:
        source: the connection string of the publisher. With `spark`, executors use it too.
        log: the directory or URL of the change log, which must have begun. With `spark`, an archiver must write it.
        directory: the directory or URL of the snapshot, which driver and executors see under the same name.
        tables: schema.table of each table; None: all tables of the log's publications.
        consumer: the name of a consumer for which the log keeps all changes after the snapshot: the option `consumer`
            of the stream that follows. None: none.
        spark: the session whose executors read large tables. None: all tables are read in one snapshot.
        ranges_above: bytes of a table on the publisher, with its indexes, from which on it is large.

    Returns:
        The position of the rows.

    Raises:
        StatementError: the log is of another publisher, it begins after the position, a table is not published, or the
            directory has other files or another use, or another process writes the snapshot.
        ApplyError: the columns of a table changed while its rows were read.
        ChangeLogError: the log cannot be read, the snapshot cannot be written, or the consumer cannot be registered.
        SubscriberError: the publisher cannot be read, or the log does not reach the rows that are read by ranges.

    Cancellation: an interrupted call leaves an unfinished snapshot. The next call replaces it, and continues the tables
        that are read by ranges.
    """
    changes, folder = ChangeLog(log), location(directory)
    tables = None if tables is None else name_list(tables)
    wanted = None if tables is None else frozenset(tables)
    ranges = RangeTables(spark, source, changes, folder / FOLDER)
    if (position := _existing(folder, changes.identity, tables)) is not None:
        ranges.remove()
        return position
    with _writing(folder) as lock, start_blocking_portal() as portal, ExitStack() as stack:
        if (position := _existing(folder, changes.identity, tables)) is not None:  # written since
            return position
        large = frozenset[str]() if spark is None else portal.call(large_tables, source, changes, wanted, ranges_above)
        if large:
            stack.enter_context(ranges.lock())
        else:
            ranges.discard()
        _prepare(folder)
        if large:
            _in_thread(portal, partial(ranges.load, large))
        rows = portal.call(partial(_read, source, changes, folder, wanted, consumer, elsewhere=large))
        if large:
            read = {version.label: version for version in rows.versions if version.label in large}
            files = _in_thread(portal, partial(ranges.write, read, rows.position, folder))
            portal.call(_check_types_now, source, list(read.values()))
            rows = rows._replace(files=[*rows.files, *files])
        system_id, versions = changes.identity.system_id, tuple(rows.versions)
        lock.check()
        TableSnapshot(folder, rows.position, system_id, rows.taken, versions, _numbered(rows.files)).store()
        ranges.remove()
    return rows.position


def _in_thread(portal: BlockingPortal, function: Callable[[], Result]) -> Result:
    """Call a function that blocks in a thread without an event loop, which a notebook's own thread has."""
    return portal.call(anyio.to_thread.run_sync, function)


@contextmanager
def _writing(folder: Location) -> Iterator[Lock]:
    """Keep other processes from writing the snapshot during the block."""
    check_use(folder, DirectoryUse.SNAPSHOT)
    try:
        make_directory(folder)
        with locked(folder / LOCK) as lock:
            yield lock
    except BlockingIOError:
        raise StatementError(
            f'another process writes the snapshot in "{folder}"',
            hint="Wait until it has ended.",
            sqlstate=OBJECT_IN_USE,
        ) from None
    except OSError as error:
        raise ChangeLogError(
            f'could not write the snapshot in "{folder}": {error.strerror or error}',
            hint="Correct what the system or the store refuses, and start again.",
            sqlstate=storage_sqlstate(error),
        ) from error


def _existing(folder: Location, identity: Identity, tables: Collection[str] | None) -> Lsn | None:
    """Return the position of the snapshot of a directory. None: it has none."""
    if not (folder / MANIFEST).exists():
        return None
    snapshot = TableSnapshot.read(folder)
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
    """Remove the files of an unfinished snapshot. Raises StatementError if the directory has others."""
    leftovers = [path for path in folder.iterdir() if path.name not in (FOLDER, LOCK)]
    for path in leftovers:
        if path.is_dir() or not path.name.endswith((".copy", ".tmp")):
            raise StatementError(
                f'the directory "{folder}" has other files',
                detail=f'It has "{path.name}".',
                hint="Choose an empty directory for the snapshot.",
                sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
            )
    for path in leftovers:
        path.unlink()


def _numbered(files: Iterable[SnapshotFile]) -> tuple[SnapshotFile, ...]:
    """Return the files with the numbers of their first rows."""
    numbered, first = list[SnapshotFile](), 0
    for file in files:
        numbered.append(replace(file, first=first))
        first += file.rows
    return tuple(numbered)


# --- tables that are read in one snapshot -----------------------------------------------------------


class _Rows(NamedTuple):
    """The content of one snapshot: its position and time, the columns of all tables, and the files of rows."""

    position: Lsn
    taken: int
    versions: list[TableVersion]
    files: list[SnapshotFile]


async def _read(
    source: str,
    log: ChangeLog,
    folder: Location,
    tables: frozenset[str] | None,
    consumer: str | None,
    *,
    elsewhere: frozenset[str],
) -> _Rows:
    """Read the columns of all tables, and the rows of those that are not read `elsewhere`."""
    publications = log.identity.publications
    hint = "Wait until `subscriber archive` has started, then call write_snapshot() again."
    async with publisher_snapshot(source, log, "snapshot", hint=hint) as (publisher, position):
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
        if consumer is not None:
            await anyio.to_thread.run_sync(register, log.directory, consumer, f"snapshot in {folder}", position)
        versions, files = [], _Files(folder)
        for label in wanted:
            table = await publisher.table(*published[label], publications)
            version = await read_snapshot_version(publisher, table, publications, position)
            if not version.is_known:
                raise ApplyError(f'the columns of table "{label}" changed while its rows were read')
            versions.append(version)
            if label in elsewhere:
                continue
            try:
                async with savepoint(publisher.session):
                    await files.read(publisher.session, label, copy_statement(table, binary=False))
            except ServerError as error:
                if error.sqlstate == INSUFFICIENT_PRIVILEGE and publisher.session.error is None:
                    grant = await missing_grant(publisher, *published[label])
                    error.amend(hint=grant and Remedy("on the publisher", grant))
                raise
        await publisher.commit()
        await _check_types(publisher, versions)
    return _Rows(position, taken, versions, files.found)


async def _check_types_now(source: str, versions: Sequence[TableVersion]) -> None:
    async with publisher_session(source, "snapshot") as publisher:
        await _check_types(publisher, versions)


async def _check_types(publisher: Publisher, versions: Sequence[TableVersion]) -> None:
    """Raise ApplyError if a composite type was altered since. PostgreSQL prints rows by the newest definition."""
    if not any(version.types for version in versions):
        return
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

    async def read(self, session: Session, label: str, statement: str) -> None:
        """Write the rows of a table, which a COPY statement returns."""
        self._label = label
        async with aclosing(session.copy_out(statement)) as payloads:
            async for lines in payloads:
                self._add(lines)
        self._finish()

    def _add(self, lines: list[bytes]) -> None:
        self._lines += lines
        self._size += sum(map(len, lines))
        if self._size >= FILE_BYTES:
            self._finish()

    def _finish(self) -> None:
        if not self._lines:
            return
        data = b"".join(self._lines)
        name = f"{len(self.found):06}.copy"
        write_file(self._folder / name, data)
        self.found.append(SnapshotFile(name, self._label, 0, data.count(b"\n"), len(data), zlib.crc32(data)))
        self._lines, self._size = [], 0
