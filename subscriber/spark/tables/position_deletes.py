"""Files with the positions of deleted rows, as version 2 of the Iceberg format has them: position delete files.

A row of a data file is deleted if a delete file has its position. So a batch that changes few rows of a large file
writes their positions, and their new versions to a new file, instead of the whole file (merge.py).

**Invariants.**

- A delete file names one data file, and is removed in the commit that removes the data file.
- A data file gets one delete file with all positions. It replaces the one that the data file had, in one commit.
- Delete files exist only where the format of the table has them: `DataFolder.address` is None for Delta.

**Failure cases.**

- Killed between the file and the commit: no version has the file, so readers ignore it. It is removed as data files
  are.
- Task that runs twice: the table gets one of the two files, which have the same positions.
- Another commit comes first, for example of a program that writes the data file again: the commit of the batch fails,
  and its tasks run again on the files that the table has then.
- Delete file whose data file is gone, because another program left it: the next commit removes it.
- Delete file of another program that names several data files, or values instead of positions: the table is set
  aside, as for every feature that commits do not observe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subscriber.changelog.storage import Location, local_file, stored_file

# The numbers that Iceberg's specification gives to the columns of such files.
FILE_PATH, POSITION = 2147483546, 2147483545


def _required(name: str, kind: pa.DataType, number: int) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"PARQUET:field_id": str(number)})


_SCHEMA = pa.schema([_required("file_path", pa.string(), FILE_PATH), _required("pos", pa.int64(), POSITION)])
NO_POSITIONS = pa.array([], pa.int64())


class NewDeletes(NamedTuple):
    """A delete file that a task has written. `first` and `last` are the smallest and largest position."""

    data_file: str  # in the directory of the table, as `path`
    path: str
    size: int
    rows: int
    first: int
    last: int


def read_positions(directory: Location, paths: Sequence[str]) -> pa.Array:
    """Return the positions of the delete files of a data file. Their `paths` are in `directory`."""
    chunks = [NO_POSITIONS]
    for path in paths:
        with local_file(directory / path) as local:
            chunks += pq.read_table(local, columns=["pos"], partitioning=None)["pos"].chunks
    return pa.concat_arrays(chunks)


def write_positions(directory: Location, prefix: str, data_file: str, address: str, positions: pa.Array) -> NewDeletes:
    """Write a delete file.

    Args:
        directory: the directory of the table.
        prefix: of the name of the file: a folder in the directory.
        data_file: the path of the data file in the directory.
        address: the location of the data file, as the metadata of the table has it.
        positions: at least one.
    """
    path = f"{prefix}part-00000-{uuid4()}-deletes.zstd.parquet"
    sorted_positions = positions.sort()
    files = pa.repeat(pa.scalar(address), len(positions))
    with stored_file(directory / path) as local:
        rows = pa.table([files, sorted_positions], schema=_SCHEMA)
        pq.write_table(rows, local, compression="zstd", use_dictionary=["file_path"])
        size = local.stat().st_size
    first, last = sorted_positions[0].as_py(), sorted_positions[-1].as_py()
    return NewDeletes(data_file, path, size, len(positions), first, last)


def numbers_to(end: int) -> pa.Array:
    """Return the numbers from 0 to `end` - 1, without an object of Python for each."""
    return pc.indices_nonzero(pc.is_null(pa.nulls(end))).cast(pa.int64())


def left_rows(rows: int, positions: pa.Array) -> pa.Array:
    """Return, for each of a file's `rows`, whether it is not deleted."""
    return pc.invert(pc.is_in(numbers_to(rows), positions))
