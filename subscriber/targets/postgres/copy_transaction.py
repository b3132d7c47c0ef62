"""The transaction of a table's initial copy on an apply session, without the COPY itself."""

from __future__ import annotations

from datetime import datetime

from subscriber.apply.relation_map import LocalRelation, RelationMapping
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.lsn import Lsn
from subscriber.quoting import identifier, qualified
from subscriber.subscription import Subscription
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.session import introspection, schema_check
from subscriber.targets.postgres.session.capabilities import detect_capabilities
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.roles import NOBODY
from subscriber.targets.postgres.session.statement_context import StatementContext

_FINISH = "SELECT subscriber.finish_copy($1, $2, $3)"
_SET_TIME = "SELECT subscriber.set_origin($1, $2, '0/0', $3)"
_NOTE = StatementContext("COPY")


async def copy_session(session: Session, subscription: Subscription, synchronous_commit: str) -> RowApplier:
    """Make a row applier for copying on `session`, which is not given a place, and acts as the subscription says."""
    means = await detect_capabilities(session)
    rows = RowApplier(Pipeline(session), "", lambda *_: None)
    rows.capabilities = means
    await rows.configure(synchronous_commit)
    await rows.roles.subscribe(subscription, replica_role=means.replica_role)
    return rows


async def begin(rows: RowApplier, schema: str, name: str) -> LocalRelation:
    """Begin the transaction, lock the table against changes of its definition, and read that. Raises MappingError."""
    pipeline = rows.pipeline
    local = await introspection.introspect(pipeline, schema, name, rows.roles.terms)
    plain = f"LOCK TABLE {qualified(schema, name)} IN ROW EXCLUSIVE MODE"
    rows.roles.on_begin()
    pipeline.execute("BEGIN", note=_NOTE)
    rows.roles.switch_for_tables([local], _NOTE)
    pipeline.execute_once(schema_check.lock(local, "ROW EXCLUSIVE") if local.guarded else plain, note=_NOTE)
    rows.roles.reset_role(_NOTE)
    await pipeline.sync()
    return await introspection.introspect(pipeline, schema, name, rows.roles.terms)


async def copy_as(rows: RowApplier, mapping: RelationMapping) -> None:
    """Switch to the role for the table. The next statement is the COPY, on the session itself."""
    role = rows.roles.role([mapping.local])
    await rows.pipeline.session.query(f"SET LOCAL ROLE {identifier(role.name) if role != NOBODY else NOBODY.name}")


async def end(
    rows: RowApplier, mapping: RelationMapping, progress: ProgressRecord, position: Lsn, read_at: datetime
) -> None:
    """After the COPY: store that the table is complete as of `position`; not committed yet.

    `read_at` is the publisher's time of that.
    """
    pipeline = rows.pipeline
    pipeline.attach()
    if mapping.runs_foreign_code:
        rows.has_run_foreign_code = True
        rows.foreign_code.begin(mapping)
    rows.foreign_code.run_deferred(_NOTE)
    rows.roles.reset(_NOTE)
    await pipeline.rows(_FINISH, *progress.shown, str(position))
    if rows.capabilities.origins:  # the rows are as old as the snapshot, for policies that compare times
        await pipeline.rows(_SET_TIME, *progress.shown, read_at.isoformat())


async def commit(rows: RowApplier) -> None:
    """The end of the transaction."""
    pipeline: Pipeline = rows.pipeline
    await pipeline.rows("COMMIT")
    rows.roles.on_begin()
    rows.foreign_code.clean()
    await pipeline.sync()
