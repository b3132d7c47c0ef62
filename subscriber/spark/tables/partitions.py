"""The partitions of a table: which values of its columns are together in a file, and the division of rows by them.

A file has rows of one partition. A row whose value changes moves to a file of another partition: the merge writes its
new version like a new row.

**Invariants.**

- Rows are divided in bounded memory, however many partitions they have. Rows that memory does not hold are in temporary
  files until a partition has a file's worth of them. One such file is open at a time.
- A task that gets more partitions than `most` fails. A column whose values are nearly unique makes as many files.
- A value and its partition are equal only if all readers find them equal. So types whose values have several forms or
  several texts are refused, and for Delta texts that its readers take for NULL.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.errors import ApplyError

IDENTITY = "identity"
HOUR, DAY, MONTH, YEAR = "hour", "day", "month", "year"
TIMES = (YEAR, MONTH, DAY, HOUR)  # Iceberg's transforms of times
HINT = "Choose other columns with --partition."

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_UNSAFE = re.compile(r"[/=%\x00-\x1f\x7f]")  # in the name of a column
_LONGEST = 240  # bytes of the name of a directory
_MICROSECONDS = 3_600_000_000  # in an hour


class PartitionColumn(NamedTuple):
    """A column whose values decide the partition of a row, or the year, month, day or hour of its values."""

    column: str
    transform: str = IDENTITY

    def __str__(self) -> str:
        return self.column if self.transform == IDENTITY else f"{self.transform}({self.column})"

    def values(self, rows: pa.RecordBatch) -> pa.Array:
        """Return the value that each row has. Times are numbers since 1970, as Iceberg has them."""
        cells = rows[self.column]
        match self.transform:
            case "year":
                return pc.subtract(pc.year(cells), 1970).cast(pa.int32())
            case "month":
                months = pc.multiply(pc.subtract(pc.year(cells), 1970), 12)
                return pc.add(months, pc.subtract(pc.month(cells), 1)).cast(pa.int32())
            case "day":
                days = pc.floor_temporal(cells, unit=DAY) if pa.types.is_timestamp(cells.type) else cells
                return days.cast(pa.date32()).cast(pa.int32())
            case "hour":
                return pc.divide(pc.floor_temporal(cells, unit=HOUR).cast(pa.int64()), _MICROSECONDS).cast(pa.int32())
            case _:
                return cells


Partitions: TypeAlias = tuple[PartitionColumn, ...]
PartitionValues: TypeAlias = tuple[Any, ...]  # one for each column


def check_partitions(partitions: Partitions, schema: pa.Schema) -> None:
    """Raise ApplyError if a table with these columns cannot have the partitions."""
    names = [partition.column for partition in partitions]
    for partition in partitions:
        if partition.column not in schema.names:
            raise ApplyError(f'it has no column "{partition.column}" for its partitions', hint=HINT)
        if names.count(partition.column) > 1:
            raise ApplyError(f'its partitions have column "{partition.column}" twice', hint=HINT)
        kind = schema.field(partition.column).type
        is_time = pa.types.is_timestamp(kind) or (pa.types.is_date(kind) and partition.transform != HOUR)
        is_value = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_string(kind) or is_time
        is_value = is_value or pa.types.is_date(kind)
        if not (is_value if partition.transform == IDENTITY else is_time and partition.transform in TIMES):
            raise ApplyError(f"it cannot have partitions by {partition}: the column is {kind}", hint=HINT)


def renamed_partitions(partitions: Partitions, names: Mapping[str, str]) -> Partitions:
    """Return the partitions after columns have got other names. Columns without a new name are dropped."""
    return tuple(
        partition._replace(column=names[partition.column]) for partition in partitions if partition.column in names
    )


# --- directories, as Hive has them ----------------------------------------------------------------


def hive_text(column: str, value: Any) -> str | None:
    """Return a value of a partition as Delta has it. Raises ApplyError for texts that readers take for NULL."""
    if value in ("", _HIVE_NULL):
        raise ApplyError(
            f'column "{column}" has the text "{value}", which readers of Delta take for NULL in a partition',
            hint=HINT,
        )
    match value:
        case None:
            return None
        case bool():
            return "true" if value else "false"
        case datetime(tzinfo=None):
            return value.isoformat(" ", "microseconds")
        case datetime():
            return f"{value.astimezone(UTC).replace(tzinfo=None).isoformat('T', 'microseconds')}Z"
        case date():
            return value.isoformat()
        case _:
            return str(value)


def hive_texts(partitions: Partitions, values: PartitionValues) -> dict[str, str | None]:
    """Return the values of a partition by the name of the column."""
    return {
        partition.column: hive_text(partition.column, value)
        for partition, value in zip(partitions, values, strict=True)
    }


def hive_folder(partitions: Partitions, values: PartitionValues) -> str:
    """Return the folder of a partition, with a slash at the end.

    Delta's log has the values, but some readers take them from the folder. Polars decodes values, and not names.
    """
    names = []
    for column, text in hive_texts(partitions, values).items():
        escaped = _UNSAFE.sub(lambda found: quote(found[0], safe=""), column)
        names.append(f"{escaped}={_HIVE_NULL if text is None else quote(text, safe='')}")
    for partition, name in zip(partitions, names, strict=True):
        if len(name.encode()) > _LONGEST:
            raise ApplyError(f'column "{partition.column}" has a value that is too long for a directory', hint=HINT)
    return "".join(f"{name}/" for name in names)


# --- rows by partition ----------------------------------------------------------------------------


class PartitionLimits(NamedTuple):
    """The limits by which rows are divided."""

    memory: int  # bytes of all rows that are in memory
    file: int  # bytes of rows that make a file
    most: int  # partitions


def by_partition(
    batches: Iterable[pa.RecordBatch], partitions: Partitions, limits: PartitionLimits
) -> Iterator[tuple[PartitionValues, Iterator[pa.RecordBatch]]]:
    """Yield the rows of one partition at a time, a file's worth or the rest of them.

    The rows must be read before the next ones are taken.

    Raises:
        ApplyError: there are too many partitions.
    """
    parts = dict[PartitionValues, _Part]()
    memory = 0
    with tempfile.TemporaryDirectory(prefix="subscriber-") as directory:
        for batch in batches:
            for values, rows in _divided(batch, partitions):
                if values not in parts:
                    if len(parts) == limits.most:
                        raise ApplyError(
                            f"it has more than {limits.most:,} partitions by {', '.join(map(str, partitions))}",
                            hint="Choose columns with fewer values with --partition.",
                        )
                    parts[values] = _Part(Path(directory) / str(len(parts)))
                part = parts[values]
                part.add(rows)
                memory += rows.nbytes
                if part.size >= limits.file:
                    memory -= part.memory
                    yield values, part.taken()
            if memory > limits.memory:
                for part in parts.values():
                    part.store()
                memory = 0
        for values, part in parts.items():
            if part.size:
                yield values, part.taken()


def _divided(batch: pa.RecordBatch, partitions: Sequence[PartitionColumn]) -> Iterator[tuple[Any, pa.RecordBatch]]:
    """Yield the rows of each partition of a batch."""
    names = [f"p{place}" for place in range(len(partitions))]
    columns = [partition.values(batch) for partition in partitions]
    rows = pa.table([*columns, pa.array(range(len(batch)), pa.int64())], names=[*names, "row"])
    groups = rows.group_by(names, use_threads=False).aggregate([("row", "list")])
    for index in range(len(groups)):
        values = tuple(groups[name][index].as_py() for name in names)
        yield values, batch if len(groups) == 1 else batch.take(groups["row_list"][index].values)


class _Part:
    """The rows of a partition that are not taken: in a file, and after these in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = list[pa.RecordBatch]()
        self.memory = 0
        self.size = 0

    def add(self, rows: pa.RecordBatch) -> None:
        self._held.append(rows)
        self.memory += rows.nbytes
        self.size += rows.nbytes

    def store(self) -> None:
        """Append the rows in memory to the file. An Arrow stream can follow another one in a file."""
        if not self._held:
            return
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with (
            self._path.open("ab") as file,
            pa.ipc.new_stream(file, self._held[0].schema, options=options) as writer,
        ):
            for rows in self._held:
                writer.write_batch(rows)
        self._held, self.memory = [], 0

    def taken(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows, and forget them."""
        if self._path.exists():
            with pa.OSFile(str(self._path)) as file:
                while file.tell() < file.size():
                    with pa.ipc.open_stream(file) as stream:
                        yield from stream
            self._path.unlink()
        yield from self._held
        self._held, self.memory, self.size = [], 0, 0
