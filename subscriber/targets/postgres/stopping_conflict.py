"""Conflicts that stop a worker's stream: find out which one an error is, and record it."""

from __future__ import annotations

from contextlib import suppress

import anyio

from subscriber import telemetry
from subscriber.apply.conflicts.policy import Policies, Policy, Rule
from subscriber.apply.conflicts.types import Conflict
from subscriber.apply.relation_map import RelationMapping
from subscriber.catalog.connection import CatalogConnection
from subscriber.catalog.grammar.conflict_options import needs_commit_times
from subscriber.catalog.store.subscriptions import record_conflict_error
from subscriber.connection.connect import open_session
from subscriber.connection.conninfo import Conninfo
from subscriber.connection.pipeline import Pipeline
from subscriber.errors import ConflictError, LateConflict, ServerError, StatementError, SubscriberError
from subscriber.protocol.messages import Insert, Update
from subscriber.sqlstate import OBJECT_NOT_IN_PREREQUISITE_STATE, UNIQUE_VIOLATION
from subscriber.targets.postgres.conflicts import unique_violation
from subscriber.targets.postgres.conflicts.history import History
from subscriber.targets.postgres.conflicts.resolution import UnresolvedConflict
from subscriber.targets.postgres.row_applier import RowApplier
from subscriber.targets.postgres.session.capabilities import apply_settings
from subscriber.targets.postgres.session.statement_context import StatementContext
from subscriber.targets.postgres.session.target_session import TargetSession

PATIENCE = 10.0  # seconds for all queries about the conflict of a failed transaction
LOCK_TIMEOUT = "SET lock_timeout = '3s'"  # another session may have locked the table


def require_commit_times(policies: Policies, *, tracked: bool, with_origin: bool) -> None:
    """Check that the target records the commit times and origins that a policy needs.

    Args:
        policies: the policies of the subscription.
        tracked: track_commit_timestamp is on.
        with_origin: the session may use replication origins.

    Raises:
        StatementError: a policy needs commit times or origins, and the target does not record them. SQLSTATE 55000.
    """
    needing = policies.needs_commit_times
    if needing is not None and not tracked:
        raise needs_commit_times(needing)
    if needing is not None and not with_origin:
        raise StatementError(
            f'conflict policy "{needing}" needs replication origins on the target',
            detail="Without them replicated changes look like local ones, written when they were applied.",
            hint="Run the subscription as a role that may use the functions for replication origins.",
            sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
        )


async def conflict_from_error(
    error: SubscriberError, applier: RowApplier, conninfo: Conninfo | str, catalog: CatalogConnection
) -> SubscriberError:
    """Return the error to raise for an error of the apply loop. A unique violation becomes its conflict.

    The conflict is recorded. Pending conflicts that did not stop the stream are completed and reported first.

    Args:
        error: the error of the loop.
        applier: of the session that has failed.
        conninfo: opens another session, because the failed one cannot run queries.
        catalog: stores the record.

    Returns:
        ConflictError for a unique violation, LateConflict if a policy can decide it in a new attempt, else `error`.
    """
    pipeline = applier.session.pipeline
    note = pipeline.failed_note
    refusal = applier.resolution.refusal if applier.resolution is not None else None
    violated = (
        isinstance(error, ServerError)
        and error is pipeline.error
        and error.sqlstate == UNIQUE_VIOLATION
        and isinstance(note, StatementContext)
    )
    if refusal is None and not violated and not applier.conflicts.has_pending_queries:
        return error
    # If this fails, the server's error is returned.
    try:
        with anyio.fail_after(PATIENCE):
            async with await open_session(conninfo, application_name="subscriber conflict") as session:
                asking = await _asking_session(applier.session, Pipeline(session))
                await applier.conflicts.retry_on(asking)
                if refusal is not None:
                    await _record(catalog, applier, refusal)
                elif violated and isinstance(error, ServerError) and isinstance(note, StatementContext):
                    return await _investigated(asking, catalog, applier, error, note)
    except (SubscriberError, TimeoutError) as unknown:
        telemetry.log(
            telemetry.WARNING,
            "the conflicts of the transaction that failed are not all known",
            detail=str(unknown) or f"The target has not answered within {PATIENCE:g} seconds.",
            event="conflict.unknown",
        )
    return error


async def _asking_session(failed: TargetSession, pipeline: Pipeline) -> TargetSession:
    """Return a session for questions that acts as the failed one did."""
    for statement in (*apply_settings(pipeline.session, failed.capabilities, "off"), LOCK_TIMEOUT):
        pipeline.execute(statement, note=StatementContext("SET"))
    await pipeline.sync()
    return TargetSession(pipeline, failed.roles.on_other_session(pipeline), capabilities=failed.capabilities)


async def _investigated(
    asking: TargetSession,
    catalog: CatalogConnection,
    applier: RowApplier,
    error: ServerError,
    note: StatementContext,
) -> SubscriberError:
    if note.mapping is None or note.transaction is None:
        return error
    with asking.asking(note.mapping, note):
        conflict = await unique_violation.investigate(asking.pipeline, error, note)
    if conflict is None:
        return error
    table = note.mapping.local.schema, note.mapping.local.name
    rule = applier.session.rules.policies.rule(table, conflict.type, several_rows=conflict.several_rows)
    if _decidable(applier, rule, note.mapping, note):
        return LateConflict(conflict.message)
    with suppress(SubscriberError):  # the error is more important than its record
        await _record(catalog, applier, UnresolvedConflict(conflict, rule, note.mapping, note.transaction))
    return _as_error(conflict, error, History(applier.session.rules).detail(conflict))


def _decidable(applier: RowApplier, rule: Rule, mapping: RelationMapping, note: StatementContext) -> bool:
    """Return True if a new attempt finds the conflicting row and the policy resolves the conflict.

    False for partitioned tables. Indexes that only a partition has are not searched, so retries would not end.
    """
    if applier.resolution is None or mapping.local.partitioned or not isinstance(note.change, Insert | Update):
        return False
    return applier.resolution.applies_to(mapping, note.change) and rule.policy not in (Policy.DEFAULT, Policy.ERROR)


async def _record(catalog: CatalogConnection, applier: RowApplier, refusal: UnresolvedConflict) -> None:
    rules = applier.session.rules
    relid = refusal.mapping.local.oid
    lines = History(rules).error_lines(refusal.conflict, relid, refusal.transaction, refusal.rule)
    async with catalog.use() as connection, connection.transaction():
        for line in lines:
            await record_conflict_error(connection, rules.subid, line)


def _as_error(conflict: Conflict, error: ServerError, detail: str) -> ConflictError:
    refused = ConflictError(
        conflict.message,
        detail=detail,
        exact_detail=conflict.exact_detail,
        conflict_type=conflict.type.value,
    )
    refused.context.extend(error.context)
    return refused.locate(error.relation, error.xid, error.finish_lsn)
