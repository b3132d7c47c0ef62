"""RangeLoad: the state of the load of one table by ranges of its key, as a file of the lake.

    loads/<table>    a JSON object: the table, the ranges that are read, and the snapshot of each

load_ranges.py has the invariants and the failure cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from subscriber.changelog.schema_history import TableVersion
from subscriber.changelog.storage import Location, file_names, for_each
from subscriber.lsn import Lsn
from subscriber.protocol.encodings import ERRORS
from subscriber.ranges.keys import PRINTED, KeyColumn, RangeKey
from subscriber.ranges.snapshot import TransactionSnapshot
from subscriber.ranges.table_ranges import RangeSnapshot
from subscriber.spark.changes.loaded_rows import LoadedRows, ReadRow
from subscriber.spark.changes.raw_rows import Key, raw_row, values
from subscriber.spark.lake.file_names import file_name
from subscriber.spark.lake.lake_table import read_json, write_json

Texts = tuple[str, ...]
_SUFFIX = ".json"


class ReadRange(NamedTuple):
    """A range whose rows are read: those with low <= key < high. None: there is no limit."""

    low: Texts | None
    high: Texts | None
    lsn: Lsn  # behind the commits of all transactions that its snapshot sees
    rows: int
    commit: int  # number of the commit of its rows


class ReadKey(NamedTuple):
    """A single key whose row is read later than its range. `row` is None if there is no such row."""

    key: Texts
    row: tuple[str | None, ...] | None
    snapshot: str
    lsn: Lsn

    @property
    def read_in(self) -> RangeSnapshot:
        """Return the snapshot."""
        return RangeSnapshot(TransactionSnapshot.parse(self.snapshot), self.lsn)


@dataclass(frozen=True, slots=True)
class RangeLoad:
    """A load that is not finished.

    Attributes:
        version: the table.
        publications: the publications that publish it.
        start: a position. The changes that rows may lack follow it.
        timeline: the publisher's timeline, whose transactions the snapshots name.
        columns: the columns of the key in the order of its index, as name and type in SQL.
        files: the OIDs of the table, or of its partitions, and the numbers of their files.
        as_text: the columns to keep as text, as schema.table.column.
        estimate: the number of rows that the publisher expects.
        writers: virtual transactions that may have committed before `start` and that no snapshot saw yet.
        is_created: the stored table is empty, or has the rows of `ranges`.
        ranges: the ranges that are read, from the lowest on.
        keys: single keys that are read later.
        is_clustered: the files of the stored table do not overlap in its cluster columns.
    """

    version: TableVersion
    publications: Texts
    start: Lsn
    timeline: int
    columns: tuple[tuple[str, str], ...]
    files: tuple[tuple[int, int], ...]
    as_text: frozenset[str]
    estimate: int
    writers: frozenset[str]
    is_created: bool = False
    ranges: tuple[ReadRange, ...] = ()
    keys: tuple[ReadKey, ...] = ()
    is_clustered: bool = False

    @property
    def label(self) -> str:
        """Return schema.name."""
        return self.version.label

    @property
    def key(self) -> RangeKey:
        """Return the columns of the key."""
        return RangeKey(tuple(KeyColumn(name, PRINTED, type_in_sql) for name, type_in_sql in self.columns))

    def condition(self, low: Texts | None, high: Texts | None) -> str:
        """Return a condition in SQL for the rows of a range. None: there is no limit.

        A partition that is created or attached later is left out. The log has the rows that it gets, and not those that
        it had before.
        """
        known = ", ".join(str(relid) for relid, _ in self.files)
        of_known = f"tableoid OPERATOR(pg_catalog.=) ANY (ARRAY[{known}]::pg_catalog.oid[])"
        return f"{self.key.condition(low, high)} AND {of_known}"

    @property
    def rows(self) -> int:
        """Return the number of rows that are read."""
        return sum(read.rows for read in self.ranges)

    @property
    def is_read(self) -> bool:
        """Return True if all ranges are read."""
        return bool(self.ranges) and self.ranges[-1].high is None

    @property
    def reached(self) -> Lsn:
        """Return a position behind all transactions that a snapshot sees."""
        return max([self.start, *(part.lsn for part in self.ranges), *(part.lsn for part in self.keys)])

    def committed(self, number: int) -> RangeLoad | None:
        """Return the load with the ranges up to commit `number`; 0: none. None: the load has no such commit."""
        numbers = [0, *(part.commit for part in self.ranges)]
        if number not in numbers:
            return None
        return replace(self, ranges=self.ranges[: len(numbers) - 1 - numbers[::-1].index(number)])

    def loaded_rows(self) -> LoadedRows:
        """Return what adds the changes after `start` to the rows. All ranges must be read.

        Raises:
            ValueError: the file of the load is damaged.
        """
        again = {}
        for read_key in self.keys:
            row = None if read_key.row is None else raw_row(tuple(map(_encoded, read_key.row)))
            again[self.raw_key(read_key.key)] = ReadRow(row, read_key.read_in)
        return LoadedRows(self.version.relation(), again)

    def raw_key(self, texts: Sequence[str]) -> Key:
        """Return a key as the log has it, from its texts."""
        by_name = dict(zip((name for name, _ in self.columns), texts, strict=True))
        return raw_row(tuple([_encoded(by_name[name]) for name in self.key_names]))

    def key_texts(self, raw: Key) -> Texts:
        """Return the texts of a key that the log has."""
        cells = values(raw, len(self.columns))
        texts = {
            name: value.decode(errors=ERRORS)
            for name, value in zip(self.key_names, cells, strict=True)
            if isinstance(value, bytes)
        }
        return tuple(texts[name] for name, _ in self.columns)

    @property
    def key_names(self) -> Texts:
        """Return the columns of the key in the order of rows."""
        names = {name for name, _ in self.columns}
        return tuple(column.name for column in self.version.columns if column.name in names)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as from_json() reads them."""
        return {
            **{name: value for name, value in asdict(self).items() if name not in ("version", "ranges", "keys")},
            "version": self.version.as_json(),
            "start": str(self.start),
            "as_text": sorted(self.as_text),
            "writers": sorted(self.writers),
            "ranges": [{**part._asdict(), "lsn": str(part.lsn)} for part in self.ranges],
            "keys": [{**part._asdict(), "lsn": str(part.lsn)} for part in self.keys],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RangeLoad:
        """Return the load that as_json() was called on."""
        return cls(
            **{
                **fields,
                "version": TableVersion.from_json(fields["version"]),
                "publications": tuple(fields["publications"]),
                "start": Lsn.parse(fields["start"]),
                "columns": tuple((name, kind) for name, kind in fields["columns"]),
                "files": tuple((relid, number) for relid, number in fields["files"]),
                "as_text": frozenset(fields["as_text"]),
                "writers": frozenset(fields["writers"]),
                "ranges": tuple(_read_range(part) for part in fields["ranges"]),
                "keys": tuple(_read_key(part) for part in fields["keys"]),
            }
        )


def _read_range(fields: Mapping[str, Any]) -> ReadRange:
    return ReadRange(
        **{
            **fields,
            "low": _texts(fields["low"]),
            "high": _texts(fields["high"]),
            "lsn": Lsn.parse(fields["lsn"]),
        }
    )


def _read_key(fields: Mapping[str, Any]) -> ReadKey:
    row = None if fields["row"] is None else tuple(fields["row"])
    return ReadKey(tuple(fields["key"]), row, fields["snapshot"], Lsn.parse(fields["lsn"]))


def _read_load(path: Location) -> RangeLoad | None:
    try:
        return RangeLoad.from_json(read_json(path))
    except (KeyError, TypeError, ValueError):
        return None


def _texts(found: Iterable[str] | None) -> Texts | None:
    return None if found is None else tuple(found)


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode(errors=ERRORS)


class RangeLoadFiles:
    """The loads by ranges of a lake that are not finished. Methods block."""

    def __init__(self, lake: Location) -> None:
        """Describe the files. `lake` is the directory of the lake."""
        self._directory = lake / "loads"

    def all(self) -> dict[str, RangeLoad]:
        """Return the loads by label. One that another version of this program has begun is missing: it begins again."""
        folder = self._directory
        names = [name for name in file_names(folder) if name.endswith(_SUFFIX)]
        loads = for_each(folder, lambda name: _read_load(folder / name), names)
        return {load.label: load for load in loads if load is not None}

    def save(self, load: RangeLoad) -> None:
        """Store the state of a load."""
        write_json(self._file(load.label), load.as_json())

    def end(self, label: str) -> None:
        """Forget the load of a table, if there is one."""
        self._file(label).unlink(missing_ok=True)

    def needed(self, position: Lsn) -> Lsn:
        """Return the position from which on a lake at `position` needs the change log."""
        return min([position, *(load.start for load in self.all().values())])

    def _file(self, label: str) -> Location:
        return self._directory / f"{file_name(label)}{_SUFFIX}"
