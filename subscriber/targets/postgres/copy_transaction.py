"""The transaction of a table's initial copy on an apply session, without the COPY itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from subscriber.apply.relation_map import LocalRelation, RelationMapping
from subscriber.catalog.store.copied_ranges import CopiedRange
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.lsn import Lsn
from subscriber.quoting import identifier, qualified
from subscriber.subscription import Subscription
from subscriber.targets.postgres.session import introspection, schema_check
from subscriber.targets.postgres.session.capabilities import detect_capabilities
from subscriber.targets.postgres.session.known_tables import KnownTables
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.roles import NOBODY
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.session.target_session import TargetSession, configure_session

_FINISH = "SELECT subscriber.finish_copy($1, $2, $3)"
# Other sessions wait while this one waits for a lock that conflicts with writes.
_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '5s'"
_SET_TIME = "SELECT subscriber.set_origin($1, $2, '0/0', $3)"
_RECORD_RANGE = "SELECT subscriber.record_range($1, $2, $3::jsonb)"
_NOTE = StatementContext("COPY")
_HAS_SHAPE = """
SELECT true FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relname = $2 AND c.oid = $3::pg_catalog.oid AND subscriber.table_shape(c.oid, $4) = $5
"""
_CHECKS = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = $1::pg_catalog.oid AND NOT i.indimmediate),
       EXISTS (SELECT FROM pg_catalog.pg_trigger t JOIN pg_catalog.pg_constraint k ON k.oid = t.tgconstraint
                WHERE t.tgrelid = $1::pg_catalog.oid AND k.contype = 'f' AND t.tgenabled IN ('A', $2))
"""


@dataclass(frozen=True, slots=True)
class TableChecks:
    """The checks of a table that concern several of its rows or other tables.

    Attributes:
        deferrable_unique: it has a unique or exclusion constraint that may be checked at COMMIT.
        foreign_keys: foreign keys from or to the table are checked for copied rows and replicated changes.
    """

    deferrable_unique: bool
    foreign_keys: bool


async def copy_session(
    connected: Session,
    subscription: Subscription,
    synchronous_commit: str,
    origin: str = "",
    known_tables: KnownTables | None = None,
) -> TargetSession:
    """Configure a connection for copying. It has no place, and acts as the subscription says."""
    capabilities = await detect_capabilities(connected)
    pipeline = Pipeline(connected)
    return await configure_session(
        pipeline,
        subscription,
        capabilities,
        synchronous_commit=synchronous_commit,
        origin=origin,
        known_tables=known_tables,
    )


async def begin(session: TargetSession, schema: str, name: str, mode: str = "ROW EXCLUSIVE") -> LocalRelation:
    """Begin the transaction, lock the table against changes of its definition, and read that. Raises MappingError."""
    pipeline = session.pipeline
    local = await introspection.introspect(pipeline, schema, name, session.roles.terms)
    plain = f"LOCK TABLE {qualified(schema, name)} IN {mode} MODE"
    session.roles.on_begin()
    pipeline.execute("BEGIN", note=_NOTE)
    if mode != "ROW EXCLUSIVE":
        limit_lock_wait(session)
    session.roles.switch_for_tables([local], _NOTE)
    pipeline.execute_once(schema_check.lock(local, mode) if local.guarded else plain, note=_NOTE)
    session.roles.reset_role(_NOTE)
    await pipeline.sync()
    if await _is_unchanged(session, local):
        return local
    return await introspection.introspect(pipeline, schema, name, session.roles.terms)


async def _is_unchanged(session: TargetSession, local: LocalRelation) -> bool:
    """Return True if a locked table is as it was, by the rule of schema_check.py. To read it again takes longer."""
    if local.guarded or local.partitioned:
        return False
    shape = (local.schema, local.name, str(local.oid), session.roles.terms.owner, local.shape)
    return bool(await session.pipeline.rows(_HAS_SHAPE, *shape))


def limit_lock_wait(session: TargetSession) -> None:
    """Queue a limit of some seconds for locks of the transaction."""
    session.pipeline.execute(_LOCK_TIMEOUT, note=_NOTE)


