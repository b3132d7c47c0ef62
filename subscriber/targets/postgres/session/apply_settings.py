"""Settings of a session that applies changes: what PostgreSQL's own worker sets or ignores."""

from __future__ import annotations

from subscriber.connection.session import Session
from subscriber.connection.settings import ALWAYS, NO_TIMEOUTS, known
from subscriber.quoting import literal
from subscriber.targets.postgres.session.capabilities import BECOME_REPLICA, TargetCapabilities

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
