"""Which rows are in the way when a unique index refuses a change: asked afterwards, on a session of its own.

The built-in worker looks into every unique index before it reports a conflict. Here the server has
refused the statement and the transaction is rolled back; so the rows may have changed since, or be gone,
and then the server's own error is all there is to say. Indexes on expressions and partial ones are left
out, and deferrable ones are not enforced for replicated changes at all.

Source: check_exclusion_or_unique_constraint(), FindConflictTuple() and CheckAndReportConflict() in
execReplication.c.
"""

from __future__ import annotations

import json

from subscriber.apply import conflict
from subscriber.apply.conflict import Conflict, LocalRow, Writer
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import ServerError
from subscriber.protocol.messages import Insert, Update
from subscriber.protocol.tuples import NULL, UNCHANGED
from subscriber.target import statements
from subscriber.target.binding import Row, bind
from subscriber.target.note import Note

UNIQUE_VIOLATION = "23505"

_INDEXES = """
SELECT pg_catalog.json_build_array(x.relname, pg_catalog.json_agg(a.attname ORDER BY k.place))
  FROM pg_catalog.pg_index i
  JOIN pg_catalog.pg_class t ON t.oid = i.indrelid AND t.relname = $2
  JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace AND n.nspname = $1
  JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid,
       pg_catalog.unnest(i.indkey::pg_catalog.int2[]) WITH ORDINALITY AS k (attnum, place)
  JOIN pg_catalog.pg_attribute a ON a.attnum = k.attnum
 WHERE a.attrelid = i.indrelid AND k.place <= i.indnkeyatts AND i.indisunique AND i.indisvalid AND i.indimmediate
   AND i.indpred IS NULL AND i.indexprs IS NULL
 GROUP BY x.oid, x.relname ORDER BY x.oid
"""
_HAS_COMMIT_TIMES = "SELECT pg_catalog.current_setting('track_commit_timestamp')"
_COMMIT_TIMES_SINCE = 140000  # server version from which the origin can be asked for with the time


async def investigate(pipeline: Pipeline, error: ServerError, note: Note) -> Conflict | None:
    """The conflict behind a unique violation of the statement `note` is about; None if it is gone.

    `pipeline` is a fresh one, on a session with the apply worker's settings.
    """
    mapping, change = note.mapping, note.change
    if error.sqlstate != UNIQUE_VIOLATION or mapping is None or not isinstance(change, Insert | Update):
        return None
    schema, table = error.fields.get("s", mapping.local.schema), error.fields.get("t", mapping.local.name)
    label = f"{schema}.{table}"
    leaves = {leaf.label: leaf.columns for leaf in mapping.local.partitions}
    columns = leaves.get(label, tuple(column.name for column in mapping.local.columns))
    new = change.new.split()
    old = change.old.split() if isinstance(change, Update) and change.old is not None else new
    names = {column.name: index for index, column in enumerate(mapping.attributes)}
    timed = await tracks_commit_times(pipeline)
    found = []
    for (row,) in await pipeline.rows(_INDEXES, schema, table):
        index, key = json.loads(row or "")
        places = [names.get(name) for name in key]
        if any(place is None or new[0][place] in (NULL, UNCHANGED) for place in places):
            continue  # NULLs are never in each other's way, and what did not change neither
        plan = statements.in_the_way(
            mapping,
            (schema, table),
            [place for place in places if place is not None],
            other_than_searched=isinstance(change, Update),
            timed=timed,
        )
        for time, origin_id, origin, xid, *values in await _rows(pipeline, plan, new, old):
            writer = Writer(xid or "", time, origin_id not in (None, "0"), origin)
            found.append(LocalRow(index, tuple(key), writer, dict(zip(columns, values, strict=True))))
    return conflict.unique(mapping, change, label, columns, found) if found else None


async def tracks_commit_times(pipeline: Pipeline) -> bool:
    """Whether the target can say when, and through which origin, a row was written."""
    version = pipeline.session.server_version
    return version >= _COMMIT_TIMES_SINCE and await pipeline.rows(_HAS_COMMIT_TIMES) == [("on",)]


async def _rows(pipeline: Pipeline, plan: statements.Plan, new: Row, old: Row) -> list[tuple[str | None, ...]]:
    result: list[tuple[str | None, ...]] = []
    formats, parameters = bind(plan, new, old)
    pipeline.execute(plan.sql, formats, parameters, on_result=lambda _note, _tag, rows: result.extend(rows))
    await pipeline.settle()
    return result