async def read_checks(session: TargetSession, local: LocalRelation) -> TableChecks:
    """Return the checks of a table in the transaction that begin() has opened."""
    enabled = "R" if session.capabilities.replica_role else "O"
    answer = await session.pipeline.rows(_CHECKS, str(local.oid), enabled)
    deferrable_unique, foreign_keys = (value == "t" for value in answer[0])
    return TableChecks(deferrable_unique, foreign_keys)


async def has_rows(session: TargetSession, mapping: RelationMapping) -> bool:
    """Return True if a table has rows, in the transaction that begin() has opened.

    Afterwards the pipeline has to be attached again.

    Raises:
        ServerError: the role that copies may not read the table.
    """
    await copy_as(session, mapping)
    answer = await session.pipeline.session.rows(f"SELECT EXISTS (SELECT FROM {mapping.local.only})")
    return answer[0][0] == "t"


async def wait_for_writers(session: TargetSession, schema: str, name: str) -> None:
    """Wait for the end of transactions that have written to a table. Raises ServerError after some seconds."""
    await begin(session, schema, name, "SHARE")
    await roll_back(session)


async def finish(session: TargetSession, progress: ProgressRecord, position: Lsn) -> None:
    """Store, in a transaction of its own, that the table is complete as of `position`."""
    await session.pipeline.rows(_FINISH, *progress.shown, str(position))
    await session.pipeline.sync()


async def copy_as(session: TargetSession, mapping: RelationMapping) -> None:
    """Switch to the role for the table. The next statement is the COPY, on the session itself."""
    role = session.roles.role([mapping.local])
    await session.pipeline.session.query(f"SET LOCAL ROLE {identifier(role.name) if role != NOBODY else NOBODY.name}")


async def end(
    session: TargetSession, mapping: RelationMapping, progress: ProgressRecord, position: Lsn, read_at: datetime
) -> None:
    """After the COPY: store that the table is complete as of `position`; not committed yet.

    `read_at` is the publisher's time of that.
    """
    _after_copy(session, mapping)
    await session.pipeline.rows(_FINISH, *progress.shown, str(position))
    await _set_time(session, progress, read_at)


async def end_range(
    session: TargetSession, mapping: RelationMapping, progress: ProgressRecord, copied: CopiedRange, read_at: datetime
) -> None:
    """Store after the COPY that a range is copied. The transaction is not committed yet.

    Args:
        session: the session.
        mapping: the table.
        progress: the table's progress record.
        copied: the range. `rangeid` is the row of the catalog that it replaces; 0: there is none.
        read_at: the publisher's time of the snapshot.

    Raises:
        ServerError: another session has claimed the progress record.
    """
    content = {
        "rangeid": copied.rangeid,
        "key_columns": copied.key_columns,
        "key_types": copied.key_types,
        "key_comparisons": copied.key_comparisons,
        "low": copied.low,
        "high": copied.high,
        "single": copied.single,
        "snapshot": copied.snapshot,
        "lsn": str(copied.lsn),
        "timeline": copied.timeline,
    }
    _after_copy(session, mapping)
    await session.pipeline.rows(_RECORD_RANGE, *progress.shown, json.dumps(content))
    await _set_time(session, progress, read_at)


def _after_copy(session: TargetSession, mapping: RelationMapping) -> None:
    pipeline = session.pipeline
    pipeline.attach()
    if mapping.runs_foreign_code:
        session.foreign_code.begin(mapping)
    session.foreign_code.run_deferred(_NOTE)
    session.roles.reset(_NOTE)


async def _set_time(session: TargetSession, progress: ProgressRecord, read_at: datetime) -> None:
    """Give the rows the age of the snapshot, for policies that compare times."""
    if session.capabilities.origins:
        await session.pipeline.rows(_SET_TIME, *progress.shown, read_at.isoformat())


async def roll_back(session: TargetSession) -> None:
    """Undo the transaction, in which nothing was copied."""
    await session.pipeline.rows("ROLLBACK")
    session.roles.on_begin()
    await session.pipeline.sync()


async def commit(session: TargetSession) -> None:
    """The end of the transaction."""
    pipeline: Pipeline = session.pipeline
    await pipeline.rows("COMMIT")
    session.roles.on_begin()
    session.foreign_code.clean()
    await pipeline.sync()
