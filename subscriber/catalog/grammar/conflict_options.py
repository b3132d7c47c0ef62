"""Options about conflicts that PostgreSQL does not have: how conflicts are resolved, and which are recorded.

apply/conflicts/policy.py parses conflict_policy. conflict_history selects the recorded conflicts (`decided`:
those that a policy resolved or that stopped the stream; `all`; `none`), conflict_log_rows whether rows are recorded.
"""

from __future__ import annotations

import asyncpg

from subscriber import server_features as features
from subscriber.apply.conflicts.policy import parse_policies
from subscriber.errors import StatementError
from subscriber.sqlstate import FEATURE_NOT_SUPPORTED, OBJECT_NOT_IN_PREREQUISITE_STATE

TRACKS_COMMIT_TIMES = "SELECT pg_catalog.current_setting('track_commit_timestamp')::boolean"


def check_policy(value: str) -> str:
    """The option's value as it is stored. Raises StatementError (22023)."""
    parse_policies(value)
    return value.strip()


async def check_commit_times(connection: asyncpg.Connection, policy: str) -> None:
    """Raises StatementError (55000) if the policy needs to know when rows were written, and the target does not."""
    needing = parse_policies(policy).needs_commit_times
    if needing is None:
        return
    if not features.COMMIT_ORIGINS.is_in_major(connection.get_server_version().major):
        message = f'conflict policy "{needing}" needs a target of PostgreSQL {features.COMMIT_ORIGINS.since} or newer'
        raise StatementError(message, sqlstate=FEATURE_NOT_SUPPORTED)
    if not await connection.fetchval(TRACKS_COMMIT_TIMES):
        raise needs_commit_times(needing)


def needs_commit_times(needing: str) -> StatementError:
    return StatementError(
        f'conflict policy "{needing}" needs track_commit_timestamp on the target',
        detail="Without it nobody knows when, and by whom, a row of the target was written.",
        hint="Set track_commit_timestamp = on in the target's configuration, and restart it.",
        sqlstate=OBJECT_NOT_IN_PREREQUISITE_STATE,
    )
