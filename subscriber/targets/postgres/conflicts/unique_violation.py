"""The rows that conflict with a change that a unique index has rejected, queried afterwards on another session.

The built-in worker checks every unique index before it reports a conflict. Here the server has
rejected the statement and the transaction is rolled back. So the rows may have changed since, or be deleted;
the report is then only the server's own error. Indexes on expressions and partial ones are left
out, and deferrable ones are not enforced for replicated changes at all.

Source: check_exclusion_or_unique_constraint(), FindConflictTuple() and CheckAndReportConflict() in
execReplication.c.
"""

from __future__ import annotations

from subscriber import server_features as features
from subscriber.apply.conflicts import types
from subscriber.apply.conflicts.types import Conflict
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import ServerError
from subscriber.protocol.messages import Insert, Update
from subscriber.server_version import Wording
from subscriber.sqlstate import UNIQUE_VIOLATION
from subscriber.targets.postgres.conflicts.row_lookup import RowLookup, columns_of
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.sql import lookup_queries

_HAS_COMMIT_TIMES = "SELECT pg_catalog.current_setting('track_commit_timestamp')"


async def investigate(pipeline: Pipeline, error: ServerError, note: StatementContext) -> Conflict | None:
    """The conflict behind a unique violation of the statement `note` is about; None if it is gone.

    `pipeline` is a fresh one, on a session with the apply worker's settings.
    """
    mapping, change = note.mapping, note.change
    if error.sqlstate != UNIQUE_VIOLATION or mapping is None or not isinstance(change, Insert | Update):
        return None
    schema, table = error.fields.get("s", mapping.local.schema), error.fields.get("t", mapping.local.name)
    label = f"{schema}.{table}"
    lookup = RowLookup(pipeline, timed=await tracks_commit_times(pipeline))
    columns = columns_of(mapping, label)
    new = change.new.split()
    old = change.old.split() if isinstance(change, Update) and change.old is not None else new
    indexes = await lookup.unique_indexes(mapping, new, (schema, table))
    searched = old[0] if isinstance(change, Update) else None
    plans = [
        lookup_queries.in_the_way(mapping, (schema, table), places, searched=searched, timed=lookup.timed)
        for _, _, places in indexes
    ]
    holders = [
        row.local_row(mapping, columns, index, key)
        for (index, key, _), rows in zip(indexes, await lookup.fetch_rows(plans, new, old), strict=True)
        for row in rows
    ]
    if not holders:
        return None
    wording = Wording.of(pipeline.session.server_version // 10_000)
    return types.unique(mapping, await lookup.render_as_text(mapping, change), label, columns, holders, wording)


async def tracks_commit_times(pipeline: Pipeline) -> bool:
    """Return True if the target records when, and through which origin, a row was written."""
    version = pipeline.session.server_version
    return features.COMMIT_ORIGINS.is_in(version) and await pipeline.rows(_HAS_COMMIT_TIMES) == [("on",)]
