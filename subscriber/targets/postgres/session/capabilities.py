"""Capabilities of an apply session's role on the target, and the consequences of missing ones.

PostgreSQL's own worker is part of the server and has all rights. A role of a managed service often lacks some, and
most features work all the same. The log, once, and `subscriber status` name the features that do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.connection.session import Session
from subscriber.connection.settings import ALWAYS, NO_TIMEOUTS, known
from subscriber.errors import ServerError
from subscriber.quoting import literal
from subscriber.sqlstate import INSUFFICIENT_PRIVILEGE

WITHOUT_REPLICA_ROLE = (
    "session_replication_role cannot be set: ordinary triggers and rules of the tables run for replicated changes, and "
    "foreign keys are checked and cascade"
)
WITHOUT_ORIGINS = (
    "replication origins cannot be used: progress is in subscriber.progress alone, and replicated changes look like "
    "local ones: a subscription to this database with origin = none gets them, too"
)

# Functions of schema subscriber use origins, and set the replica role where the session's own role may not, with the
# rights of the schema's owner.
_BY_SUPERUSER = """
SELECT r.rolsuper FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
 WHERE n.nspname = 'subscriber'
"""
SET_REPLICA = "SET session_replication_role = replica"
BECOME_REPLICA = "SELECT subscriber.become_replica()"


@dataclass(frozen=True, slots=True)
class TargetCapabilities:
    replica_role: bool = True  # session_replication_role = replica
    origins: bool = True
    by_function: bool = False  # only a function of schema subscriber may set the replica role

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings to show to the operator, one for each missing capability."""
        checked = ((self.replica_role, WITHOUT_REPLICA_ROLE), (self.origins, WITHOUT_ORIGINS))
        return tuple(text for has, text in checked if not has)


async def detect_capabilities(session: Session) -> TargetCapabilities:
    """Return the capabilities of the session's role. Sets session_replication_role if the role may."""
    by_superuser = await session.rows(_BY_SUPERUSER) == [("t",)]
    for statement in (SET_REPLICA, *([BECOME_REPLICA] if by_superuser else ())):
        try:  # asking would not do: a managed service may permit more than the privileges say
            await session.query(statement)
        except ServerError as error:
            if error.sqlstate != INSUFFICIENT_PRIVILEGE:
                raise
        else:
            return TargetCapabilities(True, by_superuser, statement is BECOME_REPLICA)
    return TargetCapabilities(False, by_superuser)


# The settings of the built-in worker, and those that only a session with SQL needs (each with its reason).
SETTINGS = {
    "session_replication_role": "replica",
    "row_security": "off",  # an error instead of rows silently left out
    "enable_seqscan": "off",  # the built-in worker always uses the identity's index, however small the table
    "enable_indexscan": "on",
    "enable_bitmapscan": "on",
    "enable_tidscan": "on",  # without it the row that find() has found is looked for in the whole table
    "enable_nestloop": "on",  # without it a batch reads a whole index
    "max_parallel_workers_per_gather": "0",  # the built-in worker looks for a row without help
    "plan_cache_mode": "force_generic_plan",  # every value of a key is searched for in the same way
    **ALWAYS,
    **NO_TIMEOUTS,
}


def apply_settings(session: Session, means: TargetCapabilities, synchronous_commit: str) -> tuple[str, ...]:
    """The statements that make the session what an apply worker's is, as far as its role may."""
    values = known(SETTINGS, session.server_version)
    if not means.replica_role or means.by_function:
        del values["session_replication_role"]
    values |= {"synchronous_commit": synchronous_commit, "client_encoding": session.encoding}
    calls = [f"pg_catalog.set_config({literal(name)}, {literal(value)}, false)" for name, value in values.items()]
    return f"SELECT {', '.join(calls)}", *([BECOME_REPLICA] if means.by_function else ())
