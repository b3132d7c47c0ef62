"""The options retain_dead_tuples and max_retention_duration in statements: checks, notices, and triggers.

The words are PostgreSQL 19's. Source: CheckSubDeadTupleRetention() in src/backend/commands/subscriptioncmds.c.
"""

from __future__ import annotations

import asyncpg

from subscriber import server_features as features
from subscriber.catalog.commands.publisher_connection import Notice
from subscriber.catalog.grammar.conflict_options import TRACKS_COMMIT_TIMES
from subscriber.errors import StatementError
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED, WARNING

SET_TRIGGERS = "SELECT subid, state, problem, hint FROM subscriber.set_delete_triggers('10s', $1::oid)"


async def check(connection: asyncpg.Connection, notice: Notice) -> None:
    """Check that the target can remember deleted rows, and warn if it does not record their commit times.

    Raises:
        StatementError: the target is older than PostgreSQL 14.
    """
    if not features.COMMIT_ORIGINS.is_in_major(connection.get_server_version().major):
        message = f"retain_dead_tuples needs a target of PostgreSQL {features.COMMIT_ORIGINS.since} or newer"
        raise StatementError(message, sqlstate=FEATURE_NOT_SUPPORTED)
    if not await connection.fetchval(TRACKS_COMMIT_TIMES):
        notice(
            "WARNING",
            "commit timestamp and origin data required for detecting conflicts won't be retained",
            None,
            'Consider setting "track_commit_timestamp" to true.',
        )


def warn_disabled(notice: Notice) -> None:
    """Warn that deleted rows accumulate, because the subscription does not run."""
    notice(
        "WARNING",
        "deleted rows to detect conflicts would not be removed until the subscription is enabled",
        None,
        "Consider setting retain_dead_tuples to false.",
    )


def note_disabled(notice: Notice) -> None:
    """Report the same as the result of ALTER SUBSCRIPTION, which needs a disabled subscription."""
    message = "deleted rows to detect conflicts would not be removed until the subscription is enabled"
    notice("NOTICE", message, None, None)


def note_ineffective(notice: Notice) -> None:
    """Report that max_retention_duration has no effect."""
    notice("NOTICE", "max_retention_duration is ineffective when retain_dead_tuples is disabled", None, None)


async def set_triggers(connection: asyncpg.Connection, subid: int, notice: Notice, *, drops: bool = False) -> None:
    """Create and drop triggers, so that exactly the tables of subscriptions with retain_dead_tuples have one.

    Args:
        connection: in the transaction of the statement.
        subid: the subscription of the statement. A table of another one without trigger is no error.
        drops: the statement drops the subscription.
        notice: receives warnings, for example for a table without a key.

    Raises:
        StatementError: the owner of schema `subscriber` may not create the trigger of a table of the subscription.
    """
    for row in await connection.fetch(SET_TRIGGERS, subid if drops else None):
        if row["state"] != WARNING and row["subid"] == subid:
            raise StatementError(row["problem"], hint=row["hint"], sqlstate=row["state"])
        notice("WARNING", row["problem"], None, row["hint"])
