"""The rows of net_rows() as staged rows of tables/merge.py. Runs on executors.

net_rows()  SCD   staged
put         1     u
delete      1     d
empty       1     none; the rows are marked as those of a truncated table
close       2     c
add         2     +
empty       2     e
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.changelog.storage import Location
from subscriber.spark.scd import net_rows
from subscriber.spark.tables import stage as staged
from subscriber.spark.tables.stage import OP, Staged, write_staged

_OPS = {"put": "u", "delete": "d", "close": "c", "add": "+"}
_EMPTY = "empty"
_HISTORY = ("start", "end", "start_time", "end_time")  # in the order of HISTORY


def stage(rows: pa.Table, width: int, keys: Sequence[int], directory: Location, *, history: bool) -> Staged:
    """Write rows of net_rows() to a new file.

    Args:
        rows: the rows. Values that were not sent are filled in.
        width: the number of the table's columns.
        keys: the indexes of the key among them.
        directory: where the file is written.
        history: SCD type 2: the columns of HISTORY follow those of the table.
    """
    ops, truncated = rows[OP].to_pylist(), False
    if _EMPTY in ops and not history:
        rows, truncated = rows.filter(pc.not_equal(rows[OP], _EMPTY)), True
        ops = rows[OP].to_pylist()
    columns = {OP: pa.array([_OPS.get(op, "e") for op in ops], pa.string())}
    places = {column: place for place, column in enumerate(keys)}
    for column in range(width):
        name = net_rows.key(places[column]) if column in places else net_rows.value(column)
        columns[staged.value(column)] = rows[name]
    if history:
        columns |= {staged.value(width + place): rows[name] for place, name in enumerate(_HISTORY)}
    return write_staged(pa.table(columns), directory, tuple(keys), truncated=truncated)
