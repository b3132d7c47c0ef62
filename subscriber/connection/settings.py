"""Settings that our sessions need, whatever postgresql.conf, the database or the role says. See connect()."""

from __future__ import annotations

from collections.abc import Mapping

# Compiling a plan takes up to several seconds. Our statements take milliseconds, or as long compiled as not. The apply
# session needs this most: its enable_seqscan = off makes a plan without an index cost 1e10 before PostgreSQL 18, far
# above jit_above_cost. The built-in worker plans nothing.
NO_JIT = {"jit": "off"}

# A name without a schema could be an object that any role has made, whose code would run with the session's rights.
ONLY_QUALIFIED_NAMES = {"search_path": ""}

# For sessions that wait: for changes, locks, the end of a long copy. The built-in workers ignore statement_timeout
# and the idle timeouts. They obey lock_timeout and transaction_timeout, and repeat the same transaction without end.
NO_TIMEOUTS = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
}

# The major version that brought a setting. Publishers may be older than those that are tested.
SINCE = {"jit": 11, "idle_session_timeout": 14, "transaction_timeout": 17}

# What is set when the session is there, instead of when it starts: the server's version has to be known, or PgBouncer
# would refuse the session.
LATER = (*SINCE, "search_path")


def known(settings: Mapping[str, str], major: int) -> dict[str, str]:
    """Those of `settings` that a server of this major version knows."""
    return {name: value for name, value in settings.items() if major >= SINCE.get(name, 0)}
