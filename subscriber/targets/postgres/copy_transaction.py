"""The transaction of a table's initial copy on an apply session: what stands around the COPY."""

from __future__ import annotations

from datetime import datetime

from subscriber.apply.relation_map import LocalRelation, RelationMapping
from subscriber.connection.pipeline import Pipeline
from subscriber.connection.session import Session
from subscriber.lsn import Lsn
from subscriber.subscription import Subscription
from subscriber.targets.postgres.row_applier import PostgresTarget
from subscriber.targets.postgres.session import introspection, schema_check
from subscriber.targets.postgres.session.capabilities import detect_capabilities
from subscriber.targets.postgres.session.progress import ProgressRecord
from subscriber.targets.postgres.session.roles import NOBODY
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.sql.row_statements import qualified, quote

_FINISH = "SELECT subscriber.finish_copy($1, $2, $3)"
_SET_TIME = "SELECT subscriber.set_origin($1, $2, '0/0', $3)"
_NOTE = StatementContext("COPY")


async def target_of(session: Session, subscription: Subscription, synchronous_commit: str) -> PostgresTarget:
    """A target for copying on `session`, which is not given a place, and acts as the subscription says."""
    means = await detect_capabilities(session)
    target = PostgresTarget(session, "", lambda *_: None)
    target.capabilities = means
    await target.configure(synchronous_commit)
    await target.roles.subscribe(subscription, replica_role=means.replica_role)
    return target


async def begin(target: PostgresTarget, schema: str, name: str) -> LocalRelation:
    """Begin the transaction, lock the table, and look at it: nobody can alter it until the end. Raises MappingError."""
    pipeline = target.pipeline
    local = await introspection.introspect(pipeline, schema, name, target.roles.terms)
    plain = f"LOCK TABLE {qualified(schema, name)} IN ROW EXCLUSIVE MODE"
    target.roles.on_begin()
    pipeline.execute("BEGIN", note=_NOTE)
    target.roles.switch_for_tables([local], _NOTE)
    pipeline.execute_once(schema_check.lock(local, "ROW EXCLUSIVE") if local.guarded else plain, note=_NOTE)
    target.roles.reset_role(_NOTE)
    await pipeline.sync()
    return await introspection.introspect(pipeline, schema, name, target.roles.terms)


async def copy_as(target: PostgresTarget, mapping: RelationMapping) -> None:
    """Act as the table's owner, or whoever it is; what comes next is the COPY, on the session itself."""
    role = target.roles.role([mapping.local])
    await target.pipeline.session.query(f"SET LOCAL ROLE {quote(role.name) if role != NOBODY else NOBODY.name}")


async def end(
    target: PostgresTarget, mapping: RelationMapping, progress: ProgressRecord, position: Lsn, read_at: datetime
) -> None:
    """After the COPY: store that the table is complete as of `position`; not committed yet.

    `read_at` is the publisher's time of that.
    """
    pipeline = target.pipeline
    pipeline.attach()
    if mapping.runs_foreign_code:
        target.has_run_foreign_code = True
        target.foreign_code.begin(mapping)
    target.foreign_code.run_deferred(_NOTE)
    target.roles.reset(_NOTE)
    await pipeline.rows(_FINISH, *progress.shown, str(position))
    if target.capabilities.origins:  # the rows are as old as the snapshot, for policies that compare times
        await pipeline.rows(_SET_TIME, *progress.shown, read_at.isoformat())


async def commit(target: PostgresTarget) -> None:
    """The end of the transaction."""
    pipeline: Pipeline = target.pipeline
    await pipeline.rows("COMMIT")
    target.roles.on_begin()
    target.foreign_code.clean()
    await pipeline.sync()
