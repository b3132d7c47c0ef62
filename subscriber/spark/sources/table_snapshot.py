"""Rows of published tables as of one position of the change log, in files that pgcdc reads before the changes.

    snapshot.json  the position, the publisher, and each table's columns and files, with a checksum
    <n>.copy       rows of a table in COPY's text format
    ranges/        while the snapshot is written: the tables that are read by ranges (snapshot/ranges.py)
    lock           the process that writes the snapshot, or has written it

Changes whose commit record starts at the position or later are not in the rows; all others are. snapshot/writer.py
writes snapshots.

**Invariants.** snapshot.json is written last. A directory without it is no snapshot. Each file has a checksum.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from subscriber.changelog.directory_use import DirectoryUse
from subscriber.changelog.schema_history import TableVersion
from subscriber.changelog.storage import Location, location, write_file
from subscriber.display import near_word, shell_word
from subscriber.errors import StatementError
from subscriber.lsn import Lsn
from subscriber.sqlstate import DATA_CORRUPTED, UNDEFINED_FILE, UNDEFINED_TABLE

MANIFEST = DirectoryUse.SNAPSHOT.value
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
        known = near_word(label, names) or f"Its tables are {', '.join(names)}."
        raise StatementError(
            f'the snapshot in "{self.directory}" has no table "{label}"',
            hint=f"{known} For other tables, begin a new query with a snapshot in another directory.",
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
